"""The MoE sub-layer of one rank: router, its experts and its part of the shared expert."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxcoll.collectives import declare_partial
from jaxcoll.dispatch import DispatchSpec, Received, combine, dispatch_finish, dispatch_start, meanwhile
from jaxcoll.plan import SharedExpert
from jaxcoll.topology import Topology
from models.deepseek_v4.bridge import Bridge
from models.deepseek_v4.config import Config
from models.deepseek_v4.experts import Experts, SharedExpertMLP
from models.deepseek_v4.router import Router, Routing

Array = jax.Array


class MoE(nnx.Module):
    """Routed plus shared experts, on all rows (one reduction is left to the caller, by type) or on own rows."""

    def __init__(self, config: Config, layer: int, topology: Topology, dtype: Any, shared: SharedExpert):
        self.shared, self.world, self.moe_tp = shared, topology.group("world"), topology.group("moe_tp")
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
        with jax.named_scope("route"):
            routing = self.gate(x, jnp.where(active, tokens, 0))
        with jax.named_scope("experts"):
            y = self.experts(x, routing, active)
        if self.shared == "sharded":
            with jax.named_scope("shared"):
                y = y + self.shared_experts(x)
        return declare_partial(y, self.world), routing

    def dispatched(self, own: Array, tokens: Array, bridge: Bridge) -> tuple[Array, Routing]:
        """Own rows to their experts' ranks and home again; the shared expert works while they travel.

        Args:
            own: [C, D] this rank's rows, SHARD over the world.
            tokens: [C] int32 their token ids.
            bridge: the step's plan.

        Returns:
            [C, D] complete, and the routing; SHARD over the world. Padding rows hold the shared expert's garbage.
        """
        with jax.named_scope("route"):
            routing = self.gate(own, tokens)
        with jax.named_scope("dispatch"):
            sent = dispatch_start(own, routing.ids, routing.weights, self._spec(bridge), count=bridge.own_count())
            with jax.named_scope("shared"):
                shared = self.shared_experts(own)
            sent, shared = meanwhile(sent, shared)
            received, handle = dispatch_finish(sent)
        with jax.named_scope("experts"):
            if isinstance(received, Received):
                y = self.experts.received(received.x, Routing(received.topk_ids, received.topk_weights))
            else:
                y = self.experts.received_per_expert(received.x, received.tokens_per_expert)
            y = declare_partial(y, self.moe_tp)
        with jax.named_scope("combine"):
            return combine(y, handle) + shared, routing

    def _spec(self, bridge: Bridge) -> DispatchSpec:
        exchange = bridge.plan.exchange
        assert exchange is not None
        experts = self.experts.config.n_routed_experts
        return DispatchSpec.of(bridge.topology, experts, mode=exchange.mode, wire=exchange.wire)

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
