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
        self.own = own_replicas(topology)
        self._fetch = Fetcher(topology)
        self._number = 0

    def __call__(self, counts: Mapping[int, int], *, extends: bool = False) -> StepMetadata:
        """Tells the others what this process's replicas bring, and hears what theirs do.

        Args:
            counts: rows of own replicas; one left out is idle.
            extends: whether they extend.

        Raises:
            ValueError: a replica that is not this process's, or a negative count.
            DisagreementError: a process has come to another step than the others.
            PeerTimeout: a process is lost.
        """
        strange = [r for r, count in counts.items() if r not in self.own or count < 0]
        if strange:
            raise ValueError(f"replica {strange[0]} has {counts[strange[0]]} rows; this process's are {list(self.own)}")
        self._number += 1
        told = np.zeros((self.topology.attn_dp, _FIELDS), np.int32)
        for replica in self.own:
            told[replica] = counts.get(replica, 0), extends, self._number
        if len(self.own) < self.topology.attn_dp:
            [shared] = place([told], [self.topology.sharding(P(self.topology.group("attn_dp")))])
            told = self._fetch(shared)
        if (told[:, 2] != self._number).any():
            numbers = ", ".join(f"replica {r} at step {n}" for r, n in enumerate(told[:, 2].tolist()))
            raise DisagreementError(f"the processes are not at the same step: {numbers}")
        return StepMetadata(tuple(told[:, 0].tolist()), bool(told[:, 1].any()), self._number)


def own_replicas(topology: Topology) -> tuple[int, ...]:
    """The attn_dp ranks that have a device in this process; all of them where there is one process."""
    mine = jax.process_index()
    ranks = (r for r, device in enumerate(topology.mesh.devices.flat) if device.process_index == mine)
    return tuple(dict.fromkeys(topology.attention_ranks(rank)[0] for rank in ranks))


def own_rows(array: jax.Array, rows: int) -> dict[int, np.ndarray]:
    """The parts [rows, ...] of a [attn_dp * rows, ...] array that this process's devices hold, by replica."""
    parts = {}
    for shard in array.addressable_shards:
        start = shard.index[0].start or 0
        held = np.asarray(shard.data)
        parts |= {start // rows + i: held[i * rows : (i + 1) * rows] for i in range(len(held) // rows)}
    return parts
