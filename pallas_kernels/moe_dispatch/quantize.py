"""How rows become e4m3: one scale per 128 channels, the same arithmetic in the kernel and in plain JAX.

Bit-equality across compilers is why there is no division here: XLA's float32 division on GPUs is not correctly
rounded (div.full), Mosaic's is, and either may fuse a multiply and an add. Every product that is added to
something is therefore exact, so that fusing changes nothing.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

ScaleKind = Literal["float32", "power_of_two"]

GROUP = 128  # channels that share a scale
E4M3_MAX = 448.0
# Floor of a group's largest magnitude, as DeepEP and the published model's quantiser have it: a group of zeros
# gets a harmless scale.
SMALLEST_AMAX = 1e-4

_EXPONENT_BITS, _MANTISSA_MASK, _ONE_BITS = 23, 0x007FFFFF, 0x3F800000
_NOT_FINITE = 255  # the biased exponent of infinities and NaN


def group_scales(amax: jax.Array, scale_kind: ScaleKind) -> tuple[jax.Array, jax.Array]:
    """Scale and inverse scale of groups whose largest magnitude is `amax` (float32, any shape).

    float32: amax / 448, its inverse good to 2**-20. power_of_two: the smallest power of two that is not below
    amax / 448, its inverse exact. Multiply rows by the inverse; multiply e4m3 values by the scale to get back.
    Where amax is no finite number the scale is none and the inverse 0 or NaN, so that the whole group comes back NaN.
    """
    scale = jnp.maximum(amax, SMALLEST_AMAX) * (1.0 / E4M3_MAX)
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    exponent = lax.shift_right_logical(bits, _EXPONENT_BITS)
    mantissa = bits & _MANTISSA_MASK
    if scale_kind == "power_of_two":
        exponent = jnp.minimum(exponent + jnp.minimum(mantissa, 1), _NOT_FINITE)
    inverse = _power_of_two(jnp.maximum(_NOT_FINITE - 1 - exponent, 0))
    if scale_kind == "power_of_two":
        return _power_of_two(exponent), inverse
    in_one_to_two = lax.bitcast_convert_type(mantissa | _ONE_BITS, jnp.float32)
    return scale, _reciprocal(in_one_to_two) * inverse


def quantize(x: jax.Array, inverse_scale: jax.Array) -> jax.Array:
    """float32 channels times their group's inverse scale (of x's shape), clipped to e4m3 and rounded to nearest."""
    # Conversion to e4m3 makes NaN, not 448, of what is too large.
    return jnp.minimum(jnp.maximum(x * inverse_scale, -E4M3_MAX), E4M3_MAX).astype(jnp.float8_e4m3fn)


def _power_of_two(biased_exponent: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(lax.shift_left(biased_exponent, _EXPONENT_BITS), jnp.float32)


def _reciprocal(m: jax.Array) -> jax.Array:
    """1 / m for m in [1, 2), by Newton's method with factors of 12 bits, whose products float32 holds exactly."""
    head = _twelve_bits(m)
    tail = m - head
    guess = _twelve_bits(2891 / 2048 - head * (241 / 512))  # within 6%
    for _ in range(2):
        guess = _twelve_bits(guess + guess * _twelve_bits(1.0 - head * guess))
    error = (1.0 - head * guess) - tail * guess
    return guess + guess * _twelve_bits(error)


def _twelve_bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & ~0xFFF, jnp.float32)
