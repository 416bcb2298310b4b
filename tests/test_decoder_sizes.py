"""Whole decode steps of sizes that no fixture has: odd vocabularies, short caches, bfloat16, the published shapes."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden import WIDE
from jax.sharding import PartitionSpec as P
from reference import Reference
from safetensors.numpy import load_file
from tiny_models import published, random_tensors, write_model

from jaxcoll.audit import audit
from jaxcoll.linear import partition_specs
from jaxcoll.plan import plan_layer
from jaxcoll.topology import Topology
from models.deepseek_v4.cache import cache_shapes
from models.deepseek_v4.config import Config
from models.deepseek_v4.decoder import TRACE, Decoder, Row
from models.deepseek_v4.model import DeepSeekV4

# On 3 x 2 devices: 61 tokens over 2 ranks, and a shared expert of width 50 that 6 ranks do not divide.
CONFIG = published(
    compress_ratios=[3, 4], num_attention_heads=4, o_groups=2, moe_intermediate_size=50, swiglu_limit=0.5
)
LENGTH = 14


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    """Half of the hash table's rows name an expert twice; the highest logits are far below the 0 of padding."""
    made = random_tensors(CONFIG)
    made["layers.0.ffn.gate.tid2eid"][::2, 2] = made["layers.0.ffn.gate.tid2eid"][::2, 0]
    made["norm.weight"][0], made["head.weight"][:, 0] = 0, 0
    return made


@pytest.fixture(scope="module")
def folder(tensors, tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), CONFIG, tensors)


def ids_of(seed: int, length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 61, length)


def check(seen: dict[str, Any], place: int, exact: dict[str, np.ndarray], position: int) -> None:
    """Everything that a step returns for one row."""
    for name, wanted in exact.items():
        kind, _, index = name.partition(".")
        found = np.asarray(seen[kind][int(index)] if index else seen[kind])[place]
        assert found.shape == wanted[position].shape
        if kind == "topk_ids":
            np.testing.assert_array_equal(found, wanted[position])
        else:
            np.testing.assert_allclose(found, wanted[position], rtol=1e-5, atol=2e-5, err_msg=name)
    assert int(np.asarray(seen["next_token"])[place]) == int(np.argmax(exact["logits"][position]))


def test_a_growing_and_shrinking_batch_equals_the_loop(folder, tensors):
    """1, 2, 3, 2, 1 rows on one replica of three: a program per bucket, and every tensor of every row is right."""
    decoder = Decoder.load(folder, Topology(3, 2, 3), slots=3, max_seq_len=LENGTH, results=TRACE)[0]
    assert decoder.model.layers[0].ffn.shared == "replicated"  # 6 ranks do not divide 50
    model, ids = Reference(CONFIG, tensors), [ids_of(seed) for seed in range(3)]
    exact = [model.run(tokens) for tokens in ids]
    starts, homes, lengths = (0, 3, 5), [(2, 1), (2, 2), (2, 0)], (14, 9, 4)
    for step in range(LENGTH):
        going = [i for i in range(3) if 0 <= step - starts[i] < lengths[i]]
        seen = decoder.step([Row(int(ids[i][step - starts[i]]), step - starts[i], *homes[i]) for i in going])
        for i, place in zip(going, seen["places"], strict=True):
            check(seen, place, exact[i], step - starts[i])
    assert decoder.compiles == 2  # buckets of 2 and 4 rows: multiples of attn_tp


def test_a_cache_shorter_than_the_window_and_every_ratio(folder, tensors):
    """Two positions: no window of 5 goes round, and no entry of 3 or 4 tokens is ever complete."""
    decoder = Decoder.load(folder, Topology(1, 1), slots=1, max_seq_len=2, results=TRACE)[0]
    ids = ids_of(5, 2)
    exact = Reference(CONFIG, tensors).run(ids)
    for position in range(2):
        seen = decoder.step([Row(int(ids[position]), position, 0, 0)])
        check(seen, seen["places"][0], exact, position)


BF16 = np.dtype(jnp.bfloat16)
# One rounding costs 2^-9 of a value; streams reach 8.5, attention and experts 4.5. Measured: logits 0.045, attn_out
# 0.03, moe_out 0.05, streams 0.09. Where a rounding flips a top-k (tiny-1, odd-11), the difference is 1 and more.
BF16_TOLERANCE = {"logits": 0.09, "streams": 0.15, "attn_out": 0.06, "moe_out": 0.1}


def test_bfloat16_stays_near_the_float32_trace(tmp_path):
    config = json.loads((WIDE / "config.json").read_text()) | {"torch_dtype": "bfloat16"}
    weights = load_file(WIDE / "model.safetensors")
    write_model(tmp_path, config, {n: v if v.dtype.kind == "i" else v.astype(BF16) for n, v in weights.items()})
    golden = load_file(WIDE / "trace.safetensors")
    count, length = golden["input_ids"].shape
    decoder = Decoder.load(tmp_path, Topology(2, 2), slots=1, max_seq_len=length, results=TRACE)[0]
    for position in range(length):
        seen = decoder.step([Row(int(golden["input_ids"][i, position]), position, i, 0) for i in range(count)])
        assert (seen["logits"].dtype, seen["streams"][0].dtype) == (np.float32, BF16)
        for name, wanted in golden.items():
            kind, _, index = name.partition(".")
            if kind not in (*BF16_TOLERANCE, "topk_ids"):
                continue
            found = np.asarray(seen[kind][int(index)] if index else seen[kind])[seen["places"]].astype(np.float32)
            if kind == "topk_ids":
                np.testing.assert_array_equal(np.sort(found), np.sort(wanted[:, position]))
            else:
                np.testing.assert_allclose(found, wanted[:, position], atol=BF16_TOLERANCE[kind], rtol=0, err_msg=name)


FLASH: dict[str, Any] = dict(
    hidden_size=4096, num_attention_heads=64, q_lora_rank=1024, o_groups=8, o_lora_rank=1024, n_routed_experts=256,
    moe_intermediate_size=2048, num_experts_per_tok=6, index_topk=512, head_dim=512, qk_rope_head_dim=64,
    sliding_window=128, index_n_heads=64, index_head_dim=128, vocab_size=129280, torch_dtype="bfloat16",
    compress_ratios=[0, 4, 128], max_position_embeddings=65536,
    rope_scaling=dict(type="yarn", factor=16, original_max_position_embeddings=65536, beta_fast=32, beta_slow=1),
)  # fmt: skip
PRO = FLASH | dict(
    hidden_size=7168, num_attention_heads=128, q_lora_rank=1536, o_groups=16, n_routed_experts=384,
    moe_intermediate_size=3072, index_topk=1024, routed_scaling_factor=2.5,
)  # fmt: skip


@pytest.mark.parametrize("sizes", [(8, 1, 8), (4, 2, 8), (2, 4, 4)], ids=str)
@pytest.mark.parametrize("shapes", [FLASH, PRO], ids=["flash", "pro"])
def test_a_step_at_the_published_shapes_passes_the_audit(shapes, sizes):
    """Traced with abstract weights and caches; one layer of each attention kind, by hash and by score."""
    config, topology = Config.from_dict(published(**shapes)), Topology(*sizes)
    model, counts = DeepSeekV4(config, topology), [1] * topology.attn_dp
    plan = plan_layer(topology, counts, shared_width=config.moe_intermediate_size)
    graph, state = nnx.split(model)

    def step(parameters: dict, caches: Any, batch: jax.Array, counts: jax.Array) -> Any:
        loaded = jax.tree.map(lambda leaf: leaf, state)
        nnx.replace_by_pure_dict(loaded, parameters)
        caches, seen = nnx.merge(graph, loaded)(batch[0], counts, caches, plan)
        return caches, seen["next_token"]

    rows = P(topology.group("attn_dp"))
    specs = (partition_specs(model), rows, rows, P())
    batch = jax.ShapeDtypeStruct((topology.attn_dp, plan.rows.rows, 3), jnp.int32)
    caches = cache_shapes(config, 2 * topology.attn_dp, 1024)
    mapped = jax.shard_map(step, mesh=topology.mesh, in_specs=specs, out_specs=(rows, rows))
    traced = jax.jit(mapped).trace(nnx.to_pure_dict(state), caches, batch, np.array(counts, np.int32))
    audit(traced)
    assert str(traced.jaxpr).count(" while[") == 3  # each layer's experts, block by block
    assert traced.out_info[1].shape == (plan.rows.rows * topology.attn_dp,)
