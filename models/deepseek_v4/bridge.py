"""The bridge between attention's replicas and the experts, as the step's plan says: rows out, rows home.

It holds no rows itself. Everything that it decides was decided by the plan.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxcoll.collectives import all_gather
from jaxcoll.combine import combine
from jaxcoll.gather import gather, own_rows
from jaxcoll.plan import LayerPlan
from jaxcoll.rows import real_rows
from jaxcoll.split import join_rows, own_count, split_rows
from jaxcoll.topology import Topology

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Bridge:
    """One step's ways between M rows of each replica and G rows of all.

    Attributes:
        topology: the mesh.
        plan: the paths and the static shapes.
        counts: [attn_dp] int32 real rows of every replica, REPLICA over the world.
    """

    topology: Topology
    plan: LayerPlan
    counts: Array

    def to_everyone(self, x: Array) -> Array:
        """[M, ...] SHARD over attn_dp, REPLICA over attn_tp -> [G, ...] REPLICA over the world."""
        if self.plan.gather == "none":  # one member: this only says that every rank holds them all
            return all_gather(x, self.topology.group("attn_dp"), 0)
        return gather(x, self.counts, self.topology, mode=self.plan.mode, total=self.plan.rows.total)

    def reduce_home(self, y: Array) -> Array:
        """[G, ...] PARTIAL over the world -> own rows [M, ...] SHARD over attn_dp, REPLICA over attn_tp, complete."""
        way, rows = self.plan.combine, self.plan.rows.rows
        assert way != "all_to_all"
        return combine(y, self.counts, self.topology, way=way, mode=self.plan.mode, rows=rows)

    def take_home(self, y: Array) -> Array:
        """[G, ...] REPLICA over the world -> own rows [M, ...] SHARD over attn_dp; nothing is sent."""
        return own_rows(y, self.counts, self.topology, mode=self.plan.mode, rows=self.plan.rows.rows)

    def own_chunk(self, x: Array) -> Array:
        """[M, ...] SHARD over attn_dp, REPLICA over attn_tp -> this rank's rows [C, ...]; nothing is sent."""
        return split_rows(x, self.topology.group("attn_tp"))

    def own_count(self) -> Array:
        """Real rows of this rank's chunk, int32 scalar."""
        count = self.counts[jax.lax.axis_index(self.topology.group("attn_dp"))]
        return own_count(count, self.plan.rows.rows, self.topology.group("attn_tp"))

    def join(self, x: Array) -> Array:
        """Chunks [C, ...] SHARD over attn_tp -> [M, ...] REPLICA over attn_tp."""
        return join_rows(x, self.topology.group("attn_tp"), rows=self.plan.rows.rows)

    def real(self) -> Array:
        """[G] bool: rows that are some replica's real ones. REPLICA over the world."""
        rows = self.plan.rows
        return real_rows(self.counts, self.plan.mode, attn_tp=self.topology.attn_tp, rows=rows.rows, total=rows.total)

    def world_tokens(self, tokens: Array) -> Array:
        """Own token ids [M] -> all rows' ids [G] int32: -1 for padding, or 0 where the plan does not mask it."""
        return jnp.where(self.real(), self.to_everyone(tokens), -1 if self.plan.mask_dp_pad else 0)
