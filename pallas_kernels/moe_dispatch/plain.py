"""Dispatch packing in plain JAX: what the kernel is checked against, and what runs where the kernel does not.

Passes over rows as XLA compiles it for an H200, at a fanout of 6 and bfloat16: one gather, which reads a row for
every slot (12 row sizes, where the kernel moves 7; less if the L2 holds the row). With fp8 it reads x for the scales
and again for the values, writes a [T, D] copy of e4m3 and gathers that (17 bytes a channel, where the kernel moves 8).
"""

import jax
import jax.numpy as jnp

from pallas_kernels.moe_dispatch.quantize import GROUP, ScaleKind, group_scales, quantize


def dispatch_rows(x: jax.Array, slots: jax.Array, num_slots: int) -> jax.Array:
    """`moe_dispatch.dispatch_rows` as a gather through the inverse table."""
    source = _source_rows(slots, num_slots)
    return jnp.where(source[:, None] >= 0, x.at[source].get(mode="clip"), jnp.zeros((), x.dtype))


def dispatch_rows_fp8(
    x: jax.Array, slots: jax.Array, num_slots: int, scale_kind: ScaleKind
) -> tuple[jax.Array, jax.Array]:
    """`moe_dispatch.dispatch_rows_fp8` as quantise, then gather."""
    groups = x.astype(jnp.float32).reshape(len(x), -1, GROUP)
    scales, inverse = group_scales(jnp.max(jnp.abs(groups), axis=-1), scale_kind)
    values = quantize(groups, jnp.broadcast_to(inverse[..., None], groups.shape)).reshape(x.shape)
    return dispatch_rows(values, slots, num_slots), dispatch_rows(scales, slots, num_slots)


def _source_rows(slots: jax.Array, num_slots: int) -> jax.Array:
    """[num_slots] the row that names each slot, -1 where none does."""
    rows = jnp.broadcast_to(jnp.arange(len(slots), dtype=jnp.int32)[:, None], slots.shape)
    nobody = jnp.full((num_slots,), -1, jnp.int32)
    return nobody.at[slots].set(rows, mode="drop", wrap_negative_indices=False)
