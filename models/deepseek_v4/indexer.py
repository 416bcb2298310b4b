"""The lightning indexer of CSA: which compressed entries a token attends to. Source: model spec, "Indexer"."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxcoll.linear import ReplicatedLinear
from models.deepseek_v4.cache import CompressorCache
from models.deepseek_v4.compressor import Compressor, visible
from models.deepseek_v4.config import CSA_RATIO, Config
from models.deepseek_v4.rope import Rotation, rotate
from models.deepseek_v4.rows import Rows, read_slots

Array = jax.Array


def highest(scores: Array, seen: Array, count: int) -> tuple[Array, Array]:
    """The `count` highest visible scores of each row; ties go to the lowest index.

    Args:
        scores: [T, L] float32; invisible ones may hold anything.
        seen: [T, L] bool.
        count: how many to keep, at most L.

    Returns:
        indices [T, count] and chosen [T, count]: False where fewer than `count` entries are visible.
    """
    # relu makes exact zeros of both signs, and top_k orders -0.0 below 0.0: one zero, so that ties are ties.
    scores = jnp.where(scores == 0, 0.0, scores)
    value, index = lax.top_k(jnp.where(seen, scores, -jnp.inf), count)
    return index, value > -jnp.inf


class Indexer(nnx.Module):
    """Scores the visible entries with its own queries and its own compressed keys; replicated over attn_tp."""

    def __init__(self, config: Config, dtype: Any):
        self.config = config
        heads, width = config.index_n_heads, config.index_head_dim
        self.wq_b = ReplicatedLinear(config.q_lora_rank, heads * width, dtype=dtype)
        self.weights_proj = ReplicatedLinear(config.hidden_size, heads, dtype=dtype)
        self.compressor = Compressor(config, CSA_RATIO, width, dtype)

    def __call__(
        self, x: Array, qr: Array, rows: Rows, turn: Rotation, cache: CompressorCache
    ) -> tuple[Array, Array, CompressorCache]:
        """Picks entries for each row.

        Args:
            x: [T, D] the sub-layer's input.
            qr: [T, q_lora] the normalised low-rank query.
            rows, turn: the step's rows and their rotation.
            cache: the indexer's own entries.

        Returns:
            indices [T, kI], chosen [T, kI] bool, and the cache after the token.
        """
        c = self.config
        cache = self.compressor(x, rows, cache)
        q = rotate(self.wq_b(qr).reshape(-1, c.index_n_heads, c.index_head_dim), turn)
        keys = read_slots(cache.entries, rows)
        seen = visible(rows, keys.shape[1], CSA_RATIO)
        dots = jnp.einsum("thd,tld->tlh", q, keys, preferred_element_type=jnp.float32)
        heads = self.weights_proj(x).astype(jnp.float32) * c.index_n_heads**-0.5
        scores = jnp.sum(jax.nn.relu(dots) * heads[:, None, :], axis=-1) * c.index_head_dim**-0.5
        return *highest(scores, seen, min(c.index_topk, keys.shape[1])), cache
