"""Linear layers whose weight is cut over a group, as flax nnx modules.

Weights are [out, in] and have no bias. A module made without `rngs` holds abstract weights, to be loaded later.
`partition_specs` gives the `in_specs` of a module's split state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxcoll.collectives import all_gather, all_reduce, contract
from jaxcoll.states import State, as_group, require
from jaxcoll.topology import Topology
from jaxcoll.whole import whole_number

Array = jax.Array


def parameter(shape: tuple[int, ...], dtype: Any, spec: P, rngs: nnx.Rngs | None = None) -> nnx.Param:
    """A parameter of global `shape` that lives on the mesh by `spec`.

    Args:
        shape: global shape.
        dtype: the type in memory.
        spec: mesh axes per dimension.
        rngs: draws normal weights of variance 1/shape[-1], global and on one device; None leaves a
            `jax.ShapeDtypeStruct`.
    """
    if rngs is None:
        return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), spec=spec)
    value = jax.random.normal(rngs.params(), shape, dtype) * shape[-1] ** -0.5
    return nnx.Param(value, spec=spec)


def partition_specs(module: nnx.Module) -> dict:
    """The PartitionSpec of every parameter, in the tree of `nnx.to_pure_dict(nnx.split(module)[1])`."""
    state = nnx.split(module)[1]
    return nnx.to_pure_dict(state, lambda variable: variable.get_metadata()["spec"])


def _matmul(x: Array, weight: Array) -> Array:
    """[..., in] x [out, in] -> [..., out]."""
    return lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))


def _checked_group(size: int, name: str, topology: Topology, group: str | Iterable[str]) -> tuple[str, ...]:
    axes = as_group(group)
    n = topology.size(axes)
    if whole_number(name, size) % n:
        raise ValueError(f"{name}={size} cannot be cut into {n} equal parts over ({', '.join(axes)})")
    return axes


class ReplicatedLinear(nnx.Module):
    """A linear layer that every rank holds whole; the state of its input is kept."""

    def __init__(self, in_features: int, out_features: int, *, dtype: Any = jnp.float32, rngs: nnx.Rngs | None = None):
        self.weight = parameter((out_features, in_features), dtype, P(None, None), rngs)

    def __call__(self, x: Array) -> Array:
        """[..., in] -> [..., out]; states unchanged."""
        return _matmul(x, self.weight[...])


class ColumnParallelLinear(nnx.Module):
    """A linear layer cut over its output features: rank t computes the t-th contiguous block.

    Source: communication semantics, section 2; SGLang's ColumnParallelLinear.

    Args:
        in_features, out_features: global sizes; the group's size must divide `out_features`.
        topology: the mesh's sizes.
        group: mesh axes that hold the cut weight, in rank order (or one axis name).
        gather_output: all_gather the output over `group`; off, the output stays SHARD.
        dtype: type of the weight.
        rngs: see `parameter`.

    Raises:
        ValueError: `out_features` is no positive whole number or the group's size does not divide it, or the mesh has
            no such axis.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        topology: Topology,
        group: str | Iterable[str],
        gather_output: bool = False,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs | None = None,
    ):
        self.group = _checked_group(out_features, "out_features", topology, group)
        self.gather_output = gather_output
        self.weight = parameter((out_features, in_features), dtype, P(self.group or None, None), rngs)

    def __call__(self, x: Array) -> Array:
        """[..., in] REPLICA over the group -> [..., out/n] SHARD, or [..., out] REPLICA with `gather_output`.

        Raises:
            StateError: `x` is not REPLICA over the group.
        """
        require(x, self.group, State.REPLICA, "ColumnParallelLinear")
        y = _matmul(x, self.weight[...])
        return all_gather(y, self.group, y.ndim - 1) if self.gather_output else y


class RowParallelLinear(nnx.Module):
    """A linear layer cut over its input features: every rank's product is one addend of the output.

    With `reduce_results=False` the output stays PARTIAL and its type hands the duty of reducing to the caller: there
    is no flag to forget. The reduction is over the layer's own group, whatever the world is; this covers the three
    cases of communication semantics, section 2 (wo_b).

    Args:
        in_features, out_features: global sizes; the group's size must divide `in_features`.
        topology: the mesh's sizes.
        group: mesh axes that hold the cut weight, in rank order (or one axis name).
        reduce_results: all_reduce the output over `group`.
        dtype: type of the weight.
        rngs: see `parameter`.

    Raises:
        ValueError: `in_features` is no positive whole number or the group's size does not divide it, or the mesh has
            no such axis.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        topology: Topology,
        group: str | Iterable[str],
        reduce_results: bool = True,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs | None = None,
    ):
        self.group = _checked_group(in_features, "in_features", topology, group)
        self.reduce_results = reduce_results
        self.weight = parameter((out_features, in_features), dtype, P(None, self.group or None), rngs)

    def __call__(self, x: Array) -> Array:
        """[..., in/n] SHARD over the group -> [..., out] REPLICA, or PARTIAL without `reduce_results`.

        Raises:
            StateError: `x` is not SHARD over the group.
        """
        require(x, self.group, State.SHARD, "RowParallelLinear")
        numbers = (((x.ndim - 1,), (1,)), ((), ()))
        y = contract(x, self.weight[...], self.group, dimension_numbers=numbers)
        return all_reduce(y, self.group) if self.reduce_results else y
