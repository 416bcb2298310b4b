"""Which mesh axes the groups of an HLO collective are, from any of the forms in which XLA writes groups.

It reads the groups' numbers only; what a collective moves is read in hlo.py.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from typing import Literal

import numpy as np

SELF = "self"
IRREGULAR = "irregular"
Axes = tuple[tuple[str, int], ...]
Numbering = Literal["replica", "partition", "device", "replicas"]  # what the numbers in the groups count

_GROUPS = re.compile(
    r"replica_groups=(?:"
    r"(?P<listed>\{[\d,{}]*\})"
    r"|\[(?P<shape>[\d,]+)\]<=\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?"
    r"|mesh\[(?P<mesh>[^\]]*)\]"
    r"(?:, device_ids=\((?:\[(?P<id_dims>[\d,]+)\]T\((?P<id_order>[\d,]+)\)|(?P<ids>[\d,]+))\))?"
    r" \{(?P<axes>[^}]*)\})"
)
_PAIRS = re.compile(r"source_target_pairs=\"?\{(?P<pairs>(?:\{\d+,\d+\},?)*)\}")
_MESH_AXIS = re.compile(r"'?(?P<name>[^'=,]+)'?=(?P<size>\d+)")
_AXIS_PART = re.compile(r"'?(?P<name>[^',:]+)'?(?::\((?P<before>\d+)\)(?P<size>\d+))?")


def named_group(
    attributes: str, reduces_or_gathers: bool, replicas: int, partitions: int, axes: Axes
) -> tuple[str, int]:
    """Name and size of a collective's groups.

    Args:
        attributes: the instruction's text after its operands.
        reduces_or_gathers: whether it is an all-reduce, all-gather or reduce-scatter: their groups may list
            replicas where the others' list partitions.
        replicas, partitions: what the program runs on; device = replica * partitions + partition.
        axes: the mesh in order; replicas * partitions devices.

    Returns:
        The axes with more than one member, in mesh order and joined by ","; "self" for one-member groups,
        "irregular" for groups that are no product of axes. For source-target pairs: the smallest group that
        holds each pair.

    Raises:
        ValueError: groups written in an unknown form, or of devices that the program does not have.
    """
    pairs = _PAIRS.search(attributes)
    groups = _GROUPS.search(attributes)
    if "replica_groups=" in attributes and not groups:
        raise ValueError(f"unknown form of replica groups: {attributes.split('replica_groups=')[1][:60]!r}")
    if "use_global_device_ids=true" in attributes:
        numbering = "device"
    elif "channel_id=" not in attributes:
        numbering = "replica"
    else:
        # Without global ids a reduction or gather spans all partitions of the replicas it lists.
        numbering = "replicas" if reduces_or_gathers else "partition"
    written = pairs["pairs"] if pairs else groups[0] if groups else ""
    return _named(written, bool(pairs), numbering, replicas, partitions, axes)


def has_pairs(attributes: str) -> bool:
    """Whether the instruction lists its senders and receivers."""
    return bool(_PAIRS.search(attributes))


@functools.lru_cache(maxsize=4096)
def _named(
    written: str, is_pairs: bool, numbering: Numbering, replicas: int, partitions: int, axes: Axes
) -> tuple[str, int]:
    rows = _listed(written) if is_pairs else _rows(written)
    if not rows and not is_pairs:
        every = {"partition": partitions, "device": replicas * partitions}
        rows = [list(range(every.get(numbering, replicas)))]
    if numbering == "replica":
        rows = [[r * partitions + p for r in row] for row in rows for p in range(partitions)]
    elif numbering == "replicas":
        rows = [[r * partitions + p for r in row for p in range(partitions)] for row in rows]
    elif numbering == "partition":
        rows = [[r * partitions + p for p in row] for row in rows for r in range(replicas)]
    if (highest := max(itertools.chain([0], *rows))) >= replicas * partitions:
        raise ValueError(f"groups name device {highest}, but the program has {replicas * partitions}")
    lowest = np.full(replicas * partitions, -1)
    for row in rows:
        lowest[row] = min(row)
    for chosen, expected in _axis_groups(axes):
        together = is_pairs and all(expected[a] == expected[b] for a, b in rows)
        if together or (not is_pairs and np.array_equal(lowest, expected)):
            name = ",".join(axes[i][0] for i in chosen)
            return name or SELF, math.prod(axes[i][1] for i in chosen)
    return IRREGULAR, max(map(len, rows))


def _axis_groups(axes: Axes) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """Every set of axes with members, fewest axes first, with each rank's lowest fellow."""
    sizes = [size for _, size in axes]
    ranks = np.arange(math.prod(sizes)).reshape(sizes)
    wide = [i for i, size in enumerate(sizes) if size > 1]
    sets = [s for n in range(len(wide) + 1) for s in itertools.combinations(wide, n)]
    return [(s, np.broadcast_to(ranks.min(axis=s, keepdims=True), ranks.shape).reshape(-1)) for s in sets]


def _rows(written: str) -> list[list[int]]:
    """The groups of a replica_groups attribute in any form; none for {}, which means one group of all."""
    m = _GROUPS.fullmatch(written)
    if not m or m["listed"]:
        return _listed(m["listed"][1:-1]) if m else []
    if m["shape"]:
        return _iota(m["dims"], m["order"]).reshape(_ints(m["shape"])).tolist()
    axes = {a["name"]: int(a["size"]) for a in _MESH_AXIS.finditer(m["mesh"])}
    if m["id_dims"]:
        devices = _iota(m["id_dims"], m["id_order"])
    else:
        devices = np.array(_ints(m["ids"])) if m["ids"] else np.arange(math.prod(axes.values()))
    dims, inside = _mesh_cut(axes, m["axes"])
    outside = [i for i in range(len(dims)) if i not in inside]
    members = math.prod(dims[i] for i in inside)
    return devices.reshape(dims).transpose(outside + inside).reshape(-1, members).tolist()


def _mesh_cut(axes: dict[str, int], grouped: str) -> tuple[list[int], list[int]]:
    """Mesh sizes, partly grouped axes cut up, and which pieces are grouped; 'd':(2)4 is the 4 after a 2."""
    found = _AXIS_PART.finditer(grouped)
    parts = [(p["name"], int(p["before"] or 1), int(p["size"] or axes[p["name"]])) for p in found]
    dims: list[int] = []
    inside: list[int] = []
    for name, size in axes.items():
        spans = [(before, before * n) for part, before, n in parts if part == name]
        edges = sorted({1, size, *itertools.chain(*spans)})
        for low, high in itertools.pairwise(edges):
            if any(begin <= low and high <= end for begin, end in spans):
                inside.append(len(dims))
            dims.append(high // low)
    return dims, inside


def _iota(dims: str, order: str | None) -> np.ndarray:
    shape = _ints(dims)
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose(_ints(order)).reshape(-1) if order else ids.reshape(-1)


def _listed(text: str) -> list[list[int]]:
    return [_ints(row) for row in re.findall(r"\{([\d,]*)\}", text)]


def _ints(text: str) -> list[int]:
    return [int(i) for i in text.split(",") if i]
