"""The rows of one decode step as every part sees them: which token, at which position, in which cache slot."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """T rows of one replica; SHARD over attn_dp (other requests), REPLICA over attn_tp.

    A row that is not active is padding: its numbers are garbage that no other row reads.

    Attributes:
        tokens: [T] int32, 0 where not active.
        positions: [T] int32, the position of that token in its request, 0 where not active.
        slots: [T] int32, the cache slot of the request; past the last slot where not active, so that writes drop.
        active: [T] bool.
    """

    tokens: Array
    positions: Array
    slots: Array
    active: Array

    @classmethod
    def unpack(cls, batch: Array, count: Array) -> Rows:
        """From the step's packed input [T, 3] int32: token, position, slot; the first `count` rows are real."""
        token, position, slot = (batch[:, i] for i in range(3))
        real = jnp.arange(batch.shape[0]) < count
        past_every_slot = jnp.iinfo(jnp.int32).max
        return cls(
            tokens=jnp.where(real, token, 0),
            positions=jnp.where(real, position, 0),
            slots=jnp.where(real, slot, past_every_slot),
            active=real,
        )


def read_slots(cache: Array, rows: Rows) -> Array:
    """The slots of the rows, [T, ...] of cache [S, ...]; padding rows read some slot, which may hold NaN."""
    return cache.at[rows.slots].get(mode="clip", wrap_negative_indices=False)


def write_slots(cache: Array, rows: Rows, value: Array) -> Array:
    """Replaces the rows' slots of cache [S, ...] by value [T, ...]; padding rows write nothing."""
    return cache.at[rows.slots].set(value.astype(cache.dtype), mode="drop", wrap_negative_indices=False)


def write_entries(cache: Array, rows: Rows, entry: Array, value: Array, write: Array) -> Array:
    """cache[slot, entry] = value for the rows where `write`: cache [S, L, ...], entry [T], value [T, ...]."""
    slots = jnp.where(write, rows.slots, jnp.iinfo(jnp.int32).max)
    return cache.at[slots, entry].set(value.astype(cache.dtype), mode="drop", wrap_negative_indices=False)
