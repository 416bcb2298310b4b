"""`python -m models.deepseek_v4.device_check`: the whole decode step on one GPU against a golden trace.

By all-to-all in both modes, with XLA and with the Pallas kernels. Needs jax, flax, numpy and chex only. Exit codes:
0 all equal on a GPU, Pallas included; 1 something differs; 2 a request that cannot be served; 3 what ran is equal, but
there is no GPU that runs the kernels: XLA on what there is, and with --interpret the kernels interpreted, prove no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax

from jaxcoll.hlo import mosaic_kernels
from jaxcoll.level import Mode
from jaxcoll.linear import partition_specs
from jaxcoll.settings import Settings
from jaxcoll.topology import Topology
from models.deepseek_v4.compare import compare
from models.deepseek_v4.decoder import TRACE, Decoder
from models.deepseek_v4.model import DeepSeekV4
from models.deepseek_v4.npz_fixture import Fixture, read
from models.deepseek_v4.requests import spread
from models.errors import UserError
from models.startup import gpu_present
from pallas_kernels.choice import Device, Kernels, unsupported_device

WIDE = Path(__file__).parents[2] / "tests" / "data" / "wide-21.npz"
EQUAL, DIFFERS, REFUSED, NOT_ON_A_GPU = 0, 1, 2, 3


class Case(NamedTuple):
    """One way to run the step."""

    mode: Mode
    kernels: Kernels
    interpret: bool


def main(words: list[str]) -> int:
    """Runs the command; its exit code."""
    parser = argparse.ArgumentParser("python -m models.deepseek_v4.device_check", description=__doc__)
    parser.add_argument("--fixture", type=Path, default=WIDE, help="an .npz made by models.deepseek_v4.npz_fixture")
    parser.add_argument("--interpret", action="store_true", help="without a GPU, interpret the Pallas kernels too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(words)
    if not gpu_present():  # with the CUDA plugin and no GPU, jax would start with a traceback
        jax.config.update("jax_platforms", "cpu")
    try:
        fixture = read(options.fixture)
    except UserError as error:
        print(f"device_check: {error}", file=sys.stderr)
        return REFUSED
    device = Device.of(jax.devices()[0])
    obstacle = unsupported_device(device)
    note = f"no GPU was checked: {obstacle}" if obstacle else None
    shown: dict[str, Any] = {"device": device.kind, "jax": jax.__version__, "not_checked": note, "checks": []}
    if not options.json:
        print(f"{device.kind}, jax {jax.__version__}{f'; {note}' if note else ''}", flush=True)
    for case in cases(on_gpu=obstacle is None, interpret=options.interpret):
        shown["checks"].append(check(case, fixture))
        if not options.json:
            print(sentence(shown["checks"][-1]), flush=True)
    if options.json:
        print(json.dumps(shown))
    if not all(outcome["ok"] for outcome in shown["checks"]):
        return DIFFERS
    return EQUAL if obstacle is None else NOT_ON_A_GPU


def cases(*, on_gpu: bool, interpret: bool) -> Iterator[Case]:
    """XLA first: if that differs, the kernels are not to blame."""
    yield from (Case(mode, "xla", False) for mode in get_args(Mode))
    if on_gpu or interpret:
        yield from (Case(mode, "pallas", not on_gpu) for mode in get_args(Mode))


def check(case: Case, fixture: Fixture) -> dict[str, Any]:
    """Decodes the fixture on the first device.

    Returns:
        What ran, the largest difference of each tensor, how many Pallas kernels the compiled program calls, and
        whether all is as it must be; a Pallas program without its kernels is not.
    """
    config, trace = fixture.config, fixture.trace
    topology = Topology(devices=tuple(jax.devices()[:1]))
    named = {"kernels": case.kernels, "pallas_interpret": case.interpret}
    settings = Settings(moe_backend="all_to_all", dispatch=case.mode, **named)
    model = DeepSeekV4(config, topology, settings)
    shardings = jax.tree.map(topology.sharding, partition_specs(model))
    parameters = jax.device_put(fixture.parameters, shardings)
    homes = spread(len(trace.input_ids), 1)
    kept = {"slots": len(homes), "max_seq_len": trace.steps, "results": TRACE, "settings": settings}
    decoder = Decoder(config, topology, parameters, model=model, **kept)
    outcome = compare(decoder, trace, homes)
    calls = sum(len(mosaic_kernels(step.compiled)) for step in decoder.steps.values())
    compiled_kernels = case.kernels == "pallas" and not case.interpret
    told = ("max_abs_err", "tolerance", "topk_mismatches", "greedy_match", "steps")
    return {
        **case._asdict(),
        "ok": outcome["ok"] and (calls > 0) == compiled_kernels,
        "pallas_calls": calls,
        **{name: outcome[name] for name in told},
    }


def sentence(outcome: dict[str, Any]) -> str:
    """One line on one check."""
    errors = outcome["max_abs_err"].values()
    worst = "not finite" if None in errors else f"{max(errors):.1e}"
    how = f"{outcome['kernels']}{' interpreted' if outcome['interpret'] else ''}, {outcome['mode']}"
    return (
        f"{'equal' if outcome['ok'] else 'DIFFERS'}  {how}: largest difference {worst} of {outcome['tolerance']:g} "
        f"allowed, {outcome['topk_mismatches']} expert choices differ, greedy ids "
        f"{'match' if outcome['greedy_match'] else 'DIFFER'}, {outcome['pallas_calls']} Pallas kernels in the program"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
