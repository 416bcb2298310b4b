"""Small random models in the published format, and one module of a model compiled alone on a mesh.

No arithmetic of the model is here: `reference` has that.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from jaxcoll.linear import partition_specs
from jaxcoll.step import compile_step
from jaxcoll.topology import Topology
from models.deepseek_v4.cache import CompressorCache, LayerCache, cache_shapes
from models.deepseek_v4.config import Config
from models.deepseek_v4.rows import Rows

Tensors = dict[str, np.ndarray]

SMALL: dict[str, Any] = dict(
    model_type="deepseek_v4", hidden_size=24, num_attention_heads=6, head_dim=12, qk_rope_head_dim=4, q_lora_rank=16,
    o_groups=3, o_lora_rank=4, sliding_window=5, compress_ratios=[0, 4, 8], index_n_heads=3, index_head_dim=8,
    index_topk=2, n_routed_experts=12, num_experts_per_tok=3, moe_intermediate_size=24, vocab_size=61,
    num_hidden_layers=3, num_hash_layers=1, num_key_value_heads=1, n_shared_experts=1, scoring_func="sqrtsoftplus",
    norm_topk_prob=True, routed_scaling_factor=1.5, swiglu_limit=10.0, rms_norm_eps=1e-6, hc_mult=4,
    hc_sinkhorn_iters=20, hc_eps=1e-6, rope_theta=10000, compress_rope_theta=160000, max_position_embeddings=256,
    num_nextn_predict_layers=0, tie_word_embeddings=False, hidden_act="silu", torch_dtype="float32",
    rope_scaling=dict(type="yarn", factor=4, original_max_position_embeddings=64, beta_fast=32, beta_slow=1),
)  # fmt: skip


def published(**changes: Any) -> dict[str, Any]:
    """The small config.json with some fields changed; the layer count follows compress_ratios."""
    config = {**SMALL, **changes}
    config["num_hidden_layers"] = len(config["compress_ratios"])
    return config


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every published tensor of the model with its shape."""
    c = config
    n, d, q, head = c["hc_mult"], c["hidden_size"], c["q_lora_rank"], c["head_dim"]
    mixes, heads, f = (2 + n) * n, c["num_attention_heads"], c["moe_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (c["vocab_size"], d), "head.weight": (c["vocab_size"], d), "norm.weight": (d,),
        "hc_head_fn": (n, n * d), "hc_head_base": (n,), "hc_head_scale": (1,),
    }  # fmt: skip

    def compressor(name: str, ratio: int, width: int) -> None:
        wide = 2 * width if ratio == 4 else width
        shapes.update({f"{name}.wkv.weight": (wide, d), f"{name}.wgate.weight": (wide, d)})
        shapes.update({f"{name}.ape": (ratio, wide), f"{name}.norm.weight": (width,)})

    for i, ratio in enumerate(c["compress_ratios"]):
        attn, ffn = f"layers.{i}.attn", f"layers.{i}.ffn"
        shapes |= {f"layers.{i}.attn_norm.weight": (d,), f"layers.{i}.ffn_norm.weight": (d,)}
        for hc in ("hc_attn", "hc_ffn"):
            name = f"layers.{i}.{hc}"
            shapes |= {f"{name}_fn": (mixes, n * d), f"{name}_base": (mixes,), f"{name}_scale": (3,)}
        groups, rank = c["o_groups"], c["o_lora_rank"]
        shapes |= {
            f"{attn}.wq_a.weight": (q, d), f"{attn}.q_norm.weight": (q,), f"{attn}.wq_b.weight": (heads * head, q),
            f"{attn}.wkv.weight": (head, d), f"{attn}.kv_norm.weight": (head,), f"{attn}.attn_sink": (heads,),
            f"{attn}.wo_a.weight": (groups * rank, heads // groups * head), f"{attn}.wo_b.weight": (d, groups * rank),
        }  # fmt: skip
        if ratio:
            compressor(f"{attn}.compressor", ratio, head)
        if ratio == 4:
            width = c["index_head_dim"]
            compressor(f"{attn}.indexer.compressor", ratio, width)
            shapes[f"{attn}.indexer.wq_b.weight"] = (c["index_n_heads"] * width, q)
            shapes[f"{attn}.indexer.weights_proj.weight"] = (c["index_n_heads"], d)
        shapes[f"{ffn}.gate.weight"] = (c["n_routed_experts"], d)
        if i < c["num_hash_layers"]:
            shapes[f"{ffn}.gate.tid2eid"] = (c["vocab_size"], c["num_experts_per_tok"])
        else:
            shapes[f"{ffn}.gate.bias"] = (c["n_routed_experts"],)
        for e in (*(f"experts.{e}" for e in range(c["n_routed_experts"])), "shared_experts"):
            shapes |= {f"{ffn}.{e}.w1.weight": (f, d), f"{ffn}.{e}.w3.weight": (f, d), f"{ffn}.{e}.w2.weight": (d, f)}
    return shapes


def random_tensors(config: dict[str, Any], seed: int = 0) -> Tensors:
    """Linear maps of unit-variance outputs, norms around 1, everything else of order one; float32 and int32."""
    draw = np.random.default_rng(seed)

    def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name.endswith("tid2eid"):
            rows = [draw.permutation(config["n_routed_experts"])[: shape[1]] for _ in range(shape[0])]
            return np.stack(rows).astype(np.int32)
        value = draw.standard_normal(shape)
        if name.endswith("norm.weight"):
            value = 1 + 0.1 * value
        elif name.endswith(("base", "scale", "sink", "ape", "bias")):
            value = 0.5 * value
        elif name != "embed.weight":
            value = value * shape[-1] ** -0.5
        return value.astype(np.float32)

    return {name: tensor(name, shape) for name, shape in tensor_shapes(config).items()}


def write_model(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """A checkpoint folder as published."""
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def parameters_of(module: nnx.Module, tensors: Tensors, prefix: str, topology: Topology) -> dict:
    """The parameters of one module, whose published tensors start with `prefix`, on the mesh."""

    def whole(path: tuple, variable: Any) -> np.ndarray:
        name = ".".join([prefix, *map(str, path)])
        if name in tensors:
            return tensors[name]
        for spelled in (f"{name}.weight", f"{prefix}_{path[-1]}"):
            if spelled in tensors:
                return tensors[spelled].reshape(variable.get_value().shape)
        owner, leaf = name.rsplit(".", 1)
        return np.stack([tensors[f"{owner}.{e}.{leaf}.weight"] for e in range(variable.get_value().shape[0])])

    nested: dict = {}
    for path, variable in nnx.to_flat_state(nnx.split(module)[1]):
        node = nested
        for part in path[:-1]:
            node = node.setdefault(part, {})
        sharding = topology.sharding(variable.get_metadata()["spec"])
        value = jnp.asarray(whole(path, variable), variable.get_value().dtype)
        assert value.shape == variable.get_value().shape
        node[path[-1]] = jax.device_put(value, sharding)
    return nested


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A module's program with its parameters."""

    program: Callable
    parameters: dict

    def __call__(self, *args: Any) -> Any:
        return self.program(self.parameters, *args)


def compile_module(
    module: nnx.Module,
    fn: Callable,
    parameters: dict,
    topology: Topology,
    args: Sequence[Any],
    in_specs: Any,
    out_specs: Any,
) -> Compiled:
    """`fn(module, *args)` as one audited program on the mesh; args give shapes and dtypes."""
    graph, state = nnx.split(module)

    def step(parameters: dict, *args: Any) -> Any:
        loaded = jax.tree.map(lambda leaf: leaf, state)
        nnx.replace_by_pure_dict(loaded, parameters)
        return fn(nnx.merge(graph, loaded), *args)

    specs = (partition_specs(module), *in_specs)
    with jax.default_matmul_precision("highest"):
        compiled = compile_step(step, topology, (parameters, *args), in_specs=specs, out_specs=out_specs)
    return Compiled(compiled, parameters)


def rows_of(batch: Any) -> Rows:
    """Rows from [T, 4] int32 (token, position, slot, 1 if real), wherever the padding lies."""
    real = batch[:, 3] == 1
    token, position, slot = (batch[:, i] for i in range(3))
    past_every_slot = jnp.iinfo(jnp.int32).max
    return Rows(jnp.where(real, token, 0), jnp.where(real, position, 0), jnp.where(real, slot, past_every_slot), real)


def filled_cache(config: Config, layer: int, slots: int, max_seq_len: int, value: float) -> LayerCache:
    """One layer's caches with every number equal to `value`."""
    shapes = cache_shapes(config, slots, max_seq_len)[layer]
    return jax.tree.map(lambda s: np.full(s.shape, value, s.dtype), shapes)


def not_owned(cache: LayerCache, owners: dict[int, int], ratio: int, value: float) -> LayerCache:
    """Overwrites every place that no request needs; owners: slot -> positions that its request has decoded."""
    width = cache.window.shape[1]

    def window(old: np.ndarray) -> np.ndarray:
        new = np.full_like(old, value)
        for slot, done in owners.items():
            kept = [p % width for p in range(max(0, done - width + 1), done)]  # the next step reads w - 1 old keys
            new[slot, kept] = old[slot, kept]
        return new

    def compressor(old: CompressorCache | None) -> CompressorCache | None:
        if old is None:
            return None
        entries, opened = (np.full_like(np.asarray(a), value) for a in (old.entries, old.open))
        for slot, done in owners.items():
            entries[slot, : done // ratio] = np.asarray(old.entries)[slot, : done // ratio]
            before = 1 if ratio == 4 else 0  # part 0 of CSA is the window before the open one
            if done % ratio:
                opened[slot, before:] = np.asarray(old.open)[slot, before:]
            if before and done >= ratio:
                opened[slot, :before] = np.asarray(old.open)[slot, :before]
        return dataclasses.replace(old, entries=entries, open=opened)

    return LayerCache(
        jnp.asarray(window(np.asarray(cache.window))), compressor(cache.compressor), compressor(cache.indexer)
    )
