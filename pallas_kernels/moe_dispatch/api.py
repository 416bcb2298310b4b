"""The public functions of dispatch packing."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import gradients
from pallas_kernels.choice import Device, Kernels, choose_for
from pallas_kernels.moe_dispatch.quantize import GROUP, ScaleKind
from pallas_kernels.tables import check_rows, check_table, over_the_same_axes


def dispatch_rows(
    x: jax.Array,
    slots: jax.Array,
    num_slots: int,
    *,
    kernels: Kernels | None = None,
    interpret: bool = False,
    device: Device | None = None,
) -> jax.Array:
    """Packs token rows into send rows: result[slots[t, p]] = x[t] for every t and p; other slots are zero.

    Args:
        x: [T, D] rows; a row that no slot is given for may hold anything, NaN included.
        slots: [T, P] int32. Entries outside 0..num_slots-1, such as -1, name no slot. A slot may be named once at
            most: of two rows that name one slot either may win, or each a part of it.
        num_slots: S, rows of the result.
        kernels: "pallas", "xla", or None to choose by device and shapes (`pallas_kernels.choice`).
        interpret: run the Pallas kernel on the CPU, slowly, with a check for races; on one device only.
        device: what the program will run on; None finds out.

    Returns:
        [S, D] in x's type. In shard_map, varying over every mesh axis that x or slots varies over.
        Differentiable by x.

    Raises:
        ValueError: wrong shapes or types; "pallas" where it is not supported, with the reason.
    """
    check_rows("x", x)
    _check_slots(x, slots, num_slots)
    x, slots = over_the_same_axes(x, slots)
    most_rows = max(len(x), num_slots)
    choice = choose_for(x, slots.shape[1], most_rows, kernels=kernels, interpret=interpret, device=device)
    return gradients.dispatch(x, slots, num_slots, choice)


def dispatch_rows_fp8(
    x: jax.Array,
    slots: jax.Array,
    num_slots: int,
    scale_kind: ScaleKind,
    *,
    kernels: Kernels | None = None,
    interpret: bool = False,
    device: Device | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`dispatch_rows` that quantises on the way: e4m3 channels and one scale per 128 of them.

    Args:
        scale_kind: "float32", the group's largest magnitude / 448; or "power_of_two", the next power of two.
        x, slots, num_slots, kernels, interpret, device: as in `dispatch_rows`; 128 must divide D.

    Returns:
        q: [S, D] float8_e4m3fn; channels [S, D / 128, 128] of q times scales[..., None] give the rows back.
        scales: [S, D / 128] float32. Slots that nobody names are zero in both. Not differentiable.

    Raises:
        ValueError: as `dispatch_rows`, and an unknown scale_kind.
    """
    check_rows("x", x)
    _check_slots(x, slots, num_slots)
    if x.shape[1] % GROUP:
        raise ValueError(f"a scale covers {GROUP} channels, which does not divide the {x.shape[1]} of x")
    if scale_kind not in get_args(ScaleKind):
        raise ValueError(f"scale_kind must be one of {', '.join(get_args(ScaleKind))}, not {scale_kind!r}")
    x, slots = over_the_same_axes(x, slots)
    most_rows = max(len(x), num_slots)
    choice = choose_for(x, slots.shape[1], most_rows, kernels=kernels, interpret=interpret, device=device)
    return gradients.dispatch_fp8(x, slots, num_slots, scale_kind, choice)


def _check_slots(x: jax.Array, slots: jax.Array, num_slots: int) -> None:
    check_table("slots", slots, jnp.int32)
    if len(slots) != len(x):
        raise ValueError(f"slots has {len(slots)} rows, but x has {len(x)}")
    if not isinstance(num_slots, int | np.integer) or not 0 <= num_slots < 2**31:
        raise ValueError(f"num_slots must be a whole number from 0 to 2^31 - 1, but is {num_slots}")
