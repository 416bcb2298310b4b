"""Replicas' rows gathered in three ways on many meshes, from copies and from partial sums, and taken back.

Rows are coded by replica and row; padding holds NaN or 2^100 (about 1e30), token ids past the count are junk.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from stepping import copies, everywhere, shape, step, wire_bytes

from jaxcoll.collectives import all_gather, all_reduce, declare_partial, reduce_scatter
from jaxcoll.gather import gather, gather_impossible, gather_partials, gather_replicas, own_rows
from jaxcoll.rows import GatherMode, real_rows, slots
from jaxcoll.states import State, StateError, states
from jaxcoll.topology import Topology

MESHES = [
    Topology(4, 1),
    Topology(2, 2),
    Topology(4, 2),
    Topology(2, 4),
    Topology(8, 1),
    Topology(3, 2),
    Topology(2, 3),
    Topology(1, 4),
    Topology(4, 2, moe_ep=2),  # attn_dp is split
    Topology(2, 4, moe_ep=4),  # attn_tp is split
]
MODES: tuple[GatherMode, ...] = ("max_len", "sum_len", "gather_v")
WIDTH = 2


def name(topology):
    return "x".join(str(n) for n in topology.axes.values())


def modes(topology: Topology) -> list[GatherMode]:
    return [m for m in MODES if not gather_impossible(m, topology)]


def batches(topology):
    """Counts per replica: none, one, all, unequal, all on the last, and some drawn."""
    attn_dp, rows = topology.attn_dp, 2 * topology.attn_tp
    rng = np.random.default_rng(attn_dp)
    fixed = [[0] * attn_dp, [1] * attn_dp, [rows] * attn_dp, [0] * (attn_dp - 1) + [rows], [1] + [0] * (attn_dp - 1)]
    drawn = [rng.integers(0, rows + 1, attn_dp).tolist() for _ in range(6)]
    return fixed + [[(3 * d + 1) % (rows + 1) for d in range(attn_dp)]] + drawn


def rows_and_ids(topology, counts, garbage):
    """x [attn_dp, M, WIDTH], ids [attn_dp, M] of all replicas."""
    rows = 2 * topology.attn_tp
    x = np.full((topology.attn_dp, rows, WIDTH), garbage, np.float32)
    ids = np.full((topology.attn_dp, rows), 777, np.int32)
    for d, count in enumerate(counts):
        for i in range(count):
            x[d, i], ids[d, i] = (100 * d + i + 1, -d - 1), 1000 * d + i
    return x, ids


def buffer_of(x, counts, mode, topology):
    """What every rank should hold: slots one after the other, zeros between real rows unless slots are equal."""
    attn_dp, rows = x.shape[:2]
    if mode == "max_len":
        return x.reshape(attn_dp * rows, *x.shape[2:])
    expected, start = np.zeros((attn_dp * rows, *x.shape[2:]), x.dtype), 0
    for d, count in enumerate(counts):
        expected[start : start + count] = x[d, :count]
        start += -(-count // topology.attn_tp) * topology.attn_tp
    return expected


@functools.cache
def everything(topology):
    """One step that gathers copies, partial sums and ids in every possible mode, and takes the rows back."""
    attn_dp, attn_tp, world = (topology.group(g) for g in ("attn_dp", "attn_tp", "world"))
    rows = 2 * topology.attn_tp

    def gathered(x, ids, counts):
        # Rank t holds t+1 parts of the row.
        partial = declare_partial(x * (lax.axis_index(attn_tp) + 1.0), attn_tp)
        result = {}
        for mode in modes(topology):
            where = {"mode": mode, "total": topology.attn_dp * rows}
            y = gather(x, counts, topology, **where)
            assert set(states(y, world).values()) == {State.REPLICA}
            own = own_rows(y, counts, topology, mode=mode, rows=rows)
            assert set(states(own, attn_dp).values()) == {State.SHARD}
            assert set(states(own, attn_tp).values()) == {State.REPLICA}
            result[mode] = {
                "copies": y,
                "partials": gather(partial, counts, topology, **where),
                "ids": gather(ids, counts, topology, **where),
                "own": own,
            }
        return result

    shapes = [shape(topology.attn_dp * rows, WIDTH), shape(topology.attn_dp * rows, dtype="int32")]
    out_specs = {m: {"copies": P(), "partials": P(), "ids": P(), "own": P(attn_dp)} for m in modes(topology)}
    counts = shape(topology.attn_dp, dtype="int32")
    return step(topology, gathered, [*shapes, counts], [P(attn_dp), P(attn_dp), P()], out_specs)


@pytest.mark.parametrize("topology", MESHES, ids=name)
def test_gathered_rows_are_the_slots_of_all_replicas(topology):
    parts = topology.attn_tp * (topology.attn_tp + 1) // 2
    for i, counts in enumerate(batches(topology)):
        x, ids = rows_and_ids(topology, counts, garbage=(np.nan, 2.0**100)[i % 2])
        flat = x.reshape(-1, WIDTH)
        found = everything(topology)(flat, ids.reshape(-1), np.array(counts, np.int32))
        for mode in modes(topology):
            expected = buffer_of(x, counts, mode, topology)
            for held in copies(found[mode]["copies"]):  # a copy counts once, whatever attn_tp is
                np.testing.assert_array_equal(held, expected)
            for held in copies(found[mode]["partials"]):
                np.testing.assert_array_equal(held, expected * np.float32(parts))
            for held in copies(found[mode]["ids"]):
                np.testing.assert_array_equal(held, buffer_of(ids, counts, mode, topology))
            real = np.arange(x.shape[1])[:, None] < np.array(counts)[:, None, None]
            np.testing.assert_array_equal(np.asarray(found[mode]["own"]), np.where(real, x, 0).reshape(-1, WIDTH))


@pytest.mark.parametrize("topology", MESHES, ids=name)
def test_real_rows_are_those_of_the_buffer(topology):
    for counts in batches(topology):
        _, ids = rows_and_ids(topology, counts, garbage=0)
        for mode in modes(topology):
            layout = {"attn_tp": topology.attn_tp, "rows": ids.shape[1]}
            real = real_rows(np.array(counts), mode, total=ids.size, **layout)
            assert buffer_of(ids, counts, mode, topology)[real].tolist() == ids[ids != 777].tolist()
            _, starts = slots(np.array(counts), mode, **layout)
            firsts = [int(s) for s, c in zip(starts, counts, strict=True) if c]
            assert real[firsts].all()


def test_the_callers_arrays_stay_as_they_are():
    topology = Topology(4, 2)
    x, ids = rows_and_ids(topology, (1, 0, 3, 4), garbage=np.nan)
    counts = np.array((1, 0, 3, 4), np.int32)
    specs = (P("attn_dp"), P("attn_dp"), P())
    given = [
        jax.device_put(a, topology.sharding(s))
        for a, s in zip((x.reshape(-1, WIDTH), ids.reshape(-1), counts), specs, strict=True)
    ]
    before = [np.array(a) for a in given]
    everything(topology)(*given)
    for array, kept in zip(given, before, strict=True):
        np.testing.assert_array_equal(np.asarray(array), kept)


@pytest.mark.parametrize("topology", [Topology(4, 2), Topology(3, 1)], ids=name)
def test_a_step_without_rows_gathers_nothing(topology):
    def gathered(x, counts):
        result = [gather(x, counts, topology, mode=mode, total=0) for mode in modes(topology)]
        own = [own_rows(y, counts, topology, mode=m, rows=0) for y, m in zip(result, modes(topology), strict=True)]
        return result, own

    specs = [P("attn_dp"), P()]
    run = step(topology, gathered, [shape(0, 2), shape(topology.attn_dp, dtype="int32")], specs, (P(), P("attn_dp")))
    result, own = run(np.zeros((0, 2), np.float32), np.zeros(topology.attn_dp, np.int32))
    assert {a.shape for a in (*result, *own)} == {(0, 2)}


# Bytes on the wire, float32 rows of 8 numbers.


@pytest.mark.parametrize(
    "topology", [Topology(4, 2), Topology(8, 1), Topology(2, 3), Topology(2, 4, moe_ep=4)], ids=name
)
@pytest.mark.parametrize("partial", [False, True])
def test_wire_bytes_are_those_of_the_formulas(topology, partial):
    attn_dp, attn_tp, world = (topology.group(g) for g in ("attn_dp", "attn_tp", "world"))
    d, t, n = topology.attn_dp, topology.attn_tp, topology.world
    rows, row = 2 * t, 8 * 4
    slice_bytes, full_bytes = rows * row, d * rows * row
    everyone = ",".join(a for a in world if topology.axes[a] > 1)
    inside = ",".join(a for a in attn_tp if topology.axes[a] > 1)
    inside_bytes = {("reduce_scatter", inside): slice_bytes * (t - 1) / t} if partial and t > 1 else {}
    expected = {
        "max_len": {("all_gather", everyone): full_bytes * (n - 1) / n} | inside_bytes,
        "sum_len": {("all_reduce", everyone): 2 * full_bytes * (n - 1) / n} | inside_bytes,
        "gather_v": {("all_gather", everyone): full_bytes * (d - 1) / d},
    }
    for mode in modes(topology):

        def gathered(x, counts, mode: GatherMode = mode):
            x = declare_partial(x, attn_tp) if partial else x
            return gather(x, counts, topology, mode=mode, total=d * rows)

        cut = world if partial else attn_dp
        shapes = [shape(topology.size(cut) * rows, 8), shape(d, dtype="int32")]
        assert wire_bytes(topology, gathered, shapes, [P(cut), P()], P()) == expected[mode]


def test_copies_need_no_reduction_inside_a_replica():
    """The same rows as zeroing all copies but one and adding them up in chunks, for fewer bytes."""
    topology = Topology(4, 2)

    def summed_copies(x, counts):
        first = lax.axis_index("attn_tp") == 0
        chunk = reduce_scatter(declare_partial(jnp.where(first, x, 0), "attn_tp"), "attn_tp", 0)
        return all_gather(chunk, ("attn_dp", "attn_tp"), 0)

    def cut_copies(x, counts):
        return gather_replicas(x, counts, topology, mode="max_len", total=16)

    shapes, specs = [shape(16, 8), shape(4, dtype="int32")], [P("attn_dp"), P()]
    x, counts = np.arange(128, dtype=np.float32).reshape(16, 8), np.full(4, 4, np.int32)
    same = [np.asarray(step(topology, f, shapes, specs, P())(x, counts)) for f in (summed_copies, cut_copies)]
    np.testing.assert_array_equal(same[0], same[1])
    by_sum, by_cut = (wire_bytes(topology, f, shapes, specs, P()) for f in (summed_copies, cut_copies))
    assert by_sum == by_cut | {("reduce_scatter", "attn_tp"): 4 * 32 / 2}
    assert by_cut == {("all_gather", "attn_dp,attn_tp"): 16 * 32 * 7 / 8}


# What is refused.

TOPOLOGY = Topology(4, 2)


def trace(function, cut=("attn_dp",), topology=TOPOLOGY):
    """Traces `function` of [4, 2] rows per rank, cut over `cut`, and of the counts."""
    args = shape(4 * topology.size(cut), 2), shape(topology.attn_dp, dtype="int32")
    world = everywhere(topology)
    return jax.jit(jax.shard_map(function, mesh=topology.mesh, in_specs=(P(cut), P()), out_specs=world)).trace(*args)


@pytest.mark.parametrize("mode", ["max_len", "sum_len"])
def test_a_partial_gathered_as_copies_is_refused(mode):
    def wrong(x, c):
        return gather_replicas(declare_partial(x, "attn_tp"), c, TOPOLOGY, mode=mode, total=16)

    words = r"gather_replicas needs REPLICA over \(attn_tp\), but this .* is PARTIAL; gather_partials gathers"
    with pytest.raises(StateError, match=words):
        trace(wrong, ("attn_dp", "attn_tp"))


@pytest.mark.parametrize("mode", ["max_len", "sum_len"])
def test_a_copy_gathered_as_a_partial_is_refused(mode):
    words = r"gather_partials needs PARTIAL over \(attn_tp\), but this .* is REPLICA; gather_replicas gathers"
    with pytest.raises(StateError, match=words):
        trace(lambda x, c: gather_partials(x, c, TOPOLOGY, mode=mode, total=16))


def test_other_states_are_refused():
    def plain(x, c):
        return gather(x, c, TOPOLOGY, mode="max_len", total=16)

    with pytest.raises(StateError, match=r"gather_replicas needs REPLICA over \(attn_tp\), but this .* is SHARD"):
        trace(plain, ("attn_dp", "attn_tp"))
    with pytest.raises(StateError, match=r"gather_replicas over \(attn_dp\) needs SHARD, but this .* is REPLICA"):
        trace(plain, ())
    with pytest.raises(StateError, match=r"gather_replicas over \(attn_dp\) needs SHARD, but this .* is PARTIAL"):
        trace(lambda x, c: plain(declare_partial(x, "attn_dp"), c))
    with pytest.raises(StateError, match=r"gather_replicas \(its counts\) over .* mixed: SHARD over attn_dp, REPLICA"):
        trace(lambda x, c: plain(x, c + lax.axis_index("attn_dp")))
    split = Topology(2, 4, moe_ep=4)
    with pytest.raises(StateError, match=r"mixed: REPLICA over attn_tp_outer, PARTIAL over attn_tp_inner"):
        trace(
            lambda x, c: gather(declare_partial(x, "attn_tp_inner"), c, split, mode="max_len", total=8),
            ("attn_dp", "attn_tp_inner"),
            split,
        )
    with pytest.raises(StateError, match=r"own_rows over \(attn_dp, attn_tp\) needs REPLICA, but .* is mixed"):
        trace(lambda x, c: own_rows(x, c, TOPOLOGY, mode="max_len", rows=1))


def test_impossible_ways_give_the_reason():
    words = "gather_v sends each rank's own rows, so it needs attn_tp = 1, not 2: several ranks hold one replica's rows"
    assert gather_impossible("gather_v", TOPOLOGY) == words
    with pytest.raises(ValueError, match=words):
        trace(lambda x, c: gather(x, c, TOPOLOGY, mode="gather_v", total=16))
    assert gather_impossible("gather_v", Topology(8, 1)) is None
    assert gather_impossible("max_len", TOPOLOGY) is gather_impossible("sum_len", TOPOLOGY) is None
    with pytest.raises(ValueError, match="unknown gather mode 'auto'; allowed are gather_v, sum_len, max_len"):
        gather_impossible("auto", TOPOLOGY)  # pyright: ignore[reportArgumentType]


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"gather_replicas by max_len has attn_dp\*M = 4\*4 = 16 rows, not 12"):
        trace(lambda x, c: gather(x, c, TOPOLOGY, mode="max_len", total=12))
    with pytest.raises(ValueError, match="gather_replicas needs rows in equal chunks: M=3 is no multiple of attn_tp=2"):
        trace(lambda x, c: gather(x[:3], c, TOPOLOGY, mode="sum_len", total=16))
    with pytest.raises(ValueError, match=r"gather_replicas needs one count per replica, \[4\], not \[2\]"):
        trace(lambda x, c: gather(x, c[:2], TOPOLOGY, mode="sum_len", total=16))
    with pytest.raises(ValueError, match="gather_replicas needs whole numbers for counts, not float32"):
        trace(lambda x, c: gather(x, c * 1.5, TOPOLOGY, mode="max_len", total=16))
    with pytest.raises(ValueError, match=r"own_rows by max_len has attn_dp\*M = 4\*2 = 8 rows, not 4"):
        trace(lambda x, c: own_rows(x, c, TOPOLOGY, mode="max_len", rows=2), ())


def test_a_reduction_before_the_gather_makes_copies():
    """Completing the attention first, or on the way, gives the same rows."""
    topology = Topology(2, 2)

    def both(x, counts):
        partial = declare_partial(x, "attn_tp")
        first = gather(all_reduce(partial, "attn_tp"), counts, topology, mode="sum_len", total=8)
        return first, gather(partial, counts, topology, mode="sum_len", total=8)

    specs = [P(("attn_dp", "attn_tp")), P()]
    run = step(topology, both, [shape(16, 2), shape(2, dtype="int32")], specs, (P(), P()))
    x = np.arange(32, dtype=np.float32).reshape(2, 2, 4, 2)
    first, on_the_way = run(x.reshape(16, 2), np.array([3, 2], np.int32))
    np.testing.assert_array_equal(np.asarray(first), np.asarray(on_the_way))
    rows = x.sum(1)
    zeros = np.zeros((1, 2))
    expected = np.concatenate([rows[0, :3], zeros, rows[1, :2], zeros, zeros])
    np.testing.assert_array_equal(np.asarray(first), expected)
