"""Manifold-constrained hyper-connections: N residual streams around a sub-layer. Source: model spec, "mHC".

Row-local and without communication; always float32. The sub-layer's output must be complete when it is written back:
`post` is affine, so writing a partial sum would add the residual once per rank.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxcoll.linear import parameter
from jaxcoll.states import State, require
from models.deepseek_v4.config import Config
from models.deepseek_v4.norm import rms

Array = jax.Array


class Mix(NamedTuple):
    """How one row's streams meet the sub-layer: post [T, N], comb [T, N, N] (source stream, target stream)."""

    post: Array
    comb: Array


def sinkhorn(logits: Array, iterations: int, eps: float) -> Array:
    """Alternately normalised softmax of [T, N, N]; ends on the columns (sums over the first stream index).

    A loop and not an unrolled chain: unrolled, the 2*iterations small reductions of every sub-layer make most of the
    program's compile time and run no faster.
    """

    def over_columns(comb: Array) -> Array:
        return comb / (jnp.sum(comb, axis=-2, keepdims=True) + eps)

    def over_rows(comb: Array) -> Array:
        return comb / (jnp.sum(comb, axis=-1, keepdims=True) + eps)

    comb = over_columns(jax.nn.softmax(logits, axis=-1) + eps)
    return lax.fori_loop(0, iterations - 1, lambda _, c: over_columns(over_rows(c)), comb)


def _mixes(streams: Array, fn: Array, eps: float) -> Array:
    """fn @ rms(flatten(streams)): [T, N, D] -> [T, outputs]."""
    flat = streams.reshape(streams.shape[0], -1).astype(jnp.float32)
    # Float32 on every device: a GPU's default would round the operands to TF32.
    return jnp.matmul(rms(flat, eps), fn.T, precision=lax.Precision.HIGHEST)


class HyperConnection(nnx.Module):
    """Reads a sub-layer's input from the streams and writes its output back to them."""

    def __init__(self, config: Config, group: tuple[str, ...]):
        n, d = config.hc_mult, config.hidden_size
        self.config, self.group = config, group
        self.fn = parameter(((2 + n) * n, n * d), jnp.float32, P(None, None))
        self.base = parameter(((2 + n) * n,), jnp.float32, P(None))
        self.scale = parameter((3,), jnp.float32, P(None))

    def read(self, streams: Array) -> tuple[Array, Mix]:
        """Streams [T, N, D] -> the sub-layer's input [T, D] in the same state, and the Mix for `write`."""
        n, c = self.config.hc_mult, self.config
        mix = _mixes(streams, self.fn[...], c.rms_norm_eps)
        scale, base = self.scale[...], self.base[...]
        pre = jax.nn.sigmoid(mix[:, :n] * scale[0] + base[:n]) + c.hc_eps
        post = 2 * jax.nn.sigmoid(mix[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        logits = (mix[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)
        x = jnp.sum(pre[:, :, None] * streams.astype(jnp.float32), axis=1).astype(streams.dtype)
        return x, Mix(post, sinkhorn(logits, c.hc_sinkhorn_iters, c.hc_eps))

    def write(self, streams: Array, y: Array, mix: Mix) -> Array:
        """X'[k] = post[k]*y + sum_j comb[j, k] X[j]: [T, N, D], [T, D] -> [T, N, D].

        Raises:
            StateError: `y` is not complete (REPLICA) over the group.
        """
        require(y, self.group, State.REPLICA, "HyperConnection.write")
        wide, y = streams.astype(jnp.float32), y.astype(jnp.float32)
        kept = sum(mix.comb[:, j, :, None] * wide[:, j, None, :] for j in range(self.config.hc_mult))
        return (mix.post[:, :, None] * y[:, None, :] + kept).astype(streams.dtype)


class HyperHead(nnx.Module):
    """Collapses the streams after the last layer. Source: model spec, "Head"."""

    def __init__(self, config: Config):
        n, d = config.hc_mult, config.hidden_size
        self.config = config
        self.fn = parameter((n, n * d), jnp.float32, P(None, None))
        self.base = parameter((n,), jnp.float32, P(None))
        self.scale = parameter((1,), jnp.float32, P(None))

    def __call__(self, streams: Array) -> Array:
        """[T, N, D] -> [T, D], same state."""
        c = self.config
        mix = _mixes(streams, self.fn[...], c.rms_norm_eps)
        pre = jax.nn.sigmoid(mix * self.scale[...] + self.base[...]) + c.hc_eps
        return jnp.sum(pre[:, :, None] * streams.astype(jnp.float32), axis=1).astype(streams.dtype)
