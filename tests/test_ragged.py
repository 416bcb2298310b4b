"""Unequal exchanges against NumPy: every small matrix of sizes, garbage in every row that is not real.

XLA has no ragged exchange for CPU. There the ragged transport runs with an exchange that does literally what jax's
documentation says, and it is compiled for H200s that are not there.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from stepping import copies, everywhere, shape, step

from jaxcoll.collectives import declare_partial, uniform_cond
from jaxcoll.ragged import (
    all_gather_v,
    all_to_all_v,
    exchange_counts,
    place_rows,
    reduce_scatter_v,
    rows_without_room,
)
from jaxcoll.states import State, state
from jaxcoll.topology import Topology

ROWS = 2  # most rows of one rank, or from one rank to another
SMALL, WIDE = Topology(2, 3), Topology(4, 2)
GROUPS = [
    (SMALL, ("attn_dp",)),  # 2 ranks, not neighbours
    (SMALL, ("attn_tp",)),  # 3 ranks
    (WIDE, ("attn_dp",)),  # 4 ranks, not neighbours
    (SMALL, ("attn_dp", "attn_tp")),
    (SMALL, ("attn_tp", "attn_dp")),  # another order of the same 6
    (WIDE, ("attn_dp", "attn_tp")),
]
TRANSPORTS = ["dense", "ragged"]


def as_documented(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`lax.ragged_all_to_all` by the pseudocode of its documentation; sizes that disagree give 99."""
    everyone = functools.partial(lax.all_gather, axis_name=axis_name)
    operands, starts, sizes, targets = map(everyone, (operand, input_offsets, send_sizes, output_offsets))
    me, row = lax.axis_index(axis_name), jnp.arange(output.shape[0])
    for src in range(lax.axis_size(axis_name)):
        from_row = row - targets[src, me]
        arrives = (from_row >= 0) & (from_row < sizes[src, me])
        sent = operands[src].at[starts[src, me] + from_row].get(mode="clip")
        output = jnp.where(arrives.reshape(-1, *(1,) * (output.ndim - 1)), sent, output)
    agree = (recv_sizes == sizes[:, me]).all()
    return jnp.where(agree, output, jnp.asarray(99, output.dtype))


@pytest.fixture(params=TRANSPORTS)
def transport(request, monkeypatch):
    monkeypatch.setattr(lax, "ragged_all_to_all", as_documented)
    return request.param


def members(topology, group):
    """World ranks of every group over these axes, each in the group's own order."""
    ranks = np.arange(topology.world).reshape(tuple(topology.axes.values()))
    inside = [list(topology.axes).index(a) for a in group]
    outside = [i for i in range(ranks.ndim) if i not in inside]
    return ranks.transpose(outside + inside).reshape(-1, topology.size(group)).tolist()


def own(topology, group):
    """The in_specs of a value that differs over the whole mesh; results keep that outside of `group`."""
    return P(tuple(a for a in topology.axes if a not in group) or None)


def count_vectors(n):
    """All vectors of n counts in 0..2, or some of them where there are too many to wait for."""
    if n <= 4:
        return list(itertools.product(range(ROWS + 1), repeat=n))
    rng = np.random.default_rng(n)
    edges = [(0,) * n, (ROWS,) * n, (0,) * (n - 1) + (ROWS,), (1,) + (0,) * (n - 1)]
    return edges + [tuple(rng.integers(0, ROWS + 1, n).tolist()) for _ in range(30)]


def coded(rank, row):
    """Two numbers that say which rank's row it is."""
    return rank * 100 + row + 1, -rank - 1


def rows_of(topology, counts_of_rank, *, garbage):
    """[world, ROWS, 2] rows of every rank with garbage past its count."""
    x = np.full((topology.world, ROWS, 2), garbage, np.float32)
    for rank in range(topology.world):
        for row in range(counts_of_rank[rank]):
            x[rank, row] = coded(rank, row)
    return x


# all_gather_v


@pytest.mark.parametrize("topology, group", GROUPS)
def test_all_gather_v_equals_numpy_for_all_counts(topology, group, transport):
    n = topology.size(group)
    capacity = n * ROWS + 1

    def gathered(x, counts):
        y = all_gather_v(x, counts, group, capacity=capacity, transport=transport)
        assert state(y, group) is State.REPLICA
        return y

    shapes = [shape(topology.world * ROWS, 2), shape(n, dtype="int32")]
    run = step(topology, gathered, shapes, [everywhere(topology), P()], own(topology, group))
    for i, counts in enumerate(count_vectors(n)):
        of_rank = {rank: counts[i] for g in members(topology, group) for i, rank in enumerate(g)}
        x = rows_of(topology, of_rank, garbage=(np.nan, 1e30)[i % 2])
        held = copies(run(x.reshape(-1, 2), np.array(counts, np.int32)))
        for ranks in members(topology, group):
            real = np.concatenate([x[rank, : of_rank[rank]] for rank in ranks])
            expected = np.zeros((capacity, 2), np.float32)
            expected[: len(real)] = real
            for rank in ranks:  # every rank's own copy of what is typed REPLICA
                np.testing.assert_array_equal(held[rank], expected)


def test_a_short_capacity_keeps_the_first_rows_and_tells(transport):
    def gathered(x, counts):
        y = all_gather_v(x, counts, ("attn_dp", "attn_tp"), capacity=3, transport=transport)
        return y, rows_without_room(counts, 3)

    run = step(SMALL, gathered, [shape(12), shape(6, dtype="int32")], [everywhere(SMALL), P()], (P(), P()))
    for counts, kept, lost in [
        ((1, 0, 2, 0, 0, 0), [0, 4, 5], 0),
        ((2, 2, 0, 0, 0, 1), [0, 1, 2], 2),
        ((0, 0, 0, 0, 0, 2), [10, 11, 0], 0),
    ]:
        y, missing = run(np.arange(12, dtype=np.float32), np.array(counts, np.int32))
        for held in copies(y):
            assert held.tolist() == kept
        assert int(missing) == lost


def test_counts_past_the_rows_held_read_nothing_else(transport):
    def gathered(x, counts):
        return all_gather_v(x, counts, "attn_dp", capacity=8, transport=transport)

    run = step(Topology(2, 1), gathered, [shape(4), shape(2, dtype="int32")], [P("attn_dp"), P()], P())
    y = run(np.arange(1, 5, dtype=np.float32), np.array([9, -4], np.int32))
    assert [held.tolist() for held in copies(y)] == [[1, 2, 0, 0, 0, 0, 0, 0]] * 2


@pytest.mark.parametrize("dtype", ["int32", "bfloat16", "bool"])
def test_all_gather_v_keeps_the_type(dtype, transport):
    def gathered(x, counts):
        return all_gather_v(x, counts, "attn_dp", capacity=3, transport=transport)

    run = step(Topology(2, 1), gathered, [shape(4, dtype=dtype), shape(2, dtype="int32")], [P("attn_dp"), P()], P())
    x = np.array([1, 0, 1, 1]).astype(dtype)
    y = run(x, np.array([1, 2], np.int32))
    assert y.dtype == dtype
    np.testing.assert_array_equal(np.asarray(y), x[[0, 2, 3]])


# reduce_scatter_v


@pytest.mark.parametrize("topology, group", GROUPS)
def test_reduce_scatter_v_equals_numpy_for_all_counts(topology, group, transport):
    n = topology.size(group)
    total = n * ROWS + 1

    def scattered(x, counts):
        y = reduce_scatter_v(declare_partial(x, group), counts, group, rows=ROWS, transport=transport)
        assert state(y, group) is State.SHARD
        return y

    shapes = [shape(topology.world * total, 2), shape(n, dtype="int32")]
    run = step(topology, scattered, shapes, [everywhere(topology), P()], everywhere(topology))
    addends = np.array([[coded(rank, row) for row in range(total)] for rank in range(topology.world)], np.float32)
    for i, counts in enumerate(count_vectors(n)):
        x = addends.copy()
        x[:, sum(counts) :] = (np.nan, 1e30)[i % 2]
        y = np.asarray(run(x.reshape(-1, 2), np.array(counts, np.int32))).reshape(topology.world, ROWS, 2)
        for ranks in members(topology, group):
            start = 0
            for rank, count in zip(ranks, counts, strict=True):
                expected = np.zeros((ROWS, 2), np.float32)
                expected[:count] = addends[ranks, start : start + count].sum(0)
                np.testing.assert_array_equal(y[rank], expected)
                start += count


def test_reduce_scatter_v_reads_slots_where_they_start(transport):
    """Slots of equal size: only their real rows are read, and what lies between them may be garbage."""
    starts = np.array([0, 3, 6, 9], np.int32)

    def scattered(x, counts):
        x = declare_partial(x, "attn_dp")
        return reduce_scatter_v(x, counts, "attn_dp", rows=3, starts=jnp.array(starts), transport=transport)

    topology = Topology(4, 1)
    run = step(topology, scattered, [shape(48), shape(4, dtype="int32")], [P("attn_dp"), P()], P("attn_dp"))
    for counts in ((3, 3, 3, 3), (1, 0, 2, 3), (0, 0, 0, 0)):
        x = np.full((4, 12), np.nan, np.float32)
        for d, count in enumerate(counts):
            x[:, starts[d] : starts[d] + count] = np.arange(4)[:, None] + 10 * d + np.arange(count)
        y = np.asarray(run(x.reshape(-1), np.array(counts, np.int32))).reshape(4, 3)
        for d, count in enumerate(counts):
            expected = np.where(np.arange(3) < count, 6 + 40 * d + 4 * np.arange(3), 0)
            np.testing.assert_array_equal(y[d], expected)


def test_slots_past_the_end_read_nothing_else(transport):
    starts = np.array([0, 3, 11, 14], np.int32)

    def scattered(x, counts):
        x = declare_partial(x, "attn_dp")
        return reduce_scatter_v(x, counts, "attn_dp", rows=3, starts=jnp.array(starts), transport=transport)

    topology = Topology(4, 1)
    run = step(topology, scattered, [shape(48), shape(4, dtype="int32")], [P("attn_dp"), P()], P("attn_dp"))
    y = run(np.tile(np.arange(1, 13, dtype=np.float32), 4), np.array([3, 2, 3, 3], np.int32))
    np.testing.assert_array_equal(np.asarray(y).reshape(4, 3), [[4, 8, 12], [16, 20, 0], [48, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize("dtype", ["int8", "int32", "bfloat16"])
def test_reduce_scatter_v_keeps_the_type(dtype, transport):
    def scattered(x, counts):
        return reduce_scatter_v(declare_partial(x, "attn_tp"), counts, "attn_tp", rows=2, transport=transport)

    topology = Topology(1, 3)
    run = step(topology, scattered, [shape(9, dtype=dtype), shape(3, dtype="int32")], [P("attn_tp"), P()], P("attn_tp"))
    y = run(np.arange(9).astype(dtype), np.array([2, 0, 1], np.int32))
    assert y.dtype == dtype
    assert np.asarray(y).astype(int).tolist() == [9, 12, 0, 0, 15, 0]


# all_to_all_v


def matrices(n):
    """[B, n, n] counts (src, dst): all of 0..2 for 2 and 3 ranks; all of 0..1 and many of 0..2 for 4; else some."""
    rng = np.random.default_rng(n)
    if n <= 3:
        return np.stack(np.unravel_index(np.arange(3 ** (n * n)), (3,) * (n * n)), -1).reshape(-1, n, n)
    drawn = rng.integers(0, ROWS + 1, (20000 if n == 4 else 300, n, n))
    if n == 4:
        ones = (np.arange(2**16)[:, None] >> np.arange(16)) & 1
        return np.concatenate([ones.reshape(-1, n, n), drawn])
    drawn[::3, rng.integers(n)] = 0  # a rank that sends nothing
    drawn[::4, :, rng.integers(n)] = 0  # a rank that receives nothing
    return drawn


def exchanged(sizes, ranks, me, capacity):
    """[B, capacity] what rank `me` of the group receives, row by row: an independent model."""
    batch, n = len(sizes), len(ranks)
    result, filled, at = np.zeros((batch, capacity), np.float32), np.zeros(batch, int), np.arange(batch)
    for src in range(n):
        first = sizes[:, src, :me].sum(1)
        for k in range(ROWS):
            there = sizes[:, src, me] > k
            result[at[there], filled[there]] = ranks[src] * 100 + first[there] + k + 1
            filled += there
    return result


@pytest.mark.parametrize("topology, group", GROUPS)
def test_all_to_all_v_equals_numpy_for_all_matrices(topology, group, transport):
    n, sizes = topology.size(group), matrices(topology.size(group)).astype(np.int32)
    capacity = held = n * ROWS

    def one(send_counts, rank):
        row = jnp.arange(held)
        x = jnp.where(row < send_counts.sum(), rank * 100.0 + row + 1, jnp.nan)
        return all_to_all_v(x, send_counts, group, capacity=capacity, pair_capacity=ROWS, transport=transport)

    def batch(sizes):
        me, rank = lax.axis_index(group), lax.axis_index(topology.group("world"))
        got = jax.vmap(one, (0, None))(sizes[:, me], rank)
        return got.rows[None], got.counts[None], got.overflow[None]

    specs = (everywhere(topology), everywhere(topology), own(topology, group))
    rows, counts, overflow = step(topology, batch, [shape(*sizes.shape, dtype="int32")], [P()], specs)(sizes)
    assert not np.asarray(overflow).any()
    rows, counts = np.asarray(rows), np.asarray(counts)
    for ranks in members(topology, group):
        for me, rank in enumerate(ranks):
            np.testing.assert_array_equal(counts[rank], sizes[:, :, me])
            np.testing.assert_array_equal(rows[rank], exchanged(sizes, ranks, me, capacity))


@pytest.mark.parametrize("sizes", [[[2, 0, 1], [0, 0, 0], [1, 2, 2]], [[0, 3, 0], [0, 3, 0], [0, 3, 0]]])
@pytest.mark.parametrize(
    "capacity, pair_capacity, held", [(9, None, 9), (4, None, 9), (9, 1, 9), (2, 2, 9), (9, None, 2)]
)
def test_no_row_is_lost_silently(sizes, capacity, pair_capacity, held, transport):
    """Every row has arrived, in its sender's order, or is counted as overflow on every rank."""
    sizes = np.array(sizes, np.int32)

    def moved(sizes):
        me = lax.axis_index("attn_tp")
        x = jnp.arange(held) + 100.0 * me + 1
        got = all_to_all_v(x, sizes[me], "attn_tp", capacity=capacity, pair_capacity=pair_capacity, transport=transport)
        return got.rows, got.counts, got.overflow

    topology = Topology(1, 3)
    out_specs = (P("attn_tp"), P("attn_tp"), P())
    rows, counts, overflow = step(topology, moved, [shape(3, 3, dtype="int32")], [P()], out_specs)(sizes)
    rows, counts = np.asarray(rows).reshape(3, capacity), np.asarray(counts).reshape(3, 3)
    assert {int(c) for c in copies(overflow)} == {sizes.sum() - counts.sum()}
    fits = np.minimum(sizes, held if pair_capacity is None else pair_capacity).T
    assert (counts <= fits).all() and (counts.sum(1) <= capacity).all()
    for me in range(3):
        expected = [100 * src + sizes[src, :me].sum() + k + 1 for src in range(3) for k in range(counts[me, src])]
        assert rows[me].tolist() == expected + [0] * (capacity - len(expected))
        if held == 9:  # nothing is dropped that had room
            assert counts[me].sum() == min(capacity, fits[me].sum())


def test_an_overflow_can_choose_the_larger_path(transport):
    """The count of lost rows is the same everywhere, so it may decide about a collective."""

    def moved(sizes):
        me = lax.axis_index("attn_dp")
        x = jnp.arange(4) + 10.0 * me + 1
        small = all_to_all_v(x, sizes[me], "attn_dp", capacity=4, pair_capacity=1, transport=transport)
        large = functools.partial(all_to_all_v, x, sizes[me], "attn_dp", capacity=4, transport=transport)
        return uniform_cond(small.overflow > 0, "attn_dp", lambda: large().rows, lambda: small.rows)

    run = step(Topology(2, 1), moved, [shape(2, 2, dtype="int32")], [P()], P("attn_dp"))
    assert np.asarray(run(np.array([[1, 1], [0, 1]], np.int32))).tolist() == [1, 0, 0, 0, 2, 11, 0, 0]
    assert np.asarray(run(np.array([[2, 2], [0, 1]], np.int32))).tolist() == [1, 2, 0, 0, 3, 4, 11, 0]


def test_everyone_learns_who_sends_what():
    def told(counts):
        return exchange_counts(counts, ("attn_dp", "attn_tp"))

    run = step(SMALL, told, [shape(36, dtype="int32")], [everywhere(SMALL)], P())
    for held in copies(run(np.arange(36, dtype=np.int32))):
        assert held.tolist() == np.arange(36).reshape(6, 6).tolist()


# Nothing to send.


@pytest.mark.parametrize("rows, width", [(0, 2), (2, 0)])
def test_empty_arrays_move(rows, width, transport):
    group = ("attn_dp", "attn_tp")

    def moved(x, counts):
        g = all_gather_v(x, counts, group, capacity=6 * rows, transport=transport)
        r = reduce_scatter_v(declare_partial(x, group), counts, group, rows=rows, transport=transport)
        a = all_to_all_v(x, jnp.where(lax.axis_index(group) >= 0, counts, 0), group, capacity=2, transport=transport)
        p = place_rows(x, jnp.int32(0), counts[0], group, total=3)
        assert [state(v, group) for v in (g, r, a.rows, p)] == [State.REPLICA, State.SHARD, State.SHARD, State.PARTIAL]
        return g, r, a.rows

    world = everywhere(SMALL)
    run = step(SMALL, moved, [shape(6 * rows, width), shape(6, dtype="int32")], [world, P()], (P(), world, world))
    g, r, a = run(np.zeros((6 * rows, width), np.float32), np.zeros(6, np.int32))
    assert (g.shape, r.shape, a.shape) == ((6 * rows, width), (6 * rows, width), (12, width))
    assert not np.asarray(a).any()


def test_an_empty_group_has_one_member(transport):
    def alone(x, counts):
        a = all_to_all_v(x, counts, (), capacity=4, transport=transport)
        r = reduce_scatter_v(x, counts, (), rows=4, starts=jnp.array([1]), transport=transport)
        return all_gather_v(x, counts, (), capacity=4, transport=transport), r, a.rows, a.counts, a.overflow

    run = step(
        Topology(2, 1),
        alone,
        [shape(6), shape(1, dtype="int32")],
        [P("attn_dp"), P()],
        (P("attn_dp"),) * 3 + (P(),) * 2,
    )
    g, r, a, counts, overflow = run(np.arange(6, dtype=np.float32), np.array([2], np.int32))
    assert np.asarray(g).tolist() == np.asarray(a).tolist() == [0, 1, 0, 0, 3, 4, 0, 0]
    assert np.asarray(r).tolist() == [1, 2, 0, 0, 4, 5, 0, 0]
    assert (counts.tolist(), int(overflow)) == ([2], 0)
