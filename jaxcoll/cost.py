"""What a plan's paths communicate, in exact bytes, before anything is compiled; no time yet.

Shapes cost what a compiled program shows (the dense transport padded blocks, the ragged one its capacity). What the
ragged transport really sends follows from the counts and has its own name, `wire_bytes_from_counts`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jaxcoll.hlo import Kind, Totals, wire_bytes
from jaxcoll.plan import LayerPlan
from jaxcoll.ragged import Transport, transport_for
from jaxcoll.topology import Group, Topology


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One collective as its shapes make it.

    Attributes:
        kind, group: as in `hlo.Collective`: mesh axes with more than one member, joined by commas.
        group_size: members of the group.
        operand_bytes, result_bytes: per device.
        wire_bytes: ring equivalent per device.
        purpose: the hand-over that needs it.
        counted_bytes: the group's real rows, where only these are sent; None where the shapes are sent.
    """

    kind: Kind
    group: str
    group_size: int
    operand_bytes: int
    result_bytes: int
    purpose: str
    counted_bytes: int | None = None

    @property
    def wire_bytes(self) -> float:
        return wire_bytes(self.kind, self.group_size, self.operand_bytes, self.result_bytes)

    @property
    def wire_bytes_from_counts(self) -> float:
        """Bytes that a device sends in this step, the mean over the group; `wire_bytes` where shapes are sent."""
        if self.counted_bytes is None:
            return self.wire_bytes
        return self.counted_bytes * (self.group_size - 1) / self.group_size


def transfer(
    kind: Kind,
    group: Group,
    topology: Topology,
    operand: int,
    result: int,
    purpose: str,
    counted: int | None = None,
) -> list[Transfer]:
    """One collective over `group`, or none where the group has one member."""
    members = topology.size(group)
    if members == 1:
        return []
    name = ",".join(a for a in topology.axes if a in group and topology.axes[a] > 1)
    return [Transfer(kind, name, members, operand, result, purpose, counted)]


def gather_transfers(
    topology: Topology,
    plan: LayerPlan,
    row_bytes: int,
    purpose: str = "gather",
    *,
    transport: Transport | None = None,
) -> list[Transfer]:
    """What moving M rows of `row_bytes` from every replica to all ranks costs.

    The rows of a replica are copies on its ranks (communication semantics, section 3, "replicate").

    Args:
        transport: of gather_v; None is what the topology's devices take.
    """
    m, g = plan.rows.rows * row_bytes, plan.rows.total * row_bytes
    if plan.gather == "none":
        return []
    if plan.gather == "max_len":
        chunk = m // topology.attn_tp
        return transfer("all_gather", topology.group("world"), topology, chunk, g, purpose)
    if plan.gather == "sum_len":
        return transfer("all_reduce", topology.group("world"), topology, g, g, purpose)
    replicas = topology.group("attn_dp")
    if (transport or transport_for(topology)) == "dense":
        return transfer("all_gather", replicas, topology, m, m * topology.attn_dp, purpose)
    return transfer("ragged_all_to_all", replicas, topology, m, g, purpose, sum(plan.rows.counts) * row_bytes)


def combine_transfers(
    topology: Topology,
    plan: LayerPlan,
    row_bytes: int,
    purpose: str = "combine",
    *,
    transport: Transport | None = None,
) -> list[Transfer]:
    """What adding up G rows of `row_bytes` and bringing own rows home costs.

    Args:
        transport: of reduce_scatter_v; None is what the topology's devices take.

    Raises:
        ValueError: the plan's rows travel by all_to_all, which is not priced here.
    """
    if plan.combine == "all_to_all":
        raise ValueError("this plan's rows travel by all_to_all: cost.py prices gathered rows only")
    world, m, g = topology.group("world"), plan.rows.rows * row_bytes, plan.rows.total * row_bytes
    if plan.combine == "all_reduce":
        return transfer("all_reduce", world, topology, g, g, purpose)
    if plan.combine == "reduce_scatter_v":
        blocks = m * topology.world
        if (transport or transport_for(topology)) == "dense":
            return transfer("reduce_scatter", world, topology, blocks, m, purpose)
        return transfer("ragged_all_to_all", world, topology, g, blocks, purpose, sum(plan.rows.counts) * row_bytes)
    chunk = g // topology.world
    scatter = transfer("reduce_scatter", world, topology, g, chunk, purpose)
    return scatter + transfer("all_gather", topology.group("attn_tp"), topology, chunk, m, purpose)


def head_transfers(
    topology: Topology, plan: LayerPlan, row_bytes: int, vocabulary_bytes: int, purpose: str = "head"
) -> list[Transfer]:
    """What the head costs for M rows per replica.

    Args:
        row_bytes: one hidden row.
        vocabulary_bytes: one row of logits with the padded vocabulary.
    """
    rows, group = plan.rows.rows, topology.group(plan.head)
    if plan.head == "attn_tp":
        logits = rows * vocabulary_bytes
        return transfer("all_gather", group, topology, logits // topology.attn_tp, logits, purpose)
    everyone = topology.attn_dp * rows
    moved = transfer("all_reduce", group, topology, everyone * row_bytes, everyone * row_bytes, purpose)
    logits = everyone * vocabulary_bytes
    return moved + transfer("all_gather", group, topology, logits // topology.world, logits, purpose)


def attention_transfers(topology: Topology, plan: LayerPlan, row_bytes: int) -> list[Transfer]:
    """wo_b's one reduction over attn_tp (communication semantics, section 2)."""
    own = plan.rows.rows * row_bytes
    return transfer("all_reduce", topology.group("attn_tp"), topology, own, own, "attention")


def totals(transfers: Iterable[Transfer]) -> dict[tuple[Kind, str], Totals]:
    """Sums per (kind, group), to be compared with `hlo.totals` of a compiled program."""
    result = {}
    for (kind, group), members in _per_kind_and_group(transfers).items():
        operands, results = sum(t.operand_bytes for t in members), sum(t.result_bytes for t in members)
        wire = wire_bytes(kind, members[0].group_size, operands, results)
        result[kind, group] = Totals(len(members), operands, results, wire)
    return result


def totals_from_counts(transfers: Iterable[Transfer]) -> dict[tuple[Kind, str], float]:
    """Sums of `wire_bytes_from_counts` per (kind, group); no compiled program shows them."""
    groups = _per_kind_and_group(transfers).items()
    return {key: sum(t.wire_bytes_from_counts for t in members) for key, members in groups}


def _per_kind_and_group(transfers: Iterable[Transfer]) -> dict[tuple[Kind, str], list[Transfer]]:
    found: dict[tuple[Kind, str], list[Transfer]] = {}
    for t in transfers:
        found.setdefault((t.kind, t.group), []).append(t)
    return found
