"""`python -m pallas_kernels.compile_report ARCH`: the kernels at the published shapes, compiled without a GPU.

Prints the assembler's reports as JSON. A process of its own for each architecture, because Mosaic keeps the first
one's code and assembler settings for the rest of a process.
"""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import cast, get_args

from pallas_kernels.aot import Arch, KernelReport, NoCompilerError, device, report
from pallas_kernels.case import Case
from pallas_kernels.choice import Device
from pallas_kernels.moe_combine.bench import cases as combine_cases
from pallas_kernels.moe_dispatch.bench import cases as dispatch_cases
from pallas_kernels.published import COMPILED_TOKENS, WIDTH


def reports_of(arch: Arch) -> dict[str, KernelReport]:
    """Compiles in a process of its own; reports by the name of their case.

    Raises:
        NoCompilerError: this installation cannot compile for GPUs.
    """
    root = str(Path(__file__).parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    words = [sys.executable, "-m", "pallas_kernels.compile_report", arch]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise NoCompilerError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "the compiler died")
    return {name: KernelReport(**fields) for name, fields in json.loads(done.stdout).items()}


def compiled_cases() -> list[Case]:
    """Every operation at every published model, for one, some and many tokens."""
    shapes = list(itertools.product(WIDTH, COMPILED_TOKENS))
    return [case for shape in shapes for case in (*dispatch_cases(*shape), *combine_cases(*shape))]


def main(words: list[str]) -> int:
    """Returns the exit code: 2 for a wrong command line, 1 where nothing can be compiled."""
    if len(words) != 1 or words[0] not in get_args(Arch):
        print(f"usage: python -m pallas_kernels.compile_report {'|'.join(get_args(Arch))}", file=sys.stderr)
        return 2
    arch = cast(Arch, words[0])
    try:
        target = Device.of(device(arch))
        found = {case.name: report(arch, case.function("pallas", target), *case.types) for case in compiled_cases()}
    except NoCompilerError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps({name: dataclasses.asdict(kernel) for name, (kernel,) in found.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
