"""The public function of combine."""

import jax
import jax.numpy as jnp

from pallas_kernels import gradients
from pallas_kernels.choice import Device, Kernels, choose_for
from pallas_kernels.tables import check_rows, check_table, over_the_same_axes


def combine_rows(
    rows: jax.Array,
    index: jax.Array,
    weights: jax.Array | None,
    *,
    kernels: Kernels | None = None,
    interpret: bool = False,
    device: Device | None = None,
) -> jax.Array:
    """Sums each token's rows: result[t] = sum over k of weights[t, k] * rows[index[t, k]].

    Added in float32 in the order of k and rounded once. Without weights: the sum over ranks of the normal mode.

    Args:
        rows: [R, D]; a row that is not named is not read, and may hold NaN.
        index: [T, K] int32. Entries outside 0..R-1, such as -1, name no row; a row may be named many times.
        weights: [T, K] float32, or None for ones. Those beside no row may be anything.
        kernels: "pallas", "xla", or None to choose by device and shapes (`pallas_kernels.choice`).
        interpret: run the Pallas kernel on the CPU, slowly, with a check for races; on one device only.
        device: what the program will run on; None finds out.

    Returns:
        [T, D] in rows' type, zero for a token that names no row. In shard_map, varying over every mesh axis that
        an argument varies over. Differentiable by rows and weights.

    Raises:
        ValueError: wrong shapes or types; "pallas" where it is not supported, with the reason.
    """
    check_rows("rows", rows)
    check_table("index", index, jnp.int32)
    tables = [index]
    if weights is not None:
        check_table("weights", weights, jnp.float32, index.shape)  # pyright: ignore[reportArgumentType]
        tables.append(weights)
    rows, index, *weighted = over_the_same_axes(rows, *tables)
    most_rows = max(len(rows), len(index))
    choice = choose_for(rows, index.shape[1], most_rows, kernels=kernels, interpret=interpret, device=device)
    return gradients.combine(rows, index, weighted[0] if weighted else None, choice)
