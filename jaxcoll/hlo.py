"""What a compiled program communicates: one record per collective instruction, read from its HLO text.

HLO is static, so a collective in a loop or a branch is one record however often it runs, and a ragged exchange shows
its capacity, not the rows sent. Of Pallas kernels only the calls are seen: one that talked to peers would be no record.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import re
from collections.abc import Iterable
from typing import Any, Literal, cast

import jax

from jaxcoll.replica_groups import has_pairs, named_group
from jaxcoll.topology import Topology

Kind = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "ragged_all_to_all",
    "collective_permute",
    "collective_broadcast",
]
REDUCES_OR_GATHERS = ("all_reduce", "all_gather", "reduce_scatter")
INSERTED = "inserted by XLA"

_COMPUTATION = re.compile(r"(?:ENTRY )?%?(?P<name>[^\s(]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?(?P<name>[^\s=]+) = (?P<text>.+)")
_COLLECTIVE = re.compile(
    r"(?P<opcode>all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute"
    r"|collective-broadcast|send)(?P<start>-start)?\("
)
_ASYNC_CALL = re.compile(r"[\w-]+-start\(.*?\), .*?(?:calls|to_apply)=%?(?P<body>[^\s,}]+)")
# What an instruction runs, branches aside; of reductions `to_apply` is their addition.
CALLED = re.compile(r"(?:calls|body|condition|to_apply)=%?([^\s,}]+)")
_GROUPED = re.compile(r"(?P<opcode>[\w-]+)\(.*, (?:replica_groups|source_target_pairs)=")
SHAPE = re.compile(r"\b(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,<=]*)\]")
_BRACKETED = re.compile(r"\b[a-z]\w*\[[^\]]*\]")
_MOSAIC_CALL = re.compile(r'custom-call\(.*?custom_call_target="mosaic_gpu\w*"')
_OP_NAME = re.compile(r'op_name="(?P<name>(?:[^"\\]|\\.)*)"')
_FRAME_OF = re.compile(r"stack_frame_id=(\d+)")
_FILE_LINE = re.compile(r'source_file="(?P<file>[^"]*)"(?: source_line=(?P<line>\d+))?')
# A module's text opens with tables that say, by ids, from which lines its instructions come.
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_TABLE_ROW = re.compile(
    r'(?P<id>\d+) (?:"(?P<file>.*)"|\{file_name_id=(?P<file_id>\d+) .*?line=(?P<line>\d+) .*\}'
    r"|\{file_location_id=(?P<location>\d+) parent_frame_id=(?P<parent>\d+)\})$"
)
_WRAPPER = re.compile(r"p?jit\(.*\)|\w+\(\)|shard_map|eval_jaxpr|closed_call|core_call")
_ASKED_FOR = re.compile(
    r"(?:unreduced_)?(?:psum|pmax|pmin|ppermute|pbroadcast|psend|precv|all_gather|reduce_scatter|all_to_all"
    r"|ragged_all_to_all)"
)
_PACKAGE = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction; bytes are per device.

    Attributes:
        kind: what it does.
        group: the mesh axes with more than one member that make up its groups, in mesh order and joined by
            ","; "self" for one-member groups, "irregular" for groups that are no product of axes. For a permute
            the smallest such group that holds every source with its target.
        group_size: members of a group (of the largest one if irregular).
        operand_bytes: all operands together; of a ragged exchange the rows' buffer alone (its capacity).
        result_bytes: all results together.
        wire_bytes: see `wire_bytes`.
        is_async: whether other work may run between its start and its end.
        dtypes: HLO element types of the operands, each once.
        source: the named-scope path that asked for it, or "inserted by XLA".
        source_line: "file.py:line" that asked for it, the innermost one outside this package if there is one;
            None if not recorded.
        name: the instruction's name.
        computation: the computation (loop body, branch, entry) that holds it.
    """

    kind: Kind
    group: str
    group_size: int
    operand_bytes: int
    result_bytes: int
    wire_bytes: float
    is_async: bool
    dtypes: tuple[str, ...]
    source: str
    source_line: str | None
    name: str
    computation: str


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums over instructions; bytes are per device."""

    count: int
    operand_bytes: int
    result_bytes: int
    wire_bytes: float


def wire_bytes(kind: Kind, group_size: int, operand_bytes: int, result_bytes: int) -> float:
    """Bytes that one device sends, as if over a ring of n members.

    With a full buffer of S bytes: all_reduce 2S(n-1)/n; all_gather (S is the result), reduce_scatter, all_to_all and
    broadcast (S is the operand) S(n-1)/n; ragged_all_to_all the same on its capacity, which bounds what its counts
    send; collective_permute S. One-member groups send nothing.
    """
    if group_size == 1:
        return 0.0
    if kind == "collective_permute":
        return float(operand_bytes)
    full = result_bytes if kind == "all_gather" else operand_bytes
    passes = 2 if kind == "all_reduce" else 1
    return passes * full * (group_size - 1) / group_size


def collectives(program: jax.stages.Compiled | str, topology: Topology) -> tuple[Collective, ...]:
    """Every collective of a compiled program, in the order of its text.

    A start/done pair is one record. Partition i of the program is taken to be rank i of the topology, as it is for
    every program compiled for `topology.mesh`.

    Args:
        program: what `jax.jit(...).lower(...).compile()` returns, or its HLO text.
        topology: names the groups.

    Raises:
        ValueError: the text is no HLO module, runs on another number of devices than the topology, or has a collective
            of an unknown kind, groups, operands or shapes.
    """
    text = program if isinstance(program, str) else program.as_text()
    module = Module(text or "", topology.world)
    return tuple(record for line in module.lines if (record := module.collective(line, topology.axes)))


def mosaic_kernels(program: jax.stages.Compiled | str) -> tuple[str, ...]:
    """The Pallas Mosaic-GPU kernels that a program (as for `collectives`) calls: scope paths, kernel's name last."""
    text = program if isinstance(program, str) else program.as_text() or ""
    calls = (line for line in text.splitlines() if _MOSAIC_CALL.search(line))
    paths = ((_OP_NAME.search(line) or {"name": "no name/"})["name"].split("/") for line in calls)
    return tuple("/".join(part for part in path[:-1] if not _WRAPPER.fullmatch(part)) for path in paths)


def totals(found: Iterable[Collective]) -> dict[tuple[Kind, str], Totals]:
    """Sums per (kind, group); unlike counts, the bytes do not change when XLA merges collectives."""
    parts: dict[tuple[Kind, str, int], list[Collective]] = {}
    for c in found:
        parts.setdefault((c.kind, c.group, c.group_size), []).append(c)
    result: dict[tuple[Kind, str], Totals] = {}
    for (kind, group, size), members in parts.items():
        operands, results = sum(c.operand_bytes for c in members), sum(c.result_bytes for c in members)
        old = result.get((kind, group), Totals(0, 0, 0, 0.0))
        result[kind, group] = Totals(
            old.count + len(members),
            old.operand_bytes + operands,
            old.result_bytes + results,
            # From the sums, so that rounding does not depend on how XLA merged them.
            old.wire_bytes + wire_bytes(kind, size, operands, results),
        )
    return result


def summary(found: Iterable[Collective]) -> list[dict[str, Any]]:
    """Records for JSON: per (kind, group, source) the count and the bytes of all of them together."""
    records: dict[tuple[str, str, str], dict[str, Any]] = {}
    for c in found:
        names = {"kind": c.kind, "group": c.group, "source": c.source}
        empty = names | {"count": 0, "operand_bytes": 0, "result_bytes": 0}
        record = records.setdefault((c.kind, c.group, c.source), empty)
        record["count"] += 1
        record["operand_bytes"] += c.operand_bytes
        record["result_bytes"] += c.result_bytes
    return list(records.values())


@dataclasses.dataclass(frozen=True)
class Line:
    computation: str
    name: str
    text: str  # right of " = ": type opcode(operands), attributes

    @functools.cached_property
    def type(self) -> str:
        end = closing(self.text, 0) + 1 if self.text.startswith("(") else self.text.index(" ")
        return self.text[:end]


class Module:
    """The lines of an HLO module, and what one line needs to know of the others."""

    def __init__(self, text: str, world: int):
        self.lines: list[Line] = []
        self.async_calls: dict[str, str] = {}  # computation -> the text of the start that runs it
        self._files: dict[int, str] = {}
        self._locations: dict[int, tuple[int, int]] = {}
        self._frames: dict[int, tuple[int, int]] = {}
        if not text.lstrip().startswith("HloModule"):
            raise ValueError(f"not the HLO text of a compiled program, which starts with HloModule: {text[:40]!r}")
        self._read(text)
        counts = dict(re.findall(r"(num_partitions|replica_count)=(\d+)", text.lstrip().partition("\n")[0]))
        self.partitions = int(counts.get("num_partitions", 1))
        # A text that names neither is taken to number the whole world.
        self.replicas = int(counts.get("replica_count", 1)) if counts else world
        devices = self.partitions * self.replicas
        if counts and devices != world:
            raise ValueError(f"the program runs on {devices} devices, but the topology's world has {world}")
        self._types = {(line.computation, line.name): line for line in self.lines}
        self._spread_async()

    def _read(self, text: str) -> None:
        computation = table = ""
        for raw in text.splitlines():
            if raw in _TABLES:
                table = raw
            elif header := _COMPUTATION.match(raw):
                computation = header["name"]
            elif instruction := _INSTRUCTION.match(raw):
                line = Line(computation, instruction["name"], instruction["text"])
                self.lines.append(line)
                if "-start(" in raw and (call := _ASYNC_CALL.match(line.text, len(line.type) + 1)):
                    self.async_calls[call["body"]] = line.text
            elif (row := _TABLE_ROW.match(raw)) and table != "FunctionNames":
                self._add_row(row)

    def _spread_async(self) -> None:
        """What runs within a computation that a start runs, such as a fusion around a collective, is started by it."""
        inside: dict[str, list[str]] = {}
        for line in self.lines if self.async_calls else ():
            inside.setdefault(line.computation, []).extend(CALLED.findall(line.text))
        waiting = list(self.async_calls)
        for outer in waiting:
            new = [name for name in inside.get(outer, ()) if name not in self.async_calls]
            self.async_calls |= dict.fromkeys(new, self.async_calls[outer])
            waiting += new

    def _add_row(self, row: re.Match[str]) -> None:
        if row["file"] is not None:
            self._files[int(row["id"])] = row["file"]
        elif row["line"]:
            self._locations[int(row["id"])] = int(row["file_id"]), int(row["line"])
        else:
            self._frames[int(row["id"])] = int(row["location"]), int(row["parent"])

    def collective(self, line: Line, mesh: dict[str, int]) -> Collective | None:
        """The record of one line, or None if it is no collective; `mesh` is the axes that name groups."""
        match = _COLLECTIVE.match(line.text, len(line.type) + 1)
        if not match:
            # Only collectives have groups; what ends one may repeat them.
            grouped = _GROUPED.match(line.text, len(line.type) + 1)
            if grouped and not grouped["opcode"].endswith(("-done", "-update")):
                raise ValueError(f"unknown collective {grouped['opcode']!r} in HLO")
            return None
        close = closing(line.text, match.end() - 1)
        operands = [self._operand_type(line, o) for o in split_operands(line.text[match.end() : close])]
        attributes = line.text[close + 1 :]
        # A send is half of a decomposed permute; without pairs it is a transfer to the host.
        is_send = match["opcode"] == "send"
        if is_send and not has_pairs(attributes):
            return None
        kind = cast(Kind, "collective_permute" if is_send else match["opcode"].replace("-", "_"))
        if is_send or kind == "ragged_all_to_all":
            operands = operands[:1]
        results = operands if is_send else _result_types(line.type, match)
        outer = self.async_calls.get(line.computation, "")
        started = bool(match["start"] or outer or is_send)
        axes, sums = tuple(mesh.items()), kind in REDUCES_OR_GATHERS
        group, size = named_group(attributes, sums, self.replicas, self.partitions, axes)
        operand_bytes, result_bytes = sum(map(_bytes, operands)), sum(map(_bytes, results))
        metadata = attributes if "op_name=" in attributes else outer
        return Collective(
            kind=kind,
            group=group,
            group_size=size,
            operand_bytes=operand_bytes,
            result_bytes=result_bytes,
            wire_bytes=wire_bytes(kind, size, operand_bytes, result_bytes),
            is_async=started and '"is_sync":true' not in attributes + outer,
            dtypes=tuple(dict.fromkeys(m["dtype"] for o in operands for m in SHAPE.finditer(o))),
            source=_source(kind, metadata),
            source_line=self._source_line(metadata),
            name=line.name,
            computation=line.computation,
        )

    def line(self, computation: str, name: str) -> Line:
        """An instruction by its name."""
        if (computation, name) not in self._types:
            raise ValueError(f"HLO names an instruction that {computation} does not have: {name}")
        return self._types[computation, name]

    def _operand_type(self, line: Line, operand: str) -> str:
        """An operand is written as its name, in older texts after its type."""
        *typed, name = operand.split()
        return " ".join(typed) or self.line(line.computation, name.lstrip("%")).type

    def _source_line(self, metadata: str) -> str | None:
        if old := _FILE_LINE.search(metadata):
            return f"{pathlib.PurePath(old['file']).name}:{old['line'] or '?'}"
        frame = _FRAME_OF.search(metadata)
        if not frame or int(frame[1]) not in self._frames:
            return None
        stack = list(self._stack(int(frame[1])))
        file, line = next((at for at in stack if pathlib.PurePath(at[0]).parent != _PACKAGE), stack[0])
        return f"{pathlib.PurePath(file).name}:{line}"

    def _stack(self, frame: int) -> Iterable[tuple[str, int]]:
        """(file, line) of a frame and of its callers, innermost first."""
        # XLA prints a parent's id plus one: the root, which has none (0), then seems to be its own parent.
        shift = 1 if self._frames.get(1, (0, 0))[1] == 1 else 0
        seen: set[int] = set()
        while frame in self._frames and frame not in seen:
            seen.add(frame)
            location, parent = self._frames[frame]
            file, line = self._locations[location]
            yield self._files[file], line
            frame = parent - shift


def closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for m in re.compile(r"[()]").finditer(text, start):
        depth += 1 if m[0] == "(" else -1
        if depth == 0:
            return m.start()
    raise ValueError(f"unbalanced parentheses in HLO: {text[:60]!r}")


def split_operands(text: str) -> list[str]:
    """Splits at the commas that no bracket encloses; XLA's /*index=5*/ comments go."""
    text = re.sub(r"/\*.*?\*/", "", text)
    depth, begin, parts = 0, 0, []
    for m in re.finditer(r"[()\[\]{},]", text):
        if m[0] == "," and depth == 0:
            parts.append(text[begin : m.start()].strip())
            begin = m.end()
        elif m[0] != ",":
            depth += 1 if m[0] in "([{" else -1
    last = text[begin:].strip()
    return [*parts, last] if last else parts


def _result_types(written: str, match: re.Match[str]) -> list[str]:
    """The part of a collective's type that is its result: a start's type also holds operands and contexts."""
    if not match["start"]:
        return [written]
    parts = split_operands(written[1:-1]) if written.startswith("(") else []
    holds_operands = parts and (parts[0].startswith("(") or match["opcode"] != "all-reduce")
    return [parts[1]] if holds_operands else [written]


def _bytes(type_text: str) -> int:
    """Bytes of a shape or of all shapes in a tuple; four-bit elements two to a byte."""
    total = 0
    for written in _BRACKETED.findall(type_text):
        if not (shape := SHAPE.fullmatch(written)):
            raise ValueError(f"unknown size of an HLO shape: {written!r}")
        elements = math.prod(int(d.lstrip("<=")) for d in shape["dims"].split(",") if d)
        total += -(-elements * _bits(shape["dtype"]) // 8)
    return total


def _bits(dtype: str) -> int:
    if dtype in ("pred", "token", "opaque"):
        return 8 if dtype == "pred" else 0
    width = re.fullmatch(r"(?:[suc]|b?f)(\d+)(?:e\d+m\d+\w*)?", dtype)
    if not width:
        raise ValueError(f"unknown HLO element type {dtype!r}")
    return int(width[1])


def source_path(text: str) -> str | None:
    """The named-scope path of an instruction without the wrappers of jit and shard_map; None if XLA kept no name."""
    named = _OP_NAME.search(text)
    return "/".join(_path(named["name"])) if named else None


def _path(op_name: str) -> list[str]:
    return [part for part in op_name.split("/") if part and not _WRAPPER.fullmatch(part)]


def _source(kind: Kind, metadata: str) -> str:
    """The scope path that asked for a collective, without the wrappers of jit and shard_map."""
    named = _OP_NAME.search(metadata)
    if not named:
        # XLA never adds one of its own, but some of its passes rebuild it without its name.
        return "ragged_all_to_all (XLA kept no name)" if kind == "ragged_all_to_all" else INSERTED
    path = _path(named["name"])
    if not path or not _ASKED_FOR.match(path[-1]):
        return f"{INSERTED} for {'/'.join(path)}" if path else INSERTED
    return "/".join(path)
