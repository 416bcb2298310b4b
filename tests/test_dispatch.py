"""Dispatch and combine on CPU meshes: every received row, id, weight and count, and the sums that come home.

XLA has no ragged exchange for CPU; there that transport runs with an exchange that does what jax documents.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dispatching import (
    arrivals,
    as_documented,
    expected_output,
    in_rank_order,
    layer,
    parts,
    poison,
    random_rows,
)
from jax import lax
from jax.sharding import PartitionSpec as P
from stepping import everywhere, shape, step

from jaxcoll.collectives import declare_partial
from jaxcoll.dispatch import (
    DispatchSpec,
    combine,
    combine_finish,
    combine_start,
    dispatch,
    dispatch_finish,
    dispatch_start,
    host_axes,
    meanwhile,
)
from jaxcoll.level import Level
from jaxcoll.states import StateError
from jaxcoll.step import compile_step
from jaxcoll.topology import Topology

ROWS, K, WIDTH, LOCAL = 5, 3, 4, 2
DP, TP = ("attn_dp",), ("attn_tp",)
BOTH, TURNED = ("attn_dp", "attn_tp"), ("attn_tp", "attn_dp")

PAIR, SIX, WIDE = Topology(2, 1), Topology(2, 3), Topology(4, 2)
# Blocks of one row where all ranks' maximum allows it, else of the bound: with SMALL both are taken.
SMALL = {"small_pair": 1}
FLAT = [(PAIR, {}), (SIX, {}), (SIX, {"moe_ep": TURNED}), (WIDE, SMALL)]
SHARED_WIDTH = [(Topology(2, 3, 2), {}), (Topology(6, 1, 3), SMALL), (Topology(2, 4, 4), {})]  # moe_tp 3, 2, 2
TWO_LEVELS = [(WIDE, SMALL | {"hosts": DP}), (SIX, {"moe_ep": TURNED, "hosts": TP})]
DENSE = [(t, s | {"mode": m}) for t, s in FLAT + SHARED_WIDTH + TWO_LEVELS for m in ("normal", "low_latency")]
RAGGED = [
    (t, s | {"mode": m, "transport": "ragged"})
    for t, s in [(SIX, {}), (SIX, {"moe_ep": TURNED, "hosts": TP}), (Topology(6, 1, 3), {})]
    for m in ("normal", "low_latency")
]


def spec_of(topology, choices):
    choices = {"transport": "dense", "hosts": ()} | choices
    ep = choices.pop("moe_ep", topology.group("moe_ep"))
    return DispatchSpec(topology.moe_ep * LOCAL, ep, topology.group("moe_tp"), **choices)


def named(case):
    topology, choices = case
    sizes = f"{topology.attn_dp}x{topology.attn_tp}-ep{topology.moe_ep}"
    return "-".join([sizes, *(f"{'+'.join(v) if isinstance(v, tuple) else v}" for v in choices.values())])


@functools.cache
def compiled(index):
    topology, choices = (DENSE + RAGGED)[index]
    return layer(topology, spec_of(topology, choices), ROWS, K, WIDTH)


def senders(topology, spec, arrays):
    """Rank-ordered rows of each rank of moe_ep with its fellows of moe_tp, and rows per sender."""
    ordered = [in_rank_order(topology, spec.moe_ep + spec.moe_tp, a) for a in arrays]
    return [a.reshape(topology.moe_ep, -1, *a.shape[2:]) for a in ordered]


def source_order(topology, spec, dst):
    """[(index of count, sender)] in order of arrival at dst: with two levels the host's ranks, each from all hosts."""
    if not spec.hosts:
        return [(s, s) for s in range(topology.moe_ep)]
    inner = topology.size(spec.moe_ep[len(spec.hosts) :])
    return [(i, h * inner + i) for i in range(inner) for h in range(topology.moe_ep // inner)]


def check_received(topology, spec, received, x, ids, weights, counts):
    """Everything received against `arrivals`."""
    real = np.arange(x.shape[1]) < counts[:, None]
    x, ids, weights = senders(topology, spec, [x, np.where(real[..., None], ids, -1), weights])
    everything = np.full(topology.moe_ep, x.shape[1])
    for dst in range(topology.moe_ep):
        order = source_order(topology, spec, dst)
        found = arrivals(x, ids, weights, everything, spec.num_experts, (dst * LOCAL, LOCAL), [s for _, s in order])
        index_of = {s: i for i, s in order}
        mine = jax.tree.map(lambda a, d=dst: np.asarray(a).reshape(topology.moe_ep, -1, *a.shape[1:])[d], received)
        if spec.mode == "normal":
            check_normal(mine, found, index_of)
        else:
            check_per_expert(mine, found, index_of)


def check_normal(mine, found, index_of):
    total = len(found)
    np.testing.assert_array_equal(
        mine.counts, np.bincount([index_of[s] for s, *_ in found], minlength=len(mine.counts))
    )
    np.testing.assert_array_equal(mine.x[:total], np.array([r for _, r, _ in found]).reshape(total, WIDTH))
    assert not mine.x[total:].any() and (mine.topk_ids[total:] == -1).all() and not mine.topk_weights[total:].any()
    for (_, _, chosen), got_ids, got_weights in zip(found, mine.topk_ids, mine.topk_weights, strict=False):
        assert {e: w for e, w in zip(got_ids.tolist(), got_weights.tolist(), strict=True) if e >= 0} == chosen
        assert not got_weights[got_ids < 0].any()
        assert (got_ids >= 0).sum() == len(chosen)
    per_expert = [sum(e in chosen for *_, chosen in found) for e in range(LOCAL)]
    np.testing.assert_array_equal(mine.tokens_per_expert, per_expert)


def check_per_expert(mine, found, index_of):
    for expert in range(LOCAL):
        rows = [(s, r) for s, r, chosen in found if expert in chosen]
        assert mine.tokens_per_expert[expert] == len(rows)
        by_source = np.bincount([index_of[s] for s, _ in rows], minlength=mine.counts.shape[1])
        np.testing.assert_array_equal(mine.counts[expert], by_source)
        np.testing.assert_array_equal(mine.x[expert, : len(rows)], np.array([r for _, r in rows]).reshape(-1, WIDTH))
        assert not mine.x[expert, len(rows) :].any()


def check(index, x, ids, weights, counts):
    topology, choices = (DENSE + RAGGED)[index]
    spec = spec_of(topology, choices)
    out, received = compiled(index)(*(a.reshape(-1, *a.shape[2:]) for a in (x, ids, weights)), counts)
    want = expected_output(x, ids, weights, counts, spec.num_experts, parts(topology))
    np.testing.assert_array_equal(np.asarray(out).reshape(x.shape), want)
    check_received(topology, spec, received, x, ids, weights, counts)


@pytest.fixture(autouse=True)
def _ragged_as_documented(monkeypatch):
    monkeypatch.setattr(lax, "ragged_all_to_all", as_documented)


@pytest.mark.parametrize("index", range(len(DENSE + RAGGED)), ids=map(named, DENSE + RAGGED))
def test_every_row_arrives_where_it_should_and_every_sum_comes_home(index):
    topology, choices = (DENSE + RAGGED)[index]
    rng = np.random.default_rng(index)
    experts = topology.moe_ep * LOCAL
    for nobody in (0.0, 0.2, 0.7, 0.95):
        check(index, *random_rows(rng, topology.world, ROWS, K, WIDTH, experts, nobody=nobody))
    for ids in crafted(rng, topology.world, experts):
        x, _, weights, counts = random_rows(rng, topology.world, ROWS, K, WIDTH, experts, nobody=0)
        x, weights, counts = (
            np.ones_like(x) * np.arange(1, ROWS + 1)[:, None],
            np.full_like(weights, 0.375),
            counts * 0 + ROWS,
        )
        poison(x, ids, weights, counts)
        check(index, x, ids, weights, counts)


def crafted(rng, world, experts):
    """All tokens to the first, a middle, the last expert; one token in the world; none on most ranks; none at all."""
    for expert in (0, experts // 2, experts - 1):
        yield np.full((world, ROWS, K), expert, np.int32)
    nobody = np.full((world, ROWS, K), -1, np.int32)
    one = nobody.copy()
    one[world - 1, 3, 1] = 0
    yield one
    few = nobody.copy()
    few[1] = rng.integers(0, experts, (ROWS, K))
    yield few
    yield nobody


def test_both_sizes_of_the_dense_blocks_are_taken():
    index = DENSE.index((WIDE, SMALL | {"mode": "normal"}))
    nobody = np.full((8, ROWS, K), -1, np.int32)
    spread = nobody.copy()
    spread[:, 0, 0] = (np.arange(8) + 3) % 8 * LOCAL  # one row for one rank each: fits blocks of one row
    crowded = spread.copy()
    crowded[2, :2, 0] = 4  # two rows from one rank for one rank: no block of one row holds them
    for ids in (spread, crowded):
        x, weights = np.ones((8, ROWS, WIDTH), np.float32) * 7, np.ones((8, ROWS, K), np.float32)
        poison(x, ids, weights, np.full(8, ROWS))
        check(index, x, ids, weights, np.full(8, ROWS, np.int32))


def test_small_blocks_come_from_the_shapes():
    assert Level(DP, 2, 8, "normal", "dense").capacities(64, 6).small_pair == 64  # nearly all rows go everywhere
    wide = Level(DP, 64, 4, "normal", "dense").capacities(128, 6)
    assert (wide.small_pair, wide.pair, wide.send, wide.slab) == (32, 128, 768, 8192)
    low = Level(DP, 64, 4, "low_latency", "dense").capacities(128, 6)
    assert (low.small_pair, low.pair, low.send, low.slab) == (32, 512, 768, 8192)
    assert Level(DP, 64, 4, "low_latency", "dense", small_pair=1000).capacities(128, 6).small_pair == 512


def identity(topology, spec, x_shape, function):
    world, n = everywhere(topology), topology.world
    shapes = [shape(n * x_shape[0], x_shape[1]), shape(n * x_shape[0], K, dtype="int32"), shape(n * x_shape[0], K)]
    return step(topology, function, shapes, [world] * 3, world)


def test_work_may_lie_between_the_phases():
    spec = spec_of(PAIR, {"mode": "normal"})

    def run(x, ids, weights):
        sent = dispatch_start(x, ids, weights, spec)
        sent, shared = meanwhile(sent, x * 3)
        received, handle = dispatch_finish(sent)
        y = jnp.sum(received.topk_weights, axis=1)[:, None] * received.x  # pyright: ignore[reportAttributeAccessIssue]
        return combine_finish(combine_start(y, handle)) + shared

    x, ids, weights, _ = random_rows(np.random.default_rng(0), 2, ROWS, K, WIDTH, 4, nobody=0)
    x = np.nan_to_num(x, nan=1)
    weights = np.full_like(weights, 0.25)
    flat = [a.reshape(-1, a.shape[-1]) for a in (x, ids, weights)]
    out = identity(PAIR, spec, (ROWS, WIDTH), run)(*flat)
    np.testing.assert_array_equal(out, flat[0] * (0.25 * K + 3))


def test_two_levels_send_one_copy_per_host():
    spec = spec_of(WIDE, {"mode": "normal", "hosts": DP})
    ids = np.full((8, ROWS, K), -1, np.int32)
    ids[0, 0] = [12, 13, 14]  # ranks 6 and 7, both of host 3
    ids[0, 1] = [4, 6, 15]  # ranks 2, 3 of host 1 and 7 of host 3

    def run(x, ids, weights):
        _, handle = dispatch(x, ids, weights, spec)
        return tuple(level.exchange.counts.sum(2)[None] for level in handle.levels)

    x, weights = np.ones((8 * ROWS, WIDTH), np.float32), np.ones((8 * ROWS, K), np.float32)
    world = everywhere(WIDE)
    shapes = [shape(8 * ROWS, WIDTH), shape(8 * ROWS, K, dtype="int32"), shape(8 * ROWS, K)]
    counted = step(WIDE, run, shapes, [world] * 3, (P("attn_tp"), P("attn_dp")))
    over_hosts, inside = counted(x, ids.reshape(-1, K), weights)
    first = np.zeros((4, 4), int)
    first[0, 1], first[0, 3] = 1, 2
    np.testing.assert_array_equal(over_hosts[0], first)  # from inner rank 0 of host 0 to inner rank 0 of the others
    assert not np.asarray(over_hosts[1]).any()
    np.testing.assert_array_equal(inside[3], [[1, 2], [0, 0]])  # host 3's rank 0 keeps one copy, hands on two
    np.testing.assert_array_equal(inside[1], [[1, 1], [0, 0]])


def test_hosts_are_found_by_their_processes():
    class Device:
        def __init__(self, number, per_host):
            self.id, self.process_index = number, number // per_host

    def found(attn_dp, attn_tp, moe_ep, per_host):
        devices = [Device(i, per_host) for i in range(attn_dp * attn_tp)]
        return host_axes(Topology(attn_dp, attn_tp, moe_ep, devices=devices))

    assert found(2, 4, 8, 4) == (DP, "(attn_dp) tells 2 hosts apart")
    assert found(2, 4, 8, 8) == ((), "all devices belong to one host, or their hosts hold no equal blocks of ranks")
    assert found(4, 2, 8, 4) == (("attn_dp_outer",), "(attn_dp_outer) tells 2 hosts apart")
    assert found(8, 2, 4, 8)[0] == ("attn_dp_outer",)  # moe_ep = attn_dp_outer, attn_dp_middle
    assert found(2, 6, 4, 6)[0] == DP
    axes, reason = found(2, 3, 6, 2)
    assert (axes, reason) == ((), "no leading axes of (attn_dp, attn_tp) tell the 3 hosts apart")


@pytest.mark.parametrize(
    "choices, words",
    [
        ({"mode": "fast"}, "unknown mode 'fast'; allowed are normal, low_latency"),
        ({"wire": "fp4"}, "unknown wire 'fp4'; allowed are auto, f32, bf16, fp8"),
        ({"transport": "nvshmem"}, "unknown transport 'nvshmem'; allowed are dense, ragged"),
        ({"scale_kind": "e5m2"}, "unknown scale_kind 'e5m2'; allowed are float32, power_of_two"),
        ({"kernels": "cuda"}, "unknown kernels 'cuda'; allowed are xla, pallas"),
        ({"hosts": TP}, "hosts must be leading axes of moe_ep"),
        ({"hosts": BOTH}, "hosts must be leading axes of moe_ep=.*, but not all"),
        ({"moe_tp": TP}, "share an axis"),
        ({"small_pair": 0}, "small_pair must be at least 1, not 0"),
        ({"chosen_from": 4}, "chosen_from must be at least 8, not 4"),
    ],
)
def test_unknown_choices_are_refused(choices, words):
    with pytest.raises(ValueError, match=words):
        DispatchSpec(8, BOTH, **choices)


def refused(function, width=WIDTH, topology=PAIR, specs=None):
    world = everywhere(topology)
    shapes = [shape(2 * ROWS, width), shape(2 * ROWS, K, dtype="int32"), shape(2 * ROWS, K)]
    step(topology, function, shapes, specs or [world] * 3, world)


def test_bad_arguments_are_refused_before_anything_runs():
    spec = DispatchSpec(4, BOTH)
    with pytest.raises(StateError, match=r"dispatch \(topk_ids\) over \(attn_dp, attn_tp\) needs SHARD"):
        refused(lambda x, i, w: dispatch(x, i, w, spec)[0].x, specs=[everywhere(PAIR), P(), everywhere(PAIR)])
    with pytest.raises(ValueError, match=r"dispatch takes x \[T, D\].*not x \[5, 4\], topk_ids \[4, 3\]"):
        refused(lambda x, i, w: dispatch(x, i[:4], w, spec)[0].x)
    with pytest.raises(ValueError, match="5 experts cannot be cut into 2 equal parts"):
        refused(lambda x, i, w: dispatch(x, i, w, DispatchSpec(5, BOTH))[0].x)
    with pytest.raises(ValueError, match="topk_ids are expert numbers, not float32"):
        refused(lambda x, i, w: dispatch(x, w, w, spec)[0].x)
    with pytest.raises(ValueError, match="dispatch needs rows and choices .*padding with id -1"):
        refused(lambda x, i, w: dispatch(x[:0], i[:0], w[:0], spec)[0].x)
    with pytest.raises(ValueError, match="do not divide D=96"):
        refused(lambda x, i, w: dispatch(x, i, w, DispatchSpec(4, BOTH, wire="fp8"))[0].x, width=96)
    with pytest.raises(ValueError, match=r"as the rows were received, \(10, 4\), not \(5, 4\)"):
        refused(lambda x, i, w: combine(x, dispatch(x, i, w, spec)[1]))


@pytest.mark.parametrize("transport", ["dense", "ragged"])
def test_a_partial_sum_over_another_axis_is_refused(transport):
    """A mesh axis that the spec does not name: a move would drop the mark, and the sum would never be made."""
    topology, mine = Topology(2, 2), P("attn_dp")
    spec = DispatchSpec(4, DP, transport=transport)
    shapes = [shape(2 * ROWS, WIDTH), shape(2 * ROWS, K, dtype="int32"), shape(2 * ROWS, K)]

    def addend(x):
        return declare_partial(lax.pcast(x, TP, to="varying"), TP)

    def result(x, ids, weights):
        received, handle = dispatch(x, ids, weights, spec)
        return combine(addend(received.x), handle)

    with pytest.raises(StateError, match=r"combine over \(attn_dp\) moves rows, but .* is PARTIAL over \(attn_tp\)"):
        step(topology, result, shapes, [mine] * 3, mine)
    with pytest.raises(StateError, match=r"dispatch \(topk_weights\) .* is PARTIAL over \(attn_tp\); complete it"):
        step(topology, lambda x, i, w: dispatch(x, i, addend(w), spec)[0].x, shapes, [mine] * 3, mine)


def test_phases_take_what_the_phase_before_made():
    spec = DispatchSpec(4, BOTH)
    with pytest.raises(TypeError, match="combine takes the Handle of dispatch or dispatch_finish, not a Dispatching"):
        refused(lambda x, i, w: combine(x, dispatch_start(x, i, w, spec)))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="dispatch_finish takes the Dispatching of dispatch_start, not a tuple"):
        refused(lambda x, i, w: dispatch_finish(dispatch(x, i, w, spec)))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="combine_finish takes the Combining of combine_start, not a Handle"):
        refused(lambda x, i, w: combine_finish(dispatch(x, i, w, spec)[1]))  # pyright: ignore[reportArgumentType]


def test_a_group_may_be_an_axis_name():
    assert DispatchSpec(4, "attn_dp") == DispatchSpec(4, DP)  # pyright: ignore[reportArgumentType]


def test_a_result_in_another_state_is_refused():
    topology = Topology(2, 3, 2)
    spec = spec_of(topology, {})
    world = everywhere(topology)
    shapes = [shape(6 * ROWS, WIDTH), shape(6 * ROWS, K, dtype="int32"), shape(6 * ROWS, K)]

    def complete(x, ids, weights):
        received, handle = dispatch(x, ids, weights, spec)
        return combine(received.x, handle)

    with pytest.raises(StateError, match=r"combine \(over moe_tp\) over \(attn_tp\) needs PARTIAL, .* is REPLICA"):
        step(topology, complete, shapes, [world] * 3, world)

    def twice_declared(x, ids, weights):
        received, handle = dispatch(x, ids, weights, spec)
        return combine(declare_partial(received.x, TP), handle)  # every rank of moe_tp would add the same

    with pytest.raises(StateError, match="REPLICA"):
        step(topology, twice_declared, shapes, [world] * 3, world)


@pytest.mark.parametrize(
    "mode, rows, words",
    [
        ("normal", 2**29, r"its receive buffer\) would number T \* ranks = 536870912 \* 4 = 2147483648 rows"),
        ("low_latency", 2**28, r"T \* min\(K, blocks\) = 268435456 \* 8 = 2147483648 rows"),
        ("low_latency", 2**24, r"T \* ranks \* local experts = 16777216 \* 4 \* 64 = 4294967296 rows"),
    ],
)
def test_row_numbers_past_two_to_the_31_are_refused_at_trace_time(mode, rows, words):
    level = Level(DP, 4, 64, mode, "dense")
    with pytest.raises(ValueError, match=words):
        level.capacities(rows, 2 if mode == "normal" else 8)
    level.capacities(rows // 64, 2)


@pytest.mark.parametrize("mode", ["normal", "low_latency"])
@pytest.mark.parametrize("rows", [16, 64])
def test_dense_memory_is_that_of_the_bounds(mode, rows):
    """On 8 devices: blocks that leave and that arrive, the receive buffer and the packed rows, and nothing else."""
    topology, k, width, local = Topology(8, 1), 6, 256, 4
    spec = DispatchSpec.of(topology, 8 * local, mode=mode)

    def run(x, ids, weights):
        received, handle = dispatch(x, ids, weights, spec)
        return combine(received.x * 2, handle)

    world, total = everywhere(topology), 8 * rows
    args = [shape(total, width), shape(total, k, dtype="int32"), shape(total, k)]
    program = compile_step(run, topology, args, in_specs=[world] * 3, out_specs=world)
    blocks, buffer = (total, total) if mode == "normal" else (total * min(k, local), total * local)
    held = program.compiled.memory_analysis().temp_size_in_bytes  # pyright: ignore[reportOptionalMemberAccess]
    ceiling = (2 * blocks + buffer + rows * k) * width * 4
    assert 0.5 * ceiling < held <= 1.02 * ceiling  # 2 %: integers
