"""The whole decode step of one rank: embedding, layers, head. Communication only at the named hand-overs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxcoll.collectives import all_gather
from jaxcoll.linear import ColumnParallelLinear, parameter
from jaxcoll.topology import Topology, TopologyError
from models.deepseek_v4.cache import LayerCache
from models.deepseek_v4.config import Config
from models.deepseek_v4.hyper_connection import HyperHead
from models.deepseek_v4.layer import Layer
from models.deepseek_v4.norm import RMSNorm
from models.deepseek_v4.rows import Rows

Array = jax.Array


def check_sizes(config: Config, topology: Topology) -> None:
    """Raises TopologyError, with the numbers, where the topology does not divide the model."""
    for group, name in (
        ("attn_tp", "num_attention_heads"),
        ("attn_tp", "o_groups"),
        ("moe_ep", "n_routed_experts"),
        ("moe_tp", "moe_intermediate_size"),
    ):
        size, total = getattr(topology, group), getattr(config, name)
        if total % size:
            raise TopologyError(f"{group}={size} does not divide {name}={total}")


def padded_vocabulary(config: Config, topology: Topology) -> int:
    """The head's rows: the vocabulary rounded up to a multiple of attn_tp; added rows are zero and cut off again."""
    return -(-config.vocab_size // topology.attn_tp) * topology.attn_tp


class Embedding(nnx.Module):
    """The token table, whole on every rank (communication semantics, section 10)."""

    def __init__(self, config: Config, dtype: Any):
        self.weight = parameter((config.vocab_size, config.hidden_size), dtype, P(None, None))

    def __call__(self, tokens: Array) -> Array:
        """[T] -> [T, D], state of `tokens`."""
        return self.weight[...].at[tokens].get(mode="clip", wrap_negative_indices=False)


class DeepSeekV4(nnx.Module):
    """One decode step. Made with abstract weights; the step is a pure function of its split, loaded state.

    Args:
        config: the model.
        topology: the mesh.

    Raises:
        TopologyError: the topology does not divide heads, groups, experts or expert width.
    """

    def __init__(self, config: Config, topology: Topology):
        check_sizes(config, topology)
        dtype = jnp.dtype(config.torch_dtype)
        self.config, self.topology = config, topology
        self.embed = Embedding(config, dtype)
        self.layers = nnx.List([Layer(config, i, topology, dtype) for i in range(config.num_hidden_layers)])
        self.hc_head = HyperHead(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = ColumnParallelLinear(
            config.hidden_size,
            padded_vocabulary(config, topology),
            topology=topology,
            group=topology.group("attn_tp"),
            dtype=dtype,
        )

    def __call__(self, batch: Array, caches: list[LayerCache]) -> tuple[list[LayerCache], dict[str, Any]]:
        """Decodes one token per row.

        Args:
            batch: [T, 4] int32 rows (token, position, slot, active), SHARD over attn_dp, REPLICA over attn_tp.
            caches: one LayerCache per layer, same states.

        Returns:
            The caches, and per row (same states): logits [T, V] float32, next_token [T] int32 (the lowest id of the
            highest logits), streams (one [T, N, D] per layer and the last output), and per layer attn_out, moe_out,
            topk_ids, topk_weights.
        """
        rows = Rows.unpack(batch)
        with jax.named_scope("embed"):
            x = self.embed(rows.tokens)
            streams = jnp.broadcast_to(x[:, None, :], (x.shape[0], self.config.hc_mult, x.shape[1]))
        with jax.named_scope("ids.all_gather"):
            own = jnp.where(rows.active, rows.tokens, -1)
            world_tokens = all_gather(own, self.topology.group("attn_dp"), 0)
        seen: dict[str, list] = {
            k: [] for k in ("streams", "attn_out", "moe_out", "topk_ids", "topk_weights")
        }
        after = []
        for layer, cache in zip(self.layers, caches, strict=True):
            seen["streams"].append(streams)
            streams, cache, passed = layer(streams, rows, world_tokens, cache)
            after.append(cache)
            for name, value in passed.items():
                seen[name].append(value)
        seen["streams"].append(streams)
        logits = self._logits(streams)
        next_token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return after, {"logits": logits, "next_token": next_token, **seen}

    def _logits(self, streams: Array) -> Array:
        """[T, N, D] -> [T, V] float32, complete on every rank of attn_tp."""
        with jax.named_scope("head"):
            x = self.norm(self.hc_head(streams))
            weight = self.head.weight[...]
            part = jnp.einsum("td,vd->tv", x, weight, preferred_element_type=jnp.float32)
        with jax.named_scope("head.all_gather"):
            return all_gather(part, self.topology.group("attn_tp"), 1)[:, : self.config.vocab_size]
