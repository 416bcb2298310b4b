"""How fast GPUs reach each other: link tables, and T = alpha + S/B of a collective whose group spans machines.

Bandwidths are the published peaks of one direction, so a time is what links allow, not what a program takes: nothing
here was measured. Bytes come from cost.py and exchange_cost.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Literal

import numpy as np

from jaxcoll.cost import Transfer
from jaxcoll.targets import GpuTarget
from jaxcoll.topology import Topology

Network = Literal["connectx7", "connectx8"]
Inside = Literal["nvlink", "pcie"]

# Seconds that starting a collective costs, and each of its log2(members) steps: NCCL's own cost model (src/graph/
# tuning.cc, protocol LL), measured by NVIDIA on its machines.
START_SECONDS = 6.6e-6


@dataclasses.dataclass(frozen=True)
class Link:
    """One kind of link.

    Attributes:
        bandwidth: bytes per second that a GPU sends over it, one direction.
        step_seconds: latency of one step over it.
        source: where the numbers are published.
    """

    name: str
    bandwidth: float
    step_seconds: float
    source: str


NVLINK_4 = Link("NVLink 4", 450e9, 0.6e-6, "NVIDIA H100 and H200 datasheets: 900 GB/s, both directions together")
NVLINK_5 = Link("NVLink 5", 900e9, 0.6e-6, "NVIDIA DGX B200 user guide: 14.4 TB/s for 8 GPUs, both directions together")
CONNECTX_7 = Link("ConnectX-7", 50e9, 5.0e-6, "NVIDIA DGX H100 and B200 user guides: 8 cards of 400 Gb/s")
CONNECTX_8 = Link("ConnectX-8", 100e9, 5.0e-6, "NVIDIA ConnectX-8 SuperNIC datasheet: 800 Gb/s")
PCIE_5 = Link("PCIe 5 x16", 64e9, 1.0e-6, "PCI-SIG: 32 GT/s on 16 lanes, one direction")
PCIE_6 = Link("PCIe 6 x16", 128e9, 1.0e-6, "PCI-SIG: 64 GT/s on 16 lanes, one direction")


@dataclasses.dataclass(frozen=True)
class Machines:
    """Equal machines of GPUs.

    Attributes:
        gpus_per_host: consecutive ranks of the world share a machine.
        inside: link between GPUs of one machine.
        between: link of one GPU to other machines; every GPU has its own network card.
    """

    gpus_per_host: int
    inside: Link
    between: Link


def machines(
    target: GpuTarget, gpus_per_host: int = 8, *, network: Network = "connectx7", inside: Inside = "nvlink"
) -> Machines:
    """Machines as they are sold with these GPUs: NVLink 4 for h100 and h200, NVLink 5 for b200.

    A network card is behind PCIe: ConnectX-7 behind generation 5, ConnectX-8 behind generation 6.

    Raises:
        KeyError: an unknown network.
    """
    card, bus = {"connectx7": (CONNECTX_7, PCIE_5), "connectx8": (CONNECTX_8, PCIE_6)}[network]
    between = dataclasses.replace(card, bandwidth=min(card.bandwidth, bus.bandwidth))
    nvlink = NVLINK_5 if target == "b200" else NVLINK_4
    return Machines(gpus_per_host, nvlink if inside == "nvlink" else PCIE_5, between)


@dataclasses.dataclass(frozen=True)
class LinkSeconds:
    """What one collective takes.

    Attributes:
        start: starting it and its steps' latencies (alpha).
        inside, between: its bytes over the links of a machine and between machines (S/B).
        total: of a hierarchical collective all three, phase after phase; of an all-to-all, whose messages are
            independent, start and the slower of both links.
    """

    start: float
    inside: float
    between: float
    total: float


def collective_seconds(transfer: Transfer, topology: Topology, fleet: Machines, imbalance: float = 1.0) -> LinkSeconds:
    """T = alpha + S/B of one collective.

    Reductions and gathers run in two phases, inside machines and then between equal places of them: of the W bytes that
    a ring would send per device, which are proportional to (n-1)/n, the inner phase sends those of a ring of g members,
    the outer one those of a ring of h on a g-th of the data. All-to-alls send to every member alike.

    Args:
        transfer: its bytes are those that are sent, `wire_bytes_from_counts`.
        topology: places the group's members on machines.
        fleet: the machines.
        imbalance: how many times the mean the busiest rank sends in an exchange by experts.
    """
    hosts, gpus = spans(transfer, topology, fleet.gpus_per_host)
    start = START_SECONDS + math.ceil(math.log2(gpus)) * fleet.inside.step_seconds
    start += math.ceil(math.log2(hosts)) * fleet.between.step_seconds
    members, sent = transfer.group_size, transfer.wire_bytes_from_counts
    full = sent * members / (members - 1)
    if transfer.kind in ("all_to_all", "ragged_all_to_all", "collective_permute"):
        inside = imbalance * full * (gpus - 1) / members / fleet.inside.bandwidth
        between = imbalance * full * (members - gpus) / members / fleet.between.bandwidth
        return LinkSeconds(start, inside, between, start + max(inside, between))
    inside = full * (gpus - 1) / gpus / fleet.inside.bandwidth
    between = full * (hosts - 1) / hosts / gpus / fleet.between.bandwidth
    return LinkSeconds(start, inside, between, start + inside + between)


def spans(transfer: Transfer, topology: Topology, gpus_per_host: int) -> tuple[int, int]:
    """Machines that the widest of a transfer's groups spans, and its members on the fullest of them."""
    axes = topology.axes
    chosen = [i for i, axis in enumerate(axes) if axis in transfer.group.split(",")]
    ranks = np.arange(topology.world).reshape(tuple(axes.values()))
    group = ranks.transpose([i for i in range(len(axes)) if i not in chosen] + chosen).reshape(-1, transfer.group_size)
    machine = np.sort(group // gpus_per_host, axis=1)
    widest = np.count_nonzero(np.diff(machine, axis=1), axis=1).argmax()  # every collective waits for it
    _, members = np.unique(machine[widest], return_counts=True)
    return len(members), int(members.max())


def total_seconds(
    transfers: Iterable[Transfer], topology: Topology, fleet: Machines, imbalance: float = 1.0
) -> LinkSeconds:
    """Sums over collectives, one after another.

    Args:
        imbalance: applies to exchanges by experts: dispatch and combine of an all-to-all.
    """
    found = [
        collective_seconds(t, topology, fleet, imbalance if t.kind.endswith("all_to_all") else 1.0) for t in transfers
    ]
    return LinkSeconds(
        *(float(sum(getattr(f, field.name) for f in found)) for field in dataclasses.fields(LinkSeconds))
    )
