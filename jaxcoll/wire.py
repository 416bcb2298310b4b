"""How rows look between ranks: as they are, narrower, or as e4m3 with one scale per 128 channels.

It encodes, decodes and counts bytes; it sends nothing. The arithmetic of e4m3 is that of the dispatch kernel.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.choice import Kernels
from pallas_kernels.moe_dispatch import dispatch_rows, dispatch_rows_fp8
from pallas_kernels.moe_dispatch.quantize import GROUP, ScaleKind, group_scales

Array = jax.Array
WireChoice = Literal["auto", "f32", "bf16", "fp8"]
Wire = Literal["f32", "bf16", "fp8"]

_PLAIN: dict[str, Wire] = {"float32": "f32", "bfloat16": "bf16"}
_DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "fp8": jnp.float8_e4m3fn}


class Encoded(NamedTuple):
    """Rows on the wire.

    Attributes:
        values: [N, D] float32, bfloat16, or for fp8 uint8: the bits of e4m3 values.
        scales: [N, D/128] float32, what each group of 128 channels is multiplied by; None unless fp8.
    """

    values: Array
    scales: Array | None


def resolve(wire: WireChoice, dtype: Any, width: int) -> Wire:
    """The wire format of rows of `width` channels; "auto" is the activations' own type.

    Raises:
        ValueError: an unknown format, fp8 for a width that 128 does not divide, or "auto" for a type that is no format.
    """
    if wire not in get_args(WireChoice):
        raise ValueError(f"unknown wire format {wire!r}; allowed are {', '.join(get_args(WireChoice))}")
    if wire == "auto":
        name = jnp.dtype(dtype).name
        if name not in _PLAIN:
            raise ValueError(f"rows of {name} have no wire format of their own; name one of {', '.join(_DTYPES)}")
        return _PLAIN[name]
    if obstacle := wire_impossible(wire, width):
        raise ValueError(f"wire format {wire} is impossible: {obstacle}")
    return wire


def wire_impossible(wire: WireChoice, width: int) -> str | None:
    """Why rows of `width` channels cannot travel in this format; None if they can."""
    if wire == "fp8" and width % GROUP:
        return f"fp8 has one scale per {GROUP} channels, which do not divide D={width}"
    return None


def home_dtype(wire: Wire) -> Any:
    """The type in which results travel home: the wire's own, bfloat16 for fp8."""
    return jnp.bfloat16 if wire == "fp8" else _DTYPES[wire]


def pack(
    x: Array,
    slots: Array,
    num_slots: int,
    wire: Wire,
    scale_kind: ScaleKind,
    kernels: Kernels | None = None,
    *,
    interpret: bool = False,
) -> Encoded:
    """Encodes rows and copies each to its slots.

    Args:
        x: [T, D]; rows without a slot may hold anything.
        slots: [T, P] int32, -1 for none; no slot twice.
        num_slots: S.
        kernels, interpret: what packs, see pallas_kernels.choice.

    Returns:
        [S, ...] encoded rows; zeros in slots that no row names.
    """
    if wire == "fp8":
        values, scales = dispatch_rows_fp8(x, slots, num_slots, scale_kind, kernels=kernels, interpret=interpret)
        # XLA moves bytes as they are on every device, e4m3 not: some of them widen it on the way.
        return Encoded(lax.bitcast_convert_type(values, jnp.uint8), scales)
    x = x.astype(_DTYPES[wire])
    return Encoded(dispatch_rows(x, slots, num_slots, kernels=kernels, interpret=interpret), None)


def unpack(rows: Encoded, dtype: Any) -> Array:
    """[N, D] in `dtype`: the rows that were encoded, within `fp8_error_bound` for fp8."""
    if rows.scales is None:
        return rows.values.astype(dtype)
    values = lax.bitcast_convert_type(rows.values, jnp.float8_e4m3fn).astype(jnp.float32)
    groups = values.reshape(len(values), -1, GROUP) * rows.scales[..., None]
    return groups.reshape(values.shape).astype(dtype)


def fp8_error_bound(x: Array, scale_kind: ScaleKind, dtype: Any) -> Array:
    """[N, D] float32: how far each channel of a finite x may be off after the way through fp8.

    With v = x/scale, at most 448: e4m3 has 3 bits after the leading one, so a normal v is rounded by at most 2^-4*|v|;
    below 2^-6 its step is 2^-9, so v is rounded by at most 2^-10. Hence max(2^-4*|x|, 2^-10*scale). A float32 scale
    has an inverse good to 2^-20, and the products round; a power of two is exact. Back in bfloat16 the product with a
    float32 scale is rounded by another 2^-8 of itself; with a power of two it has 4 significant bits and is exact.
    """
    x = jnp.abs(x.astype(jnp.float32))
    amax = jnp.max(x.reshape(len(x), -1, GROUP), axis=-1)
    scale = jnp.repeat(group_scales(amax, scale_kind)[0], GROUP, axis=-1)
    step = jnp.maximum(2.0**-4 * x, 2.0**-10 * scale)
    if scale_kind == "power_of_two":
        return step
    rounded = 2.0**-8 if jnp.dtype(dtype) == jnp.bfloat16 else 0.0
    return step + (x + step) * (rounded + 2.0**-19)


def row_bytes(wire: Wire, width: int) -> tuple[int, int]:
    """Bytes of one row on its way to the experts, scales included, and of one result on its way home."""
    there = width * jnp.dtype(_DTYPES[wire]).itemsize + (4 * width // GROUP if wire == "fp8" else 0)
    return there, width * jnp.dtype(home_dtype(wire)).itemsize


def sent_bytes(copies: np.ndarray, bytes_per_row: int) -> np.ndarray:
    """Bytes that each rank sends to others, from counts.

    Args:
        copies: [R, R] rows from rank src (first) for rank dst (second): of ranks, or of hosts.
        bytes_per_row: see `row_bytes`.

    Returns:
        [R] int64; what a rank keeps costs nothing.
    """
    copies = np.asarray(copies, np.int64)
    return (copies.sum(1) - np.diagonal(copies)) * bytes_per_row
