"""Which of jax's primitives communicate, and how: names, the axes of an equation, and the bodies nested in it.

It judges nothing; the audit does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Axes = frozenset[str]
NONE: Axes = frozenset()

# What may touch a partial sum between its birth and its reduction: f(a) + f(b) == f(a + b) for each of these.
LINEAR = frozenset(
    "add sub neg add_any reshape transpose slice squeeze expand_dims broadcast_in_dim tile reduce_sum concatenate "
    "stack split unstack copy name stop_gradient optimization_barrier".split()
)
CASTS = frozenset("partial_to_shard pvary preduced reduced_vary_cast vary_unreduced_cast vary_reduced_cast".split())
SUMS = frozenset(
    "psum psum_invariant unreduced_psum psum_invariant_start reduce_scatter unreduced_reduce_scatter "
    "reduce_scatter_start".split()
)
EXTREMES = frozenset("pmax pmin unreduced_pmax unreduced_pmin".split())
GATHERS = frozenset(
    "all_gather all_gather_invariant all_gather_reduced all_gather_start all_gather_reduced_start".split()
)
BROADCASTS = frozenset("pbroadcast pbroadcast_dynamic shard_to_replica".split())
# XLA:CPU lets a permute wait for every device, also for those that it neither sends to nor hears from.
PERMUTES = frozenset("ppermute ppermute_start psend precv".split())
MOVES = frozenset("all_to_all ragged_all_to_all all_to_all_start".split()) | PERMUTES
COLLECTIVES = SUMS | EXTREMES | GATHERS | BROADCASTS | MOVES
# These leave the same value on every rank of their axes; scatters and moves do not.
MAKES_EQUAL = frozenset("psum psum_invariant unreduced_psum psum_invariant_start".split())
MAKES_EQUAL |= EXTREMES | GATHERS | BROADCASTS


def opened(jaxpr: Any) -> Any:
    """A jaxpr without its constants' values."""
    return jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr


def name_of(eqn: Any) -> str:
    """The primitive's name, the same in every version of jax."""
    return eqn.primitive.name.removesuffix("_p")  # before jax 0.12 the casts carry it


def _named_axes(eqn: Any) -> tuple[Any, ...]:
    for key in ("axes", "axis_name", "axis") if name_of(eqn) in COLLECTIVES else ():
        if key in eqn.params:
            axes = eqn.params[key]
            return tuple(axes) if isinstance(axes, tuple | list | frozenset | set) else (axes,)
    return ()


def collective_axes(eqn: Any) -> Axes:
    """The mesh axes over which one equation communicates; empty for an equation that does not."""
    return frozenset(_named_axes(eqn))


def axes_named_twice(eqn: Any) -> Axes:
    """The mesh axes that a collective's group names more than once."""
    axes = _named_axes(eqn)
    return frozenset(axis for axis in axes if axes.count(axis) > 1)


def subjaxprs(eqn: Any) -> Iterator[Any]:
    """The bodies nested directly in an equation, opened."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(opened(item), "eqns"):
                yield opened(item)


def nested_collectives(jaxpr: Any) -> Iterator[Any]:
    """Every equation that communicates, at any depth."""
    for eqn in jaxpr.eqns:
        if name_of(eqn) in COLLECTIVES:
            yield eqn
        for body in subjaxprs(eqn):
            yield from nested_collectives(body)
