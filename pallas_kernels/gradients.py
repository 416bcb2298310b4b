"""Dispatch and combine with their gradients: the rows of each go back through the other.

Arguments are checked by the public functions of moe_dispatch and moe_combine. No rows, no slots: no kernel.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.choice import Choice
from pallas_kernels.moe_combine import plain as plain_combine
from pallas_kernels.moe_dispatch import plain as plain_dispatch
from pallas_kernels.moe_dispatch.quantize import GROUP, ScaleKind


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def dispatch(x: jax.Array, slots: jax.Array, num_slots: int, choice: Choice) -> jax.Array:
    """[T, D], [T, P] -> [num_slots, D]; the gradient of x sums that of the slots each row was sent to."""
    if 0 in (*slots.shape, num_slots):
        return _zeros((num_slots, x.shape[1]), x.dtype, x)
    if choice.kernels == "xla":
        return plain_dispatch.dispatch_rows(x, slots, num_slots)
    from pallas_kernels.moe_dispatch import kernel  # Mosaic is imported only where it is used

    return kernel.dispatch_rows(x, slots, num_slots, cores=choice.cores, interpret=choice.interpret)


def _dispatch_forward(x: jax.Array, slots: jax.Array, num_slots: int, choice: Choice) -> tuple[jax.Array, jax.Array]:
    return dispatch(x, slots, num_slots, choice), slots


def _dispatch_backward(num_slots: int, choice: Choice, slots: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None]:
    return combine(gradient, slots, None, choice), None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def dispatch_fp8(
    x: jax.Array, slots: jax.Array, num_slots: int, scale_kind: ScaleKind, choice: Choice
) -> tuple[jax.Array, jax.Array]:
    """[T, D], [T, P] -> e4m3 [num_slots, D] and float32 [num_slots, D / 128]; it has no gradient, and says so."""
    if 0 in (*slots.shape, num_slots):
        width = x.shape[1]
        return (
            _zeros((num_slots, width), jnp.float8_e4m3fn, x),
            _zeros((num_slots, width // GROUP), jnp.float32, x),
        )
    if choice.kernels == "xla":
        return plain_dispatch.dispatch_rows_fp8(x, slots, num_slots, scale_kind)
    from pallas_kernels.moe_dispatch import kernel

    return kernel.dispatch_rows_fp8(x, slots, num_slots, scale_kind, cores=choice.cores, interpret=choice.interpret)


def _no_gradient(*_: Any) -> Any:
    raise NotImplementedError("dispatch_rows_fp8 has no gradient, since it rounds: train with dispatch_rows")


dispatch_fp8.defvjp(_no_gradient, _no_gradient)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def combine(rows: jax.Array, index: jax.Array, weights: jax.Array | None, choice: Choice) -> jax.Array:
    """[R, D], [T, K], [T, K] -> [T, D]; gradients of rows, and of weights where there are any."""
    if 0 in (*index.shape, len(rows)):
        return _zeros((len(index), rows.shape[1]), rows.dtype, rows)
    if choice.kernels == "xla":
        return plain_combine.combine_rows(rows, index, weights)
    from pallas_kernels.moe_combine import kernel

    return kernel.combine_rows(rows, index, weights, cores=choice.cores, interpret=choice.interpret)


_Saved = tuple[jax.Array, jax.Array, jax.Array | None]


def _combine_forward(
    rows: jax.Array, index: jax.Array, weights: jax.Array | None, choice: Choice
) -> tuple[jax.Array, _Saved]:
    return combine(rows, index, weights, choice), (rows, index, weights)


def _combine_backward(choice: Choice, saved: _Saved, gradient: jax.Array) -> tuple[jax.Array, None, jax.Array | None]:
    rows, index, weights = saved
    if 0 in (*index.shape, len(rows)):
        nothing = None if weights is None else _zeros(weights.shape, weights.dtype, weights)
        return _zeros(rows.shape, rows.dtype, rows), None, nothing
    # Tables of MoE routing name a row at most once, and then it goes back by dispatch. Others are summed by XLA.
    names = jnp.zeros((len(rows),), jnp.int32).at[index].add(1, mode="drop", wrap_negative_indices=False)
    to_rows = lax.cond(
        jnp.max(names) > 1,
        lambda: _summed_to_rows(gradient, index, weights, len(rows)),
        lambda: _dispatched_to_rows(gradient, index, weights, len(rows), choice),
    )
    return to_rows, None, None if weights is None else _to_weights(gradient, rows, index)


combine.defvjp(_combine_forward, _combine_backward)


def _dispatched_to_rows(
    gradient: jax.Array, index: jax.Array, weights: jax.Array | None, rows: int, choice: Choice
) -> jax.Array:
    """[T, D] -> [R, D]: each token's gradient to the rows it named, times their weights."""
    sent = dispatch(gradient, index, rows, choice)
    if weights is None:
        return sent
    weight = jnp.zeros((rows,), jnp.float32).at[index].set(weights, mode="drop", wrap_negative_indices=False)
    return (sent.astype(jnp.float32) * weight[:, None]).astype(gradient.dtype)


def _summed_to_rows(gradient: jax.Array, index: jax.Array, weights: jax.Array | None, rows: int) -> jax.Array:
    """The same where several tokens name one row: added in float32."""
    total = jnp.zeros((rows, gradient.shape[1]), jnp.float32)
    for k in range(index.shape[1]):
        sent = gradient.astype(jnp.float32) * (1.0 if weights is None else weights[:, k, None])
        total = total.at[index[:, k]].add(sent, mode="drop", wrap_negative_indices=False)
    return total.astype(gradient.dtype)


def _to_weights(gradient: jax.Array, rows: jax.Array, index: jax.Array) -> jax.Array:
    """[T, K]: the dot of each token's gradient with each row that it named, in float32; 0 where it named none."""
    named = (index >= 0) & (index < len(rows))
    chosen = jnp.where(named[..., None], rows.at[index].get(mode="clip").astype(jnp.float32), 0.0)
    return jnp.sum(gradient.astype(jnp.float32)[:, None] * chosen, axis=-1)


def _zeros(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.Array:
    """Zeros that vary over the mesh axes that `like` varies over."""
    axes = tuple(jax.typeof(like).mat.varying)
    zeros = jnp.zeros(shape, dtype)
    return lax.pcast(zeros, axes, to="varying") if axes else zeros
