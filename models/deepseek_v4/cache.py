"""The static-shape caches of a decode step: one tree of arrays [replicas * slots, ...], cut over attn_dp.

A slot belongs to one request at a time. Nothing has to be cleared before it is reused: what a row may read follows
from its position, and everything else may hold anything, NaN included.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from models.deepseek_v4.config import CSA_RATIO, Config

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CompressorCache:
    """Compressed entries of one layer and the open window they grow from.

    Attributes:
        entries: [S, L, width]; entry i covers positions i*m .. i*m+m-1 (CSA also the window before).
        open: [S, P, 3, width] float32, a running softmax-weighted sum per part: peak score, mass, total. P = 1 for
            HCA; CSA has 3 parts: the a halves of the window before, the a halves and the b halves of the open one.
    """

    entries: Array
    open: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """Caches of one layer.

    Attributes:
        window: [S, w, d], the key/value of position p at p % w.
        compressor: the layer's entries; None for a window layer.
        indexer: the indexer's own entries; None except for CSA.
    """

    window: Array
    compressor: CompressorCache | None
    indexer: CompressorCache | None


def _abstract(shape: tuple[int, ...], dtype: Any) -> Any:
    """Stands where an array will be, so that shapes and arrays share one tree."""
    return jax.ShapeDtypeStruct(shape, dtype)


def _compressor(config: Config, ratio: int, width: int, slots: int, max_seq_len: int, dtype: Any) -> CompressorCache:
    parts = 3 if ratio == CSA_RATIO else 1
    # XLA gathers nothing from an empty array, so a cache shorter than one window keeps one entry that nobody sees.
    entries = max(max_seq_len // ratio, 1)
    return CompressorCache(
        entries=_abstract((slots, entries, width), dtype),
        open=_abstract((slots, parts, 3, width), jnp.float32),
    )


def cache_shapes(config: Config, slots: int, max_seq_len: int) -> list[LayerCache]:
    """Abstract caches of every layer for `slots` slots in all; dtype is the config's."""
    dtype = jnp.dtype(config.torch_dtype)
    shapes = []
    for layer, ratio in enumerate(config.compress_ratios):
        kind = config.attention_kind(layer)
        window = _abstract((slots, config.sliding_window, config.head_dim), dtype)
        compressor = indexer = None
        if kind != "window":
            compressor = _compressor(config, ratio, config.head_dim, slots, max_seq_len, dtype)
        if kind == "csa":
            indexer = _compressor(config, ratio, config.index_head_dim, slots, max_seq_len, dtype)
        shapes.append(LayerCache(window, compressor, indexer))
    return shapes
