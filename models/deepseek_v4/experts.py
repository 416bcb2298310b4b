"""Routed and shared experts on this rank: its own experts' rows, its own slice of their width; no communication.

What leaves here is a contribution (one addend per rank) that the caller declares PARTIAL.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxcoll.dispatch import Received, ReceivedPerExpert
from jaxcoll.linear import parameter
from jaxcoll.placement import Placement
from jaxcoll.routing import merge_repeats
from jaxcoll.topology import Topology
from models.deepseek_v4.config import Config
from models.deepseek_v4.router import Routing

Array = jax.Array

# Multiply-adds below which every local expert simply sees every row: at tiny batches reading each weight once is what
# counts, and a batched matmul reads at several times the rate of a grouped one (CPU: 8x). At the published shapes even
# one row per device is beyond this.
DENSE_WORK = 5e8


def gated(w1_out: Array, w3_out: Array, limit: float) -> Array:
    """silu(min(gate, L)) * clip(up, -L, L): the gate is not clipped from below."""
    return jax.nn.silu(jnp.minimum(w1_out, limit)) * jnp.clip(w3_out, -limit, limit)


class Experts(nnx.Module):
    """The routed experts: cut over moe_ep by (physical) expert and over moe_tp by width."""

    def __init__(self, config: Config, topology: Topology, dtype: Any, placement: Placement | None = None):
        c, ep, tp = config, topology.group("moe_ep") or None, topology.group("moe_tp") or None
        self.config, self.ep = config, topology.group("moe_ep")
        experts = c.n_routed_experts if placement is None else placement.num_physical
        wide = (experts, c.moe_intermediate_size, c.hidden_size)
        self.w1 = parameter(wide, dtype, P(ep, tp, None))
        self.w3 = parameter(wide, dtype, P(ep, tp, None))
        self.w2 = parameter((wide[0], wide[2], wide[1]), dtype, P(ep, None, tp))

    def __call__(self, x: Array, routing: Routing, active: Array) -> Array:
        """This rank's experts applied to the rows that chose them.

        Args:
            x: [G, D], REPLICA over the world.
            routing: of the same rows, by physical expert.
            active: [G] bool; padding rows are nobody's.

        Returns:
            [G, D] this rank's addend of the routed output (SHARD-typed over the world).
        """
        local = self.w1.shape[0]
        first = lax.axis_index(self.ep) * local if self.ep else 0
        ids = jnp.where(active[:, None], routing.ids - first, -1)
        return self._choose_form(x)(x, Routing(ids, routing.weights))

    def weights(self) -> tuple[Array, Array, Array]:
        """w1, w3, w2 of this rank's own experts, each [L, ...]; SHARD over the world."""
        return self.w1[...], self.w3[...], self.w2[...]

    def on(self, received: Received | ReceivedPerExpert) -> Array:
        """What a dispatch brought, through the experts that it is for: see `received` and `received_per_expert`."""
        if isinstance(received, Received):
            return self.received(received.x, Routing(received.topk_ids, received.topk_weights))
        return self.received_per_expert(received.x, received.tokens_per_expert)

    def wave(self, weights: tuple[Array, Array, Array], received: Received | ReceivedPerExpert) -> Array:
        """`on` with the weights of some of this rank's experts in place of all."""
        some = copy.copy(self)
        some.w1, some.w3, some.w2 = map(nnx.Param, weights)
        return some.on(received)

    def received(self, x: Array, routing: Routing) -> Array:
        """Rows that were sent to this rank, through the experts that they chose here.

        Args:
            x: [R, D], SHARD over moe_ep, REPLICA over moe_tp.
            routing: local expert numbers, -1 for nobody, and weights.

        Returns:
            [R, D] weighted sums, each rank of moe_tp its addend.
        """
        return self._choose_form(x)(x, routing)

    def received_per_expert(self, x: Array, counts: Array) -> Array:
        """Rows that were sent to each of this rank's experts, through it and unweighted.

        Args:
            x: [L, C, D], SHARD over moe_ep, REPLICA over moe_tp; the first counts[l] rows of expert l are real.
            counts: [L] int32.

        Returns:
            [L, C, D], each rank of moe_tp its addend; rows past the counts are garbage.
        """
        local, capacity, width = x.shape
        if 3 * local * capacity * self.w1.shape[1] * width <= DENSE_WORK:
            hidden = gated(_per_expert(self.w1[...], x), _per_expert(self.w3[...], x), self.config.swiglu_limit)
            out = lax.dot_general(self.w2[...], hidden.astype(x.dtype), (((2,), (1,)), ((0,), (0,))))  # [L, D, C]
            return out.transpose(0, 2, 1)
        # At most min(K, L) copies of each row came here: close them up, so that work follows them.
        bound = capacity * min(self.config.num_experts_per_tok, local)
        place = (jnp.cumsum(counts) - counts)[:, None] + jnp.arange(capacity)
        place = jnp.where(jnp.arange(capacity) < counts[:, None], place, bound).reshape(-1)
        source = jnp.zeros(bound, jnp.int32).at[place].set(jnp.arange(local * capacity), mode="drop")
        rows = x.reshape(-1, width)[source]
        up = _ragged(rows, self.w1[...], counts), _ragged(rows, self.w3[...], counts)
        out = _ragged(gated(*up, self.config.swiglu_limit).astype(x.dtype), self.w2[...], counts)
        return out.at[place].get(mode="fill", fill_value=0).reshape(x.shape)

    def _choose_form(self, x: Array) -> Callable[[Array, Routing], Array]:
        local = self.w1.shape[0]
        work = 3 * x.shape[0] * local * self.w1.shape[1] * self.w1.shape[2]
        grouped = work > DENSE_WORK and local > self.config.num_experts_per_tok
        return self._grouped if grouped else self._dense

    def _dense(self, x: Array, routing: Routing) -> Array:
        """Every local expert on every row, unchosen ones with weight 0; reads each weight once."""
        local, limit = self.w1.shape[0], self.config.swiglu_limit
        chosen = routing.ids[:, :, None] == jnp.arange(local)
        weight = jnp.sum(jnp.where(chosen, routing.weights[:, :, None], 0), axis=1)  # [G, local]
        rows = jnp.broadcast_to(x, (local, *x.shape))
        hidden = gated(_per_expert(self.w1[...], rows), _per_expert(self.w3[...], rows), limit)  # [local, F, G]
        weight = weight.T[:, None, :]
        hidden = jnp.where(weight > 0, hidden * weight, 0).astype(x.dtype)
        out = lax.dot_general(self.w2[...], hidden, (((2,), (1,)), ((0,), (0,))))  # [local, D, G]
        return jnp.sum(out, axis=0).T

    def _grouped(self, x: Array, routing: Routing) -> Array:
        """Rows sorted by expert, one grouped matmul: work follows the routed rows, not rows x experts."""
        local = self.w1.shape[0]
        merged = Routing(*merge_repeats(routing.ids, routing.weights))
        g, k = merged.ids.shape
        mine = (merged.ids >= 0) & (merged.ids < local)
        expert = jnp.where(mine, merged.ids, local).reshape(-1)
        # After the merge a row has at most min(K, local) choices here, so the sorted prefix holds all of them.
        bound = g * min(k, local)
        order = jnp.lexsort((expert,))  # stable; argsort's positions would be typed as equal on all ranks
        sizes = jnp.sum(expert[:, None] == jnp.arange(local), axis=0, dtype=jnp.int32)
        rows = x[order[:bound] // k]
        up = _ragged(rows, self.w1[...], sizes), _ragged(rows, self.w3[...], sizes)
        out = _ragged(gated(*up, self.config.swiglu_limit).astype(x.dtype), self.w2[...], sizes)
        place = jnp.lexsort((order,)).reshape(g, k)  # where each (row, choice) went
        back = out.at[place].get(mode="clip", wrap_negative_indices=False).astype(jnp.float32)
        # `where`, not a product: rows past the groups' end may hold anything.
        weighted = jnp.where(mine[:, :, None], back * merged.weights[:, :, None], 0)
        return jnp.sum(weighted, axis=1).astype(x.dtype)


def _per_expert(w: Array, rows: Array) -> Array:
    """[E, F, D] x [E, G, D] -> [E, F, G]; the weight first, which XLA:CPU streams fastest."""
    return lax.dot_general(w, rows, (((2,), (2,)), ((0,), (0,))))


def _ragged(rows: Array, w: Array, sizes: Array) -> Array:
    """Grouped matmul with [out, in] weights: rows [R, in] sorted by expert, w [E, out, in] -> [R, out]."""
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    return lax.ragged_dot_general(rows, w, sizes, numbers)


class SharedExpertMLP(nnx.Module):
    """The expert that every row visits: width cut over the world, or whole on every rank.

    Source: communication semantics, section 8 ("TP-sharded over the global TP group", "TP1").
    """

    def __init__(self, config: Config, topology: Topology, dtype: Any, *, cut: bool):
        d, f = config.hidden_size, config.moe_intermediate_size
        self.limit = config.swiglu_limit
        group = topology.group("world") if cut else None
        self.w1 = parameter((f, d), dtype, P(group, None))
        self.w3 = parameter((f, d), dtype, P(group, None))
        self.w2 = parameter((d, f), dtype, P(None, group))

    def __call__(self, x: Array) -> Array:
        """[G, D] REPLICA -> this rank's addend (SHARD-typed) where the width is cut, else the complete output."""
        hidden = gated(x @ self.w1[...].T, x @ self.w3[...].T, self.limit)
        return hidden.astype(x.dtype) @ self.w2[...].T
