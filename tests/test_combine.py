"""Experts' partial sums brought home in three ways on many meshes: all equal, each reduced once.

Addends are coded by rank and row; rows that are not real hold NaN or 2^100 (about 1e30).
"""

import functools

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from stepping import copies, everywhere, shape, step, wire_bytes

from jaxcoll.collectives import all_reduce, declare_partial
from jaxcoll.combine import Way, combine, combine_impossible
from jaxcoll.gather import gather, gather_impossible
from jaxcoll.rows import GatherMode, StepFacts, plan_rows, real_rows, slots
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
WAYS: tuple[Way, ...] = ("all_reduce", "reduce_scatter_v", "reduce_scatter")
MODES: tuple[GatherMode, ...] = ("max_len", "sum_len", "gather_v")
WIDTH = 2


def name(topology):
    return "x".join(str(n) for n in topology.axes.values())


def modes_of(topology: Topology) -> list[GatherMode]:
    return [mode for mode in MODES if not gather_impossible(mode, topology)]


def possible(topology: Topology) -> list[tuple[Way, GatherMode]]:
    """(way, mode) of every cell that this mesh has."""
    return [(way, mode) for mode in modes_of(topology) for way in WAYS if not combine_impossible(way, mode, topology)]


def batches(topology):
    attn_dp, rows = topology.attn_dp, 2 * topology.attn_tp
    rng = np.random.default_rng(attn_dp)
    fixed = [[0] * attn_dp, [rows] * attn_dp, [0] * (attn_dp - 1) + [rows], [1] + [0] * (attn_dp - 1)]
    return fixed + [rng.integers(0, rows + 1, attn_dp).tolist() for _ in range(6)]


@functools.cache
def everything(topology):
    """One step that combines the addends in every possible way."""
    attn_dp, attn_tp, world = (topology.group(g) for g in ("attn_dp", "attn_tp", "world"))
    rows = 2 * topology.attn_tp
    modes = modes_of(topology)

    def combined(addends, counts):
        result = {}
        for way, mode in possible(topology):
            y = declare_partial(addends[mode], world)
            out = combine(y, counts, topology, way=way, mode=mode, rows=rows)
            assert set(states(out, attn_dp).values()) == {State.SHARD}
            assert set(states(out, attn_tp).values()) == {State.REPLICA}
            result[f"{way} {mode}"] = out
        return result

    total = topology.world * topology.attn_dp * rows
    shapes = [{mode: shape(total, WIDTH) for mode in modes}, shape(topology.attn_dp, dtype="int32")]
    out_specs = {f"{way} {mode}": P(attn_dp) for way, mode in possible(topology)}
    return step(topology, combined, shapes, [{mode: P(world) for mode in modes}, P()], out_specs)


@pytest.mark.parametrize("topology", MESHES, ids=name)
def test_every_way_returns_the_slot_of_the_sum(topology):
    attn_dp, attn_tp, world, rows = topology.attn_dp, topology.attn_tp, topology.world, 2 * topology.attn_tp
    total = attn_dp * rows
    code = 1000 * np.arange(world)[:, None] + np.arange(total) + 1
    for i, counts in enumerate(batches(topology)):
        addends, expected = {}, {}
        for mode in modes_of(topology):
            real = real_rows(np.array(counts), mode, attn_tp=attn_tp, rows=rows, total=total)
            flat = np.where(real, code, (np.nan, 2.0**100)[i % 2]).astype(np.float32)
            addends[mode] = np.stack([flat, -flat], -1).reshape(-1, WIDTH)
            _, starts = slots(np.array(counts), mode, attn_tp=attn_tp, rows=rows)
            expected[mode] = np.zeros((attn_dp, rows, WIDTH), np.float32)
            for d, count in enumerate(counts):
                slot = code.sum(0)[starts[d] : starts[d] + count]
                expected[mode][d, :count] = np.stack([slot, -slot], -1)
        found = everything(topology)(addends, np.array(counts, np.int32))
        assert len(found) == len(possible(topology))
        for way, mode in possible(topology):
            for rank, held in enumerate(copies(found[f"{way} {mode}"])):  # all ranks of a replica hold the same rows
                np.testing.assert_array_equal(held, expected[mode][topology.attention_ranks(rank)[0]])


# The plans of communication semantics, section 4.2, all the way: gather, experts, back.

CONFORMANCE: list[tuple[Topology, tuple[int, ...], StepFacts, GatherMode]] = [
    (Topology(4, 1), (5, 0, 1, 0), StepFacts(), "sum_len"),
    (Topology(4, 1), (2, 2, 1, 2), StepFacts(), "max_len"),
    (Topology(2, 2), (3, 0), StepFacts(), "max_len"),
    (Topology(2, 2), (3, 1), StepFacts(extend_in_batch=True), "sum_len"),
    (Topology(8, 1), (1, 0, 0, 0, 0, 0, 0, 0), StepFacts(graph="decode"), "max_len"),
]


@pytest.mark.parametrize("topology, counts, facts, mode", CONFORMANCE)
def test_conformance_vectors_go_to_the_experts_and_back(
    topology: Topology, counts: tuple[int, ...], facts: StepFacts, mode: GatherMode
):
    """Expert rank r adds (r + 1) times every row, so a row comes home times the sum of 1..world."""
    plan = plan_rows(counts, topology.attn_tp, facts=facts)
    assert plan.mode == mode
    attn_dp, world = topology.group("attn_dp"), topology.group("world")
    modes: list[GatherMode] = [mode, "gather_v"] if mode == "sum_len" and topology.attn_tp == 1 else [mode]
    cells: list[tuple[Way, GatherMode]] = [(way, m) for way, m in possible(topology) if m in modes]
    assert (
        len(cells)
        == {("max_len", 1): 3, ("sum_len", 1): 4, ("max_len", 2): 2, ("sum_len", 2): 1}[mode, topology.attn_tp]
    )

    def there_and_back(x, counts):
        back = {}
        for way, m in cells:
            everyone = gather(x, counts, topology, mode=m, total=plan.total)
            part = declare_partial(everyone * (lax.axis_index(world) + 1), world)
            back[f"{way} {m}"] = combine(part, counts, topology, way=way, mode=m, rows=plan.rows)
        return {m: gather(x, counts, topology, mode=m, total=plan.total) for m in modes}, back

    held = topology.attn_dp * plan.rows
    specs = {m: P() for m in modes}, {f"{way} {m}": P(attn_dp) for way, m in cells}
    run = step(
        topology, there_and_back, [shape(held, WIDTH), shape(topology.attn_dp, dtype="int32")], [P(attn_dp), P()], specs
    )
    x = np.full((topology.attn_dp, plan.rows, WIDTH), np.nan, np.float32)
    for d, count in enumerate(counts):
        x[d, :count] = np.stack([100 * d + np.arange(count) + 1, -np.arange(count)], -1)
    gathered, back = run(x.reshape(-1, WIDTH), np.array(counts, np.int32))
    real = np.arange(plan.rows)[None, :, None] < np.array(counts)[:, None, None]
    slot_rows = plan.rows if mode == "max_len" else None
    slots_of_all = [x[d, : slot_rows or plan.aligned[d]] for d in range(topology.attn_dp)]
    concat = np.nan_to_num(np.concatenate(slots_of_all))
    for buffer in gathered.values():
        for rank_holds in copies(buffer):
            np.testing.assert_array_equal(np.nan_to_num(rank_holds), concat)
    factor = topology.world * (topology.world + 1) // 2
    for home in back.values():
        np.testing.assert_array_equal(np.asarray(home), np.where(real, x * factor, 0).reshape(-1, WIDTH))


# Bytes on the wire, float32 rows of 8 numbers.


COUNTED = [Topology(4, 2), Topology(8, 1), Topology(2, 3), Topology(4, 2, moe_ep=2)]


@pytest.mark.parametrize("topology", COUNTED, ids=name)
def test_wire_bytes_are_those_of_the_formulas(topology):
    attn_dp, attn_tp, world = (topology.group(g) for g in ("attn_dp", "attn_tp", "world"))
    d, t, n = topology.attn_dp, topology.attn_tp, topology.world
    rows, row = 2 * t, 8 * 4
    full = d * rows * row
    everyone, inside = (",".join(a for a in g if topology.axes[a] > 1) for g in (world, attn_tp))
    expected = {
        "all_reduce": {("all_reduce", everyone): 2 * full * (n - 1) / n},
        "reduce_scatter_v": {("reduce_scatter", everyone): full * (d - 1) / d},
        "reduce_scatter": {("reduce_scatter", everyone): full * (n - 1) / n}
        | ({("all_gather", inside): rows * row * (t - 1) / t} if t > 1 else {}),
    }
    for way, mode in possible(topology):

        def combined(y, counts, way: Way = way, mode: GatherMode = mode):
            return combine(declare_partial(y, world), counts, topology, way=way, mode=mode, rows=rows)

        shapes = [shape(n * d * rows, 8), shape(d, dtype="int32")]
        assert wire_bytes(topology, combined, shapes, [P(world), P()], P(attn_dp)) == expected[way]


# What is refused.

TOPOLOGY = Topology(4, 2)


def trace(function, cut=("attn_dp", "attn_tp"), topology=TOPOLOGY):
    """Traces `function` of [16, 2] rows per rank, cut over `cut`, and of the counts."""
    args = shape(16 * topology.size(cut), 2), shape(topology.attn_dp, dtype="int32")
    world = everywhere(topology)
    return jax.jit(jax.shard_map(function, mesh=topology.mesh, in_specs=(P(cut), P()), out_specs=world)).trace(*args)


@pytest.mark.parametrize("way", ["all_reduce", "reduce_scatter"])
def test_a_second_reduction_is_refused(way):
    def twice(y, c):
        once = all_reduce(declare_partial(y, ("attn_dp", "attn_tp")), ("attn_dp", "attn_tp"))
        return combine(once, c, TOPOLOGY, way=way, mode="max_len", rows=4)

    with pytest.raises(StateError, match=rf"combine by {way} over .* needs PARTIAL, but this .* is REPLICA"):
        trace(twice)


def test_a_sum_over_a_part_of_the_world_is_refused():
    with pytest.raises(StateError, match="mixed: REPLICA over attn_dp, PARTIAL over attn_tp"):
        trace(
            lambda y, c: combine(declare_partial(y, "attn_tp"), c, TOPOLOGY, way="all_reduce", mode="max_len", rows=4),
            ("attn_tp",),
        )
    with pytest.raises(StateError, match=r"needs PARTIAL, but this .* is SHARD; contract makes a partial sum"):
        trace(lambda y, c: combine(y, c, TOPOLOGY, way="all_reduce", mode="max_len", rows=4))


def test_counts_that_ranks_could_disagree_on_are_refused():
    with pytest.raises(StateError, match=r"combine by all_reduce \(its counts\) .* mixed: SHARD over attn_dp, REPLICA"):
        trace(
            lambda y, c: combine(
                declare_partial(y, ("attn_dp", "attn_tp")),
                c + lax.axis_index("attn_dp"),
                TOPOLOGY,
                way="all_reduce",
                mode="sum_len",
                rows=4,
            )
        )


BY_RANK = "reduce_scatter_v leaves each rank its own rows, so it needs attn_tp = 1, not 2"
EQUAL = "reduce_scatter cuts all rows into equal chunks, so it needs the equal slots of max_len, not sum_len"


@pytest.mark.parametrize(
    "way, mode, words", [("reduce_scatter_v", "max_len", BY_RANK), ("reduce_scatter", "sum_len", EQUAL)]
)
def test_impossible_ways_give_the_reason(way, mode, words):
    reason = combine_impossible(way, mode, TOPOLOGY)
    assert reason and reason.startswith(words)
    with pytest.raises(ValueError, match=words):
        trace(lambda y, c: combine(declare_partial(y, ("attn_dp", "attn_tp")), c, TOPOLOGY, way=way, mode=mode, rows=4))


def test_the_possible_cells():
    assert possible(Topology(4, 1)) == [
        *((way, "max_len") for way in WAYS),
        *((way, mode) for mode in ("sum_len", "gather_v") for way in WAYS[:2]),
    ]
    assert possible(TOPOLOGY) == [("all_reduce", "max_len"), ("reduce_scatter", "max_len"), ("all_reduce", "sum_len")]
    with pytest.raises(ValueError, match="unknown combine 'auto'; allowed are all_reduce, reduce_scatter_v, reduce_"):
        combine_impossible("auto", "max_len", TOPOLOGY)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="unknown gather mode 'auto'; allowed are gather_v, sum_len, max_len"):
        combine_impossible("all_reduce", "auto", TOPOLOGY)  # pyright: ignore[reportArgumentType]


def test_a_buffer_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"combine by all_reduce by max_len has attn_dp\*M = 4\*2 = 8 rows, not 16"):
        trace(
            lambda y, c: combine(
                declare_partial(y, ("attn_dp", "attn_tp")), c, TOPOLOGY, way="all_reduce", mode="max_len", rows=2
            )
        )
