"""Exchanges of unequal numbers of rows: counts are data, capacities are shapes.

Transport "ragged" sends only real rows (`lax.ragged_all_to_all`, which XLA does not have for CPU); "dense" sends equal
padded blocks and runs everywhere. Both give the same results. No row that lies past a count is ever read, so padding
may hold NaN. JAX types a ragged exchange by its output buffer alone, so this is the one file that asserts states: two
private retypes, known to the audit by name. Not differentiable where a retype is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import mlir

from jaxcoll.collectives import all_gather, all_to_all, declare_partial, reduce_scatter
from jaxcoll.routing import check_numbered
from jaxcoll.states import State, StateError, as_group, group_size, require
from jaxcoll.topology import Topology

Array = jax.Array
Group = str | Iterable[str]
Transport = Literal["dense", "ragged"]


class Received(NamedTuple):
    """What one rank holds after `all_to_all_v` over n ranks.

    Attributes:
        rows: [capacity, ...] SHARD; the rows of rank i start at the exclusive prefix sum of `counts`; zeros after.
        counts: [n] SHARD; rows that arrived from every rank.
        overflow: scalar REPLICA; rows of the whole group that found no room. They are lost unless it is 0.
    """

    rows: Array
    counts: Array
    overflow: Array


def transport_for(topology: Topology) -> Transport:
    """ "dense" for CPU devices, and for one device, which exchanges with nobody; "ragged" for any other mesh."""
    return "dense" if topology.world == 1 or topology.mesh.devices.flat[0].platform == "cpu" else "ragged"


def rows_without_room(counts: Array, capacity: int) -> Array:
    """How many of `counts` rows do not fit `capacity`: 0 proves that a verb with that capacity loses none."""
    return jnp.maximum(counts.sum() - capacity, 0)


def all_gather_v(x: Array, counts: Array, group: Group, *, capacity: int, transport: Transport = "dense") -> Array:
    """Concatenates the ranks' real rows, in rank order; every rank gets all of them.

    Args:
        x: [M, ...] SHARD over `group` of n ranks; rank r's first counts[r] rows are real, the rest is garbage.
        counts: [n] integers, REPLICA; each at most M.
        capacity: rows of the result. It must hold the sum of the counts, as RowPlan.total does; where no plan proves
            it, `rows_without_room` tells. Rows past it are dropped.

    Returns:
        [capacity, ...] REPLICA over `group`: rank r's rows from the exclusive prefix sum of the counts on, then zeros.
        Wire bytes of rank r with b bytes per row: dense M*b*(n-1), ragged counts[r]*b*(n-1).

    Raises:
        StateError: `x` is not SHARD or `counts` not REPLICA over `group`.
        ValueError: not one count per rank, unknown transport, or row numbers that pass 2^31.
    """
    axes, n, rows = _checked(x, counts, group, State.SHARD, "all_gather_v", transport)
    check_numbered("all_gather_v", n * rows, capacity)
    counts = jnp.clip(counts, 0, rows)
    starts = _exclusive_sum(counts)
    if 0 in (x.size, capacity):
        return _zeros(x, (), capacity, drop=axes)
    if transport == "dense" or not axes:
        return _joined(all_gather(x, axes, 0), counts, capacity, stride=rows)
    sizes = jnp.clip(counts, 0, jnp.maximum(capacity - starts, 0))
    mine = lax.axis_index(axes)
    every = jnp.zeros(n, jnp.int32)
    arrived = lax.ragged_all_to_all(
        x,
        _zeros(x, axes, capacity),
        _varying(every, axes),
        every + sizes[mine],
        every + starts[mine],
        _varying(sizes, axes),
        axis_name=axes,
    )
    return _retyped_as_replica(arrived, axes)


def reduce_scatter_v(
    x: Array, counts: Array, group: Group, *, rows: int, starts: Array | None = None, transport: Transport = "dense"
) -> Array:
    """Adds up a partial sum and leaves each rank its own rows, of which every rank may have another number.

    Args:
        x: [G, ...] PARTIAL over `group` of n ranks. Rows that no slot names may hold anything.
        counts: [n] integers, REPLICA; rows of every rank, each at most `rows`.
        rows: rows of the result; it must hold the largest count, as RowPlan.rows does.
        starts: [n] integers, REPLICA; where every rank's rows begin in x. Default: the exclusive prefix sum of counts.

    Returns:
        [rows, ...] SHARD over `group`: on rank r rows starts[r] to starts[r] + counts[r] of the sum, then zeros.
        Wire bytes of rank r with b bytes per row: dense rows*b*(n-1), ragged (sum(counts) - counts[r])*b. The ragged
        transport adds addends of 16 bits in float32 and rounds once.

    Raises:
        StateError: `x` is not PARTIAL over `group` alone, or `counts` is not REPLICA over it.
        ValueError: not one count per rank, unknown transport, or row numbers that pass 2^31.
    """
    axes, n, total = _checked(x, counts, group, State.PARTIAL, "reduce_scatter_v", transport)
    check_numbered("reduce_scatter_v", n * rows, total)
    starts = _exclusive_sum(counts) if starts is None else starts
    _counts_are_replicas(starts, axes, n, "reduce_scatter_v")
    starts = jnp.clip(starts, 0, total)
    counts = jnp.clip(counts, 0, jnp.minimum(rows, total - starts))
    if 0 in (x.size, rows):
        return _zeros(x, axes, rows)
    if not axes:
        return _cut(x, starts, counts, rows)
    addends = retyped_as_shard(x, axes)
    if transport == "dense":
        return reduce_scatter(declare_partial(_cut(addends, starts, counts, rows), axes), axes, 0)
    return _moved_and_added(addends, starts, counts, axes, rows)


def exchange_counts(send_counts: Array, group: Group) -> Array:
    """Tells every rank who sends how many rows to whom.

    Args:
        send_counts: [n] integers, SHARD over `group` of n ranks: rows for every rank; below 0 counts as 0.

    Returns:
        [n, n] int32 REPLICA over `group`: [src, dst].

    Raises:
        StateError: `send_counts` is not SHARD over `group`.
        ValueError: not one count per rank.
    """
    axes = as_group(group)
    require(send_counts, axes, State.SHARD, "exchange_counts")
    _one_per_rank(send_counts, group_size(axes), "exchange_counts")
    return jnp.maximum(all_gather(send_counts.astype(jnp.int32)[None], axes, 0), 0)


def all_to_all_v(
    x: Array,
    send_counts: Array,
    group: Group,
    *,
    capacity: int,
    pair_capacity: int | None = None,
    transport: Transport = "dense",
) -> Received:
    """Sends every rank its own number of rows.

    Args:
        x: [R, ...] SHARD over `group` of n ranks: rows for rank 0, then for rank 1, and so on.
        send_counts: [n] integers, SHARD: rows for every rank; their sum is at most R.
        capacity: rows of the receive buffer; n*R is a proven bound.
        pair_capacity: most rows from one rank to another, default R, which is proven. Dense sends n blocks of it.

    Returns:
        What arrived; the caller proves or checks that its overflow is 0, and may steer a `uniform_cond` by it. Wire
        bytes, b per row: dense pair_capacity*b*(n-1), ragged b per row sent; 4*n*(n-1) more for the counts.

    Raises:
        StateError: `x` or `send_counts` is not SHARD over `group`, or `x` is PARTIAL over other axes.
        ValueError: not one count per rank, unknown transport, or row numbers that pass 2^31.
    """
    axes, held = as_group(group), x.shape[0]
    block = held if pair_capacity is None else pair_capacity
    _require_rows(x, axes, State.SHARD, "all_to_all_v", transport)
    check_numbered("all_to_all_v", group_size(axes) * max(block, held), capacity)
    asked, mine = exchange_counts(send_counts, axes), lax.axis_index(axes) if axes else 0
    sent, recv_starts = _admitted(asked, held, capacity, block)
    sends, recv_counts = (_exclusive_sum(asked[mine]), sent[mine]), sent[:, mine]
    if 0 in (x.size, capacity, block):
        rows = _zeros(x, axes, capacity)
    elif transport == "dense" or not axes:
        rows = _joined(all_to_all(_cut(x, *sends, block), axes, 0, 0), recv_counts, capacity, stride=block)
    else:
        room = _zeros(x, axes, capacity)
        rows = lax.ragged_all_to_all(x, room, *sends, recv_starts[mine], recv_counts, axis_name=axes)
    return Received(rows, recv_counts, asked.sum() - sent.sum())


def require_complete_elsewhere(x: Array, axes: tuple[str, ...], verb: str) -> None:
    """Raises StateError where `x` is PARTIAL over an axis outside `axes`: the moves here would drop that mark."""
    rest = sorted(jax.typeof(x).mat.unreduced - set(axes))
    if rest:
        raise StateError(
            f"{verb} over ({', '.join(axes)}) moves rows, but this {jax.typeof(x).str_short()} is PARTIAL over "
            f"({', '.join(rest)}); complete it there first"
        )


def place_rows(x: Array, start: Array, count: Array, group: Group, *, total: int) -> Array:
    """Puts this rank's rows where they belong among all; their sum over the ranks is then the buffer of all rows.

    Args:
        x: [M, ...] SHARD over `group`; the first `count` rows are real, the rest is garbage.
        start, count: integer scalars of this rank. The ranks' intervals [start, start + count) must not overlap.
        total: rows of the result; rows past it are dropped.

    Returns:
        [total, ...] PARTIAL over `group`, zeros outside the interval. Nothing is sent.

    Raises:
        StateError: `x` is not SHARD over `group`.
    """
    axes = as_group(group)
    require(x, axes, State.SHARD, "place_rows")
    rows = x.shape[0]
    check_numbered("place_rows", total + rows)
    real = _where_rows(jnp.arange(rows) < count, x)
    # A whole block fits from any start, so that dynamic_update_slice never moves it to make it fit.
    buffer = jnp.zeros((total + rows, *x.shape[1:]), x.dtype)
    placed = lax.dynamic_update_slice_in_dim(buffer, real, jnp.clip(start, 0, total), 0)
    return declare_partial(placed[:total], axes)


def _moved_and_added(addends: Array, starts: Array, counts: Array, axes: tuple[str, ...], rows: int) -> Array:
    """[rows, ...]: every rank's addends of this rank's rows, sent without padding, then added."""
    n, mine = group_size(axes), lax.axis_index(axes)
    every = jnp.zeros(n, jnp.int32)
    arrived = lax.ragged_all_to_all(
        addends,
        _zeros(addends, axes, n * rows),
        _varying(starts, axes),
        _varying(counts, axes),
        every + mine * rows,
        every + counts[mine],
        axis_name=axes,
    )
    return arrived.reshape(n, rows, *addends.shape[1:]).sum(0, dtype=addends.dtype)


def _checked(
    x: Array, counts: Array, group: Group, needed: State, verb: str, transport: str
) -> tuple[tuple[str, ...], int, int]:
    """The axes, their ranks and the rows of x, after checking what every verb with known counts needs."""
    axes = as_group(group)
    _require_rows(x, axes, needed, verb, transport)
    n = group_size(axes)
    _counts_are_replicas(counts, axes, n, verb)
    return axes, n, x.shape[0]


def _require_rows(x: Array, axes: tuple[str, ...], needed: State, verb: str, transport: str) -> None:
    require(x, axes, needed, verb)
    if transport not in get_args(Transport):
        raise ValueError(f"unknown transport {transport!r}; allowed are {', '.join(get_args(Transport))}")
    require_complete_elsewhere(x, axes, verb)


def _counts_are_replicas(counts: Array, axes: tuple[str, ...], n: int, verb: str) -> None:
    require(counts, axes, State.REPLICA, f"{verb} (its counts)")
    _one_per_rank(counts, n, verb)


def _one_per_rank(counts: Array, n: int, verb: str) -> None:
    if counts.shape != (n,) or not jnp.issubdtype(counts.dtype, jnp.integer):
        raise ValueError(f"{verb} needs one whole number per rank, [{n}], not {counts.dtype}{list(counts.shape)}")


def _exclusive_sum(counts: Array) -> Array:
    return jnp.cumsum(counts) - counts


def _admitted(asked: Array, held: int, capacity: int, block: int) -> tuple[Array, Array]:
    """The rows [src, dst] that exist and fit both capacities, and where they start in dst's buffer."""
    starts = jnp.cumsum(asked, 1) - asked
    sent = jnp.clip(asked, 0, jnp.clip(held - starts, 0, block))
    recv_starts = jnp.minimum(jnp.cumsum(sent, 0) - sent, capacity)
    return jnp.clip(sent, 0, capacity - recv_starts), recv_starts


def _where_rows(real: Array, x: Array) -> Array:
    """x where `real`, zeros elsewhere; a product with 0 would keep NaN."""
    return jnp.where(real.reshape(real.shape + (1,) * (x.ndim - 1)), x, jnp.zeros((), x.dtype))


def _rows_at(x: Array, index: Array, real: Array) -> Array:
    """x[index] where `real`, zeros elsewhere."""
    return _where_rows(real, x.at[index].get(mode="clip", wrap_negative_indices=False))


def _cut(x: Array, starts: Array, counts: Array, rows: int) -> Array:
    """[n*rows, ...]: block j holds counts[j] rows of x from starts[j] on, then zeros."""
    row = jnp.arange(rows)
    index, real = starts[:, None] + row, row < counts[:, None]
    return _rows_at(x, index.reshape(-1), real.reshape(-1))


def _joined(blocks: Array, counts: Array, capacity: int, *, stride: int) -> Array:
    """[capacity, ...]: the first counts[i] rows of every block of `stride` rows, closed up, then zeros."""
    ends = jnp.cumsum(counts)
    row = jnp.arange(capacity)
    block = (row[:, None] >= ends).sum(1, dtype=jnp.int32)
    index = block * stride + row - (ends - counts)[block]
    return _rows_at(blocks, index, row < ends[-1])


def _varying(x: Array, axes: tuple[str, ...]) -> Array:
    """A value that is typed SHARD over all of `axes`, whatever it was over each."""
    rest = tuple(a for a in axes if a not in jax.typeof(x).mat.varying)
    return lax.pcast(x, rest, to="varying") if rest else x


def _zeros(x: Array, axes: tuple[str, ...], rows: int, *, drop: tuple[str, ...] = ()) -> Array:
    """[rows, ...] zeros, typed SHARD over `axes`, REPLICA over `drop` and like x elsewhere.

    A ragged exchange writes into them; where nothing can arrive they are the result, and nothing is sent.
    """
    varying = (jax.typeof(x).mat.varying | set(axes)) - set(drop)
    return _varying(jnp.zeros((rows, *x.shape[1:]), x.dtype), tuple(sorted(varying)))


def _retype(name: str, joins: Literal["varying", "replica"]) -> core.Primitive:
    """An identity under which `axes` leave every state and join one."""
    primitive = core.Primitive(name)

    @primitive.def_abstract_eval
    def _(aval, *, axes):
        kind, axes = aval.mat, frozenset(axes)
        varying = kind.varying | axes if joins == "varying" else kind.varying - axes
        retyped = type(kind)(varying=varying, unreduced=kind.unreduced - axes, reduced=kind.reduced)
        return aval.update(manual_axis_type=retyped)

    mlir.register_lowering(primitive, lambda ctx, x, **_: [x])
    return primitive


# Both are known to the audit by these names, and nothing outside this file may bind them.
_PARTIAL_TO_SHARD = _retype("partial_to_shard", "varying")
_SHARD_TO_REPLICA = _retype("shard_to_replica", "replica")


def retyped_as_shard(x: Array, axes: tuple[str, ...]) -> Array:
    """Each rank's addend as its own rows, so that they can be moved to where they are added."""
    return _PARTIAL_TO_SHARD.bind(x, axes=axes)


def _retyped_as_replica(x: Array, axes: tuple[str, ...]) -> Array:
    """Asserts that every rank received the same rows, which JAX cannot know of a ragged exchange."""
    return _SHARD_TO_REPLICA.bind(x, axes=axes)
