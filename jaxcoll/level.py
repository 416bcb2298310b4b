"""One level of dispatch and combine: rows from every rank of one group to the owners of their experts, and back.

dispatch.py strings levels together (hosts, then ranks of a host) and adds what happens before and after.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxcoll.exchange import Capacities, Exchange, meet, send, send_home, take_rows
from jaxcoll.ragged import Transport
from jaxcoll.routing import RoutePlan, check_row_numbers, plan_routes, tokens_per_expert
from jaxcoll.states import Group
from jaxcoll.wire import Encoded
from pallas_kernels.choice import Kernels
from pallas_kernels.moe_combine import combine_rows

Array = jax.Array
Mode = Literal["normal", "low_latency"]
_STATIC = {"static": True}


@dataclasses.dataclass(frozen=True)
class Level:
    """A group of R ranks of which rank r owns experts [r*L, (r+1)*L) of this level.

    Attributes:
        group: its mesh axes in rank order.
        ranks: R.
        experts: L. Where a member is a whole host, the host's experts.
        mode: "normal": one copy per (row, rank). "low_latency": one copy per (row, expert), sorted by expert.
        transport: see exchange.py.
        small_pair: block that the dense transport tries first; None chooses it from the shapes.
        share: of all choices that rows make, those that are expected to name an expert of this level.
    """

    group: Group
    ranks: int
    experts: int
    mode: Mode
    transport: Transport
    small_pair: int | None = None
    share: float = 1.0

    def capacities(self, rows: int, k: int) -> Capacities:
        """Proven bounds for `rows` rows per rank that each name at most k experts, each once.

        Raises:
            ValueError: a buffer's row numbers would pass 2^31 - 1.
        """
        choices = min(k, self.ranks if self.mode == "normal" else self.ranks * self.experts)
        per_pair = 1 if self.mode == "normal" else min(k, self.experts)
        sizes = {"T": rows, "ranks": self.ranks}
        check_row_numbers("dispatch (its send buffer)", {"T": rows, "min(K, blocks)": choices})
        slabs = {} if self.mode == "normal" else {"local experts": self.experts}
        check_row_numbers("dispatch (its receive buffer)", sizes | slabs)
        check_row_numbers("dispatch (its blocks)", sizes | {"min(K, local experts)": per_pair})
        pair = rows * per_pair
        small = self._balanced_pair(rows, k, pair) if self.small_pair is None else min(self.small_pair, pair)
        return Capacities(send=rows * choices, slab=rows * self.ranks, pair=pair, small_pair=small)

    def _balanced_pair(self, rows: int, k: int, pair: int) -> int:
        """Rows for one rank if every choice were random: the mean and four deviations, in eights.

        Near the proven bound a second program buys nothing, so it is the bound.
        """
        k_here = k * self.share
        mean = rows * (1 - (1 - 1 / self.ranks) ** k_here) if self.mode == "normal" else rows * k_here / self.ranks
        balanced = 8 * math.ceil((mean + 4 * math.sqrt(mean)) / 8)
        return balanced if balanced <= 0.75 * pair else pair


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LevelHandle:
    """What one level of `combine` needs of the dispatch that it answers. States over the level's group.

    Attributes:
        slots: [T, K] int32, SHARD: position in packed order of the copy that choice k of row t caused, -1 where it
            caused none (routing.RoutePlan). Results come home to the same positions.
        weights: [T, K] float32, SHARD: low latency only, what the row's own rank multiplies results by; 0 where the
            choice is nobody's. None in normal mode, where the weights travel with the rows.
        exchange: counts (REPLICA) and both sides' offsets (SHARD): exchange.Exchange, routing.ExchangePlan.
    """

    slots: Array
    weights: Array | None
    exchange: Exchange


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Arrived:
    """Rows as they came off the wire; rows past the counts are zeros.

    Attributes:
        values: [N, D] the wire's type.
        side: [N, W] int32 or None: per row, if they travelled, K expert ids, the bits of K weights, the bits of scales.
        weights: [N, K] float32 or None: the weights in `side`, differentiable by those that were sent.
        choices: K if ids and weights are in `side`, else 0.
    """

    values: Array
    side: Array | None
    weights: Array | None
    choices: int = dataclasses.field(metadata=_STATIC)

    def encoded(self) -> Encoded:
        """The rows with their scales."""
        if self.side is None or self.side.shape[1] == 2 * self.choices:
            return Encoded(self.values, None)
        return Encoded(self.values, _floats(self.side[:, 2 * self.choices :]))


def depart(
    level: Level, ids: Array, weights: Array, pack: Callable[[RoutePlan], Encoded]
) -> tuple[Arrived, LevelHandle]:
    """Tells the others the counts, then sends the rows.

    Args:
        ids: [T, K] int32, SHARD over the group: experts of this level, each at most once per row, -1 for nobody.
        weights: [T, K] float32, 0 where the id is -1.
        pack: puts the rows into packed order, as they travel.
    """
    normal = level.mode == "normal"
    plan = plan_routes(
        ids, num_experts=level.ranks * level.experts, num_ranks=level.ranks, unit="rank" if normal else "expert"
    )
    exchange = meet(plan.send_counts, level.group, transport=level.transport, capacities=level.capacities(*ids.shape))
    rows = pack(plan)
    beside = []
    if normal:
        beside.append(take_rows(jnp.concatenate([plan.expert_ids, _bits(weights)], axis=1), plan.rows))
    if rows.scales is not None:
        beside.append(_bits(rows.scales))
    sides = [jnp.concatenate(beside, axis=1)] if beside else []
    values, *side = send(exchange, rows.values, *sides)
    if not normal:
        return Arrived(values, side[0] if side else None, None, 0), LevelHandle(plan.slots, weights, exchange)
    k = ids.shape[1]
    landed = _landed_weights(take_rows(weights, plan.rows), side[0][:, k : 2 * k], exchange)
    return Arrived(values, side[0], landed, k), LevelHandle(plan.slots, None, exchange)


def routing_of(level: Level, arrived: Arrived, handle: LevelHandle) -> tuple[Array, Array]:
    """Which of this rank's own experts the rows of a normal level are for.

    Returns:
        ids: [N, K] int32 in 0..L-1, -1 where the choice is not local and in rows past the counts.
        weights: [N, K] float32, 0 where the id is -1.
    """
    assert arrived.side is not None and arrived.weights is not None
    rank = lax.axis_index(level.group) if level.group else 0
    local = arrived.side[:, : arrived.choices] - rank * level.experts
    real = jnp.arange(arrived.values.shape[0]) < jnp.sum(handle.exchange.plan.recv_counts)
    mine = real[:, None] & (local >= 0) & (local < level.experts)
    return jnp.where(mine, local, -1), jnp.where(mine, arrived.weights, 0)


def go_home(y: Array, handle: LevelHandle) -> Array:
    """[m*slab, D] results where their rows arrived -> [S, D] in their sources' packed order."""
    (home,) = send_home(handle.exchange, y)
    return home


def add_up(home: Array, handle: LevelHandle, dtype: Any, kernels: Kernels | None, *, interpret: bool = False) -> Array:
    """[S, D] -> [T, D] in `dtype`: the float32 sum of each row's results, weighted here in low latency."""
    # As exact as they came home: a float32 wire would be for nothing if bfloat16 rows rounded each addend first.
    rows = home.astype(jnp.promote_types(home.dtype, dtype))
    return combine_rows(rows, handle.slots, handle.weights, kernels=kernels, interpret=interpret).astype(dtype)


def joined(handles: Sequence[LevelHandle], rows: Sequence[int]) -> LevelHandle:
    """One handle for packed orders laid end to end, each `rows` long, whose choices are disjoint."""
    if len(handles) == 1:
        return handles[0]
    slots, weights, start = handles[0].slots, handles[0].weights, 0
    for handle, before in zip(handles[1:], rows[:-1], strict=True):
        start += before
        slots = jnp.where(handle.slots >= 0, handle.slots + start, slots)
        weights = None if weights is None or handle.weights is None else weights + handle.weights
    return dataclasses.replace(handles[0], slots=slots, weights=weights)


def local_expert_counts(level: Level, ids: Array | None, handle: LevelHandle) -> Array:
    """[L] int32: rows for each of this rank's experts; `ids` as from `routing_of` in normal mode."""
    if ids is not None:
        return tokens_per_expert(ids, level.experts)
    return jnp.sum(handle.exchange.plan.recv_counts.reshape(level.ranks, -1), axis=0)


@jax.custom_vjp
def _landed_weights(sent: Array, bits: Array, exchange: Exchange) -> Array:
    """[S, K] float32 in packed order, and their bits as they landed -> [N, K] float32 as landed.

    Bits have no derivative, and without this rule the weights' would silently be zero: it goes home as results do.
    """
    del sent, exchange
    return _floats(bits)


def _landed_weights_forward(sent: Array, bits: Array, exchange: Exchange) -> tuple[Array, Exchange]:
    return _landed_weights(sent, bits, exchange), exchange


def _landed_weights_backward(exchange: Exchange, gradient: Array) -> tuple[Array, None, None]:
    return send_home(exchange, gradient)[0], None, None


_landed_weights.defvjp(_landed_weights_forward, _landed_weights_backward)


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _floats(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.float32)
