"""One mesh for attention and experts: sizes, axes, groups and the rank formula, both ways.

It knows nothing of tensors. A size-1 axis stays in the mesh, so a program is type-checked on one device
exactly as on many.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcoll.whole import whole_number

GroupName = Literal["attn_dp", "attn_tp", "moe_ep", "moe_tp", "world"]
Group = tuple[str, ...]


class TopologyError(ValueError):
    """Sizes that no mesh can have; the message carries the numbers."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """world = attn_dp * attn_tp = moe_ep * moe_tp devices on one mesh.

    The mesh axes are the common refinement of both factorisations and, where there is one, of the cut into hosts: an
    axis that another cut divides is split into `*_outer` and `*_inner`, or with two cuts `*_outer`, `*_middle` and
    `*_inner`. Rank = attn_dp_rank * attn_tp + attn_tp_rank = moe_ep_rank * moe_tp +
    moe_tp_rank, which is also the row-major position in `mesh.devices`.

    Args:
        attn_dp: replicas that hold different requests.
        attn_tp: ranks that share one replica's heads.
        moe_ep: owners of disjoint experts; None means the world. moe_tp (ranks that share one expert's width)
            follows from it.
        devices: the world's devices in rank order; None takes the first ones of `jax.devices()` when the mesh is
            first asked for.
        hosts: equal blocks of consecutive ranks, each on one host; None reads them off `devices`, and is one host
            where there are none or their hosts are no such blocks. A cut into hosts that is no refinement of the
            factorisations leaves no axis that tells hosts apart.

    Raises:
        TopologyError: a size below 1, moe_ep that does not divide the world, factorisations without a common
            refinement, a device count other than the world's, a device given twice, or hosts that do not divide the
            world.
    """

    attn_dp: int = 1
    attn_tp: int = 1
    moe_ep: int | None = None
    devices: Sequence[Any] | None = dataclasses.field(default=None, compare=False, repr=False)
    hosts: int | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self):
        for name in ("attn_dp", "attn_tp", "moe_ep"):
            size = getattr(self, name)
            if name == "moe_ep" and size is None:
                size = self.world
            object.__setattr__(self, name, whole_number(name, size, error=TopologyError))
        if self.world % self._moe_ep:
            raise TopologyError(
                f"moe_ep={self._moe_ep} does not divide the world of attn_dp*attn_tp = "
                f"{self.attn_dp}*{self.attn_tp} = {self.world} devices"
            )
        if self.attn_tp % self.moe_tp and self.moe_tp % self.attn_tp:
            raise TopologyError(
                f"attn_dp x attn_tp = {self.attn_dp}x{self.attn_tp} and moe_ep x moe_tp = "
                f"{self._moe_ep}x{self.moe_tp} have no common refinement: neither attn_tp={self.attn_tp} "
                f"nor moe_tp={self.moe_tp} divides the other"
            )
        if self.devices is not None and len(self.devices) != self.world:
            raise TopologyError(f"{len(self.devices)} devices given for a world of {self.world}")
        if self.devices is not None and len(set(self.devices)) != self.world:
            raise TopologyError(f"a device is given twice: {', '.join(map(str, self.devices))}")
        hosts = _hosts_of(self.devices) if self.hosts is None else self.hosts
        object.__setattr__(self, "hosts", whole_number("hosts", hosts, error=TopologyError))
        if self.world % self._hosts:
            raise TopologyError(f"hosts={self.hosts} does not divide the world of {self.world} devices")

    @classmethod
    def here(cls, attn_dp: int = 1, attn_tp: int = 1, moe_ep: int | None = None) -> Topology:
        """On the first of the devices that jax sees, hosts included; asking starts the devices."""
        anywhere = cls(attn_dp, attn_tp, moe_ep)
        found = tuple(jax.devices()[: anywhere.world])
        return cls(attn_dp, attn_tp, moe_ep, devices=found) if len(found) == anywhere.world else anywhere

    @property
    def _hosts(self) -> int:
        assert self.hosts is not None
        return self.hosts

    @property
    def _moe_ep(self) -> int:
        assert self.moe_ep is not None
        return self.moe_ep

    @property
    def world(self) -> int:
        return self.attn_dp * self.attn_tp

    @property
    def moe_tp(self) -> int:
        return self.world // self._moe_ep

    @functools.cached_property
    def axes(self) -> dict[str, int]:
        """Mesh axes, outermost first, with their sizes."""
        cuts = {self.moe_tp}
        host = self.world // self._hosts
        if _is_chain({*cuts, self.attn_tp, host}):
            cuts.add(host)
        inside = sorted(c for c in cuts if 1 < c < self.attn_tp)
        outside = sorted(c for c in cuts if self.attn_tp < c < self.world)
        return _pieces("attn_dp", self.world, outside, self.attn_tp) | _pieces("attn_tp", self.attn_tp, inside, 1)

    def group(self, name: GroupName) -> Group:
        """The axes of a group, in mesh order; empty for a moe_tp or moe_ep that no axis carries."""
        axes = tuple(self.axes)
        if name == "world":
            return axes
        if name in ("attn_dp", "attn_tp"):
            return tuple(a for a in axes if a.startswith(name))
        if name not in ("moe_ep", "moe_tp"):
            raise TopologyError(f"unknown group {name!r}; groups are attn_dp, attn_tp, moe_ep, moe_tp, world")
        cut = next(i for i in range(len(axes) + 1) if self.size(axes[i:]) == self.moe_tp and self._tight(axes[i:]))
        return axes[:cut] if name == "moe_ep" else axes[cut:]

    def _tight(self, axes: Group) -> bool:
        """Whether the group starts with an axis that has members (a leading size-1 axis belongs to the other side)."""
        return not axes or self.axes[axes[0]] > 1

    def size(self, group: Group) -> int:
        """Members of a group: the product of its axes' sizes.

        Raises:
            TopologyError: the mesh has no such axis.
        """
        for axis in group:
            if axis not in self.axes:
                raise TopologyError(f"the mesh has no axis {axis!r}; its axes are {', '.join(self.axes)}")
        return math.prod(self.axes[a] for a in group)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The mesh; asking for it starts the devices unless they were given."""
        devices = self.devices
        if devices is None:
            found = jax.devices()
            if len(found) < self.world:
                raise TopologyError(
                    f"a world of {self.world} needs {self.world} devices; this process sees {len(found)}"
                )
            devices = found[: self.world]
        grid = np.array(devices, dtype=object).reshape(tuple(self.axes.values()))
        return Mesh(grid, tuple(self.axes), axis_types=(AxisType.Auto,) * len(self.axes))

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """Where a global array with this spec lives on the mesh."""
        return NamedSharding(self.mesh, spec)

    def attention_rank(self, attn_dp_rank: int, attn_tp_rank: int) -> int:
        """World rank of an attention rank pair (communication semantics, section 1)."""
        return self._joined(attn_dp_rank, self.attn_dp, attn_tp_rank, self.attn_tp)

    def expert_rank(self, moe_ep_rank: int, moe_tp_rank: int) -> int:
        """World rank of an expert rank pair (communication semantics, section 1)."""
        return self._joined(moe_ep_rank, self._moe_ep, moe_tp_rank, self.moe_tp)

    def attention_ranks(self, rank: int) -> tuple[int, int]:
        """(attn_dp_rank, attn_tp_rank) of a world rank."""
        self._joined(rank, self.world, 0, 1)
        return divmod(rank, self.attn_tp)

    def expert_ranks(self, rank: int) -> tuple[int, int]:
        """(moe_ep_rank, moe_tp_rank) of a world rank."""
        self._joined(rank, self.world, 0, 1)
        return divmod(rank, self.moe_tp)

    def members(self, name: GroupName) -> list[list[int]]:
        """World ranks of every group of that name, each in the group's own order."""
        group = self.group(name)
        ranks = np.arange(self.world).reshape(tuple(self.axes.values()))
        inside = [list(self.axes).index(a) for a in group]
        outside = [i for i in range(len(self.axes)) if i not in inside]
        return ranks.transpose(outside + inside).reshape(-1, self.size(group)).tolist()

    @staticmethod
    def _joined(outer: int, outer_size: int, inner: int, inner_size: int) -> int:
        if not (0 <= outer < outer_size and 0 <= inner < inner_size):
            raise TopologyError(f"rank ({outer}, {inner}) lies outside {outer_size} x {inner_size}")
        return outer * inner_size + inner


def host_axes(topology: Topology) -> tuple[Group, str]:
    """The leading axes of moe_ep that tell its devices' hosts apart, or (); with the reason in one sentence."""
    ep, hosts = topology.group("moe_ep"), topology.hosts
    if hosts == 1:
        return (), "all devices belong to one host, or their hosts hold no equal blocks of ranks"
    for cut in range(1, len(ep)):
        if topology.size(ep[:cut]) == hosts:
            return ep[:cut], f"({', '.join(ep[:cut])}) tells {hosts} hosts apart"
    return (), f"no leading axes of ({', '.join(ep)}) tell the {hosts} hosts apart"


def _hosts_of(devices: Sequence[Any] | None) -> int:
    """Hosts that hold equal blocks of consecutive devices; 1 where they do not."""
    owners = [getattr(device, "process_index", 0) for device in devices or ()]
    hosts = len(set(owners)) or 1
    size = len(owners) // hosts
    blocks = [set(owners[i : i + size]) for i in range(0, len(owners), size)] if owners else []
    return hosts if len(blocks) == hosts and all(len(block) == 1 for block in blocks) else 1


def _is_chain(sizes: set[int]) -> bool:
    """Each size divides the next larger one."""
    ordered = sorted(sizes)
    return all(large % small == 0 for small, large in zip(ordered, ordered[1:], strict=False))


def _pieces(name: str, size: int, cuts: Sequence[int], rest: int) -> dict[str, int]:
    """The axes, outermost first, into which the sizes of trailing ranks in `cuts` divide an axis of size / rest."""
    edges = [size, *reversed(cuts), rest]
    parts = [large // small for large, small in zip(edges, edges[1:], strict=False)]
    places = {1: ("",), 2: ("_outer", "_inner"), 3: ("_outer", "_middle", "_inner")}[len(parts)]
    return {name + place: part for place, part in zip(places, parts, strict=True)}
