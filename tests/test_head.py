"""The vocabulary cut over attn_tp or over the world: the same logits, with a padded vocabulary, and the bytes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from tiny_models import published

from jaxcoll import cost, hlo
from jaxcoll.linear import partition_specs
from jaxcoll.plan import LayerPlan, plan_layer
from jaxcoll.settings import Settings
from jaxcoll.step import Step, compile_step
from jaxcoll.targets import compile_only, gpu_devices
from jaxcoll.topology import Topology
from models.deepseek_v4.bridge import Bridge
from models.deepseek_v4.config import Config
from models.deepseek_v4.head import Head

D, VOCABULARY = 24, 61  # a prime: every cut pads it
MESHES = [(4, 1), (2, 2), (4, 2), (2, 3), (3, 2), (1, 4), (1, 1)]
each_mesh = pytest.mark.parametrize("sizes", MESHES, ids=str)


def config(dtype: str) -> Config:
    return Config.from_dict(published(compress_ratios=[0], hidden_size=D, vocab_size=VOCABULARY, torch_dtype=dtype))


def weight(padded: int) -> np.ndarray:
    """[padded, D] small whole numbers, so that logits are exact; rows past the vocabulary are zeros."""
    real = np.random.default_rng(0).integers(-4, 5, (VOCABULARY, D))
    return np.concatenate([real, np.zeros((padded - VOCABULARY, D))]).astype(np.float32)


def compiled(
    topology: Topology, plan: LayerPlan, kinds: tuple[Any, ...], dtype: str = "float32", compiler: Any = None
) -> tuple[Step, dict[str, Head]]:
    """A step (parameters, x, counts) -> logits of every kind of head."""
    heads = nnx.Dict({kind: Head(config(dtype), topology, jnp.dtype(dtype), kind) for kind in kinds})
    graph, state = nnx.split(heads)

    def step(parameters: Any, x: Any, counts: Any) -> Any:
        loaded = jax.tree.map(lambda leaf: leaf, state)
        nnx.replace_by_pure_dict(loaded, parameters)
        return {kind: head(x, Bridge(topology, plan, counts)) for kind, head in nnx.merge(graph, loaded).items()}

    own = P(topology.group("attn_dp"))
    args = (
        nnx.to_pure_dict(state),
        jax.ShapeDtypeStruct((topology.attn_dp * plan.rows.rows, D), dtype),
        jax.ShapeDtypeStruct((topology.attn_dp,), jnp.int32),
    )
    specs = partition_specs(heads), own, P()
    return compile_step(step, topology, args, in_specs=specs, out_specs=own, compiler=compiler), dict(heads.items())


def planned(topology: Topology, counts: tuple[int, ...], head: Any = "attn_tp", **more: Any) -> LayerPlan:
    return plan_layer(topology, counts, Settings(head=head), shared_width=24, **more)


@each_mesh
def test_both_cuts_give_the_same_logits(sizes):
    topology = Topology(*sizes)
    dp, rows = topology.attn_dp, 4 * topology.attn_tp
    step, heads = compiled(topology, planned(topology, (rows,) * dp), ("attn_tp", "world"))
    own, everywhere = topology.sharding(P(topology.group("attn_dp"))), topology.sharding(P())
    parameters = {}
    for kind, head in heads.items():
        padded, spec = head.weight.shape[0], head.weight.get_metadata()["spec"]
        members = topology.world if kind == "world" else topology.attn_tp
        assert padded == -(-VOCABULARY // members) * members
        parameters[kind] = {"weight": jax.device_put(weight(padded), topology.sharding(spec))}
    x = np.random.default_rng(1).integers(-4, 5, (dp * rows, D)).astype(np.float32)
    right = x @ weight(VOCABULARY).T
    for counts in [(rows,) * dp, (1,) * dp, (*(0,) * (dp - 1), rows), tuple((2 * r + 1) % rows for r in range(dp))]:
        real = (np.arange(rows) < np.array(counts)[:, None]).reshape(-1)
        garbage = jax.device_put(np.where(real[:, None], x, np.nan), own)
        out = step(parameters, garbage, jax.device_put(np.array(counts, np.int32), everywhere))
        for kind in heads:
            assert out[kind].shape == (dp * rows, VOCABULARY) and out[kind].dtype == jnp.float32
            np.testing.assert_array_equal(np.asarray(out[kind])[real], right[real], err_msg=f"{kind} {counts}")


@each_mesh
@pytest.mark.parametrize("kind", ["attn_tp", "world"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_heads_bytes_are_as_predicted(sizes, kind, dtype):
    """float32 on CPU, bf16 on compile-only GPUs; counts are unequal, and the head pays for equal slots all the same."""
    gpu = dtype == "bfloat16"
    topology = Topology(*sizes, devices=gpu_devices("h200", 1, sizes[0] * sizes[1]) if gpu else None)
    plan = planned(topology, (3, 0, 1, 0)[: sizes[0]], kind)
    step, heads = compiled(topology, plan, (kind,), dtype, compile_only if gpu else None)
    found = hlo.totals(c for c in hlo.collectives(step.compiled, topology) if c.group_size > 1)
    padded, item = heads[kind].weight.shape[0], 2 if gpu else 4
    told = cost.totals(cost.head_transfers(topology, plan, D * item, padded * 4))
    assert found.keys() == told.keys()
    for key, total in told.items():
        real = found[key]
        assert (real.operand_bytes, real.result_bytes) == (total.operand_bytes, total.result_bytes), key
        assert real.wire_bytes == total.wire_bytes


def test_what_the_heads_cost():
    """4 replicas of 2 ranks, 4 rows each, float32: hidden rows of 96 bytes, logits of 64 padded columns."""
    topology = Topology(4, 2)
    own = cost.head_transfers(topology, planned(topology, (4,) * 4), 96, 256)
    over_world = cost.head_transfers(topology, planned(topology, (4,) * 4, "world"), 96, 256)
    assert [(t.kind, t.group, t.wire_bytes) for t in own] == [("all_gather", "attn_tp", 4 * 256 / 2)]
    assert [(t.kind, t.group, t.wire_bytes) for t in over_world] == [
        ("all_reduce", "attn_dp,attn_tp", 2 * 16 * 96 * 7 / 8),
        ("all_gather", "attn_dp,attn_tp", 16 * 256 * 7 / 8),
    ]
