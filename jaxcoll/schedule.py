"""The order in which a compiled program communicates and computes, and how much its matmuls multiply.

It reads HLO text, where a scheduled program's instructions stand in the order of their start. It runs nothing and knows
no times. What the collectives are is read in hlo.py.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

import jax

from jaxcoll.hlo import CALLED, SHAPE, Collective, Line, Module, closing, source_path, split_operands
from jaxcoll.replica_groups import IRREGULAR, Axes
from jaxcoll.topology import Topology

_ENTRY = re.compile(r"^ENTRY %?([^\s(]+)", re.MULTILINE)
_LISTED = re.compile(r"called_computations=\{([^}]*)\}")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([^\s,}]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_STRATEGY = re.compile(r'"kernel_strategy":"KERNEL_STRATEGY_(\w+)"')
_OPCODE = re.compile(r"([\w-]+)\(")
# A step of something asynchronous after its start; older texts write the operand's type before its name.
END = re.compile(r"[\w-]+-(?P<step>done|update)\((?:\(.*?\) |\S+\[\S* )?%?(?P<of>[^\s,()]+)[),]")
_MOVES_NOTHING = frozenset("parameter constant tuple get-tuple-element bitcast copy partition-id after-all".split())


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """One collective in its place of the schedule.

    Attributes:
        collective: what it is.
        kernel_strategy: what XLA:GPU chose to run it with, such as "default" (the communication library); None where
            the program does not say.
        meanwhile: what is computed between its start and its end: named-scope paths, each once, in order. Empty for
            one that is not asynchronous.
        in_branch: whether it stands in a branch or a loop whose trips are data, and may not run.
    """

    collective: Collective
    kernel_strategy: str | None
    meanwhile: tuple[str, ...]
    in_branch: bool


def schedule(program: jax.stages.Compiled | str, topology: Topology, machines: Axes = ()) -> tuple[Scheduled, ...]:
    """Every collective in the order in which the program starts it; bodies stand where they are called.

    Args:
        program, topology: as for `hlo.collectives`.
        machines: another way to cut the world, such as (("hosts", 2), ("gpus", 8)), whose axes name the groups that
            are no product of the topology's: XLA splits collectives over several machines.

    Raises:
        ValueError: the text is no HLO module, or of another number of devices.
    """
    text = program if isinstance(program, str) else program.as_text() or ""
    reader = Reader(text, topology.world)
    found = reader.collectives(reader.entry, topology.axes, in_branch=False)
    if not machines:
        return tuple(found)
    by_machine = reader.collectives(reader.entry, dict(machines), in_branch=False)
    return tuple(a if a.collective.group != IRREGULAR else b for a, b in zip(found, by_machine, strict=True))


def matmul_flops(program: jax.stages.Compiled | str, devices: int, scope: str, trips: float) -> float:
    """Floating-point operations of the matmuls that were asked for within a named scope, per device and run.

    A matmul is a dot, wherever fusions put it, or a sum over products, which XLA makes of a dot with one row. Its
    operations are 2 * result elements * contracted length, times the trips of the loops around it. Of a conditional the
    most expensive branch counts.

    Args:
        devices: what the program is compiled for.
        scope: part of the named-scope path of the matmul, or of the fusion or loop around it.
        trips: of the loops in that scope whose trips are data, all together; each is taken to have an equal share.
    """
    text = program if isinstance(program, str) else program.as_text() or ""
    reader = Reader(text, devices)
    loops = reader.loops(reader.entry, scope)
    return reader.flops(reader.entry, scope, trips / max(loops, 1), inside=False)


class Reader:
    """A module's computations, each as its lines in order."""

    def __init__(self, text: str, devices: int):
        self.module = Module(text, devices)
        entry = _ENTRY.search(text)
        assert entry, "every HLO module has an entry"
        self.entry = entry[1]
        self.computations: dict[str, list[Line]] = {}
        for line in self.module.lines:
            self.computations.setdefault(line.computation, []).append(line)

    def called(self, line: Line) -> list[str]:
        """The computations that an instruction runs, but not reducers and comparators."""
        if (opcode := opcode_of(line)) == "conditional":
            found = [a or b for a, b in _BRANCHES.findall(line.text)]
            return [name.strip(" %") for names in found for name in names.split(",")]
        if opcode == "custom-call":
            calls = [name.strip(" %") for names in _LISTED.findall(line.text) for name in names.split(",")]
        elif opcode in ("fusion", "while", "call", "call-start"):
            calls = CALLED.findall(line.text)
        else:
            calls = CALLED.findall(line.text) if opcode.endswith("-start") and "to_apply" not in line.text else []
        return [name for name in calls if name in self.computations]

    def collectives(self, name: str, axes: dict[str, int], *, in_branch: bool) -> Iterator[Scheduled]:
        lines = self.computations[name]
        for at, line in enumerate(lines):
            if record := self.module.collective(line, axes):
                yield self.scheduled(record, line.text, lines, at, in_branch)
                continue
            maybe = opcode_of(line) == "conditional" or (opcode_of(line) == "while" and not _TRIPS.search(line.text))
            for body in self.called(line):
                for inner in self.collectives(body, axes, in_branch=in_branch or maybe):
                    if opcode_of(line).endswith("-start"):  # a wrapper: its start and end are what counts
                        inner = self.scheduled(inner.collective, line.text, lines, at, in_branch)
                    yield inner

    def scheduled(self, record: Collective, text: str, lines: list[Line], at: int, in_branch: bool) -> Scheduled:
        strategy = _STRATEGY.search(text)
        between = self.between(lines, at) if record.is_async else ()
        return Scheduled(record, strategy[1].lower() if strategy else None, between, in_branch)

    def between(self, lines: list[Line], at: int) -> tuple[str, ...]:
        """What is computed after the start at `at` and before its done."""
        held, found = lines[at].name, dict[str, None]()
        for line in lines[at + 1 :]:
            if (end := END.match(line.text, len(line.type) + 1)) and end["of"] == held:
                if end["step"] == "done":
                    return tuple(found)
                held = line.name
            opcode = opcode_of(line)
            if opcode not in _MOVES_NOTHING and not opcode.endswith(("-start", "-done", "-update")):
                found[source_path(line.text) or line.name] = None
        return ()

    def loops(self, name: str, scope: str) -> int:
        """Loops within a scope whose trips are data."""
        found = 0
        for line in self.computations[name]:
            counted = opcode_of(line) == "while" and not _TRIPS.search(line.text)
            found += counted and scope in (source_path(line.text) or "")
            found += sum(self.loops(body, scope) for body in self.called(line))
        return found

    def flops(self, name: str, scope: str, trips: float, *, inside: bool) -> float:
        total = 0.0
        for line in self.computations[name]:
            here = inside or scope in (source_path(line.text) or "")
            opcode, each = opcode_of(line), 1.0
            if opcode == "while":
                known = _TRIPS.search(line.text)
                each = float(known[1]) if known else trips
            bodies = [self.flops(body, scope, trips, inside=here) for body in self.called(line)]
            total += each * (max(bodies, default=0.0) if opcode == "conditional" else sum(bodies))
            if here and opcode in ("dot", "reduce", "custom-call"):
                total += self.products(line, opcode)
        return total

    def products(self, line: Line, opcode: str) -> float:
        """Operations of one dot, or of one sum over products; 0 for what is neither."""
        start = line.text.index("(", len(line.type))
        close = closing(line.text, start)
        names = [operand.split()[-1].lstrip("%") for operand in split_operands(line.text[start + 1 : close])]
        operands = [self.module.line(line.computation, name) for name in names]
        if opcode == "reduce":
            is_sum = self.is_product(operands[0]) and "f" in _dtype(operands[0].type)
            return 2.0 * math.prod(_dims(operands[0].type)) if is_sum else 0.0
        if opcode == "custom-call":
            if "matmul" not in line.text and "gemm" not in line.text:
                return 0.0
            contracted = re.search(r'"lhs_contracting_dimensions":\["(\d+)"', line.text)
        else:
            contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line.text)
        lhs, result = _dims(operands[0].type), _dims(line.type)  # a tuple's first shape is the product
        lengths = [lhs[int(d)] for d in contracted[1].split(",") if d] if contracted else []
        return 2.0 * math.prod(result) * math.prod(lengths)

    def is_product(self, line: Line) -> bool:
        """Whether the value is a product, also if only its shape or type was changed since."""
        opcode = opcode_of(line)
        if opcode in ("convert", "bitcast", "reshape", "transpose", "copy"):
            start = line.text.index("(", len(line.type))
            (name,) = split_operands(line.text[start + 1 : closing(line.text, start)])
            return self.is_product(self.module.line(line.computation, name.split()[-1].lstrip("%")))
        return opcode == "multiply"


def opcode_of(line: Line) -> str:
    match = _OPCODE.match(line.text, len(line.type) + 1)
    return match[1] if match else ""


def _dims(type_text: str) -> list[int]:
    shape = SHAPE.search(type_text)
    return [int(d.lstrip("<=")) for d in shape["dims"].split(",") if d] if shape else []


def _dtype(type_text: str) -> str:
    shape = SHAPE.search(type_text)
    return shape["dtype"] if shape else ""
