"""Rows through their experts block by block: the number of blocks is data, so work follows the real counts.

A grouped matmul would be one call, but XLA:GPU makes `lax.ragged_dot` multiply every expert with every row. There is no
collective inside the loop, so ranks may run different numbers of blocks. What a block computes is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

MOST_ROWS = 512
PADDING = 1.5  # a block may have this many times the rows that an expert has when the load is even


def block_rows(rows_per_expert: float) -> int:
    """Rows of one block, chosen when a step is compiled.

    An expert's weights are read once per block, so a block has room for a load that is uneven by half; more would let
    the padding of an even load cost more than `PADDING`. Below three rows per expert a block is one row: a larger one
    costs three reads, as XLA:GPU copies its weights before it multiplies.

    Args:
        rows_per_expert: mean over the experts.
    """
    rows = int(PADDING * rows_per_expert)
    if rows_per_expert < 3:
        return 1
    return rows if rows < 8 else min(rows // 8 * 8, MOST_ROWS)


def blocks_at_even_load(rows: float, experts: int, size: int) -> int:
    """Blocks that `rows` rows make when they are spread over the experts as evenly as whole rows allow."""
    each, more = divmod(math.ceil(rows), experts)
    return more * -(-(each + 1) // size) + (experts - more) * -(-each // size)


def over_blocks[Carry](counts: Array, size: int, block: Callable[[Array, Array, Carry], Carry], carry: Carry) -> Carry:
    """Runs block(expert, offset, carry) for every block of `size` rows that some expert has.

    Args:
        counts: [L] int32, rows of each expert; any state.
        size: from `block_rows`. The last block of an expert may hold rows past its count.
        block: expert and offset (the block's first row among the expert's) are int32 scalars in the state of `counts`.
        carry: arrays in the state that `block` returns, see `as_varying_as`.
    """
    per_expert = -(-counts // size)
    ends = jnp.cumsum(per_expert, dtype=jnp.int32)

    def one(i: Array, carry: Carry) -> Carry:
        expert = jnp.sum(i >= ends, dtype=jnp.int32)
        return block(expert, (i - (ends[expert] - per_expert[expert])) * size, carry)

    return lax.fori_loop(as_varying_as(jnp.int32(0), counts), ends[-1], one, carry)


def as_varying_as(x: Array, *others: Array) -> Array:
    """x, typed SHARD also over every axis over which one of `others` is."""
    axes = frozenset().union(*(jax.typeof(other).mat.varying for other in others)) - jax.typeof(x).mat.varying
    return lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def times(rows: Array, w: Array) -> Array:
    """[B, in] x [out, in] -> [B, out] in the rows' type.

    One row is a sum of products, which XLA:GPU reads from where the weights lie; a matmul makes it copy them first.
    """
    if rows.shape[0] > 1:
        return lax.dot_general(rows, w, (((1,), (1,)), ((), ())))
    products = w.astype(jnp.float32) * rows.astype(jnp.float32)
    return jnp.sum(products, axis=1)[None].astype(rows.dtype)


def expert_of(weights: tuple[Any, ...], expert: Array) -> list[Array]:
    """One expert's matrices of stacked ones."""
    return [lax.dynamic_index_in_dim(w, expert, keepdims=False) for w in weights]
