"""Experts' partial output for all rows -> each replica's complete rows, in three ways with exactly one reduction.

It does not decide which way: that is the plan's. Source: communication semantics, section 4 (rows A, B and C).
"""

from __future__ import annotations

from typing import Literal, get_args

import jax

from jaxcoll.collectives import all_gather, all_reduce, reduce_scatter
from jaxcoll.gather import own_rows, require_layout, zero_padding
from jaxcoll.ragged import Transport, reduce_scatter_v, transport_for
from jaxcoll.rows import GatherMode, slots
from jaxcoll.states import State, require
from jaxcoll.topology import Topology

Array = jax.Array
Way = Literal["all_reduce", "reduce_scatter_v", "reduce_scatter"]


def combine_impossible(way: Way, mode: GatherMode, topology: Topology) -> str | None:
    """Why rows gathered by `mode` cannot come back in that way on this mesh, or None."""
    for name, value, allowed in (("combine", way, get_args(Way)), ("gather mode", mode, get_args(GatherMode))):
        if value not in allowed:
            raise ValueError(f"unknown {name} {value!r}; allowed are {', '.join(allowed)}")
    if way == "reduce_scatter_v" and topology.attn_tp > 1:
        return (
            f"reduce_scatter_v leaves each rank its own rows, so it needs attn_tp = 1, not {topology.attn_tp}: "
            "several ranks need one replica's rows"
        )
    if way == "reduce_scatter" and mode != "max_len":
        return f"reduce_scatter cuts all rows into equal chunks, so it needs the equal slots of max_len, not {mode}"
    return None


def combine(
    y: Array,
    counts: Array,
    topology: Topology,
    *,
    way: Way,
    mode: GatherMode,
    rows: int,
    transport: Transport | None = None,
) -> Array:
    """Adds up the experts' partial output once and returns each replica's own rows.

    Args:
        y: [G, ...] PARTIAL over the world, laid out by `rows.slots`; rows that are not real may hold anything.
        counts: [attn_dp] integers, REPLICA over the world; each at most M.
        way: all_reduce (A): all_reduce over the world, then `own_rows`. reduce_scatter_v (B): every rank its real
            rows; attn_tp must be 1. reduce_scatter (C): equal chunks over the world, joined by all_gather inside
            attn_tp; mode must be max_len.
        mode, rows: how the rows were gathered, and M.
        transport: of reduce_scatter_v; None takes `transport_for`.

    Returns:
        [M, ...] SHARD over attn_dp, REPLICA over attn_tp; zeros past the replica's count.
        Wire bytes, b per row: A 2*G*b*(n-1)/n; B reduce_scatter_v's; C G*b*(n-1)/n + M*b*(attn_tp-1)/attn_tp.

    Raises:
        StateError: `y` is not PARTIAL over the whole world; a complete value would be scaled.
        ValueError: an impossible way, with the reason, or rows that do not fit the mode.
    """
    if reason := combine_impossible(way, mode, topology):
        raise ValueError(reason)
    world = topology.group("world")
    require(y, world, State.PARTIAL, f"combine by {way}")
    require_layout(f"combine by {way}", counts, topology, mode, rows, y.shape[0])
    if way == "all_reduce":
        return own_rows(all_reduce(y, world), counts, topology, mode=mode, rows=rows)
    if way == "reduce_scatter":
        own = all_gather(reduce_scatter(y, world, 0), topology.group("attn_tp"), 0)
        return zero_padding(own, counts, topology)
    return _reduce_scatter_v(y, counts, topology, mode, rows, transport)


def _reduce_scatter_v(
    y: Array, counts: Array, topology: Topology, mode: GatherMode, rows: int, transport: Transport | None
) -> Array:
    _, starts = slots(counts, mode, attn_tp=1, rows=rows)
    transport = transport or transport_for(topology)
    own = reduce_scatter_v(y, counts, topology.group("world"), rows=rows, starts=starts, transport=transport)
    # One member: this only says that the replica's one rank holds all of its rows.
    return all_gather(own, topology.group("attn_tp"), 0)
