"""What the processes tell each other before a step: how many rows each replica brings, so that all run one program.

It is the count exchange of communication semantics, section 7, as one all_gather of a few integers on the devices'
own transport. Where every process knows all rows anyway, nobody needs it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxcoll.coordination import DisagreementError
from jaxcoll.host_arrays import Fetcher, place
from jaxcoll.topology import Topology

_FIELDS = 3  # rows, extends, number of the step


@dataclasses.dataclass(frozen=True)
class StepMetadata:
    """The same in every process.

    Attributes:
        counts: rows per replica.
        extend_in_batch: whether some replica extends (prefills).
        number: of the step, as counted by the exchange.
    """

    counts: tuple[int, ...]
    extend_in_batch: bool
    number: int

    @property
    def everyone_is_idle(self) -> bool:
        """Nobody runs; otherwise the idle replicas take part in every collective."""
        return not any(self.counts)


class StepExchange:
    """Gathers the replicas' counts; every process calls it once per step, its replicas idle or not."""

    def __init__(self, topology: Topology):
        self.topology = topology
        self.own, self._own_ranks = own_replicas(topology), own_ranks(topology)
        self._fetch = Fetcher(topology)
        self._number = 0

    def __call__(self, counts: Mapping[int, int], *, extends: bool = False) -> StepMetadata:
        """Tells the others what this process's replicas bring, and hears what theirs do.

        Args:
            counts: rows of own replicas; one left out is idle. Processes that share a replica must say the same of it.
            extends: whether they extend.

        Raises:
            ValueError: a replica that is not this process's, or a negative count.
            DisagreementError: a process has come to another step than the others, or says something else of a replica
                that it shares.
            PeerTimeout: a process is lost.
        """
        strange = [r for r, count in counts.items() if r not in self.own or count < 0]
        if strange:
            raise ValueError(f"replica {strange[0]} has {counts[strange[0]]} rows; this process's are {list(self.own)}")
        self._number += 1
        replica_of = np.array([self.topology.attention_ranks(rank)[0] for rank in range(self.topology.world)])
        told = np.zeros((self.topology.world, _FIELDS), np.int32)  # by rank: a replica may live in several processes
        for rank in self._own_ranks:
            told[rank] = counts.get(replica_of[rank], 0), extends, self._number
        if len(self._own_ranks) < self.topology.world:
            [shared] = place([told], [self.topology.sharding(P(self.topology.group("world")))])
            told = self._fetch(shared)
        if (told[:, 2] != self._number).any():
            raise DisagreementError(f"the processes are not at the same step: {self._said(told[:, 2], 'at step {}')}")
        first = told[np.searchsorted(replica_of, np.arange(self.topology.attn_dp))]  # replicas lie in rank order
        differing = np.flatnonzero(told[:, 0] != first[replica_of, 0])
        if differing.size:
            replica = replica_of[differing[0]]
            said = self._said(np.where(replica_of == replica, told[:, 0], -1), "with {} rows")
            raise DisagreementError(f"the processes that share replica {replica} bring different rows: {said}")
        return StepMetadata(tuple(first[:, 0].tolist()), bool(told[:, 1].any()), self._number)

    @property
    def _processes(self) -> list[int]:
        """By rank."""
        return [device.process_index for device in self.topology.mesh.devices.flat]

    def _said(self, values: np.ndarray, what: str) -> str:
        """Who says what, by process; -1 is no word."""
        pairs = zip(self._processes, values.tolist(), strict=True)
        said = {(process, value) for process, value in pairs if value >= 0}
        return ", ".join(f"process {process} {what.format(value)}" for process, value in sorted(said))


def own_replicas(topology: Topology) -> tuple[int, ...]:
    """The attn_dp ranks that have a device in this process; all of them where there is one process."""
    return tuple(dict.fromkeys(topology.attention_ranks(rank)[0] for rank in own_ranks(topology)))


def own_ranks(topology: Topology) -> tuple[int, ...]:
    """The ranks of this process's devices."""
    mine = jax.process_index()
    return tuple(r for r, device in enumerate(topology.mesh.devices.flat) if device.process_index == mine)


def own_rows(array: jax.Array, rows: int) -> dict[int, np.ndarray]:
    """The parts [rows, ...] of a [attn_dp * rows, ...] array that this process's devices hold, by replica."""
    parts = {}
    for shard in array.addressable_shards:
        start = shard.index[0].start or 0
        held = np.asarray(shard.data)
        parts |= {start // rows + i: held[i * rows : (i + 1) * rows] for i in range(len(held) // rows)}
    return parts
