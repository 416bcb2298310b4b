"""A replica's rows, cut over its ranks so that each speaks for its own, and joined again.

Rows are padded to equal chunks: real row i of M lies on rank i // C as its row i % C, with C = ceil(M / attn_tp).
Source: communication semantics, section 5 ("row split").
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxcoll.collectives import all_gather, take_shard
from jaxcoll.states import Group, as_group, group_size

Array = jax.Array


def chunk_rows(rows: int, ranks: int) -> int:
    """C: rows of one rank's chunk of `rows` rows."""
    return -(-rows // ranks)


def split_rows(x: Array, group: Group, *, fill: float | int = 0) -> Array:
    """Keeps this rank's chunk of rows that all ranks of the group hold; token ids are cut the same way.

    Args:
        x: [M, ...] REPLICA over `group` of n ranks.
        fill: what rows past M hold, of which the last ranks have some where n does not divide M.

    Returns:
        [C, ...] SHARD over `group`. Nothing is sent.

    Raises:
        StateError: `x` is not REPLICA over `group`.
    """
    axes = as_group(group)
    ranks = group_size(axes)
    missing = chunk_rows(x.shape[0], ranks) * ranks - x.shape[0]
    padded = jnp.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1)), constant_values=fill) if missing else x
    return take_shard(padded, axes, 0)


def own_count(count: Array | int, rows: int, group: Group) -> Array:
    """How many rows of this rank's chunk are real.

    Args:
        count: scalar; the first `count` of the replica's M rows are real.
        rows: M.

    Returns:
        int32 scalar in 0..C, SHARD over `group`.
    """
    axes = as_group(group)
    count = jnp.asarray(count, jnp.int32)
    if not axes:
        return count
    size = chunk_rows(rows, lax.axis_size(axes))
    return jnp.clip(count - lax.axis_index(axes) * size, 0, size)


def join_rows(x: Array, group: Group, *, rows: int) -> Array:
    """Puts the chunks of `split_rows` together again on every rank.

    Args:
        x: [C, ...] SHARD over `group` of n ranks.
        rows: M.

    Returns:
        [M, ...] REPLICA over `group`. Wire bytes per rank with b bytes per row: C*b*(n-1).

    Raises:
        StateError: `x` is not SHARD over `group`.
        ValueError: C is not the chunk of M rows.
    """
    axes = as_group(group)
    ranks = group_size(axes)
    if x.shape[0] != chunk_rows(rows, ranks):
        raise ValueError(
            f"join_rows makes {rows} rows of {ranks} chunks of {chunk_rows(rows, ranks)}, not of {x.shape[0]}"
        )
    return all_gather(x, axes, 0)[:rows]
