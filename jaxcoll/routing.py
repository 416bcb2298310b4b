"""Where rows go, as integers: which rank or expert gets a copy of which row, in which order, at which offset.

Nothing is sent here and no row is touched. `plan_routes` reads one rank's own top-k ids; `plan_exchange` reads what
every rank means to send. Source: communication semantics, section 5 (DeepEP's layout step).
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from jaxcoll.hand_over import PlanError

Array = jax.Array
Unit = Literal["rank", "expert"]

MAX_ROWS = 2**31 - 1  # row numbers are int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoutePlan:
    """What one rank sends, from its own T rows' top-k ids. All arrays are int32 unless said.

    A copy is one row bound for one block. Blocks are the R destination ranks in rank order (unit "rank": a row's copy
    for a rank is made once, however many of its experts live there) or the E experts in order (unit "expert"), which
    are in rank order too, as rank r owns experts [r*E/R, (r+1)*E/R). B is R or E. Packed order: all copies for block
    0, then those for block 1, and so on; inside a block by row.

    Attributes:
        expert_ids: [T, K] the row's experts, each once, at its first mention; -1 at later mentions, where the id
            was outside 0..E-1, and in rows from `count` on.
        is_token_in_rank: [T, R] bool; row t has a copy for rank r.
        tokens_per_rank: [R] rows with a copy for rank r, each counted once.
        tokens_per_expert: [E] rows that chose expert e, each counted once.
        send_counts: [B] copies per block: tokens_per_rank or tokens_per_expert.
        send_offsets: [B] exclusive prefix sum of send_counts: where each block begins in packed order.
        slots: [T, K] position in packed order of the copy that choice k caused; -1 where it caused none (nobody's,
            or unit "rank" and an earlier choice of this row lives on the same rank). The inverse of `rows`.
        rows: [S] the row of every position in packed order, -1 past the last copy. S = T*min(K, B) is a proven bound.
        overflow: scalar; copies that blocks of `capacity` rows would have no room for. 0 proves that they hold all.
    """

    expert_ids: Array
    is_token_in_rank: Array
    tokens_per_rank: Array
    tokens_per_expert: Array
    send_counts: Array
    send_offsets: Array
    slots: Array
    rows: Array
    overflow: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExchangePlan:
    """Which slice of whose rows lands where, for one rank of R. All arrays [R*m] int32, the other rank major.

    Every rank sends every rank m slices (m = 1: all its copies; m = local experts: those of one expert each). Slices
    for others lie in packed order (RoutePlan); what arrives is laid out in m slabs of `slab_rows` rows: slab j holds
    slice j of source 0, then of source 1, and so on, closed up.

    Attributes:
        send_counts: rows of slice j for rank dst.
        send_offsets: where that slice begins in this rank's packed order: the exclusive prefix sum of send_counts.
        landing_offsets: where that slice begins in dst's receive buffer.
        recv_counts: rows of slice j from rank src.
        recv_offsets: where that slice begins in this rank's receive buffer.
        home_offsets: where that slice begins in src's packed order: its way back.
    """

    send_counts: Array
    send_offsets: Array
    landing_offsets: Array
    recv_counts: Array
    recv_offsets: Array
    home_offsets: Array


def merge_repeats(topk_ids: Array, topk_weights: Array) -> tuple[Array, Array]:
    """Gives an expert that a row names twice to its first mention, with the summed weight.

    Args:
        topk_ids: [T, K] integers, negative for nobody.
        topk_weights: [T, K]; where nobody is named anything, NaN included.

    Returns:
        ids: [T, K] int32, -1 for nobody and at later mentions.
        weights: [T, K] float32, 0 where the id is -1.

    Raises:
        ValueError: the ids are no [T, K] integers.
    """
    ids = named_experts(topk_ids, MAX_ROWS)
    same, first = _mentions(ids, ids >= 0)
    weights = jnp.sum(jnp.where(same, topk_weights[:, None, :].astype(jnp.float32), 0), axis=2)
    return jnp.where(first, ids, -1), jnp.where(first, weights, 0)


def named_experts(topk_ids: Array, num_experts: int, count: Array | int | None = None) -> Array:
    """[T, K] int32: the ids 0..E-1; -1 for every other id, and in rows from `count` on.

    Args:
        topk_ids: [T, K] integers of any width.
        num_experts: E.
        count: integer scalar; rows from it on are padding. Default: all rows are real.

    Raises:
        ValueError: the ids are no [T, K] integers, or the count is no integer scalar.
    """
    if topk_ids.ndim != 2 or not jnp.issubdtype(topk_ids.dtype, jnp.integer):
        raise ValueError(f"topk_ids are expert numbers, not {topk_ids.dtype}{list(topk_ids.shape)}: integers [T, K]")
    # Compared in their own type where E fits it and as int32 where it may not: an int8 would wrap E = 256 to 0, an
    # int32 would wrap an int64 into range, and no unsigned type holds -1.
    wide = topk_ids if jnp.iinfo(topk_ids.dtype).bits >= 32 else topk_ids.astype(jnp.int32)
    real = (wide >= 0) & (wide < num_experts)
    if count is not None:
        if jnp.ndim(count) or not jnp.issubdtype(jnp.result_type(count), jnp.integer):
            raise ValueError(f"count must be one integer, not {jnp.result_type(count)}{list(jnp.shape(count))}")
        real &= jnp.arange(len(topk_ids))[:, None] < count
    return jnp.where(real, wide.astype(jnp.int32), -1)


def plan_routes(
    topk_ids: Array,
    *,
    num_experts: int,
    num_ranks: int,
    unit: Unit = "rank",
    count: Array | None = None,
    capacity: int | None = None,
) -> RoutePlan:
    """Plans where one rank's rows go.

    Args:
        topk_ids: [T, K] integers: global expert ids, -1 for nobody. An expert named twice by a row is taken once.
        num_experts: E, a multiple of num_ranks.
        num_ranks: R.
        unit: what a copy is for: "rank" or "expert".
        count: integer scalar; rows from it on are padding, whatever ids they hold. Default: all rows are real.
        capacity: rows that `overflow` is counted against; default T, which every block fits.

    Raises:
        ValueError: an unknown unit, ids that are no [T, K] integers, a count that is no integer scalar, experts that
            R does not divide, or row numbers that pass 2^31 - 1.
    """
    if unit not in get_args(Unit):
        raise ValueError(f"unknown unit {unit!r}; allowed are {', '.join(get_args(Unit))}")
    ids = named_experts(topk_ids, num_experts, count)
    rows, k = ids.shape
    experts_per_rank(num_experts, num_ranks)
    blocks = num_ranks if unit == "rank" else num_experts
    check_row_numbers("plan_routes", {"T": rows, "min(K, blocks)": min(k, blocks)})
    _, first = _mentions(ids, ids >= 0)
    expert_ids = jnp.where(first, ids, -1)
    return _planned(expert_ids, num_experts, num_ranks, unit, rows if capacity is None else capacity)


def plan_exchange(counts: Array, rank: Array | int, *, slab_rows: int) -> ExchangePlan:
    """Turns what every rank sends into one rank's offsets, both ways.

    Args:
        counts: [R, R, m] int32: rows of slice j from rank src (first) for rank dst (second); the same on every rank.
        rank: this rank.
        slab_rows: rows of one slab in every receive buffer; it must hold the slab's fullest.
    """
    slices, sends = counts.shape[1] * counts.shape[2], counts.reshape(counts.shape[0], -1)
    homes = exclusive_sum(sends, axis=1).reshape(counts.shape)  # [src, dst, j] in src's packed order
    lands = exclusive_sum(counts, axis=0) + jnp.arange(counts.shape[2], dtype=jnp.int32) * slab_rows
    return ExchangePlan(
        send_counts=counts[rank].reshape(slices),
        send_offsets=homes[rank].reshape(slices),
        landing_offsets=lands[rank].reshape(slices),
        recv_counts=counts[:, rank].reshape(slices),
        recv_offsets=lands[:, rank].reshape(slices),
        home_offsets=homes[:, rank].reshape(slices),
    )


def tokens_per_expert(expert_ids: Array, num_experts: int) -> Array:
    """[E] int32: how often each expert is named in `expert_ids` (any shape; ids outside 0..E-1 count for nobody)."""
    # `bincount` would count -1 as expert 0.
    ids = named_experts(expert_ids.reshape(-1, 1), num_experts)
    return jnp.zeros(num_experts, jnp.int32).at[ids].add(1, mode="drop", wrap_negative_indices=False)


def experts_per_rank(num_experts: int, num_ranks: int) -> int:
    """L = E / R.

    Raises:
        ValueError: R does not divide E, or one of them is below 1.
    """
    if num_experts < 1 or num_ranks < 1 or num_experts % num_ranks:
        raise ValueError(
            f"{num_experts} experts cannot be cut into {num_ranks} equal parts; redundant copies of experts (a "
            "placement) can fill the gap"
        )
    return num_experts // num_ranks


def exclusive_sum(counts: Array, axis: int = 0) -> Array:
    """Exclusive prefix sum in the type of `counts`."""
    return jnp.cumsum(counts, axis, dtype=counts.dtype) - counts


def check_numbered(what: str, *rows: int) -> None:
    """Raises PlanError where the last row of one of these buffers has no number."""
    if max(rows) > MAX_ROWS:
        raise PlanError(f"{what} would number {max(rows)} rows, which passes 2^31 - 1; use fewer rows or capacities")


def check_row_numbers(what: str, sizes: dict[str, int]) -> int:
    """The product of the named sizes, which are rows of a buffer.

    Raises:
        PlanError: it passes 2^31 - 1, the last row number.
    """
    product = 1
    for size in sizes.values():
        product *= size
    if product > MAX_ROWS:
        names, numbers = " * ".join(sizes), " * ".join(map(str, sizes.values()))
        raise PlanError(
            f"{what} would number {names} = {numbers} = {product} rows, which passes 2^31 - 1; use fewer rows per rank"
        )
    return product


def _planned(expert_ids: Array, num_experts: int, num_ranks: int, unit: Unit, capacity: int) -> RoutePlan:
    """The plan for ids [T, K] of which a row names each at most once, -1 for nobody."""
    rows, k = expert_ids.shape
    chosen = expert_ids >= 0
    ranks = jnp.where(chosen, lax.div(expert_ids, jnp.int32(num_experts // num_ranks)), -1)
    _, first_in_rank = _mentions(ranks, chosen)
    in_rank = _any_choice_is(ranks, num_ranks)
    block, causes = (ranks, first_in_rank) if unit == "rank" else (expert_ids, chosen)
    in_block = (in_rank if unit == "rank" else _any_choice_is(expert_ids, num_experts)).astype(jnp.int32)
    counts = jnp.sum(in_block, axis=0)
    offsets = exclusive_sum(counts)
    place = offsets + exclusive_sum(in_block)  # [T, B] where row t's copy for every block would lie
    slots = jnp.where(causes, jnp.take_along_axis(place, jnp.maximum(block, 0), axis=1), -1)
    return RoutePlan(
        expert_ids=expert_ids,
        is_token_in_rank=in_rank,
        tokens_per_rank=jnp.sum(in_rank, axis=0, dtype=jnp.int32),
        tokens_per_expert=tokens_per_expert(expert_ids, num_experts),
        send_counts=counts,
        send_offsets=offsets,
        slots=slots,
        rows=_row_of_every_slot(slots, rows * min(k, in_block.shape[1])),
        overflow=jnp.sum(jnp.maximum(counts - capacity, 0)),
    )


def _mentions(ids: Array, real: Array) -> tuple[Array, Array]:
    """same [T, K, K]: choices that name the same; first [T, K]: no earlier choice of the row names the same."""
    k = ids.shape[1]
    same = (ids[:, :, None] == ids[:, None, :]) & real[:, :, None] & real[:, None, :]
    earlier = jnp.any(same & jnp.tril(jnp.ones((k, k), bool), -1), axis=2)
    return same, real & ~earlier


def _any_choice_is(ids: Array, size: int) -> Array:
    """[T, size] bool: whether one of the row's choices names it."""
    return jnp.any(ids[:, :, None] == jnp.arange(size), axis=1)


def _row_of_every_slot(slots: Array, num_slots: int) -> Array:
    rows = jnp.broadcast_to(jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None], slots.shape)
    nobody = jnp.full(num_slots, -1, jnp.int32)
    return nobody.at[slots].set(rows, mode="drop", wrap_negative_indices=False)
