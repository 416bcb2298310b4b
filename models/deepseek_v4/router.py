"""Which experts a token goes to, and with which weights: by score or by token id. Source: model spec, "MoE"."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxcoll.linear import ReplicatedLinear, parameter
from models.deepseek_v4.config import Config

Array = jax.Array


class Routing(NamedTuple):
    """ids [G, K] int32 (a hash row may name an expert twice; it then counts twice) and weights [G, K] float32."""

    ids: Array
    weights: Array


def scores_of(logits: Array) -> Array:
    """sqrt(softplus(logits)) in float32, accurate wherever the result is a normal number (down to logits of -174)."""
    logits = logits.astype(jnp.float32)
    # Below -20 softplus is exp to the last bit; its root exp(x/2) lives on where exp(x) is flushed to 0 (below -87).
    return jnp.where(logits < -20, jnp.exp(logits / 2), jnp.sqrt(jax.nn.softplus(logits)))


def weights_of(scores: Array, ids: Array, scaling: float) -> Array:
    """The chosen experts' scores over their sum, times `scaling`; finite even where all scores underflow to 0."""
    chosen = jnp.take_along_axis(scores, ids, axis=1, mode="clip")
    return chosen / (jnp.sum(chosen, axis=1, keepdims=True) + 1e-20) * scaling


class Router(nnx.Module):
    """Routes rows; every rank holds it whole, and the same rows give the same choice on every rank."""

    def __init__(self, config: Config, layer: int, dtype: Any):
        self.config, self.kind = config, config.routing_kind(layer)
        linear = ReplicatedLinear(config.hidden_size, config.n_routed_experts, dtype=dtype)
        self.weight = linear.weight
        if self.kind == "hash":
            self.tid2eid = parameter((config.vocab_size, config.num_experts_per_tok), jnp.int32, P(None, None))
        else:
            self.bias = parameter((config.n_routed_experts,), jnp.float32, P(None))

    def __call__(self, x: Array, tokens: Array) -> Routing:
        """Chooses K experts for each row.

        Args:
            x: [G, D], any one state.
            tokens: [G] int32, the same rows' token ids; hash layers choose by them.

        Returns:
            Routing in x's state.
        """
        c = self.config
        weight = self.weight[...].astype(jnp.float32)
        # Float32 on every device: a GPU's default would round the operands to TF32, and near-ties would flip.
        scores = scores_of(jnp.matmul(x.astype(jnp.float32), weight.T, precision=lax.Precision.HIGHEST))
        if self.kind == "hash":
            ids = self.tid2eid[...][tokens]
        else:
            _, ids = lax.top_k(scores + self.bias[...], c.num_experts_per_tok)
        return Routing(ids, weights_of(scores, ids, c.routed_scaling_factor))
