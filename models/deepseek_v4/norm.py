"""Root-mean-square normalisation, in float32, cast once at the end."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxcoll.linear import parameter


def rms(x: jax.Array, eps: float, weight: jax.Array | None = None) -> jax.Array:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dimension, in x's dtype and state."""
    wide = x.astype(jnp.float32)
    y = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (y if weight is None else y * weight).astype(x.dtype)


class RMSNorm(nnx.Module):
    """`rms` with a weight that every rank holds."""

    def __init__(self, features: int, eps: float):
        self.eps = eps
        self.weight = parameter((features,), jnp.float32, P(None))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., features] -> the same shape, dtype and state."""
        return rms(x, self.eps, self.weight[...])
