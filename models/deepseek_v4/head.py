"""The vocabulary projection, cut over attn_tp or over the world. Source: communication semantics, section 10."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxcoll.collectives import all_gather
from jaxcoll.gather import gather, own_rows
from jaxcoll.linear import parameter
from jaxcoll.plan import Head as HeadKind
from jaxcoll.topology import Topology
from models.deepseek_v4.bridge import Bridge
from models.deepseek_v4.config import Config

Array = jax.Array


class Head(nnx.Module):
    """logits = weight x in float32; the weight has zero rows up to a multiple of its group's size, cut off again."""

    def __init__(self, config: Config, topology: Topology, dtype: Any, kind: HeadKind):
        self.vocab_size, self.kind, self.topology = config.vocab_size, kind, topology
        self.group = topology.group(kind)
        size = topology.size(self.group)
        padded = -(-config.vocab_size // size) * size
        self.weight = parameter((padded, config.hidden_size), dtype, P(self.group, None))

    def __call__(self, x: Array, bridge: Bridge) -> Array:
        """Own rows [T, D] SHARD over attn_dp, REPLICA over attn_tp -> logits [T, V] float32 in the same states.

        Over the world, every replica's rows are gathered by sum_len, each rank projects them all onto its part of the
        vocabulary, and own rows are taken back.
        """
        if self.kind == "attn_tp":
            return self._complete(x)
        counts, rows = bridge.counts, bridge.plan.rows
        total = self.topology.attn_dp * rows.rows
        everyone = gather(x, counts, self.topology, mode="sum_len", total=total)
        return own_rows(self._complete(everyone), counts, self.topology, mode="sum_len", rows=rows.rows)

    def _complete(self, x: Array) -> Array:
        """[R, D] -> [R, V] float32, complete over the weight's group."""
        part = jnp.einsum("td,vd->tv", x, self.weight[...], preferred_element_type=jnp.float32)
        with jax.named_scope("all_gather"):
            return all_gather(part, self.group, 1)[:, : self.vocab_size]
