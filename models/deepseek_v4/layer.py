"""One DeepSeek-V4 decode layer: follow a token from its streams through attention and experts and back.

States are written at every line as (attn_dp, attn_tp): R replica, S shard or other requests' rows, P partial sum.
How rows reach the experts and come home is the plan's choice (communication semantics, sections 3 and 4); the states
before and after are the same whatever it chose.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jaxcoll.collectives import all_reduce
from jaxcoll.placement import Placement
from jaxcoll.plan import SharedExpert
from jaxcoll.topology import Topology
from models.deepseek_v4.attention import Attention
from models.deepseek_v4.bridge import Bridge
from models.deepseek_v4.cache import LayerCache
from models.deepseek_v4.config import Config
from models.deepseek_v4.hyper_connection import HyperConnection, Mix
from models.deepseek_v4.moe import MoE
from models.deepseek_v4.norm import RMSNorm
from models.deepseek_v4.router import Routing
from models.deepseek_v4.rows import Rows

Array = jax.Array
scope = jax.named_scope


def passed_by(attn_out: Array, moe_out: Array, routing: Routing) -> dict[str, Array]:
    """What a layer reports for comparison."""
    return {"attn_out": attn_out, "moe_out": moe_out, "topk_ids": routing.ids, "topk_weights": routing.weights}


class Layer(nnx.Module):
    """mHC around attention, mHC around experts."""

    def __init__(
        self,
        config: Config,
        layer: int,
        topology: Topology,
        dtype: Any,
        shared: SharedExpert,
        placement: Placement | None = None,
    ):
        self.name = f"layer.{layer}"
        self.attn_tp = topology.group("attn_tp")
        self.hc_attn = HyperConnection(config, self.attn_tp)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(config, layer, topology, dtype)
        self.hc_ffn = HyperConnection(config, self.attn_tp)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn = MoE(config, layer, topology, dtype, shared, placement)

    def __call__(
        self, streams: Array, rows: Rows, world_tokens: Array, cache: LayerCache, bridge: Bridge
    ) -> tuple[Array, LayerCache, dict[str, Array]]:
        """One token per row through the layer.

        Args:
            streams: [T, N, D] residual streams of this replica's rows, (S, R).
            rows: this replica's rows, (S, R).
            world_tokens: [G] token ids of all replicas' rows, -1 for padding, (R, R).
            cache: this layer's caches, (S, R).
            bridge: the step's way to the experts and back.

        Returns:
            streams after the layer, the caches with this token in them, and what passed by, for comparison:
            attn_out, moe_out [T, D], topk_ids, topk_weights [T, K], all (S, R). Padding rows are garbage.
        """
        with scope(self.name):
            streams, attn_out, cache = self.attend(streams, rows, cache)  # [T, N, D], [T, D] (S, R)
            x, mix = self.read_ffn(streams)  # [T, D] (S, R)
            if bridge.plan.backend == "gather":
                moe_out, routing = self._gathered(x, world_tokens, bridge)  # [T, D] (S, R)
            else:
                moe_out, routing = self._dispatched(x, rows, bridge)  # [T, D] (S, R)
            streams = self.write_ffn(streams, moe_out, mix)  # [T, N, D] (S, R)
        return streams, cache, passed_by(attn_out, moe_out, routing)

    def attend(self, streams: Array, rows: Rows, cache: LayerCache) -> tuple[Array, Array, LayerCache]:
        """mHC around attention: [T, N, D] (S, R) -> the same, attention's [T, D] (S, R), and the caches."""
        with scope("hc_attn.read"):
            x, mix = self.hc_attn.read(streams)  # [T, D] (S, R)
            x = self.attn_norm(x)
        with scope("attn"):
            y, cache = self.attn(x, rows, cache)  # [T, D] (S, P): each rank's heads
        with scope("attn.all_reduce"):
            attn_out = all_reduce(y, self.attn_tp)  # [T, D] (S, R)
        with scope("hc_attn.write"):
            return self.hc_attn.write(streams, attn_out, mix), attn_out, cache

    def read_ffn(self, streams: Array) -> tuple[Array, Mix]:
        """What the experts see of the streams, [T, D] (S, R), and how their output will be mixed in."""
        with scope("hc_ffn.read"):
            x, mix = self.hc_ffn.read(streams)
            return self.ffn_norm(x), mix

    def write_ffn(self, streams: Array, moe_out: Array, mix: Mix) -> Array:
        """The streams with the experts' complete output [T, D] (S, R) in them."""
        with scope("hc_ffn.write"):
            return self.hc_ffn.write(streams, moe_out, mix)

    def _gathered(self, x: Array, world_tokens: Array, bridge: Bridge) -> tuple[Array, Routing]:
        """All rows to every rank, partial sums home: [T, D] (S, R) -> [T, D] (S, R) complete, and own rows' routing."""
        with scope("moe.gather"):
            everyone = bridge.to_everyone(x)  # [G, D] (R, R): every rank sees all rows
        with scope("moe"):
            y, routing = self.ffn(everyone, world_tokens)  # [G, D] (P, P): each rank's experts
        with scope("moe.combine"):
            moe_out = bridge.reduce_home(y)  # [T, D] (S, R): added up once, own rows
        with scope("moe.shared"):
            shared = self.ffn.shared_apart(x, everyone, bridge)  # [T, D] (S, R) complete, or None: joined before
            moe_out = moe_out if shared is None else moe_out + shared
        return moe_out, Routing(*(bridge.take_home(a) for a in routing))

    def _dispatched(self, x: Array, rows: Rows, bridge: Bridge) -> tuple[Array, Routing]:
        """Each row to its experts and home: [T, D] (S, R) -> [T, D] (S, R) complete, and own rows' routing."""
        with scope("moe.split"):
            own, tokens = bridge.own_chunk(x), bridge.own_chunk(rows.tokens)  # [C, D] (S, S): nothing is sent
        with scope("moe"):
            y, routing = self.ffn.dispatched(own, tokens, bridge)  # [C, D] (S, S): complete
        with scope("moe.join"):
            return bridge.join(y), Routing(*map(bridge.join, routing))  # [T, D] (S, R)
