"""Rotary positions, interleaved: channels (2i, 2i+1) turn by position * frequency_i. Source: model spec, "RoPE"."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from models.deepseek_v4.config import Config

Rotation = tuple[jax.Array, jax.Array]  # cos, sin: each [..., r/2]


@functools.lru_cache
def frequencies(config: Config, *, compressed: bool) -> np.ndarray:
    """Angle per position for each channel pair, [r/2] float32.

    Layers that compress (`compressed`) use their own base and YaRN; window layers the plain base. YaRN's mscale is
    not applied to cos and sin.
    """
    r = config.qk_rope_head_dim
    pair = np.arange(r // 2, dtype=np.float64)
    base = float(config.compress_rope_theta if compressed else config.rope_theta)
    plain = base ** (-2 * pair / r)
    if not compressed or config.rope_scaling is None:
        return plain.astype(np.float32)
    scaling = config.rope_scaling

    def dim(rotations: float) -> float:
        length = scaling.original_max_position_embeddings
        return r * math.log(length / (2 * math.pi * rotations)) / (2 * math.log(base))

    low = max(math.floor(dim(scaling.beta_fast)), 0)
    high: float = min(math.ceil(dim(scaling.beta_slow)), r - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((pair - low) / (high - low), 0, 1)
    return (plain / scaling.factor * ramp + plain * (1 - ramp)).astype(np.float32)


def rotation(positions: jax.Array, freq: np.ndarray) -> Rotation:
    """cos and sin, each [..., r/2] float32, for positions [...]."""
    angle = positions[..., None].astype(jnp.float32) * freq
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, turn: Rotation, *, inverse: bool = False) -> jax.Array:
    """Rotates the trailing r channels of `x`; the others pass.

    Args:
        x: [T, ..., d], any state.
        turn: cos and sin [T, r/2], one row per row of `x`.
        inverse: turn back.

    Returns:
        [T, ..., d] in x's dtype and state.
    """
    cos, sin = (c.reshape(c.shape[0], *(1,) * (x.ndim - 2), c.shape[1]) for c in turn)
    if inverse:
        sin = -sin
    r = 2 * cos.shape[-1]
    rest, tail = x[..., : x.shape[-1] - r], x[..., x.shape[-1] - r :].astype(jnp.float32)
    even, odd = tail[..., 0::2], tail[..., 1::2]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(tail.shape)
    return jnp.concatenate([rest, turned.astype(x.dtype)], axis=-1)
