"""The MoE sub-layer of one rank: router, its experts and its part of the shared expert."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxcoll.collectives import declare_partial
from jaxcoll.plan import SharedExpert
from jaxcoll.topology import Topology
from models.deepseek_v4.bridge import Bridge
from models.deepseek_v4.config import Config
from models.deepseek_v4.experts import Experts, SharedExpertMLP
from models.deepseek_v4.router import Router, Routing

Array = jax.Array


class MoE(nnx.Module):
    """Routed plus shared experts; exactly one reduction, over the world, is left to the caller by type."""

    def __init__(self, config: Config, layer: int, topology: Topology, dtype: Any, shared: SharedExpert):
        self.shared, self.world = shared, topology.group("world")
        self.gate = Router(config, layer, dtype)
        self.experts = Experts(config, topology, dtype)
        self.shared_experts = SharedExpertMLP(config, topology, dtype, cut=shared == "sharded")

    def __call__(self, x: Array, tokens: Array) -> tuple[Array, Routing]:
        """All rows of the world through this rank's experts.

        A cut shared expert joins before the one reduction. A whole one is complete on every rank and must not: the
        caller adds `shared_apart` after it (communication semantics, section 8).

        Args:
            x: [G, D], REPLICA over the world.
            tokens: [G] int32 token ids of the same rows, -1 for padding.

        Returns:
            [G, D] PARTIAL over the world, and the routing (REPLICA).
        """
        active = tokens >= 0
        routing = self.gate(x, jnp.where(active, tokens, 0))
        y = self.experts(x, routing, active)
        if self.shared == "sharded":
            y = y + self.shared_experts(x)
        return declare_partial(y, self.world), routing

    def shared_apart(self, own: Array, everyone: Array, bridge: Bridge) -> Array | None:
        """A whole shared expert's complete output for own rows, to be added after the reduction.

        Args:
            own: [T, D] own rows before the gather, SHARD over attn_dp, REPLICA over attn_tp.
            everyone: [G, D] all rows, REPLICA over the world.
            bridge: the way home.

        Returns:
            [T, D] in the state of `own`; None for a cut one, which joined before.
        """
        if self.shared == "sharded":
            return None
        if self.shared == "replicated_local":
            return self.shared_experts(own)
        return bridge.take_home(self.shared_experts(everyone))
