"""The state of a value over a group of devices, read off JAX's own type.

Inside `jax.shard_map` every value's type says, per mesh axis, whether it varies, is a partial sum or is the same
everywhere. This module names that (State), asks for it (`require`) and refuses the rest (StateError). There is no
wrapper class and no run-time cost. The audit of a whole traced step is in audit.py.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import jax
from jax import lax

Group = tuple[str, ...]


class StateError(TypeError):
    """A value is in another state than the operation needs; raised while tracing, before anything runs."""


class State(enum.Enum):
    """What the members of a group hold of one tensor.

    REPLICA: identical copies. SHARD: disjoint pieces, or unrelated rows. PARTIAL: addends whose sum is the tensor.
    """

    REPLICA = "REPLICA"
    SHARD = "SHARD"
    PARTIAL = "PARTIAL"

    def __str__(self) -> str:
        return self.value


# Which verb leaves a state, for the last half-sentence of an error.
_FITTING_VERB = {
    (State.PARTIAL, State.REPLICA): "all_reduce completes a partial sum",
    (State.PARTIAL, State.SHARD): "reduce_scatter completes a partial sum and cuts it",
    (State.SHARD, State.REPLICA): "all_gather completes shards",
    (State.SHARD, State.PARTIAL): (
        "contract makes a partial sum of two shards, declare_partial states that a contribution is one"
    ),
    (State.REPLICA, State.SHARD): "take_shard cuts a replica without communication",
    (State.REPLICA, State.PARTIAL): "a replica is complete already and must not be summed again",
}


def as_group(group: str | Iterable[str]) -> Group:
    """A group as the tuple of its mesh axes; a single axis may be given by its name.

    Raises:
        ValueError: an axis is named twice.
        TypeError: no axis names in an order of their own. A set has none: every process would number the ranks
            in its own way.
    """
    ordered = isinstance(group, Iterable) and not isinstance(group, set | frozenset)
    axes = (group,) if isinstance(group, str) else tuple(group) if ordered else ()
    if not ordered or not all(isinstance(axis, str) for axis in axes):
        raise TypeError(f"a group is an axis name or a tuple of axis names in rank order, not {group!r}")
    if len(set(axes)) != len(axes):
        raise ValueError(f"the group ({', '.join(axes)}) names an axis twice")
    return axes


def group_size(group: Group) -> int:
    """Members of a group on the mesh that is traced; 1 for no axes."""
    return jax.lax.axis_size(group) if group else 1


def states(x: jax.Array, group: str | Iterable[str]) -> dict[str, State]:
    """The state of `x` over each axis of `group`.

    Raises:
        StateError: an axis is not a manual axis here, or `check_vma` is off and states are unknown.
    """
    axes = as_group(group)
    for axis in axes:
        _require_checked_axis(axis)
    kind = jax.typeof(x).mat
    return {
        a: State.PARTIAL if a in kind.unreduced else State.SHARD if a in kind.varying else State.REPLICA for a in axes
    }


def state(x: jax.Array, group: str | Iterable[str]) -> State | None:
    """The one state of `x` over `group`, or None where its axes disagree or the group is empty."""
    found = set(states(x, group).values())
    return found.pop() if len(found) == 1 else None


def describe(x: jax.Array, group: str | Iterable[str]) -> str:
    """The state of `x` over `group` in words: "SHARD", or "mixed: SHARD over attn_dp, REPLICA over attn_tp"."""
    found = states(x, group)
    if len(set(found.values())) == 1:
        return str(next(iter(found.values())))
    return "mixed: " + ", ".join(f"{s} over {a}" for a, s in found.items()) if found else "no group"


def require(x: jax.Array, group: str | Iterable[str], needed: State, verb: str) -> None:
    """Raises StateError unless `x` is in state `needed` over every axis of `group`.

    An empty group (one member) asks for nothing: complete, cut and partial are then the same thing.
    """
    axes = as_group(group)
    found = states(x, axes)
    if all(s is needed for s in found.values()):
        return
    hint = ""
    if len(set(found.values())) == 1:
        here = next(iter(found.values()))
        hint = f"; {_FITTING_VERB[here, needed]}"
    raise StateError(
        f"{verb} over ({', '.join(axes)}) needs {needed}, but this {jax.typeof(x).str_short()} is "
        f"{describe(x, axes)}{hint}"
    )


def _require_checked_axis(axis: str) -> None:
    try:
        rank = lax.axis_index(axis)
    except NameError:
        raise StateError(f"{axis!r} is no manual mesh axis here; call this inside jax.shard_map over it") from None
    if axis not in jax.typeof(rank).mat.varying:
        raise StateError(f"states over {axis!r} are unknown: this jax.shard_map was called with check_vma=False")
