"""Routed and shared experts on this rank: its own experts' rows, its own slice of their width; no communication.

What leaves here is a contribution (one addend per rank) that the caller declares PARTIAL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxcoll.linear import parameter
from jaxcoll.routing import exclusive_sum, merge_repeats, tokens_per_expert
from jaxcoll.topology import Topology
from models.deepseek_v4.config import Config
from models.deepseek_v4.expert_blocks import as_varying_as, block_rows, expert_of, over_blocks, times
from models.deepseek_v4.router import Routing

Array = jax.Array

# Multiply-adds below which every local expert simply sees every row: at tiny batches reading each weight once is what
# counts, and a batched matmul reads at several times the rate of a grouped one (CPU: 8x). At the published shapes even
# one row per device is beyond this.
DENSE_WORK = 5e8

SCOPE = "routed_experts"  # names the routed experts' matmuls in traced and compiled programs


def gated(w1_out: Array, w3_out: Array, limit: float) -> Array:
    """silu(min(gate, L)) * clip(up, -L, L): the gate is not clipped from below."""
    return jax.nn.silu(jnp.minimum(w1_out, limit)) * jnp.clip(w3_out, -limit, limit)


class Experts(nnx.Module):
    """The routed experts: cut over moe_ep by expert and over moe_tp by width."""

    def __init__(self, config: Config, topology: Topology, dtype: Any):
        c, ep, tp = config, topology.group("moe_ep") or None, topology.group("moe_tp") or None
        self.config, self.ep = config, topology.group("moe_ep")
        wide = (c.n_routed_experts, c.moe_intermediate_size, c.hidden_size)
        self.w1 = parameter(wide, dtype, P(ep, tp, None))
        self.w3 = parameter(wide, dtype, P(ep, tp, None))
        self.w2 = parameter((wide[0], wide[2], wide[1]), dtype, P(ep, None, tp))

    def __call__(self, x: Array, routing: Routing, active: Array) -> Array:
        """This rank's experts applied to the rows that chose them.

        Args:
            x: [G, D], REPLICA over the world.
            routing: of the same rows.
            active: [G] bool; padding rows are nobody's.

        Returns:
            [G, D] this rank's addend of the routed output (SHARD-typed over the world).
        """
        local = self.w1.shape[0]
        first = lax.axis_index(self.ep) * local if self.ep else 0
        ids = jnp.where(active[:, None], routing.ids - first, -1)
        return self.received(x, Routing(ids, routing.weights))

    def received(self, x: Array, routing: Routing) -> Array:
        """Rows that were sent to this rank, through the experts that they chose here.

        Args:
            x: [R, D], SHARD over moe_ep, REPLICA over moe_tp.
            routing: local expert numbers, -1 for nobody, and weights.

        Returns:
            [R, D] weighted sums, each rank of moe_tp its addend.
        """
        with jax.named_scope(SCOPE):
            return self._choose_form(x)(x, routing)

    def received_per_expert(self, x: Array, counts: Array) -> Array:
        """Rows that were sent to each of this rank's experts, through it and unweighted.

        Args:
            x: [L, C, D], SHARD over moe_ep, REPLICA over moe_tp; the first counts[l] rows of expert l are real.
            counts: [L] int32.

        Returns:
            [L, C, D], each rank of moe_tp its addend; rows past the counts are garbage.
        """
        with jax.named_scope(SCOPE):
            return self._per_expert(x, counts)

    def _per_expert(self, x: Array, counts: Array) -> Array:
        local, capacity, width = x.shape
        if 3 * local * capacity * self.w1.shape[1] * width <= DENSE_WORK:
            hidden = gated(_by_expert(self.w1[...], x), _by_expert(self.w3[...], x), self.config.swiglu_limit)
            out = lax.dot_general(self.w2[...], hidden.astype(x.dtype), (((2,), (1,)), ((0,), (0,))))  # [L, D, C]
            return out.transpose(0, 2, 1)
        size = min(self.block_rows(capacity), capacity)

        def block(expert: Array, offset: Array, x: Array) -> Array:
            start = jnp.minimum(offset, capacity - size)
            rows = lax.dynamic_slice(x, (expert, start, 0), (1, size, width))[0]
            # A last block that is moved to fit begins with rows that hold their results already.
            done = start + jnp.arange(size) < offset
            out = jnp.where(done[:, None], rows, self._expert(expert, rows))
            return lax.dynamic_update_slice(x, out[None], (expert, start, 0))

        # Results take their rows' place: no second buffer of the proven bound.
        return over_blocks(counts, size, block, as_varying_as(x, self.w1[...], counts))

    def block_rows(self, tokens: int) -> int:
        """Rows of one block where `tokens` rows, of the whole world, choose experts."""
        return block_rows(tokens * self.config.num_experts_per_tok / self.config.n_routed_experts)

    def _choose_form(self, x: Array) -> Callable[[Array, Routing], Array]:
        local = self.w1.shape[0]
        work = 3 * x.shape[0] * local * self.w1.shape[1] * self.w1.shape[2]
        return self._grouped if work > DENSE_WORK else self._dense

    def _dense(self, x: Array, routing: Routing) -> Array:
        """Every local expert on every row, unchosen ones with weight 0; reads each weight once."""
        local, limit = self.w1.shape[0], self.config.swiglu_limit
        chosen = routing.ids[:, :, None] == jnp.arange(local)
        weight = jnp.sum(jnp.where(chosen, routing.weights[:, :, None], 0), axis=1)  # [G, local]
        rows = jnp.broadcast_to(x, (local, *x.shape))
        hidden = gated(_by_expert(self.w1[...], rows), _by_expert(self.w3[...], rows), limit)  # [local, F, G]
        weight = weight.T[:, None, :]
        hidden = jnp.where(weight > 0, hidden * weight, 0).astype(x.dtype)
        out = lax.dot_general(self.w2[...], hidden, (((2,), (1,)), ((0,), (0,))))  # [local, D, G]
        return jnp.sum(out, axis=0).T

    def _grouped(self, x: Array, routing: Routing) -> Array:
        """Rows sorted by expert, block by block: work follows the routed rows, not rows x experts."""
        local = self.w1.shape[0]
        ids, weights = merge_repeats(routing.ids, routing.weights)
        rows, k = ids.shape
        expert = jnp.where((ids >= 0) & (ids < local), ids, local).reshape(-1)
        order = jnp.lexsort((expert,))  # stable; argsort's positions would be typed as equal on all ranks
        counts = tokens_per_expert(expert, local)
        starts, size = exclusive_sum(counts), self.block_rows(rows)

        def block(expert: Array, offset: Array, out: Array) -> Array:
            place = offset + jnp.arange(size, dtype=jnp.int32)
            real = place < counts[expert]
            choice = order.at[starts[expert] + place].get(mode="clip", wrap_negative_indices=False)
            y = self._expert(expert, x[choice // k]).astype(jnp.float32) * weights.reshape(-1)[choice][:, None]
            # `where`, not a product: what is not real may hold anything. An expert has each row once.
            to = jnp.where(real, choice // k, rows + place)
            y = jnp.where(real[:, None], y, 0)
            return out.at[to].add(y, mode="drop", wrap_negative_indices=False, unique_indices=True)

        out = as_varying_as(jnp.zeros(x.shape, jnp.float32), x, self.w1[...], ids)
        return over_blocks(counts, size, block, out).astype(x.dtype)

    def _expert(self, expert: Array, rows: Array) -> Array:
        """[B, D] through one of this rank's experts, unweighted: each rank of moe_tp its addend."""
        w1, w3, w2 = expert_of((self.w1[...], self.w3[...], self.w2[...]), expert)
        hidden = gated(times(rows, w1), times(rows, w3), self.config.swiglu_limit)
        return times(hidden.astype(rows.dtype), w2)


def _by_expert(w: Array, rows: Array) -> Array:
    """[E, F, D] x [E, G, D] -> [E, F, G]; the weight first, which XLA:CPU streams fastest."""
    return lax.dot_general(w, rows, (((2,), (2,)), ((0,), (0,))))


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
