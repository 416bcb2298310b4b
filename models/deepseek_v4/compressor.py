"""Compressors: m tokens become one entry, weighted per channel by a softmax. Source: model spec, "Compressors".

The softmax over the window is kept as a running sum (peak, mass, total), so that a token costs the same whether or
not it closes a window and the state does not grow with m.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxcoll.linear import ReplicatedLinear, parameter
from models.deepseek_v4.cache import CompressorCache
from models.deepseek_v4.config import CSA_RATIO, Config
from models.deepseek_v4.norm import RMSNorm
from models.deepseek_v4.rope import frequencies, rotate, rotation
from models.deepseek_v4.rows import Rows, read_slots, write_entries, write_slots

Array = jax.Array
PEAK, MASS, TOTAL = 0, 1, 2


def absorb(state: Array, score: Array, value: Array) -> Array:
    """Adds one weighted value per channel to a running softmax sum: state [..., 3, w], score and value [..., w]."""
    peak = jnp.maximum(state[..., PEAK, :], score)
    kept, new = jnp.exp(state[..., PEAK, :] - peak), jnp.exp(score - peak)
    mass = state[..., MASS, :] * kept + new
    return jnp.stack([peak, mass, state[..., TOTAL, :] * kept + new * value], axis=-2)


def join(a: Array, b: Array) -> Array:
    """The running sum over what both states saw: [..., 3, w] each."""
    peak = jnp.maximum(a[..., PEAK, :], b[..., PEAK, :])
    of_a, of_b = jnp.exp(a[..., PEAK, :] - peak), jnp.exp(b[..., PEAK, :] - peak)
    mass = a[..., MASS, :] * of_a + b[..., MASS, :] * of_b
    return jnp.stack([peak, mass, a[..., TOTAL, :] * of_a + b[..., TOTAL, :] * of_b], axis=-2)


def nothing_seen(like: Array) -> Array:
    """The state before the first token, in the shape of `like` [..., 3, w]."""
    row = np.array([-np.inf, 0.0, 0.0], np.float32)[:, None]
    return jnp.broadcast_to(jnp.asarray(row), like.shape)


class Compressor(nnx.Module):
    """One compressor of width d (a layer's) or dI (an indexer's); every rank of attn_tp computes and keeps it all."""

    def __init__(self, config: Config, ratio: int, width: int, dtype: Any):
        self.config, self.ratio, self.width = config, ratio, width
        self.overlapping = ratio == CSA_RATIO
        halves = 2 if self.overlapping else 1
        self.wkv = ReplicatedLinear(config.hidden_size, halves * width, dtype=dtype)
        self.wgate = ReplicatedLinear(config.hidden_size, halves * width, dtype=dtype)
        self.ape = parameter((ratio, halves * width), jnp.float32, P(None, None))
        self.norm = RMSNorm(width, config.rms_norm_eps)

    def __call__(self, x: Array, rows: Rows, cache: CompressorCache) -> CompressorCache:
        """Lets each row's token join its open window; a row whose token closes one appends an entry.

        Args:
            x: [T, D] the sub-layer's input.
            rows: the step's rows.
            cache: this compressor's cache.

        Returns:
            The cache after the token; padding rows change nothing.
        """
        place = rows.positions % self.ratio
        halves = (x.shape[0], -1, self.width)
        value = self.wkv(x).astype(jnp.float32).reshape(halves)
        score = self.wgate(x).astype(jnp.float32).reshape(halves) + self.ape[...][place].reshape(halves)
        before = read_slots(cache.open, rows)
        opens = (place == 0)[:, None, None, None]
        closes = place == self.ratio - 1
        if self.overlapping:
            now = absorb(jnp.where(opens, nothing_seen(before[:, 1:]), before[:, 1:]), score, value)
            has_previous = (rows.positions >= self.ratio)[:, None, None]
            previous = jnp.where(has_previous, before[:, 0], nothing_seen(before[:, 0]))
            seen = join(previous, now[:, 1])
            kept = jnp.where(closes[:, None, None], now[:, 0], before[:, 0])
            after = jnp.concatenate([kept[:, None], now], axis=1)
        else:
            after = absorb(jnp.where(opens, nothing_seen(before), before), score, value)
            seen = after[:, 0]
        entry = self._entry(seen, rows.positions - place, cache.entries.dtype)
        index = rows.positions // self.ratio
        return dataclasses.replace(
            cache,
            open=write_slots(cache.open, rows, after),
            entries=write_entries(cache.entries, rows, index, entry, closes & rows.active),
        )

    def _entry(self, seen: Array, first_position: Array, dtype: Any) -> Array:
        """The entry of a window that closes now: normalised and rotated at the window's first position; [T, w]."""
        entry = self.norm(seen[:, TOTAL] / seen[:, MASS])
        return rotate(entry, rotation(first_position, frequencies(self.config, compressed=True))).astype(dtype)


def visible(rows: Rows, entries: int, ratio: int) -> Array:
    """Which entries a row may read: i < (t + 1) // m; [T, L] bool."""
    return jnp.arange(entries) < ((rows.positions + 1) // ratio)[:, None]
