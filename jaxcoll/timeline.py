"""The schedule of a compiled program as two lanes of bars: what is computed, and what communicates meanwhile.

Read from HLO text, where a scheduled program's instructions stand in the order of their start. Positions, not times.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Literal

import jax

from jaxcoll.explain import group_name
from jaxcoll.hlo import Collective, _Line, _Module, source_path
from jaxcoll.topology import Topology

Lane = Literal["communication", "computation"]

_ENTRY = re.compile(r"^ENTRY %?([^\s(]+)", re.MULTILINE)
_OPCODE = re.compile(r"([\w-]+)\(")
_DONE = re.compile(r"[\w-]+-done\(%?([^\s,)]+)")
_BODIES = re.compile(
    r"(?:calls=|body=|to_apply=|(?:true|false)_computation=|branch_computations=\{)(%[^\s,}]+(?:, %[^}]+)?)"
)
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


def bars(program: jax.stages.Compiled | str, topology: Topology, *, prefix: str = "", depth: int = 1) -> list[Bar]:
    """The entry of a compiled program, instruction by instruction.

    A collective that starts and ends in two instructions is one bar from its start to its end. Loops, branches and
    calls take one position each; one that holds a collective is communication.

    Args:
        program: what `jax.jit(...).lower(...).compile()` returns, or its HLO text.
        topology: names the groups of the collectives.
        prefix: keeps only instructions whose scope path starts with it, such as "layer.1/", and cuts it off; positions
            are counted from the first of them.
        depth: parts of the scope path, after the prefix, that a bar's scope keeps.

    Raises:
        ValueError: the text is no HLO module, or of another number of devices.
    """
    text = program if isinstance(program, str) else program.as_text() or ""
    reader = _Reader(text, topology)
    found: list[Bar] = []
    started: dict[str, int] = {}
    for line in reader.entry:
        if done := _DONE.match(line.text, len(line.type) + 1):
            if (at := started.get(done[1])) is not None:
                found[at] = dataclasses.replace(found[at], end=len(found))
        elif (path := source_path(line.text) or "").startswith(prefix) and _opcode(line) not in _FREE:
            scope = "/".join(path.removeprefix(prefix).split("/")[:depth]) or "other"
            started[line.name] = len(found)
            found.append(_bar(len(found), scope, reader.collectives(line), topology))
    return found


def _bar(position: int, scope: str, collectives: Sequence[Collective], topology: Topology) -> Bar:
    if not collectives:
        return Bar("computation", position, position + 1, scope)
    label = "\n".join(dict.fromkeys(f"{c.kind}({_group(c, topology)})" for c in collectives))
    sent = sum(c.wire_bytes for c in collectives)
    return Bar("communication", position, position + 1, scope, label, sent)


def _group(collective: Collective, topology: Topology) -> str:
    axes = collective.group.split(",")
    return group_name(topology, axes) if set(axes) <= set(topology.axes) else collective.group


class _Reader:
    """A module's entry, and the collectives that each of its instructions runs, however deep."""

    def __init__(self, text: str, topology: Topology):
        module = _Module(text, topology.world)
        entry = _ENTRY.search(text)
        assert entry, "every HLO module has an entry"
        self._lines: dict[str, list[_Line]] = {}
        self._own: dict[tuple[str, str], Collective] = {}
        for line in module.lines:
            self._lines.setdefault(line.computation, []).append(line)
            record = module.collective(line, topology)
            if record and record.group_size > 1:
                self._own[line.computation, line.name] = record
        self.entry = self._lines[entry[1]]

    def collectives(self, line: _Line) -> list[Collective]:
        """Those of more than one member; of a conditional those of all its branches."""
        if record := self._own.get((line.computation, line.name)):
            return [record]
        bodies = [name.strip(" %") for names in _BODIES.findall(line.text) for name in names.split(",")]
        return [found for body in bodies for inner in self._lines.get(body, ()) for found in self.collectives(inner)]


def _opcode(line: _Line) -> str:
    match = _OPCODE.match(line.text, len(line.type) + 1)
    return match[1] if match else ""
