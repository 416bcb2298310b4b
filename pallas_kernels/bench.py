"""`python -m pallas_kernels.bench [--json]`: the kernels against the bytes they must move, and against XLA.

On a Hopper or Blackwell GPU: measured. Elsewhere: the floors at published bandwidths, and what the compiler says of
the kernels for GPUs that are not there.
"""

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import jax

from pallas_kernels.aot import Arch, NoCompilerError, memory_bandwidth
from pallas_kernels.case import Case
from pallas_kernels.choice import Device
from pallas_kernels.compile_report import reports_of
from pallas_kernels.measure import copy_bandwidth, measure
from pallas_kernels.moe_combine.bench import cases as combine_cases
from pallas_kernels.moe_dispatch.bench import cases as dispatch_cases
from pallas_kernels.published import TOKENS, WIDTH

TITLES = {
    "operation": "operation",
    "model": "model",
    "tokens": "T",
    "floor_bytes": "floor bytes",
    "floor_us": "floor us",
    "pallas_us": "Pallas us",
    "xla_us": "XLA us",
    "fraction_of_floor": "of floor",
    "speedup": "vs XLA",
    "agree": "agree",
    "clock": "clock",
    "sm_90a_us": "us on H200",
    "sm_100a_us": "us on B200",
    "case": "case",
    "arch": "arch",
    "registers": "registers",
    "spill_bytes": "spilled",
    "stack_bytes": "stack",
    "smem_bytes": "SMEM",
    "blocks_per_core": "blocks/SM",
    "bulk_loads": "TMA loads",
    "bulk_stores": "TMA stores",
}


def main(words: list[str]) -> int:
    """Runs the command; returns its exit code, 1 if some kernel and XLA disagree."""
    parser = argparse.ArgumentParser("python -m pallas_kernels.bench", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, metavar="T", help="tokens of a device")
    options = parser.parse_args(words)
    if min(options.tokens) < 1:
        parser.error(f"--tokens must be at least 1, not {min(options.tokens)}")
    cases = list(every_case(options.tokens))
    if not Path("/dev/nvidiactl").exists():  # with the CUDA plugin and no GPU, jax would start with a traceback
        jax.config.update("jax_platforms", "cpu")
    device = Device.of(jax.devices()[0])
    found = measured(cases, device) if device.runs_pallas else not_measured(cases, device)
    shown: dict[str, Any] = {"device": device.kind, "jax": jax.__version__}
    for title, value in found:
        shown[title] = value
        if not options.json:
            print(f"\n{title.replace('_', ' ')}: {value}" if isinstance(value, str) else f"\n{table(value)}")
    if options.json:
        print(json.dumps(shown))
    return int(any(not row.get("agree", True) for row in shown.get("measured", [])))


def every_case(tokens: list[int] | tuple[int, ...]) -> Iterator[Case]:
    """Every operation at every published model."""
    for model, count in itertools.product(WIDTH, tokens):
        yield from dispatch_cases(model, count)
        yield from combine_cases(model, count)


def measured(cases: list[Case], device: Device) -> Iterator[tuple[str, Any]]:
    """The machine's copy bandwidth, and a row for each case."""
    bandwidth = copy_bandwidth()
    yield "copy_bandwidth", f"{bandwidth / 1e12:.2f} TB/s"
    rows = []
    for case in cases:
        rows.append(dataclasses.asdict(measure(case, device, bandwidth)))
        print(f"{case.name}: {rows[-1]['pallas_us']:.1f} us", file=sys.stderr)
    yield "measured", rows


def not_measured(cases: list[Case], device: Device) -> Iterator[tuple[str, Any]]:
    """Why nothing is measured, the floors, and the compiler's reports."""
    yield "not_measured", f"the device is {device.kind} ({device.platform}), not a Hopper or Blackwell GPU"
    yield "floors", [floor(case) for case in cases]
    for arch in get_args(Arch):
        try:
            reports = reports_of(arch)
        except NoCompilerError as error:
            yield "not_compiled", str(error)
            return
        yield (
            f"compiled_{arch}",
            [
                {"case": name, **dataclasses.asdict(report), "blocks_per_core": report.blocks_per_core}
                for name, report in reports.items()
            ],
        )


def floor(case: Case) -> dict[str, Any]:
    """A case's fewest bytes, and their time at published bandwidths."""
    times = {f"{arch}_us": case.floor_bytes / memory_bandwidth(arch) * 1e6 for arch in get_args(Arch)}
    named = {"operation": case.operation, "model": case.model, "tokens": case.tokens}
    return {**named, "floor_bytes": case.floor_bytes, **times}


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of one kind as aligned text; columns without a title are left out."""
    keys = [key for key in rows[0] if key in TITLES]
    lines = [[TITLES[key] for key in keys]]
    lines += [[f"{v:.2f}" if isinstance(v := row[key], float) else str(v) for key in keys] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
