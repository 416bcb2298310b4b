"""What a traced step does at each named stage: shapes, states and collectives, read off the program itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from jaxcoll.html import table_html
from jaxcoll.primitives import collective_axes, subjaxprs
from jaxcoll.states import State
from jaxcoll.topology import GroupName, Topology

_GROUPS: tuple[GroupName, ...] = ("attn_dp", "attn_tp")
_NAMED: tuple[GroupName, ...] = (*_GROUPS, "world", "moe_ep", "moe_tp")
_VERBS = {
    "unreduced_psum": "all_reduce",
    "unreduced_reduce_scatter": "reduce_scatter",
    "all_gather_invariant": "all_gather",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "ragged_all_to_all",
}


@dataclasses.dataclass(frozen=True)
class Stage:
    """What one named scope of a step leaves behind.

    Attributes:
        scope: the scope's path, such as layer.1/attn.all_reduce.
        shape: per-rank shape of its result.
        dtype: element type of its result.
        states: of the result, per group.
        collective: the verbs that ran in it with their groups, such as "all_reduce(attn_tp)", or "" for none.
    """

    scope: str
    shape: tuple[int, ...]
    dtype: str
    states: dict[str, str]
    collective: str


class Stages(list[Stage]):
    """Stages in program order; Jupyter shows them as a table."""

    def _repr_html_(self) -> str:
        header = "stage", "shape per rank", "type", *_GROUPS, "collective"
        rows = [
            (s.scope, " x ".join(map(str, s.shape)), s.dtype, *s.states.values(), s.collective or "-") for s in self
        ]
        return table_html("What each stage leaves on a rank, with its state over groups", header, rows)


def _two_parts(path: str) -> str:
    return "/".join(path.split("/")[:2])


def stages(
    traced: Any,
    topology: Topology,
    prefix: str,
    *,
    groups: Sequence[GroupName] = _GROUPS,
    stage_of: Callable[[str], str] = _two_parts,
    width: int | None = None,
) -> Stages:
    """The stages of a traced step whose scope path starts with `prefix`, in program order.

    Args:
        traced: a `Step.traced`.
        topology: the step's mesh.
        prefix: such as "layer.1/".
        groups: those whose states are told.
        stage_of: the stage that a scope path belongs to; by default its first two parts.
        width: where a stage computes arrays with rows of that many channels, the last of these is its result; None
            takes the last value of any shape.
    """
    found: dict[str, Stage] = {}
    for eqn in _mapped_equations(traced.jaxpr.jaxpr):
        scope = stage_of(str(eqn.source_info.name_stack))
        if not scope.startswith(prefix) or not eqn.outvars:
            continue
        aval = eqn.outvars[0].aval
        collective = found[scope].collective if scope in found else ""
        if axes := collective_axes(eqn):
            verb = _VERBS.get(eqn.primitive.name, eqn.primitive.name)
            collective = "; ".join(filter(None, [collective, f"{verb}({group_name(topology, axes)})"]))
        if width and aval.shape[-1:] != (width,) and scope in found and found[scope].shape[-1:] == (width,):
            found[scope] = dataclasses.replace(found[scope], collective=collective)
            continue
        states = {g: _state(aval, topology.group(g)) for g in groups}
        found[scope] = Stage(scope, tuple(aval.shape), str(aval.dtype), states, collective)
    return Stages(found.values())


def _mapped_equations(jaxpr: Any) -> Iterator[Any]:
    """The equations directly inside the step's shard_map."""
    for eqn in jaxpr.eqns:
        for body in subjaxprs(eqn):
            yield from body.eqns if eqn.primitive.name == "shard_map" else _mapped_equations(body)


def group_name(topology: Topology, axes: Collection[str]) -> str:
    """The topology's name for these axes, or the axes themselves where no group has exactly them."""
    ordered = tuple(a for a in topology.axes if a in axes)
    named = (name for name in _NAMED if topology.group(name) == ordered)
    return next(named, ",".join(ordered))


def _state(aval: Any, group: tuple[str, ...]) -> str:
    kind = aval.mat
    found = {
        State.PARTIAL if a in kind.unreduced else State.SHARD if a in kind.varying else State.REPLICA for a in group
    }
    return str(found.pop()) if len(found) == 1 else "mixed" if found else str(State.REPLICA)


def mermaid(found: Sequence[Stage]) -> str:
    """A Mermaid flowchart of stages, with the state over (attn_dp, attn_tp) on every arrow."""
    lines = ["flowchart TB", '    start(["in"])']
    before = "start"
    label = ""
    for number, stage in enumerate(found):
        node = f"s{number}"
        name = stage.scope.split("/", 1)[-1]
        box = f'{{{{"{name}<br/>{stage.collective}"}}}}' if stage.collective else f'["{name}"]'
        arrow = f'-- "{label}" -->' if label else "-->"
        lines.append(f"    {before} {arrow} {node}{box}")
        shape = " x ".join(map(str, stage.shape))
        states = ", ".join(stage.states[g][0] for g in _GROUPS)
        before, label = node, f"({states}) {shape}"
    lines.append(f'    {before} -- "{label}" --> stop(["out"])')
    return "\n".join(lines)
