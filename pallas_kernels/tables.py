"""What the public functions ask of their arguments before anything is traced: shapes, types, mesh axes."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def check_rows(name: str, rows: jax.Array) -> None:
    """Refuses what is not [N, D] of a float type, and partial sums.

    Raises:
        ValueError: saying what `name` is and what it may be.
    """
    if rows.ndim != 2 or not jnp.issubdtype(rows.dtype, jnp.floating):
        raise ValueError(f"{name} must be [rows, channels] of a float type, not {rows.dtype}{list(rows.shape)}")
    if partial := jax.typeof(rows).mat.unreduced:
        raise ValueError(f"{name} holds partial sums over {', '.join(sorted(map(str, partial)))}: reduce it first")


def check_table(name: str, table: jax.Array, dtype: Any, shape: tuple[int, int] | None = None) -> None:
    """Refuses a table of another type, another rank, or another shape than the one given.

    Raises:
        ValueError: saying what `name` is and what it must be.
    """
    wanted = list(shape) if shape else ["rows", "fanout"]
    if table.ndim != 2 or table.dtype != dtype or (shape and table.shape != shape):
        raise ValueError(
            f"{name} must be {jnp.dtype(dtype).name}{wanted}, not {table.dtype}{list(table.shape)}".replace("'", "")
        )


def over_the_same_axes(*arrays: jax.Array) -> list[jax.Array]:
    """The arrays, also NumPy's, each made to vary over every mesh axis that one of them varies over.

    Outside shard_map nothing varies, and they stay as they are.
    The way back of that cast sums the gradient over those axes, so it is done outside our own gradients.
    """
    arrays = tuple(map(jnp.asarray, arrays))
    axes = frozenset[Any]().union(*(jax.typeof(array).mat.varying for array in arrays))
    missing = [tuple(axes - jax.typeof(array).mat.varying) for array in arrays]
    return [lax.pcast(a, more, to="varying") if more else a for a, more in zip(arrays, missing, strict=True)]
