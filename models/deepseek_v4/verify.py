"""`jaxcoll verify`: decode a golden fixture position by position, then greedily, and compare with its trace."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxcoll.topology import Topology
from models.deepseek_v4 import report
from models.deepseek_v4.config import Config
from models.deepseek_v4.decoder import TRACE, Decoder, Row
from models.deepseek_v4.requests import Home, cache_length, slots_for, spread
from models.deepseek_v4.trace import Trace
from models.options import VerifyOptions
from models.progress import Working

# Largest absolute difference that counts as equal. float32: reductions in another order; the fixtures show 1e-5.
# bfloat16 has 8 bits of mantissa, and every sub-layer rounds: at the fixtures' magnitudes of 1 to 8 that is 0.06.
TOLERANCE = {"float32": 2e-4, "bfloat16": 0.25}


def run(options: VerifyOptions) -> int:
    """Runs the command; 0 equal, 1 not. Raises UserError for what cannot be compared."""
    with Working() as working:
        result, notes = verify(options, working)
    for note in notes:
        print(f"jaxcoll: {note}", file=sys.stderr)
    if options.json:
        print(json.dumps(result))
    else:
        _show(result)
    return 0 if result["ok"] else 1


def verify(options: VerifyOptions, working: Working) -> tuple[dict[str, Any], list[str]]:
    """Decodes and compares; returns the JSON's content and notes about what was ignored."""
    config = Config.from_folder(options.fixture)
    trace = Trace.load(options.fixture, config)
    topology = Topology(*options.topology.sizes)
    homes = spread(len(trace.input_ids), topology.attn_dp, options.requests_per_replica)
    positions = trace.input_ids.shape[1] + trace.greedy_ids.shape[1] - 1
    length = cache_length(config, options.max_seq_len, positions, "the trace")
    working.stage("loading weights")
    decoder, loaded = Decoder.load(
        options.fixture,
        topology,
        slots=slots_for(homes),
        max_seq_len=length,
        results=TRACE,
        config=config,
        progress=working.advance,
    )
    working.stage("compiling the step and decoding")
    outcome = compare(decoder, trace, homes, working)
    tolerance = TOLERANCE[config.torch_dtype]
    close = all(error <= tolerance for error in outcome["max_abs_err"].values())  # False for NaN
    ok = close and not outcome["topk_mismatches"] and outcome["greedy_match"]
    errors = {k: v if math.isfinite(v) else None for k, v in outcome.pop("max_abs_err").items()}
    result = {
        "ok": ok,
        "tolerance": tolerance,
        "max_abs_err": errors,
        **outcome,
        "compiles": decoder.compiles,
    }
    result |= {
        "topology": report.topology_json(topology),
        "plan": report.plan_json(topology),
        "collectives": report.collectives_json(decoder.steps.values()),
    }
    return result, report.ignored_notes(config, loaded.ignored)


def compare(decoder: Decoder, trace: Trace, homes: Sequence[Home], working: Working) -> dict[str, Any]:
    """Feeds the trace's ids one position per step, comparing everything, then continues greedily."""
    errors = dict.fromkeys(trace.values, 0.0)
    mismatches, steps = 0, 0
    total = trace.input_ids.shape[1] + trace.greedy_ids.shape[1] - 1
    generated: list[np.ndarray] = []
    tokens = trace.input_ids[:, 0]
    for position in range(total):
        seen = decoder.step([Row(int(t), position, *home) for t, home in zip(tokens, homes, strict=True)])
        steps += 1
        working.advance(steps, total)
        if position < trace.input_ids.shape[1]:
            mismatches += _compare_position(seen, trace, position, errors)
        following = np.asarray(seen["next_token"])[seen["places"]]
        if position + 1 < trace.input_ids.shape[1]:
            tokens = trace.input_ids[:, position + 1]
        else:
            tokens = following
            generated.append(following)
    ids = np.stack(generated, axis=1)
    return {
        "max_abs_err": errors,
        "topk_mismatches": mismatches,
        "greedy_match": bool(np.array_equal(ids, trace.greedy_ids)),
        "generated": ids.tolist(),
        "steps": steps,
    }


def _compare_position(seen: dict[str, Any], trace: Trace, position: int, errors: dict[str, float]) -> int:
    """Raises `errors` to this position's; returns how many expert choices differ from the trace's."""
    places = seen["places"]
    for name, golden in trace.values.items():
        kind, _, index = name.partition(".")
        value = np.asarray(seen[kind][int(index)] if index else seen[kind])[places]
        error = np.max(np.abs(value.astype(np.float32) - golden[:, position]))
        errors[name] = float(np.maximum(errors[name], error))  # keeps a NaN
    differing = 0
    for ours, golden in zip(seen["topk_ids"], trace.topk_ids, strict=True):
        differing += int(np.sum(np.sort(np.asarray(ours)[places]) != np.sort(golden[:, position])))
    return differing


def _show(result: dict[str, Any]) -> None:
    console = Console()
    sizes = result["topology"]
    console.print(
        f"{sizes['world']} devices: attn_dp {sizes['attn_dp']} x attn_tp {sizes['attn_tp']} = "
        f"moe_ep {sizes['moe_ep']} x moe_tp {sizes['moe_tp']}; {result['steps']} steps, {result['compiles']} compiled"
    )
    table = Table(title="largest absolute difference from the trace", title_justify="left")
    table.add_column("tensor")
    table.add_column("difference", justify="right")
    for name, error in result["max_abs_err"].items():
        table.add_row(name, "not finite" if error is None else f"{error:.1e}")
    console.print(table)
    console.print(report.collectives_table(result["collectives"]))
    for request, ids in enumerate(result["generated"]):
        console.print(f"request {request} continues with {ids}")
    verdict = "equal" if result["ok"] else "NOT equal"
    greedy = "match" if result["greedy_match"] else "do not match"
    console.print(
        f"{verdict} to the trace at {result['tolerance']:g}; {result['topk_mismatches']} expert choices differ; "
        f"greedy ids {greedy}"
    )
