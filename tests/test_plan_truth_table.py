"""The MoE sub-layer on every mesh of up to 8 devices, through every possible way there and back, with every kind of
shared expert: each equals the dense reference for one device, before the residual is added.

Shared experts write the first channels only and routed ones the others, so that nothing counted twice can hide. One
program per mesh runs all its cells; counts are its data.
"""

import functools
import itertools
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from reference import Reference
from tiny_models import Tensors, compile_module, parameters_of, published, random_tensors

from jaxcoll.plan import LayerPlan, PlanError, SharedExpert, plan_layer
from jaxcoll.settings import Settings
from jaxcoll.topology import Topology
from models.deepseek_v4.bridge import Bridge
from models.deepseek_v4.config import Config
from models.deepseek_v4.moe import MoE

GATHERS, COMBINES = ("gather_v", "sum_len", "max_len"), ("all_reduce", "reduce_scatter_v", "reduce_scatter")
KINDS: dict[str, dict[str, bool]] = {
    "sharded": {},
    "replicated": {"shared_expert_tp1": True},
    "replicated_local": {"shared_expert_tp1": True, "shared_expert_local": True},
}
D, VOCABULARY = 8, 32
CLOSE: dict[str, Any] = dict(rtol=1e-5, atol=1e-5)  # float32 against float64; measured: 1e-6
# Experts and widths that every moe_ep and moe_tp of a world divides.
SIZES = {5: (10, 10), 7: (14, 14)} | dict.fromkeys((1, 2, 3, 4, 6, 8), (24, 24))


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def meshes() -> list[Topology]:
    found = []
    for world in range(1, 9):
        for tp, moe_tp in itertools.product(divisors(world), divisors(world)):
            if tp % moe_tp == 0 or moe_tp % tp == 0:
                found.append(Topology(world // tp, tp, world // moe_tp))
    return found


MESHES = meshes()


def model_of(world: int) -> dict[str, Any]:
    experts, width = SIZES[world]
    sizes = dict(hidden_size=D, n_routed_experts=experts, moe_intermediate_size=width, vocab_size=VOCABULARY)
    return published(compress_ratios=[0, 0], num_hash_layers=1, **sizes)


@functools.cache
def tensors(sizes: tuple[int, int]) -> Tensors:
    world = next(w for w, s in SIZES.items() if s == sizes)
    found = random_tensors(model_of(world))
    for name, value in found.items():
        if name.endswith("w2.weight"):
            value[slice(D // 2, D) if "shared" in name else slice(0, D // 2)] = 0
    return found


@functools.cache
def answers(sizes: tuple[int, int], layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows [16, D], their token ids, and what the one-device reference makes of each."""
    draw = np.random.default_rng(layer)
    x, ids = draw.standard_normal((16, D)).astype(np.float32), draw.permutation(VOCABULARY)[:16].astype(np.int32)
    world = next(w for w, s in SIZES.items() if s == sizes)
    model = Reference(model_of(world), tensors(sizes))
    y = np.stack([model.moe(row.astype(np.float64), int(token), layer) for row, token in zip(x, ids, strict=True)])
    return x, ids, y


def batches(replicas: int, rows: int) -> list[tuple[int, ...]]:
    """Equal, uneven, one row alone at either end, all on the last replica."""
    last = (0,) * (replicas - 1)
    uneven = tuple((3 * r + 1) % (rows + 1) for r in range(replicas))
    found = [(rows,) * replicas, (1,) * replicas, uneven, (1, *last), (*last, 1), (*last, rows)]
    return sorted({counts for counts in found if any(counts)}, reverse=True)


def layer_of(topology: Topology) -> int:
    """Every second mesh routes by token id (layer 0), the others by score (layer 1)."""
    return MESHES.index(topology) % 2


def plans(topology: Topology) -> dict[str, LayerPlan]:
    """Every possible cell by its name, with room everywhere. Where each rank owns its own experts, one kind also runs
    with room on the last replica only, where slots by count make a small buffer, and padding that is not masked."""
    rows, found = 2 * topology.attn_tp, {}
    kinds = (*KINDS, *(("last",) if topology.moe_tp == 1 else ()))
    for kind, gather, combine in itertools.product(kinds, ("auto", *GATHERS), ("auto", *COMBINES)):
        room = (*(0,) * (topology.attn_dp - 1), rows) if kind == "last" else (rows,) * topology.attn_dp
        named: dict[str, Any] = {"gather": gather, "combine": combine, **KINDS.get(kind, {})}
        settings = Settings(**named, mask_dp_pad=kind != "last", use_reduce_scatter=False)
        try:
            plan = plan_layer(topology, room, settings, shared_width=SIZES[topology.world][1])
        except PlanError:
            continue
        assert plan.reducers() == ["combine"] and plan.shared_expert == ("sharded" if kind == "last" else kind)
        found[f"{kind} {plan.gather} {plan.combine}"] = plan
    return found


class Cells(nnx.Module):
    """One MoE sub-layer with its shared expert held in every way."""

    def __init__(self, topology: Topology):
        config, layer = Config.from_dict(model_of(topology.world)), layer_of(topology)
        self.topology = topology
        self.sharded, self.replicated, self.replicated_local = (
            MoE(config, layer, topology, jnp.float32, kind) for kind in get_args(SharedExpert)
        )
        for other in (self.replicated, self.replicated_local):
            other.gate, other.experts = self.sharded.gate, self.sharded.experts
        self.replicated_local.shared_experts = self.replicated.shared_experts

    def __call__(self, own: Any, ids: Any, counts: Any) -> dict[str, Any]:
        """own [M, D] and ids [M] of own rows -> the MoE's output of every cell, [M, D]."""
        once: dict[Any, Any] = {}
        out = {}
        for name, plan in plans(self.topology).items():
            moe, bridge = getattr(self, plan.shared_expert), Bridge(self.topology, plan, counts)
            key = plan.shared_expert, plan.gather, plan.rows.bucket, plan.mask_dp_pad
            if key not in once:  # one trip to the experts, and every way home from there
                everyone = bridge.to_everyone(own)
                once[key] = everyone, moe(everyone, bridge.world_tokens(ids))[0]
            everyone, y = once[key]
            home, apart = bridge.reduce_home(y), moe.shared_apart(own, everyone, bridge)
            out[name] = home if apart is None else home + apart
        return out


def compiled(topology: Topology) -> Any:
    module, rows = Cells(topology), topology.attn_dp * 2 * topology.attn_tp
    prefix, given = f"layers.{layer_of(topology)}.ffn", tensors(SIZES[topology.world])
    cut = parameters_of(module.sharded.shared_experts, given, f"{prefix}.shared_experts", topology)
    parameters = {  # flax holds what several modules share under the first of them
        "replicated": parameters_of(module.replicated, given, prefix, topology),
        "sharded": {"shared_experts": cut},
    }
    own, specs = P(topology.group("attn_dp")), (P(topology.group("attn_dp")), P(topology.group("attn_dp")), P())
    shapes = (((rows, D), jnp.float32), ((rows,), jnp.int32), ((topology.attn_dp,), jnp.int32))
    args = [jax.ShapeDtypeStruct(*s) for s in shapes]
    step = compile_module(module, lambda m, *a: m(*a), parameters, topology, args, specs, own)
    places = tuple(map(topology.sharding, specs))
    return lambda *args: step(*jax.device_put(args, places))


@pytest.mark.slow
@pytest.mark.parametrize("topology", MESHES, ids=lambda t: f"{t.attn_dp}x{t.attn_tp}-ep{t.world // t.moe_tp}")
def test_every_cell_equals_one_device(topology: Topology):
    rows, cells = 2 * topology.attn_tp, plans(topology)
    assert len(cells) == expected_cells(topology)
    step = compiled(topology)
    x, ids, right = (a[: topology.attn_dp * rows] for a in answers(SIZES[topology.world], layer_of(topology)))
    for counts in batches(topology.attn_dp, rows):
        real = (np.arange(rows) < np.array(counts)[:, None]).reshape(-1)
        garbage = np.where(real[:, None], x, np.nan), np.where(real, ids, VOCABULARY - 1)
        out = step(*garbage, np.array(counts, np.int32))
        for name in cells:
            if not name.startswith("last") or not any(counts[:-1]):  # else the counts do not fit the room
                got = np.asarray(out[name])[real]
                np.testing.assert_allclose(got, right[real], err_msg=f"{name} {counts}", **CLOSE)


def expected_cells(topology: Topology) -> int:
    """attn_tp = 1: A and B after each gather, C after max_len. Else A after both, C after max_len. One replica also
    has the way without a gather."""
    ways = 7 if topology.attn_tp == 1 else 3
    if topology.attn_dp == 1:
        ways += 2 if topology.attn_tp == 1 else 1
    return ways * (len(KINDS) + (topology.moe_tp == 1))


def test_all_meshes_are_here():
    assert len(MESHES) == 56 and len({(t.attn_dp, t.attn_tp, t.moe_tp) for t in MESHES}) == 56
    assert {t.world for t in MESHES} == set(range(1, 9))
