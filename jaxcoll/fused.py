"""Routed experts in one call: rows out, through the experts, and home, in waves of experts whose exchanges overlap.

While wave i's experts compute, wave i+1's rows come and wave i-1's results go home. What an expert computes is the
caller's. Source: communication semantics, section 6 (FuseEP: one call, complete routed output in source order).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxcoll.collectives import declare_partial
from jaxcoll.dispatch import (
    Combining,
    Dispatching,
    DispatchSpec,
    Received,
    ReceivedPerExpert,
    combine_finish,
    combine_start,
    depart_rows,
    dispatch_finish,
    meanwhile,
    rows_of_moe_tp,
)
from jaxcoll.routing import check_row_numbers, experts_per_rank
from jaxcoll.states import group_size

Array = jax.Array
MOST_WAVES = 4  # each wave is an exchange more, which costs its latency; two already hide half of the bytes

Weights = Any
ExpertFn = Callable[[Weights, Received | ReceivedPerExpert, tuple[int, int]], Array]


def fused_moe(
    hidden: Array,
    topk_ids: Array,
    topk_weights: Array,
    expert_weights: Weights,
    experts: ExpertFn,
    spec: DispatchSpec,
    *,
    waves: int | None = None,
    count: Array | None = None,
) -> Array:
    """Every row through the experts that it chose, weighted and summed, back in the order of the rows.

    Args:
        hidden: [T, D] SHARD over moe_ep and moe_tp: this rank's own rows.
        topk_ids, topk_weights: [T, K], as for `dispatch`.
        expert_weights: of this rank's own L experts, in whatever form `experts` reads. They are not cut here: XLA
            would copy a wave's share of them in every step.
        experts: computes a wave: (expert_weights, what arrived, (first, size) of the wave's experts, which are
            numbered from 0 in what arrived) -> [R, D] or [size, C, D], as `combine` takes them; with moe_tp each of
            its ranks returns its addend (SHARD).
        spec: how rows travel. low_latency sends no row more than a single exchange would; normal sends a row to a
            rank once for each wave in which it has an expert there.
        waves: into how many the L experts are cut, as equal as possible; None is `default_waves`.
        count: int32 scalar; rows from it on are padding. Default: all T are real.

    Returns:
        [T, D] in the rows' type, SHARD over moe_ep and moe_tp. low_latency: equal to one dispatch and combine bit by
        bit. Rows that are nobody's are zeros. Wire bytes: the waves' dispatches and combines.

    Raises:
        StateError, ValueError: as `dispatch` and `combine`; or waves are not in 1..L.
    """
    local = experts_per_rank(spec.num_experts, group_size(spec.moe_ep))
    cuts = wave_cuts(local, waves)
    rows, ids, weights = rows_of_moe_tp(hidden, topk_ids, topk_weights, spec, count)
    check_row_numbers("fused_moe (its results)", {"T": ids.shape[0], "K": ids.shape[1], "waves": len(cuts)})
    depart = functools.partial(_depart, rows, ids, weights, spec, local)
    return combine_finish(*_in_waves(depart, functools.partial(experts, expert_weights), cuts, spec))


def _in_waves(depart: Callable, experts: Callable, cuts: list[tuple[int, int]], spec: DispatchSpec) -> list[Combining]:
    """Every wave's results on their way home: the next wave leaves before this one computes."""
    sent = depart(cuts[0])
    home: list[Combining] = []
    for i, cut in enumerate(cuts):
        following = depart(cuts[i + 1]) if i + 1 < len(cuts) else None
        received, handle = dispatch_finish(sent)
        with jax.named_scope(f"wave.{i}"):
            y = experts(received, cut)
        if home:
            home[-1], y = meanwhile(home[-1], y)
        if following is not None:
            sent, y = meanwhile(following, y)
        home.append(combine_start(declare_partial(y, spec.moe_tp), handle))
    return home


def default_waves(local_experts: int) -> int:
    """Waves where none are asked for: at most MOST_WAVES, each with an expert at least."""
    return min(MOST_WAVES, local_experts)


def wave_spec(spec: DispatchSpec, local_experts: int, size: int) -> DispatchSpec:
    """How a wave of `size` of a rank's experts travels."""
    return replace(spec, num_experts=spec.num_experts // local_experts * size, chosen_from=spec.num_experts)


def wave_cuts(local_experts: int, waves: int | None = None) -> list[tuple[int, int]]:
    """(first, size) of each wave's experts on every rank; the first ones are one larger where they do not divide.

    Args:
        waves: None is `default_waves`.

    Raises:
        ValueError: waves are not in 1..local_experts.
    """
    waves = default_waves(local_experts) if waves is None else waves
    if not 1 <= waves <= local_experts:
        raise ValueError(f"waves must be from 1 to the {local_experts} experts of a rank, not {waves}")
    base, larger = divmod(local_experts, waves)
    sizes = [base + (wave < larger) for wave in range(waves)]
    return [(sum(sizes[:wave]), size) for wave, size in enumerate(sizes)]


def _depart(
    rows: Array, ids: Array, weights: Array, spec: DispatchSpec, local: int, cut: tuple[int, int]
) -> Dispatching:
    """Sends the copies for one wave: its experts are numbered as if there were no others."""
    first, size = cut
    rank, expert = ids // local, ids % local - first
    here = (ids >= 0) & (expert >= 0) & (expert < size)
    ids = jnp.where(here, rank * size + expert, -1)
    return depart_rows(rows, ids, jnp.where(here, weights, 0), wave_spec(spec, local, size))
