"""The MoE sub-layer of one rank: router, its experts and its part of the shared expert."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxcoll.collectives import declare_partial
from jaxcoll.dispatch import (
    Dispatching,
    DispatchSpec,
    Handle,
    combine,
    dispatch_finish,
    dispatch_start,
    meanwhile,
)
from jaxcoll.fused import fused_moe
from jaxcoll.placement import Placement, place_experts, to_physical
from jaxcoll.plan import SharedExpert
from jaxcoll.topology import Topology, TopologyError
from models.deepseek_v4.bridge import Bridge
from models.deepseek_v4.config import Config
from models.deepseek_v4.experts import Experts, SharedExpertMLP
from models.deepseek_v4.router import Router, Routing

Array = jax.Array


def place(config: Config, topology: Topology, redundant: int = 0) -> Placement:
    """Where the experts live: in order, with `redundant` copies beyond the first of each.

    Raises:
        TopologyError: moe_ep does not divide the experts and their copies, or there are more copies than could serve.
    """
    experts, ranks = config.n_routed_experts, topology.world // topology.moe_tp
    if redundant > experts * ranks:
        raise TopologyError(
            f"{redundant} redundant copies are more than one of each of {experts} experts for each of moe_ep={ranks} "
            f"ranks, which are {experts * ranks}"
        )
    if missing := -(experts + redundant) % ranks:
        held = f"n_routed_experts={experts}" + (f" and {redundant} redundant copies" if redundant else "")
        raise TopologyError(
            f"moe_ep={ranks} does not divide {held}; --redundant-experts {redundant + missing} would fill the gap"
        )
    return place_experts(experts, ranks, redundant=redundant)


class Going(NamedTuple):
    """Own rows on their way: the rows, their routing, what was sent, and the shared expert's output if it is known."""

    own: Array
    routing: Routing
    sent: Dispatching
    shared: Array | None


class MoE(nnx.Module):
    """Routed plus shared experts, on all rows (one reduction is left to the caller, by type) or on own rows."""

    def __init__(
        self,
        config: Config,
        layer: int,
        topology: Topology,
        dtype: Any,
        shared: SharedExpert,
        placement: Placement | None = None,
    ):
        self.shared, self.world, self.moe_tp = shared, topology.group("world"), topology.group("moe_tp")
        self.placement = placement or place(config, topology)
        self.gate = Router(config, layer, dtype)
        self.experts = Experts(config, topology, dtype, self.placement)
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
            y = self.experts(x, Routing(to_physical(routing.ids, self.placement), routing.weights), active)
        if self.shared == "sharded":
            with jax.named_scope("shared"):
                y = y + self.shared_experts(x)
        return declare_partial(y, self.world), routing

    def dispatched(self, own: Array, tokens: Array, bridge: Bridge) -> tuple[Array, Routing]:
        """Own rows to their experts' ranks and home again, by the plan's exchange.

        Args:
            own: [C, D] this rank's rows, SHARD over the world.
            tokens: [C] int32 their token ids.
            bridge: the step's plan.

        Returns:
            [C, D] complete, and the routing; SHARD over the world. Padding rows hold the shared expert's garbage.
        """
        if bridge.plan.backend == "fused":
            return self._fused(own, tokens, bridge)
        going = self.send(own, tokens, bridge)
        y, handle = self.at_experts(going.sent)
        with jax.named_scope("combine"):
            return combine(self.partial(y), handle) + self.shared_of(going), going.routing

    def send(self, own: Array, tokens: Array, bridge: Bridge) -> Going:
        """Routes own rows and sends them; arguments as for `dispatched`. The shared expert works while they travel."""
        routing, placed = self._route(own, tokens)
        with jax.named_scope("dispatch"):
            sent = dispatch_start(own, *placed, self._spec(bridge), count=bridge.own_count())
        if bridge.plan.exchange and bridge.plan.exchange.overlap == "none":
            return Going(own, routing, sent, None)
        with jax.named_scope("shared"):
            sent, shared = meanwhile(sent, self.shared_experts(own))
        return Going(own, routing, sent, shared)

    def at_experts(self, sent: Dispatching) -> tuple[Array, Handle]:
        """What arrived, through this rank's experts: laid out as received, each rank of moe_tp its addend."""
        with jax.named_scope("dispatch"):
            received, handle = dispatch_finish(sent)
        with jax.named_scope("experts"):
            return self.experts.on(received), handle

    def partial(self, y: Array) -> Array:
        """Results of `at_experts` as what they are: PARTIAL over moe_tp."""
        return declare_partial(y, self.moe_tp)

    def shared_of(self, going: Going) -> Array:
        """The shared expert's output for own rows, computed now if it was not before."""
        return self.shared_experts(going.own) if going.shared is None else going.shared

    def _fused(self, own: Array, tokens: Array, bridge: Bridge) -> tuple[Array, Routing]:
        routing, placed = self._route(own, tokens)
        with jax.named_scope("fused"):
            y = fused_moe(own, *placed, self.experts, Experts.on, self._spec(bridge), count=bridge.own_count())
        with jax.named_scope("shared"):
            return y + self.shared_experts(own), routing

    def _route(self, own: Array, tokens: Array) -> tuple[Routing, Routing]:
        """Own rows' routing, and the same by physical expert; rows are numbered so that copies share them evenly."""
        with jax.named_scope("route"):
            routing = self.gate(own, tokens)
            first_row = jax.lax.axis_index(self.world) * own.shape[0]
            return routing, Routing(to_physical(routing.ids, self.placement, first_row), routing.weights)

    def _spec(self, bridge: Bridge) -> DispatchSpec:
        exchange, kernels = bridge.plan.exchange, bridge.plan.kernels
        assert exchange is not None
        choices = {
            "hosts": exchange.hosts,
            "mode": exchange.mode,
            "wire": exchange.wire,
            "kernels": kernels.path,
            "interpret": kernels.interpret,
        }
        return DispatchSpec.of(bridge.topology, self.placement.num_physical, **choices)

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
