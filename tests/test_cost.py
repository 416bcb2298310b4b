"""Predicted bytes against compiled programs: every possible way there and back at 2, 4, 6 and 8 devices, as totals per
(kind, group), in float32 on CPU and in bf16 on compile-only GPUs, where unequal rows go by the ragged transport."""

import functools
import itertools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from stepping import step, wire_bytes
from tiny_models import published

from jaxcoll import cost, hlo
from jaxcoll.collectives import all_gather, declare_partial, reduce_scatter, take_shard
from jaxcoll.explain import stages
from jaxcoll.plan import LayerPlan, PlanError, plan_layer
from jaxcoll.settings import Settings
from jaxcoll.step import compile_step
from jaxcoll.targets import compile_only, gpu_devices
from jaxcoll.topology import Topology
from models.deepseek_v4.bridge import Bridge
from models.deepseek_v4.cache import cache_shapes
from models.deepseek_v4.config import Config
from models.deepseek_v4.model import DeepSeekV4
from models.deepseek_v4.program import abstract_parameters, compile_decode, plan_decode, predicted_transfers
from models.deepseek_v4.published import named_config, of_dtype

GATHERS, COMBINES = ("gather_v", "sum_len", "max_len"), ("all_reduce", "reduce_scatter_v", "reduce_scatter")
WIDTH = 64
ITEM = {"float32": 4, "bfloat16": 2}


def meshes() -> list[tuple[int, int, int]]:
    """(attn_dp, attn_tp, moe_ep) of 2, 4, 6 and 8 devices with every set of mesh axes that they can have."""
    found: dict[tuple, tuple[int, int, int]] = {}
    for world in (2, 4, 6, 8):
        sizes = [n for n in range(1, world + 1) if world % n == 0]
        for tp, moe_tp in itertools.product(sizes, sizes):
            if tp % moe_tp == 0 or moe_tp % tp == 0:
                given = world // tp, tp, world // moe_tp
                found.setdefault(tuple(Topology(*given).axes.items()), given)
    return list(found.values())


def counts_of(replicas: int) -> tuple[int, ...]:
    """Unequal, with idle replicas, so that slots by count need fewer rows than equal ones."""
    return (3, 0, 1, *(0,) * 5)[:replicas]


def cells(topology: Topology, counts: tuple[int, ...]) -> dict[str, LayerPlan]:
    found = {}
    for gather, combine in itertools.product(("auto", *GATHERS), ("auto", *COMBINES)):
        named: dict[str, Any] = {"gather": gather, "combine": combine, "use_reduce_scatter": False}
        try:
            plan = plan_layer(topology, counts, Settings(**named), shared_width=8)
        except PlanError:
            continue
        found[f"{plan.gather} {plan.combine}"] = plan
    return found


def compiled_totals(topology: Topology, plan: LayerPlan, dtype: str, compiler: Any = None) -> dict[Any, hlo.Totals]:
    """What one trip of rows to experts and back communicates; groups of one member left out."""
    world, own = topology.group("world"), P(topology.group("attn_dp"))

    def trip(x: Any, counts: Any) -> Any:
        bridge = Bridge(topology, plan, counts)
        everyone = jnp.tanh(bridge.to_everyone(x))
        return bridge.reduce_home(declare_partial(everyone * lax.axis_index(world).astype(x.dtype), world))

    args = (
        jax.ShapeDtypeStruct((topology.attn_dp * plan.rows.rows, WIDTH), dtype),
        jax.ShapeDtypeStruct((topology.attn_dp,), jnp.int32),
    )
    done = compile_step(trip, topology, args, in_specs=(own, P()), out_specs=own, compiler=compiler)
    return hlo.totals(c for c in hlo.collectives(done.compiled, topology) if c.group_size > 1)


def predicted(topology: Topology, plan: LayerPlan, dtype: str) -> list[cost.Transfer]:
    row = WIDTH * ITEM[dtype]
    return cost.gather_transfers(topology, plan, row) + cost.combine_transfers(topology, plan, row)


def bytes_of(totals: dict[Any, hlo.Totals]) -> dict[Any, tuple]:
    """Without the number of instructions, which XLA changes."""
    return {key: (t.operand_bytes, t.result_bytes, t.wire_bytes) for key, t in totals.items()}


each_mesh = pytest.mark.parametrize("sizes", meshes(), ids=lambda s: f"{s[0]}x{s[1]}-ep{s[2]}")


def test_the_meshes_have_every_set_of_axes():
    assert len(meshes()) == 25 and {a * b for a, b, _ in meshes()} == {2, 4, 6, 8}


@pytest.mark.slow
@each_mesh
def test_float32_on_cpu_is_as_predicted(sizes):
    topology = Topology(*sizes)
    found = cells(topology, counts_of(sizes[0]))
    assert len(found) == (7 if sizes[1] == 1 else 4 if sizes[0] == 1 else 3)
    for name, plan in found.items():
        told = cost.totals(predicted(topology, plan, "float32"))
        assert bytes_of(told) == bytes_of(compiled_totals(topology, plan, "float32")), name


@pytest.mark.slow
@each_mesh
def test_bf16_on_gpus_that_are_not_there_is_as_predicted(sizes):
    topology = Topology(*sizes, devices=gpu_devices("h200", 1, sizes[0] * sizes[1]))
    for name, plan in cells(topology, counts_of(sizes[0])).items():
        transfers = predicted(topology, plan, "bfloat16")
        real = compiled_totals(topology, plan, "bfloat16", compile_only)
        assert bytes_of(cost.totals(transfers)) == bytes_of(real), name
        ragged = {"gather"} if plan.gather == "gather_v" else set()
        ragged |= {"combine"} if plan.combine == "reduce_scatter_v" else set()
        assert {t.purpose for t in transfers if t.kind == "ragged_all_to_all"} == ragged, name


@pytest.mark.slow
def test_over_hosts_rows_by_count_are_as_predicted():
    topology = Topology(4, 1, devices=gpu_devices("h200", 2, 2))
    config = of_dtype(named_config("tiny")[1], "bf16")
    settings = Settings(gather="gather_v", combine="reduce_scatter_v")
    plan = plan_decode(config, topology, (2, 1, 0, 1), settings)
    model = DeepSeekV4(config, topology, settings)
    caches = cache_shapes(config, plan.rows.rows * 4, 64)
    step = compile_decode(model, plan, abstract_parameters(model), caches, ("logits",), compile_only)
    real = hlo.totals(c for c in hlo.collectives(step.compiled, topology) if c.group_size > 1)
    assert bytes_of(cost.totals(predicted_transfers(model, plan))) == bytes_of(real)


# What the ragged transport sends by the counts, rank by rank, against what the cost model says.


def sent_rows(verb: str, counts: tuple[int, ...]) -> list[int]:
    """Rows that every rank sends to others."""
    n = len(counts)
    if verb == "all_gather_v":  # its rows to everybody else
        return [count * (n - 1) for count in counts]
    return [sum(counts) - count for count in counts]  # everybody else's rows to their owners


@pytest.mark.parametrize("counts", [(3, 0, 1, 0), (1, 1, 1, 1), (0, 0, 0, 4), (5, 4, 3, 2, 1, 0, 0, 7)])
def test_bytes_from_counts_are_the_mean_of_what_the_ranks_send(counts):
    topology, row = Topology(len(counts), 1), 10
    plan = plan_layer(topology, counts, Settings(gather="gather_v", combine="reduce_scatter_v"), shared_width=8)
    (gather,) = cost.gather_transfers(topology, plan, row, transport="ragged")
    (combine,) = cost.combine_transfers(topology, plan, row, transport="ragged")
    for transfer, verb in ((gather, "all_gather_v"), (combine, "reduce_scatter_v")):
        assert transfer.kind == "ragged_all_to_all" and transfer.group == "attn_dp"
        assert transfer.wire_bytes_from_counts == row * sum(sent_rows(verb, counts)) / len(counts)
    assert (gather.operand_bytes, gather.result_bytes) == (row * plan.rows.rows, row * plan.rows.total)
    assert (combine.operand_bytes, combine.result_bytes) == (row * plan.rows.total, row * plan.rows.rows * len(counts))


@pytest.mark.parametrize("counts", [(3, 0, 1, 0), (1, 1, 1, 1)])
def test_padded_paths_send_their_shapes_whatever_the_counts(counts):
    topology = Topology(4, 1)
    for plan in cells(topology, counts).values():
        for transport in ("dense", "ragged"):
            transfers = cost.gather_transfers(topology, plan, 8, transport=transport)
            transfers += cost.combine_transfers(topology, plan, 8, transport=transport)
            for t in transfers:
                assert (t.counted_bytes is None) == (t.kind != "ragged_all_to_all")
                if t.counted_bytes is None:
                    assert t.wire_bytes_from_counts == t.wire_bytes


def test_totals_add_up_per_kind_and_group():
    topology = Topology(2, 3)
    plan = plan_layer(topology, (3, 3), Settings(gather="max_len", combine="reduce_scatter"), shared_width=6)
    assert (plan.rows.rows, plan.rows.total) == (3, 6)
    transfers = [*cost.gather_transfers(topology, plan, 8), *cost.combine_transfers(topology, plan, 8)] * 2
    found = cost.totals(transfers)
    world = "attn_dp,attn_tp"
    assert found == {
        ("all_gather", world): hlo.Totals(2, 2 * 8, 2 * 48, 2 * 48 * 5 / 6),
        ("reduce_scatter", world): hlo.Totals(2, 2 * 48, 2 * 8, 2 * 48 * 5 / 6),
        ("all_gather", "attn_tp"): hlo.Totals(2, 2 * 8, 2 * 24, 2 * 24 * 2 / 3),
    }
    counted = cost.totals_from_counts(transfers)
    assert counted == pytest.approx({key: t.wire_bytes for key, t in found.items()})
    assert cost.totals([]) == {} == cost.totals_from_counts([])


def test_one_device_sends_nothing():
    topology = Topology(1, 1)
    for plan in cells(topology, (3,)).values():
        assert cost.gather_transfers(topology, plan, 8) == cost.combine_transfers(topology, plan, 8) == []
        assert cost.head_transfers(topology, plan, 8, 8) == cost.attention_transfers(topology, plan, 8) == []


def test_equal_reduce_scatter_sends_half_of_what_all_reduce_does():
    topology, counts = Topology(8, 1), (4,) * 8
    found = cells(topology, counts)
    a, c = (compiled_totals(topology, found[f"max_len {way}"], "float32") for way in ("all_reduce", "reduce_scatter"))
    full = 8 * 4 * WIDTH * 4
    assert a["all_reduce", "attn_dp"].wire_bytes == 2 * full * 7 / 8
    assert c["reduce_scatter", "attn_dp"].wire_bytes == full * 7 / 8
    assert a.keys() ^ c.keys() == {("all_reduce", "attn_dp"), ("reduce_scatter", "attn_dp")}


# max_len where attn_tp > 1: three ways to the same rows.


def by_summing(x: Any, topology: Topology) -> Any:
    """SGLang's: all copies but one become zeros, chunks of their sum, then all chunks."""
    tp = topology.group("attn_tp")
    first = declare_partial(jnp.where(lax.axis_index(tp) == 0, x, 0), tp)
    return all_gather(reduce_scatter(first, tp, 0), topology.group("world"), 0)


def by_cutting(x: Any, topology: Topology) -> Any:
    """Ours: every rank cuts its own chunk out of its copy."""
    return all_gather(take_shard(x, topology.group("attn_tp"), 0), topology.group("world"), 0)


def by_replica(x: Any, topology: Topology) -> Any:
    """Whole copies, once per attn_tp rank."""
    return all_gather(x, topology.group("attn_dp"), 0)


@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (2, 2), (2, 3), (3, 2)])
def test_cutting_a_replica_saves_the_reduction_inside_attn_tp(sizes):
    (dp, tp), topology, m = sizes, Topology(*sizes), 2 * sizes[1]
    size, own = m * WIDTH * 4, P(topology.group("attn_dp"))
    x = np.arange(dp * m * WIDTH, dtype=np.float32).reshape(dp * m, WIDTH)
    sums: dict[Any, float] = {}
    for way in (by_summing, by_cutting, by_replica):
        program: Any = (topology, functools.partial(way, topology=topology), [x], (own,), P())
        np.testing.assert_array_equal(step(*program)(x), x)
        sums[way] = sum(wire_bytes(*program).values())
    n = dp * tp
    assert sums[by_cutting] == dp * size * (n - 1) / n
    assert sums[by_summing] == sums[by_cutting] + size * (tp - 1) / tp
    assert sums[by_replica] == dp * size * (dp - 1) / dp == sums[by_cutting] - size * (tp - 1) / tp
    plan = plan_layer(topology, (m,) * dp, Settings(gather="max_len"), shared_width=n)
    if plan.rows.rows == m:
        assert sums[by_cutting] == sum(t.wire_bytes for t in cost.gather_transfers(topology, plan, WIDTH * 4))


# The plan against the program that it makes: verbs and groups of every named stage of a traced step.


DENSE_KIND = {"all_gather_v": "all_gather", "reduce_scatter_v": "reduce_scatter"}


def traced_collectives(topology: Topology, settings: Settings) -> dict[str, str]:
    """What a one-layer model's step sends at the hand-overs that a plan names; nothing is compiled."""
    sizes = dict(num_attention_heads=24, o_groups=24, n_routed_experts=24, moe_intermediate_size=24)
    config = Config.from_dict(published(compress_ratios=[0], **sizes))
    counts = (1,) * topology.attn_dp
    plan = plan_layer(topology, counts, settings, shared_width=24)
    model = DeepSeekV4(config, topology, settings)
    caches = cache_shapes(config, topology.attn_dp, 8)
    compiler: Any = lambda lowered: lowered  # noqa: E731
    traced = compile_decode(model, plan, abstract_parameters(model), caches, ("logits",), compiler).traced
    found = stages(traced, topology, "layer.0/") + stages(traced, topology, "head")
    return {
        name: "; ".join(s.collective for s in found if s.scope.startswith(scope) and s.collective)
        for name, scope in (
            ("attention", "layer.0/attn.all_reduce"),
            ("gather", "layer.0/moe.gather"),
            ("combine", "layer.0/moe.combine"),
            ("shared_expert", "layer.0/moe.shared"),
            ("head", "head"),
        )
    }


@pytest.mark.parametrize(
    ("topology", "gather", "combine", "head"),
    [
        *((Topology(4, 1), *name.split(), "attn_tp") for name in cells(Topology(4, 1), (1,) * 4)),
        (Topology(2, 2), "max_len", "all_reduce", "world"),
        (Topology(2, 2), "max_len", "reduce_scatter", "attn_tp"),
        (Topology(2, 2), "sum_len", "all_reduce", "world"),
        (Topology(2, 3, 2), "max_len", "reduce_scatter", "attn_tp"),
        (Topology(4, 2, 2), "max_len", "reduce_scatter", "world"),
        (Topology(2, 4, 4), "max_len", "reduce_scatter", "attn_tp"),
        (Topology(1, 4), "auto", "all_reduce", "attn_tp"),
        (Topology(1, 4), "sum_len", "all_reduce", "world"),
        (Topology(1, 4), "max_len", "reduce_scatter", "attn_tp"),
    ],
)
def test_the_program_does_what_its_plan_says(topology, gather, combine, head):
    settings = Settings(gather=gather, combine=combine, head=head)
    plan = plan_layer(topology, (1,) * topology.attn_dp, settings, shared_width=24)
    found = traced_collectives(topology, settings)
    for h in plan.hand_overs:
        planned = "; ".join(f"{DENSE_KIND.get(verb, verb)}({group})" for verb, group in h.collectives)
        assert several_members(topology, found[h.name]) == several_members(topology, planned), h.name


def several_members(topology: Topology, text: str) -> list[tuple[str, str]]:
    """(verb, group) of "verb(group); verb(group)", without groups of one member, which only complete a type. With
    attn_tp = 1 the world is attn_dp."""
    pairs = [part.rstrip(")").split("(") for part in text.split("; ") if part]
    pairs = [(verb, "attn_dp" if topology.attn_tp == 1 and group == "world" else group) for verb, group in pairs]
    return [(verb, group) for verb, group in pairs if topology.size(topology.group(cast(Any, group))) > 1]
