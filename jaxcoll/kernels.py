"""What packs an all-to-all's rows and adds up what comes home, Pallas kernels or XLA, and why; it runs nothing.

The limits are those of `pallas_kernels.choice`, asked before there is an array.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxcoll.fused import MOST_WAVES
from jaxcoll.hand_over import PlanError
from jaxcoll.plan_exchange import Exchange
from jaxcoll.settings import Settings
from jaxcoll.split import chunk_rows
from jaxcoll.topology import Topology, TopologyError
from pallas_kernels.choice import Device, Kernels, unsupported_device, unsupported_shape


@dataclasses.dataclass(frozen=True)
class RowShape:
    """A token's row, as the kernels' limits and an exchange's bytes see it: D channels of a type, K experts."""

    width: int
    dtype: str
    fanout: int

    @property
    def bytes(self) -> int:
        """Of one row as the model computes it."""
        return self.width * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class KernelPlan:
    """What runs on a rank's own rows before and after an exchange.

    Attributes:
        path: "pallas" or "xla"; None where the plan was not told what a row is: tracing decides, by the same rule.
        reason: why.
        interpret: the Pallas kernels are interpreted.
        obstacle: why Pallas is impossible here, None if it is not.
    """

    path: Kernels | None
    reason: str
    interpret: bool = False
    obstacle: str | None = None

    def record(self) -> dict[str, Any]:
        """For JSON, in the form of `plan.plan_records`."""
        impossible = {"pallas": self.obstacle} if self.obstacle else {}
        others = [name for name in ("pallas", "xla") if name != self.path and name not in impossible]
        not_chosen = dict.fromkeys(others, self.reason) if self.path else {}
        told = {"name": "kernels", "path": self.path, "interpret": self.interpret, "reason": self.reason}
        return {**told, "not_chosen": not_chosen, "impossible": impossible}


_GATHER = "the gather backend packs no rows and adds none up: only an all_to_all has kernels"
NO_KERNELS = KernelPlan("xla", _GATHER, obstacle=_GATHER)


def plan_kernels(
    settings: Settings, topology: Topology, exchange: Exchange, rows: int, row: RowShape | None
) -> KernelPlan:
    """Chooses for an all-to-all of `rows` rows per replica.

    Raises:
        PlanError: Pallas was asked for by name and is impossible here, with the reason.
    """
    named = settings.kernels == "pallas"
    if not named and not _has_devices(topology):
        return KernelPlan(None, "which devices will run it was not told")
    interpret = named and settings.pallas_interpret
    obstacle = _obstacle(topology, exchange, rows, row, interpret=interpret)
    if named and obstacle:
        raise PlanError(f"kernels pallas is impossible here because {obstacle}")
    if settings.kernels != "auto":
        reason = f"it was asked for by name{', to be interpreted' if interpret else ''}"
        return KernelPlan(settings.kernels, reason, interpret, obstacle)
    if obstacle:
        return KernelPlan("xla", f"Pallas is impossible: {obstacle}", obstacle=obstacle)
    if row is None:
        return KernelPlan(None, "the device runs Pallas, and what a row is was not told")
    return KernelPlan("pallas", f"{_device(topology).kind} runs it, and {row.width} channels of {row.dtype} fit")


def _has_devices(topology: Topology) -> bool:
    """Whether the mesh is of devices; a job that is only planned has numbers for them, or more than are here."""
    try:
        return hasattr(topology.mesh.devices.flat[0], "platform")
    except TopologyError:
        return False


def _device(topology: Topology) -> Device:
    return Device.of(topology.mesh.devices.flat[0])


def _obstacle(
    topology: Topology, exchange: Exchange, rows: int, row: RowShape | None, *, interpret: bool
) -> str | None:
    if interpret and topology.world > 1:
        return f"interpreted kernels run on one device only, and this mesh has {topology.world}"
    if obstacle := unsupported_device(_device(topology), interpret=interpret):
        return obstacle
    if row is None:
        return None
    elements = _most_rows(topology, exchange, rows, row.fanout) * row.width
    return unsupported_shape(row.width, row.dtype, row.fanout, elements)


def _most_rows(topology: Topology, exchange: Exchange, rows: int, fanout: int) -> int:
    """At most how many rows the largest array of a kernel has: copies in packed order (level.Level.capacities).

    Results of all waves come home before they are added up, so those of the first level count once per wave.
    """
    own = chunk_rows(rows, topology.attn_tp) * topology.moe_tp
    hosts = topology.size(exchange.hosts)
    ranks = topology.world // topology.moe_tp // hosts
    copies = own * hosts * (min(fanout, ranks) if exchange.mode == "normal" else fanout)
    first_level = copies if hosts == 1 else own * min(fanout, hosts)
    return max(copies, first_level * (MOST_WAVES if exchange.overlap == "waves" else 1))
