"""Attention replicas' rows -> one buffer of all rows on every rank, in three ways, and back without communication.

What a replica's own ranks hold decides which form is legal: copies (`gather_replicas`) or partial sums
(`gather_partials`, which also performs the attention reduction). Token ids travel the same way as hidden states, with
the same counts. Source: communication semantics, section 3; SGLang's `dp_gather_replicate`, `dp_gather_partial` and
`dp_scatter`.
"""

from __future__ import annotations

from typing import get_args

import jax
import jax.numpy as jnp
from jax import lax

from jaxcoll.collectives import all_gather, all_reduce, reduce_scatter, take_shard
from jaxcoll.ragged import Transport, all_gather_v, place_rows, transport_for
from jaxcoll.rows import GatherMode, slots
from jaxcoll.states import State, StateError, describe, require, state
from jaxcoll.topology import Topology

Array = jax.Array


def gather_impossible(mode: GatherMode, topology: Topology) -> str | None:
    """Why this mesh cannot gather in that way, or None."""
    if mode not in get_args(GatherMode):
        raise ValueError(f"unknown gather mode {mode!r}; allowed are {', '.join(get_args(GatherMode))}")
    if mode == "gather_v" and topology.attn_tp > 1:
        return (
            f"gather_v sends each rank's own rows, so it needs attn_tp = 1, not {topology.attn_tp}: "
            "several ranks hold one replica's rows"
        )
    return None


def gather(
    x: Array,
    counts: Array,
    topology: Topology,
    *,
    mode: GatherMode,
    total: int,
    transport: Transport | None = None,
) -> Array:
    """Gathers every replica's rows by what its ranks hold: `gather_partials` for a partial sum, else `gather_replicas`.

    Arguments, result and errors are theirs.
    """
    partial = state(x, topology.group("attn_tp")) is State.PARTIAL
    form = gather_partials if partial else gather_replicas
    return form(x, counts, topology, mode=mode, total=total, transport=transport)


def gather_replicas(
    x: Array,
    counts: Array,
    topology: Topology,
    *,
    mode: GatherMode,
    total: int,
    transport: Transport | None = None,
) -> Array:
    """Gathers rows that all ranks of a replica hold alike; each row is counted once.

    Every rank of a replica cuts its own chunk out of the copy, which costs nothing. (SGLang zeroes all copies but one
    and adds them up in chunks, which costs a reduce_scatter inside attn_tp and gives the same rows.)

    Args:
        x: [M, ...] SHARD over attn_dp, REPLICA over attn_tp, which divides M. Row i is real for i < counts[d] on
            replica d, garbage from there on.
        counts: [attn_dp] integers, REPLICA over the world; each at most M.
        mode: gather_v: true counts, all_gather_v over attn_dp; attn_tp must be 1. sum_len: every rank's chunk placed
            among zeros, one all_reduce over the world. max_len: all_gather over the world.
        total: G, rows of the result: attn_dp*M for max_len, otherwise at least the sum of the aligned counts (a
            RowPlan's `total`).
        transport: of gather_v; None is "dense" on CPU and "ragged" elsewhere.

    Returns:
        [G, ...] REPLICA over the world; replica d's rows from its slot's start on (`rows.slots`). All other rows are
        0 by gather_v and sum_len, and whatever the replicas' padding holds by max_len (`rows.real_rows` tells).
        Wire bytes per rank, b per row, n ranks: max_len G*b*(n-1)/n; sum_len 2*G*b*(n-1)/n; gather_v as all_gather_v.

    Raises:
        StateError: another state; a partial sum would enter the experts unreduced.
        ValueError: gather_v with attn_tp > 1, an M that attn_tp does not divide, or max_len with another G.
    """
    _check("gather_replicas", x, counts, topology, mode, total)
    _require_over_attn_tp(x, topology, State.REPLICA, "gather_replicas", "gather_partials gathers a partial sum")
    if mode == "gather_v":
        return _all_gather_v(x, counts, topology, total, transport)
    chunk = take_shard(x, topology.group("attn_tp"), 0)
    return _gather_chunks(chunk, counts, topology, mode, total)


def gather_partials(
    x: Array,
    counts: Array,
    topology: Topology,
    *,
    mode: GatherMode,
    total: int,
    transport: Transport | None = None,
) -> Array:
    """Gathers rows of which the ranks of a replica hold addends, and adds those up on the way.

    Arguments and result as for `gather_replicas`, with `x` PARTIAL over attn_tp: reduce_scatter inside attn_tp gives
    every rank its own chunk of the complete rows, which then goes the same way.
    Wire bytes per rank: those of gather_replicas and M*b*(attn_tp-1)/attn_tp.

    Raises:
        StateError: another state; a replica would be counted attn_tp times.
        ValueError: as for `gather_replicas`.
    """
    _check("gather_partials", x, counts, topology, mode, total)
    _require_over_attn_tp(x, topology, State.PARTIAL, "gather_partials", "gather_replicas gathers copies")
    if mode == "gather_v":  # one member: this completes the type and sends nothing
        return _all_gather_v(all_reduce(x, topology.group("attn_tp")), counts, topology, total, transport)
    chunk = reduce_scatter(x, topology.group("attn_tp"), 0)
    return _gather_chunks(chunk, counts, topology, mode, total)


def own_rows(y: Array, counts: Array, topology: Topology, *, mode: GatherMode, rows: int) -> Array:
    """Takes each replica's rows back out of the buffer of all rows; nothing is sent.

    Args:
        y: [G, ...] REPLICA over the world, laid out by `rows.slots`.
        counts: [attn_dp] integers, REPLICA over the world.
        mode: how the buffer was gathered.
        rows: M.

    Returns:
        [M, ...] SHARD over attn_dp, REPLICA over attn_tp; zeros past the replica's count.

    Raises:
        StateError: `y` or `counts` is not REPLICA over the world.
        ValueError: not one count per replica, or max_len with G other than attn_dp*M.
    """
    world, attn_dp = topology.group("world"), topology.group("attn_dp")
    require(y, world, State.REPLICA, "own_rows")
    require_layout("own_rows", counts, topology, mode, rows, y.shape[0])
    if mode == "max_len":
        return zero_padding(take_shard(y, attn_dp, 0), counts, topology)
    _, starts = slots(counts, mode, attn_tp=topology.attn_tp, rows=rows)
    index = starts[lax.axis_index(attn_dp)] + jnp.arange(rows)
    return zero_padding(y.at[index].get(mode="fill", fill_value=0), counts, topology)


def zero_padding(x: Array, counts: Array, topology: Topology) -> Array:
    """[M, ...] SHARD over attn_dp with zeros past the replica's count; other states are kept."""
    count = counts[lax.axis_index(topology.group("attn_dp"))]
    real = (jnp.arange(x.shape[0]) < count).reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.where(real, x, jnp.zeros((), x.dtype))


def _all_gather_v(x: Array, counts: Array, topology: Topology, total: int, transport: Transport | None) -> Array:
    transport = transport or transport_for(topology)
    return all_gather_v(x, counts, topology.group("attn_dp"), capacity=total, transport=transport)


def _gather_chunks(chunk: Array, counts: Array, topology: Topology, mode: GatherMode, total: int) -> Array:
    """[M/attn_tp, ...] SHARD over the world -> [G, ...] REPLICA: rank (d, t) holds chunk t of replica d."""
    world = topology.group("world")
    if mode == "max_len":  # in world order (d, t) the chunks of a slot, and the slots, follow each other
        return all_gather(chunk, world, 0)
    size = chunk.shape[0]
    d, t = (lax.axis_index(topology.group(name)) for name in ("attn_dp", "attn_tp"))
    _, starts = slots(counts, mode, attn_tp=topology.attn_tp, rows=size * topology.attn_tp)
    count = jnp.clip(counts[d] - t * size, 0, size)
    return all_reduce(place_rows(chunk, starts[d] + t * size, count, world, total=total), world)


def _check(verb: str, x: Array, counts: Array, topology: Topology, mode: GatherMode, total: int) -> None:
    reason = gather_impossible(mode, topology)
    if reason:
        raise ValueError(reason)
    require(x, topology.group("attn_dp"), State.SHARD, verb)
    require_layout(verb, counts, topology, mode, x.shape[0], total)


def require_layout(verb: str, counts: Array, topology: Topology, mode: GatherMode, rows: int, total: int) -> None:
    """Refuses counts that ranks could disagree on, and shapes that the layout of the rows does not have."""
    require(counts, topology.group("world"), State.REPLICA, f"{verb} (its counts)")
    if counts.shape != (topology.attn_dp,):
        raise ValueError(f"{verb} needs one count per replica, [{topology.attn_dp}], not {list(counts.shape)}")
    if not jnp.issubdtype(counts.dtype, jnp.integer):
        raise ValueError(f"{verb} needs whole numbers for counts, not {counts.dtype}")
    if rows % topology.attn_tp:
        raise ValueError(f"{verb} needs rows in equal chunks: M={rows} is no multiple of attn_tp={topology.attn_tp}")
    if mode == "max_len" and total != topology.attn_dp * rows:
        raise ValueError(
            f"{verb} by max_len has attn_dp*M = {topology.attn_dp}*{rows} = {topology.attn_dp * rows} rows, not {total}"
        )


def _require_over_attn_tp(x: Array, topology: Topology, needed: State, verb: str, other: str) -> None:
    group = topology.group("attn_tp")
    if state(x, group) is not needed:
        raise StateError(
            f"{verb} needs {needed} over ({', '.join(group)}), but this {jax.typeof(x).str_short()} is "
            f"{describe(x, group)}; {other}"
        )
