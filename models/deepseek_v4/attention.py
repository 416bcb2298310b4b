"""Attention of one layer, decode: window, CSA or HCA, heads cut over attn_tp. Source: model spec, "Attention".

Keys are values: one head `kv` serves all query heads, so every rank of attn_tp computes and caches it whole
(communication semantics, section 2), while queries, sinks and output groups are cut contiguously.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxcoll.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear, parameter
from jaxcoll.topology import Topology
from models.deepseek_v4.cache import LayerCache
from models.deepseek_v4.compressor import Compressor, visible
from models.deepseek_v4.config import Config
from models.deepseek_v4.indexer import Indexer
from models.deepseek_v4.norm import RMSNorm, rms
from models.deepseek_v4.rope import frequencies, rotate, rotation
from models.deepseek_v4.rows import Rows, read_slots, write_entries

Array = jax.Array


def attend(q: Array, keys: Array, valid: Array, sink: Array) -> Array:
    """Softmax attention with one sink logit per head whose share is dropped.

    Args:
        q: [T, h, d].
        keys: [T, L, d], used as keys and as values; rows that are not valid may hold NaN.
        valid: [T, L] bool.
        sink: [h] float32.

    Returns:
        [T, h, d] in q's dtype, state of q.
    """
    keys = jnp.where(valid[..., None], keys, 0)
    logits = jnp.einsum("thd,tld->thl", q, keys, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    logits = jnp.where(valid[:, None, :], logits, -jnp.inf)
    peak = jnp.maximum(jnp.max(logits, axis=-1), sink)
    weight = jnp.exp(logits - peak[..., None])
    weight = weight / (jnp.sum(weight, axis=-1) + jnp.exp(sink - peak))[..., None]
    return jnp.einsum("thl,tld->thd", weight.astype(keys.dtype), keys).astype(q.dtype)


class Attention(nnx.Module):
    """One layer's attention; the output is PARTIAL over attn_tp and its type says so."""

    def __init__(self, config: Config, layer: int, topology: Topology, dtype: Any):
        c, group = config, topology.group("attn_tp")
        self.config, self.kind, self.ratio = (
            config,
            config.attention_kind(layer),
            config.compress_ratios[layer],
        )
        self.wq_a = ReplicatedLinear(c.hidden_size, c.q_lora_rank, dtype=dtype)
        self.q_norm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        self.wq_b = ColumnParallelLinear(
            c.q_lora_rank, c.num_attention_heads * c.head_dim, topology=topology, group=group, dtype=dtype
        )
        self.wkv = ReplicatedLinear(c.hidden_size, c.head_dim, dtype=dtype)
        self.kv_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.attn_sink = parameter((c.num_attention_heads,), jnp.float32, P(group))
        heads_width = c.num_attention_heads // c.o_groups * c.head_dim
        self.wo_a = parameter((c.o_groups, c.o_lora_rank, heads_width), dtype, P(group, None, None))
        self.wo_b = RowParallelLinear(
            c.o_groups * c.o_lora_rank,
            c.hidden_size,
            topology=topology,
            group=group,
            reduce_results=False,
            dtype=dtype,
        )
        if self.kind != "window":
            self.compressor = Compressor(c, self.ratio, c.head_dim, dtype)
        if self.kind == "csa":
            self.indexer = Indexer(c, dtype)

    def __call__(self, x: Array, rows: Rows, cache: LayerCache) -> tuple[Array, LayerCache]:
        """One token per row attends to its request's past.

        Args:
            x: [T, D], SHARD over attn_dp, REPLICA over attn_tp.
            rows: the step's rows.
            cache: this layer's caches.

        Returns:
            [T, D] PARTIAL over attn_tp, and the caches with this token in them. Padding rows are garbage.
        """
        c = self.config
        turn = rotation(rows.positions, frequencies(c, compressed=self.kind != "window"))
        qr = self.q_norm(self.wq_a(x))
        q = self.wq_b(qr).reshape(x.shape[0], -1, c.head_dim)
        q = rotate(rms(q, c.rms_norm_eps), turn)
        kv = rotate(self.kv_norm(self.wkv(x)), turn)
        slot_in_ring = rows.positions % c.sliding_window
        cache = dataclasses.replace(cache, window=write_entries(cache.window, rows, slot_in_ring, kv, rows.active))
        keys, valid = self._window(rows, cache)
        if self.kind != "window":
            entries, chosen, cache = self._entries(x, qr, rows, turn, cache)
            keys, valid = jnp.concatenate([keys, entries], axis=1), jnp.concatenate([valid, chosen], axis=1)
        o = rotate(attend(q, keys, valid, self.attn_sink[...]), turn, inverse=True)
        wo_a = self.wo_a[...]
        z = jnp.einsum("tgi,gri->tgr", o.reshape(x.shape[0], wo_a.shape[0], -1), wo_a)
        return self.wo_b(z.reshape(x.shape[0], -1)), cache

    def _window(self, rows: Rows, cache: LayerCache) -> tuple[Array, Array]:
        """The ring [T, w, d] and which of it this request has written: ring place j holds t - ((t - j) mod w)."""
        age = (rows.positions[:, None] - jnp.arange(self.config.sliding_window)) % self.config.sliding_window
        return read_slots(cache.window, rows), age <= rows.positions[:, None]

    def _entries(
        self, x: Array, qr: Array, rows: Rows, turn: Any, cache: LayerCache
    ) -> tuple[Array, Array, LayerCache]:
        """Compressed entries [T, L', d] to attend to and which of them count: all visible (HCA) or the chosen (CSA)."""
        assert cache.compressor is not None
        compressor = self.compressor(x, rows, cache.compressor)
        cache = dataclasses.replace(cache, compressor=compressor)
        if self.kind == "hca":
            entries = read_slots(compressor.entries, rows)
            return entries, visible(rows, entries.shape[1], self.ratio), cache
        assert cache.indexer is not None
        index, chosen, indexer = self.indexer(x, qr, rows, turn, cache.indexer)
        at = compressor.entries.at[rows.slots[:, None], index]
        entries = at.get(mode="clip", wrap_negative_indices=False)
        return entries, chosen, dataclasses.replace(cache, indexer=indexer)
