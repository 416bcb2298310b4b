"""Routed and shared experts on this rank: its own experts' rows, its own slice of their width; no communication.

What leaves here is a contribution (one addend per rank) that the caller declares PARTIAL.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxcoll.dispatch import Received, ReceivedPerExpert
from jaxcoll.linear import parameter
from jaxcoll.placement import Placement
from jaxcoll.routing import exclusive_sum, merge_repeats, tokens_per_expert
from jaxcoll.topology import Topology
from models.deepseek_v4.config import Config
from models.deepseek_v4.expert_blocks import as_varying_as, block_rows, expert_of, over_blocks, times
from models.deepseek_v4.router import Routing

Array = jax.Array
Cut = tuple[int, int]

# Multiply-adds below which every local expert simply sees every row: at tiny batches reading each weight once is what
# counts, and a batched matmul reads at several times the rate of a grouped one (CPU: 8x). At the published shapes even
# one row per device is beyond this.
DENSE_WORK = 5e8

SCOPE = "routed_experts"  # names the routed experts' matmuls in traced and compiled programs


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
        with jax.named_scope(SCOPE):
            return self._rows(x, Routing(ids, routing.weights), (0, local))

    def on(self, received: Received | ReceivedPerExpert, cut: Cut | None = None) -> Array:
        """What a dispatch brought, through the experts that it is for.

        Args:
            received: [R, D] or [L, C, D], SHARD over moe_ep, REPLICA over moe_tp.
            cut: (first, size) of this rank's experts that it is for, numbered from 0 in it; None is all.

        Returns:
            Laid out as received; each rank of moe_tp its addend. Normal: weighted sums; low latency: unweighted
            results, garbage past the counts.
        """
        cut = cut or (0, self.w1.shape[0])
        with jax.named_scope(SCOPE):
            if isinstance(received, Received):
                return self._rows(received.x, Routing(received.topk_ids, received.topk_weights), cut)
            return self._per_expert(received.x, received.tokens_per_expert, cut)

    def _rows(self, x: Array, routing: Routing, cut: Cut) -> Array:
        work = 3 * x.shape[0] * cut[1] * self.w1.shape[1] * self.w1.shape[2]
        return (self._grouped if work > DENSE_WORK else self._dense)(x, routing, cut)

    def _per_expert(self, x: Array, counts: Array, cut: Cut) -> Array:
        local, capacity, width = x.shape
        if 3 * local * capacity * self.w1.shape[1] * width <= DENSE_WORK:
            # The rows first: with rows of their own for each expert XLA:CPU is then half as slow as weights first.
            w1, w3, w2 = self._weights(cut)
            each = (((2,), (2,)), ((0,), (0,)))
            hidden = gated(lax.dot_general(x, w1, each), lax.dot_general(x, w3, each), self.config.swiglu_limit)
            return lax.dot_general(hidden.astype(x.dtype), w2, each)  # [L, C, D]
        size = min(self.block_rows(capacity), capacity)

        def block(expert: Array, offset: Array, x: Array) -> Array:
            start = jnp.minimum(offset, capacity - size)
            rows = lax.dynamic_slice(x, (expert, start, 0), (1, size, width))[0]
            # A last block that is moved to fit begins with rows that hold their results already.
            done = start + jnp.arange(size) < offset
            out = jnp.where(done[:, None], rows, self._expert(cut[0] + expert, rows))
            return lax.dynamic_update_slice(x, out[None], (expert, start, 0))

        # Results take their rows' place: no second buffer of the proven bound.
        return over_blocks(counts, size, block, as_varying_as(x, self.w1[...], counts))

    def block_rows(self, tokens: int) -> int:
        """Rows of one block where `tokens` rows, of the whole world, choose experts."""
        return block_rows(tokens * self.config.num_experts_per_tok / self.config.n_routed_experts)

    def _weights(self, cut: Cut) -> list[Array]:
        """w1, w3, w2 of some experts; a copy where they are not all."""
        weights = [self.w1[...], self.w3[...], self.w2[...]]
        return weights if cut[1] == len(weights[0]) else [w[cut[0] : sum(cut)] for w in weights]

    def _dense(self, x: Array, routing: Routing, cut: Cut) -> Array:
        """Every local expert on every row, unchosen ones with weight 0; reads each weight once."""
        local, limit = cut[1], self.config.swiglu_limit
        w1, w3, w2 = self._weights(cut)
        chosen = routing.ids[:, :, None] == jnp.arange(local)
        weight = jnp.sum(jnp.where(chosen, routing.weights[:, :, None], 0), axis=1)  # [G, local]
        rows = jnp.broadcast_to(x, (local, *x.shape))
        hidden = gated(_by_expert(w1, rows), _by_expert(w3, rows), limit)  # [local, F, G]
        weight = weight.T[:, None, :]
        hidden = jnp.where(weight > 0, hidden * weight, 0).astype(x.dtype)
        out = lax.dot_general(w2, hidden, (((2,), (1,)), ((0,), (0,))))  # [local, D, G]
        return jnp.sum(out, axis=0).T

    def _grouped(self, x: Array, routing: Routing, cut: Cut) -> Array:
        """Rows sorted by expert, block by block: work follows the routed rows, not rows x experts."""
        local = cut[1]
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
            y = self._expert(cut[0] + expert, x[choice // k]).astype(jnp.float32) * weights.reshape(-1)[choice][:, None]
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
