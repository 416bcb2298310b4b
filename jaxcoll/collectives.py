"""The strict verbs: each checks the state of its operand and is one `lax` call.

| verb | state before -> after | lax |
| contract | both SHARD on the contracted dimension -> PARTIAL | dot_general + pcast |
| declare_partial | SHARD-typed contribution -> PARTIAL (an axiom) | pcast |
| all_reduce | PARTIAL -> REPLICA | psum |
| reduce_scatter | PARTIAL -> SHARD | psum_scatter |
| all_gather | SHARD -> REPLICA | all_gather(to="invarying") |
| all_to_all | SHARD -> SHARD | all_to_all |
| take_shard | REPLICA -> SHARD, nothing is sent | dynamic_slice |
| uniform_cond | predicate REPLICA | cond |

A group is a tuple of mesh axes in rank order (or one axis name). Over an empty group every verb returns its operand.
Call them inside `jax.shard_map` with `check_vma` on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Any

import jax
from jax import lax

from jaxcoll.states import State, as_group, group_size, require

_ALL_GATHER_RETYPES = "to" in inspect.signature(lax.all_gather).parameters  # jax >= 0.12


def contract(
    x: jax.Array,
    w: jax.Array,
    group: str | Iterable[str],
    *,
    dimension_numbers: lax.DotDimensionNumbers | None = None,
    preferred_element_type: Any = None,
) -> jax.Array:
    """Multiplies two tensors cut along the contracted dimension; each rank's product is one addend of the result.

    Args:
        x: [..., K_local], SHARD over `group`.
        w: [K_local, ...], SHARD over `group`.
        dimension_numbers: as for `lax.dot_general`; default contracts x's last with w's first dimension.
        preferred_element_type: as for `lax.dot_general`.

    Returns:
        [..., ...], PARTIAL over `group`, otherwise as JAX types the product.

    Raises:
        StateError: an operand is not SHARD over `group`.
        ValueError: `dimension_numbers` sum over nothing, so that the product of two shards is no addend.
    """
    axes = as_group(group)
    require(x, axes, State.SHARD, "contract")
    require(w, axes, State.SHARD, "contract")
    numbers = dimension_numbers or (((x.ndim - 1,), (0,)), ((), ()))
    if axes and not numbers[0][0]:
        raise ValueError(f"contract over ({', '.join(axes)}) needs a dimension to sum over, not {numbers}")
    y = lax.dot_general(x, w, numbers, preferred_element_type=preferred_element_type)
    return _to_unreduced(y, axes)


def declare_partial(x: jax.Array, group: str | Iterable[str]) -> jax.Array:
    """States that each rank's `x` is one addend of the result: an axiom, and the only one.

    JAX cannot tell a contribution from a shard, so this is trusted. The audit still refuses a contribution that is
    really the same value on every rank. PARTIAL is born last: mask, scale and place rows before.

    Args:
        x: any shape, SHARD-typed over `group`.

    Returns:
        The same value, PARTIAL over `group`.

    Raises:
        StateError: `x` is a replica over some axis of `group`, or partial already.
    """
    axes = as_group(group)
    require(x, axes, State.SHARD, "declare_partial")
    return _to_unreduced(x, axes)


def all_reduce(x: jax.Array, group: str | Iterable[str]) -> jax.Array:
    """Adds up a partial sum; every rank gets all of it.

    Args:
        x: any shape, PARTIAL over `group`.

    Returns:
        The sum in the same shape, REPLICA over `group`. Wire bytes per rank: 2*S*(n-1)/n for S bytes of x, n ranks.

    Raises:
        StateError: `x` is not PARTIAL over every axis of `group`; a complete value would be scaled by the group size.
    """
    axes = as_group(group)
    require(x, axes, State.PARTIAL, "all_reduce")
    return lax.psum(x, axes) if axes else x


def reduce_scatter(x: jax.Array, group: str | Iterable[str], dim: int) -> jax.Array:
    """Adds up a partial sum and leaves each rank its chunk, in rank order along `dim`.

    Args:
        x: [..., n*L, ...], PARTIAL over `group` of n ranks.
        dim: the dimension to cut; its size must be a multiple of n.

    Returns:
        [..., L, ...], SHARD over `group`. Wire bytes per rank: S*(n-1)/n for S bytes of x.

    Raises:
        StateError: `x` is not PARTIAL over every axis of `group`.
        ValueError: n does not divide the dimension.
    """
    axes = as_group(group)
    require(x, axes, State.PARTIAL, "reduce_scatter")
    dim = _require_divisible(x, axes, dim, "reduce_scatter")
    if not axes:
        return x
    if x.size == 0:
        size = x.shape[dim] // group_size(axes)
        return lax.pcast(_sum_of_nothing(x, axes, dim, size), axes, to="varying")
    return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)


def all_gather(x: jax.Array, group: str | Iterable[str], dim: int) -> jax.Array:
    """Concatenates the ranks' shards along `dim`, in rank order; every rank gets all of it.

    Args:
        x: [..., L, ...], SHARD over `group` of n ranks.
        dim: the dimension that is cut.

    Returns:
        [..., n*L, ...], REPLICA over `group`. Wire bytes per rank: S*(n-1)/n for S bytes of the result.

    Raises:
        StateError: `x` is not SHARD over every axis of `group`.
        ValueError: `x` has no such dimension.
    """
    axes = as_group(group)
    require(x, axes, State.SHARD, "all_gather")
    dim = _dimension(x, dim, "all_gather")
    if not axes:
        return x
    if x.size == 0:
        return _sum_of_nothing(x, axes, dim, x.shape[dim] * group_size(axes))
    if _ALL_GATHER_RETYPES:
        return lax.all_gather(x, axes, axis=dim, tiled=True, to="invarying")
    from jax._src.lax import parallel  # where it lives before jax 0.12

    return parallel.all_gather_invariant(x, axes, axis=dim, tiled=True)  # pyright: ignore[reportAttributeAccessIssue]


def all_to_all(x: jax.Array, group: str | Iterable[str], split: int, concat: int) -> jax.Array:
    """Sends chunk j of `x` along `split` to rank j and concatenates what arrives along `concat`, in rank order.

    Args:
        x: [..., n*L, ...], SHARD over `group` of n ranks.
        split: the dimension to cut; its size must be a multiple of n.
        concat: the dimension along which the received chunks are joined.

    Returns:
        SHARD over `group`. Wire bytes per rank: S*(n-1)/n for S bytes of x.

    Raises:
        StateError: `x` is not SHARD over every axis of `group`.
        ValueError: n does not divide the `split` dimension.
    """
    axes = as_group(group)
    require(x, axes, State.SHARD, "all_to_all")
    split = _require_divisible(x, axes, split, "all_to_all")
    concat = _dimension(x, concat, "all_to_all")
    return lax.all_to_all(x, axes, split_axis=split, concat_axis=concat, tiled=True) if axes else x


def take_shard(x: jax.Array, group: str | Iterable[str], dim: int) -> jax.Array:
    """Keeps this rank's chunk of a replica along `dim`; nothing is sent.

    Args:
        x: [..., n*L, ...], REPLICA over `group` of n ranks.
        dim: the dimension to cut; its size must be a multiple of n.

    Returns:
        [..., L, ...], SHARD over `group`: chunk r on rank r.

    Raises:
        StateError: `x` is not REPLICA over every axis of `group`.
        ValueError: n does not divide the dimension.
    """
    axes = as_group(group)
    require(x, axes, State.REPLICA, "take_shard")
    dim = _require_divisible(x, axes, dim, "take_shard")
    if not axes:
        return x
    size = x.shape[dim] // group_size(axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, dim)


def uniform_cond(
    pred: jax.Array, group: str | Iterable[str], true_fn: Callable, false_fn: Callable, *operands: Any
) -> Any:
    """`lax.cond` whose branches may communicate over `group`: all its ranks must take the same branch.

    Args:
        pred: scalar, REPLICA over `group` (a count must be reduced first).
        true_fn, false_fn, operands: as for `lax.cond`.

    Raises:
        StateError: the ranks could disagree, and those inside a collective would wait for ever.
    """
    require(pred, group, State.REPLICA, "uniform_cond")
    return lax.cond(pred, true_fn, false_fn, *operands)


def _to_unreduced(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.pcast(x, axes, to="unreduced") if axes else x


def _dimension(x: jax.Array, dim: int, verb: str) -> int:
    """`dim` counted from the front."""
    if not isinstance(dim, Integral) or not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{verb} is asked for dimension {dim} of a value of shape {x.shape}")
    return dim % x.ndim


def _require_divisible(x: jax.Array, axes: tuple[str, ...], dim: int, verb: str) -> int:
    dim, size = _dimension(x, dim, verb), group_size(axes)
    if x.shape[dim] % size:
        raise ValueError(
            f"{verb} over ({', '.join(axes)}) cuts dimension {dim} into {size} equal chunks, "
            f"which its size {x.shape[dim]} does not allow"
        )
    return dim


def _sum_of_nothing(x: jax.Array, axes: tuple[str, ...], dim: int, size: int) -> jax.Array:
    """An empty replica with `size` in place of dimension `dim`.

    XLA lowers no gather or scatter of an empty array. It does lower a sum, and then drops it: this only retypes.
    """
    shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    return lax.psum(x, axes).astype(x.dtype).reshape(shape)
