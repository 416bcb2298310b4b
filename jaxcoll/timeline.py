"""The schedule of a compiled program as two lanes of bars: what is computed, and what communicates meanwhile.

Read from HLO text, where a scheduled program's instructions stand in the order of their start. Positions, not times.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax

from jaxcoll.explain import group_name
from jaxcoll.hlo import Collective, Line, source_path
from jaxcoll.replica_groups import IRREGULAR, Axes
from jaxcoll.schedule import END, Reader, opcode_of
from jaxcoll.topology import Topology

Lane = Literal["communication", "computation"]

# No work of its own: names for values, and what is decided before the program starts.
_FREE = frozenset("parameter constant tuple get-tuple-element bitcast partition-id replica-id after-all".split())


@dataclasses.dataclass(frozen=True)
class Bar:
    """One instruction in the schedule.

    Attributes:
        lane: what kind of work.
        start, end: positions in the schedule, [start, end).
        scope: the named scope that asked for it, cut to the depth asked for; "other" where none did.
        label: of a collective its kind and group; "" for computation.
        wire_bytes: of a collective, per device.
    """

    lane: Lane
    start: int
    end: int
    scope: str
    label: str = ""
    wire_bytes: float = 0.0


def bars(
    program: jax.stages.Compiled | str, topology: Topology, *, prefix: str = "", depth: int = 1, machines: Axes = ()
) -> list[Bar]:
    """The entry of a compiled program, instruction by instruction.

    A collective that starts and ends in two instructions is one bar from its start to its end. Loops, branches and
    calls take one position each; one that holds a collective is communication. A collective that XLA kept no name for
    counts to the scope of what stands before it.

    Args:
        program: what `jax.jit(...).lower(...).compile()` returns, or its HLO text.
        topology: names the groups of the collectives.
        prefix: keeps only instructions whose scope path starts with it, such as "layer.1/", and cuts it off; positions
            are counted from the first of them.
        depth: parts of the scope path, after the prefix, that a bar's scope keeps.
        machines: names the groups that are no product of the topology's axes, see `schedule.schedule`.

    Raises:
        ValueError: the text is no HLO module, or of another number of devices.
    """
    text = program if isinstance(program, str) else program.as_text() or ""
    reader = Reader(text, topology.world)
    found: list[Bar] = []
    started: dict[str, int] = {}
    named = ""
    for line in reader.computations[reader.entry]:
        if end := END.match(line.text, len(line.type) + 1):
            if (at := started.get(end["of"])) is not None:
                found[at] = dataclasses.replace(found[at], end=max(len(found), at + 1))
                started[line.name] = at
        elif opcode_of(line) not in _FREE:
            sent = _sent(reader, line, topology, machines)
            path = source_path(line.text) or ""
            named = path or named
            path = named if sent else path
            if path.startswith(prefix):
                scope = "/".join(path.removeprefix(prefix).split("/")[:depth]) or "other"
                started[line.name] = len(found)
                found.append(_bar(len(found), scope, sent))
    return found


def _bar(position: int, scope: str, sent: dict[str, float]) -> Bar:
    if not sent:
        return Bar("computation", position, position + 1, scope)
    return Bar("communication", position, position + 1, scope, "\n".join(sent), sum(sent.values()))


def _sent(reader: Reader, line: Line, topology: Topology, machines: Axes) -> dict[str, float]:
    """Wire bytes by kind and group of what an instruction communicates, however deep; of all branches."""
    sent: dict[str, float] = {}
    found = _collectives(reader, line, topology.axes)
    by_machine = _collectives(reader, line, dict(machines)) if machines else found
    for one, other in zip(found, by_machine, strict=True):
        axes = one.group.split(",")
        group = group_name(topology, axes) if set(axes) <= set(topology.axes) else one.group
        label = f"{one.kind}({other.group if group == IRREGULAR and machines else group})"
        if one.group_size > 1:
            sent[label] = sent.get(label, 0.0) + one.wire_bytes
    return sent


def _collectives(reader: Reader, line: Line, axes: dict[str, int]) -> list[Collective]:
    if own := reader.module.collective(line, axes):
        return [own]
    bodies = reader.called(line)
    return [found.collective for body in bodies for found in reader.collectives(body, axes, in_branch=False)]
