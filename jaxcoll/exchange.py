"""Rows to other ranks and back by one plan, with transport "ragged" (only real rows) or "dense" (padded blocks).

Counts are exchanged first (`meet`), and every capacity follows from them: no row can be lost. What the rows are, and
what they are for, is not known here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxcoll.collectives import all_gather, all_to_all, uniform_cond
from jaxcoll.ragged import Transport
from jaxcoll.routing import ExchangePlan, plan_exchange
from jaxcoll.states import Group, group_size

Array = jax.Array
_STATIC = {"static": True}


@dataclasses.dataclass(frozen=True)
class Capacities:
    """Rows of the buffers of an exchange, the same on every rank.

    Attributes:
        send: S, rows in packed order; at least any rank's sum of counts.
        slab: rows of one of the m slabs of the receive buffer; at least any rank's sum over the sources.
        pair: most rows that a rank can have for another.
        small_pair: block of the dense transport that is tried first; equal to `pair` where there is nothing to try.
    """

    send: int
    slab: int
    pair: int
    small_pair: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Exchange:
    """One agreed exchange over a group of R ranks.

    Attributes:
        counts: [R, R, m] int32, REPLICA over the group: rows of slice j from rank src (first) for rank dst (second).
        plan: this rank's offsets, SHARD over the group.
        group, transport, capacities: how it is done.
    """

    counts: Array
    plan: ExchangePlan
    group: Group = dataclasses.field(metadata=_STATIC)
    transport: Transport = dataclasses.field(metadata=_STATIC)
    capacities: Capacities = dataclasses.field(metadata=_STATIC)

    @property
    def recv_rows(self) -> int:
        """Rows of the receive buffer: m slabs."""
        return self.counts.shape[2] * self.capacities.slab

    @property
    def fits_small(self) -> Array:
        """Scalar bool, REPLICA over the group: every pair's rows fit the small block."""
        return jnp.max(jnp.sum(self.counts, axis=2)) <= self.capacities.small_pair


def meet(send_counts: Array, group: Group, *, transport: Transport, capacities: Capacities) -> Exchange:
    """Tells every rank of the group what every other will send, before any row travels.

    Args:
        send_counts: [R*m] int32, SHARD over `group` of R ranks: rows of slice j for every rank, the rank major. Zero
            is said like any other number.
        transport: how `send` and `send_home` will move rows.
        capacities: proven bounds.

    Returns:
        The exchange. Wire bytes per rank: 4*m*R*(R-1).

    Raises:
        StateError: `send_counts` is not SHARD over `group`.
    """
    ranks = group_size(group)
    counts = all_gather(send_counts[None], group, 0).reshape(ranks, ranks, -1)
    plan = plan_exchange(counts, lax.axis_index(group) if group else 0, slab_rows=capacities.slab)
    return Exchange(counts, plan, group, transport, capacities)


def send(exchange: Exchange, *packed: Array) -> tuple[Array, ...]:
    """Sends rows in packed order to where the plan says.

    Args:
        packed: arrays [S, ...], SHARD over the group; rows past the counts may hold anything.

    Returns:
        For each one an array [m*slab, ...], SHARD over the group: slab j holds slice j of every source, closed up, in
        source order; zeros after. Wire bytes of rank r with b bytes per row: ragged b per row for another rank, dense
        b*(R-1) times the block that the fullest pair needs (small_pair or pair).
    """
    plan = exchange.plan
    if exchange.transport == "dense" or not exchange.group:
        return _dense(exchange, functools.partial(_dense_there, exchange), packed)
    slices = plan.send_offsets, plan.send_counts, plan.landing_offsets, plan.recv_counts
    return tuple(_ragged(exchange.group, x, exchange.recv_rows, slices) for x in packed)


def send_home(exchange: Exchange, *landed: Array) -> tuple[Array, ...]:
    """Sends rows back to where they came from, each to its own place in packed order.

    Args:
        landed: arrays [m*slab, ...], SHARD over the group, laid out as `send` left them; rows past the counts may hold
            anything.

    Returns:
        For each one an array [S, ...], SHARD over the group, in packed order; zeros after. Wire bytes as for `send`,
        with arrivals for departures.
    """
    plan = exchange.plan
    if exchange.transport == "dense" or not exchange.group:
        return _dense(exchange, functools.partial(_dense_home, exchange), landed)
    slices = plan.recv_offsets, plan.recv_counts, plan.home_offsets, plan.send_counts
    return tuple(_ragged(exchange.group, y, exchange.capacities.send, slices) for y in landed)


def take_rows(x: Array, index: Array) -> Array:
    """x[index], zeros where the index is -1; `where`, as a product with 0 would keep NaN."""
    taken = x.at[index].get(mode="clip", wrap_negative_indices=False)
    return jnp.where((index >= 0).reshape(-1, *(1,) * (x.ndim - 1)), taken, jnp.zeros((), x.dtype))


def _ragged(group: Group, x: Array, rows: int, slices: tuple[Array, Array, Array, Array]) -> Array:
    """Slices of x (offsets, sizes) to the other ranks (at their offsets), slices of theirs (sizes) from them."""
    # JAX types a ragged exchange by its output buffer alone, so the buffer is typed like what is sent.
    varying = tuple(sorted(jax.typeof(x).mat.varying))
    buffer = lax.pcast(jnp.zeros((rows, *x.shape[1:]), x.dtype), varying, to="varying")
    return lax.ragged_all_to_all(x, buffer, *slices, axis_name=group)


def _dense(exchange: Exchange, move: Callable[..., tuple[Array, ...]], rows: tuple[Array, ...]) -> tuple[Array, ...]:
    small, large = exchange.capacities.small_pair, exchange.capacities.pair
    if small >= large:
        return move(large, *rows)
    # Every rank of the group holds the same counts, so all take the same branch.
    moves = (functools.partial(move, block) for block in (small, large))
    return uniform_cond(exchange.fits_small, exchange.group, *moves, *rows)


def _dense_there(exchange: Exchange, block: int, *packed: Array) -> tuple[Array, ...]:
    landed_from = _inverse(_landings(exchange, block), exchange.recv_rows)
    return _by_blocks(exchange, packed, _departures(exchange, block), landed_from)


def _dense_home(exchange: Exchange, block: int, *landed: Array) -> tuple[Array, ...]:
    packed_from = _inverse(_departures(exchange, block), exchange.capacities.send)
    return _by_blocks(exchange, landed, _landings(exchange, block), packed_from)


def _by_blocks(exchange: Exchange, rows: tuple[Array, ...], into: Array, out_of: Array) -> tuple[Array, ...]:
    """One equal block to every rank: rows `into` go into the blocks, rows `out_of` are taken out of what arrives."""
    blocks = (all_to_all(take_rows(x, into), exchange.group, 0, 0) for x in rows)
    return tuple(take_rows(b, out_of) for b in blocks)


def _departures(exchange: Exchange, block: int) -> Array:
    """[R*block] where row c of the block for every rank lies in packed order, -1 past its count."""
    ranks, plan = exchange.counts.shape[0], exchange.plan
    starts = plan.send_offsets.reshape(ranks, -1)[:, :1]
    counts = jnp.sum(plan.send_counts.reshape(ranks, -1), axis=1, keepdims=True)
    row = jnp.arange(block, dtype=jnp.int32)
    return jnp.where(row < counts, starts + row, -1).reshape(-1)


def _landings(exchange: Exchange, block: int) -> Array:
    """[R*block] where row c of the block from every rank lies in the receive buffer, -1 past its count."""
    ranks, plan = exchange.counts.shape[0], exchange.plan
    counts, offsets = plan.recv_counts.reshape(ranks, -1), plan.recv_offsets.reshape(ranks, -1)
    ends = jnp.cumsum(counts, axis=1, dtype=jnp.int32)
    row = jnp.arange(block, dtype=jnp.int32)
    piece = jnp.sum(row[None, :, None] >= ends[:, None, :], axis=2, dtype=jnp.int32)  # [R, block]; m past the last
    shift = jnp.take_along_axis(offsets - (ends - counts), jnp.minimum(piece, counts.shape[1] - 1), axis=1)
    return jnp.where(row < ends[:, -1:], shift + row, -1).reshape(-1)


def _inverse(index: Array, size: int) -> Array:
    """[size]: the position at which `index` holds each number, -1 for those that it does not hold."""
    positions = jnp.arange(index.size, dtype=jnp.int32)
    return jnp.full(size, -1, jnp.int32).at[index].set(positions, mode="drop", wrap_negative_indices=False)
