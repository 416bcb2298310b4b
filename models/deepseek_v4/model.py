"""The whole decode step of one rank: embedding, layers, head. Communication only at the named hand-overs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxcoll.linear import parameter
from jaxcoll.plan import LayerPlan, choose_shared_expert
from jaxcoll.settings import Settings
from jaxcoll.topology import Topology, TopologyError
from models.deepseek_v4.batches import decode_layers
from models.deepseek_v4.bridge import Bridge
from models.deepseek_v4.cache import LayerCache
from models.deepseek_v4.config import Config
from models.deepseek_v4.head import Head
from models.deepseek_v4.hyper_connection import HyperHead
from models.deepseek_v4.layer import Layer
from models.deepseek_v4.moe import place
from models.deepseek_v4.norm import RMSNorm
from models.deepseek_v4.rows import Rows

Array = jax.Array


def check_sizes(config: Config, topology: Topology) -> None:
    """Raises TopologyError, with the numbers, where the topology does not divide the model."""
    for group, name in (
        ("attn_tp", "num_attention_heads"),
        ("attn_tp", "o_groups"),
        ("moe_tp", "moe_intermediate_size"),
    ):
        size, total = getattr(topology, group), getattr(config, name)
        if total % size:
            raise TopologyError(f"{group}={size} does not divide {name}={total}")


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
        settings: decide where the shared expert's and the head's weights live; None is all defaults.

    Raises:
        TopologyError: the topology does not divide heads, groups, experts or expert width.
    """

    def __init__(self, config: Config, topology: Topology, settings: Settings | None = None):
        settings = settings or Settings()
        check_sizes(config, topology)
        dtype = jnp.dtype(config.torch_dtype)
        self.config, self.topology = config, topology
        self.embed = Embedding(config, dtype)
        shared, _ = choose_shared_expert(topology, settings, config.moe_intermediate_size)
        self.placement = place(config, topology, settings.redundant_experts)
        kept = topology, dtype, shared, self.placement
        self.layers = nnx.List([Layer(config, i, *kept) for i in range(config.num_hidden_layers)])
        self.hc_head = HyperHead(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = Head(config, topology, dtype, settings.head)

    def __call__(
        self, batch: Array, counts: Array, caches: list[LayerCache], plan: LayerPlan
    ) -> tuple[list[LayerCache], dict[str, Any]]:
        """Decodes one token per row.

        Args:
            batch: [T, 3] int32 rows (token, position, slot), SHARD over attn_dp, REPLICA over attn_tp.
            counts: [attn_dp] int32 real rows of every replica, REPLICA over the world; the rest of a batch is padding.
            caches: one LayerCache per layer, states of `batch`.
            plan: the paths of this step, and its static shapes.

        Returns:
            The caches, and per row (states of `batch`): logits [T, V] float32, next_token [T] int32 (the lowest id of
            the highest logits), streams (one [T, N, D] per layer and the last output), and per layer attn_out,
            moe_out, topk_ids, topk_weights.
        """
        bridge = Bridge(self.topology, plan, counts)
        rows = Rows.unpack(batch, counts[jax.lax.axis_index(self.topology.group("attn_dp"))])
        with jax.named_scope("embed"):
            x = self.embed(rows.tokens)
            streams = jnp.broadcast_to(x[:, None, :], (x.shape[0], self.config.hc_mult, x.shape[1]))
        with jax.named_scope("ids.gather"):
            world_tokens = bridge.world_tokens(rows.tokens) if plan.backend == "gather" else rows.tokens
        after, entered, passed = decode_layers(self.layers, streams, rows, world_tokens, caches, bridge)
        seen = {"streams": entered, **{name: [by[name] for by in passed] for name in passed[0]}}
        with jax.named_scope("head"):
            logits = self.head(self.norm(self.hc_head(entered[-1])), bridge)
            next_token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return after, {"logits": logits, "next_token": next_token, **seen}
