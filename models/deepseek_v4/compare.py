"""Decoding along a golden trace and comparing everything that passes by; it reads and prints nothing."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from models.deepseek_v4.decoder import Decoder, Row
from models.deepseek_v4.requests import Home
from models.deepseek_v4.trace import Trace

if TYPE_CHECKING:
    from models.progress import Working

# Largest absolute difference that counts as equal. float32: reductions in another order; the fixtures show 1e-5.
# bfloat16 has 8 bits of mantissa, and every sub-layer rounds: at the fixtures' magnitudes of 1 to 8 that is 0.06.
TOLERANCE = {"float32": 2e-4, "bfloat16": 0.25}


def compare(decoder: Decoder, trace: Trace, homes: Sequence[Home], working: Working | None = None) -> dict[str, Any]:
    """Feeds the trace's ids one position per step, comparing everything, then continues greedily.

    Returns:
        `verify`'s JSON up to `compiles`; a difference that is not finite is None, because JSON has no NaN.
    """
    errors = dict.fromkeys(trace.values, 0.0)
    mismatches, steps = 0, 0
    total = trace.steps
    generated: list[np.ndarray] = []
    tokens = trace.input_ids[:, 0]
    for position in range(total):
        seen = decoder.step([Row(int(t), position, *home) for t, home in zip(tokens, homes, strict=True)])
        steps += 1
        if working is not None:
            working.decoded(steps, total)
        if position < trace.input_ids.shape[1]:
            seen = decoder.fetch(seen)
            mismatches += _compare_position(seen, trace, position, errors)
        following = decoder.fetch(seen["next_token"])[seen["places"]]
        if position + 1 < trace.input_ids.shape[1]:
            tokens = trace.input_ids[:, position + 1]
        else:
            tokens = following
            generated.append(following)
    ids = np.stack(generated, axis=1)
    tolerance = TOLERANCE[decoder.config.torch_dtype]
    close = all(error <= tolerance for error in errors.values())  # False for NaN
    greedy_match = bool(np.array_equal(ids, trace.greedy_ids))
    return {
        "ok": close and not mismatches and greedy_match,
        "tolerance": tolerance,
        "max_abs_err": {name: error if math.isfinite(error) else None for name, error in errors.items()},
        "topk_mismatches": mismatches,
        "greedy_match": greedy_match,
        "generated": ids.tolist(),
        "steps": steps,
        "compiles": decoder.compiles,
    }


def _compare_position(seen: dict[str, Any], trace: Trace, position: int, errors: dict[str, float]) -> int:
    """Raises `errors` to this position's; returns how many expert choices differ from the trace's."""
    places = seen["places"]
    for name, golden in trace.values.items():
        kind, _, index = name.partition(".")
        value = (seen[kind][int(index)] if index else seen[kind])[places]
        with np.errstate(invalid="ignore"):  # infinity - infinity: NaN, which counts as different
            error = np.max(np.abs(value.astype(np.float32) - golden[:, position]))
        errors[name] = float(np.maximum(errors[name], error))  # keeps a NaN
    pairs = zip(seen["topk_ids"], trace.topk_ids, strict=True)
    return sum(_unlike(ours[places], golden[:, position]) for ours, golden in pairs)


def _unlike(ours: np.ndarray, golden: np.ndarray) -> int:
    """How many ids of the rows [B, K] the golden row lacks; their order does not count, repetitions do."""
    rows = zip(ours.tolist(), golden.tolist(), strict=True)
    return sum((collections.Counter(mine) - collections.Counter(theirs)).total() for mine, theirs in rows)
