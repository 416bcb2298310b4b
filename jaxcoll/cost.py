"""What a plan's paths communicate, in exact bytes, before anything is compiled; no time yet.

Transports that send real rows only cost what the counts say; the dense ones cost their padded shapes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jaxcoll.hlo import Kind, Totals, wire_bytes
from jaxcoll.plan import LayerPlan
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
    """

    kind: Kind
    group: str
    group_size: int
    operand_bytes: int
    result_bytes: int
    purpose: str

    @property
    def wire_bytes(self) -> float:
        return wire_bytes(self.kind, self.group_size, self.operand_bytes, self.result_bytes)


def transfer(kind: Kind, group: Group, topology: Topology, operand: int, result: int, purpose: str) -> list[Transfer]:
    """One collective over `group`, or none where the group has one member."""
    members = topology.size(group)
    if members == 1:
        return []
    name = ",".join(a for a in topology.axes if a in group and topology.axes[a] > 1)
    return [Transfer(kind, name, members, operand, result, purpose)]


def gather_transfers(topology: Topology, plan: LayerPlan, row_bytes: int, purpose: str = "gather") -> list[Transfer]:
    """What moving M rows of `row_bytes` from every replica to all ranks costs, dense transport.

    The rows of a replica are copies on its ranks (communication semantics, section 3, "replicate").
    """
    m, g = plan.rows.rows * row_bytes, plan.rows.total * row_bytes
    if plan.gather == "none":
        return []
    if plan.gather == "max_len":
        chunk = m // topology.attn_tp
        return transfer("all_gather", topology.group("world"), topology, chunk, g, purpose)
    if plan.gather == "sum_len":
        return transfer("all_reduce", topology.group("world"), topology, g, g, purpose)
    return transfer("all_gather", topology.group("attn_dp"), topology, m, m * topology.attn_dp, purpose)


def combine_transfers(topology: Topology, plan: LayerPlan, row_bytes: int, purpose: str = "combine") -> list[Transfer]:
    """What adding up G rows of `row_bytes` and bringing own rows home costs, dense transport."""
    world, m, g = topology.group("world"), plan.rows.rows * row_bytes, plan.rows.total * row_bytes
    if plan.combine == "all_reduce":
        return transfer("all_reduce", world, topology, g, g, purpose)
    if plan.combine == "reduce_scatter_v":
        return transfer("reduce_scatter", world, topology, m * topology.world, m, purpose)
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
    sums: dict[tuple[Kind, str], Totals] = {}
    for t in transfers:
        old = sums.get((t.kind, t.group), Totals(0, 0, 0, 0.0))
        sums[t.kind, t.group] = Totals(
            old.count + 1,
            old.operand_bytes + t.operand_bytes,
            old.result_bytes + t.result_bytes,
            old.wire_bytes + t.wire_bytes,
        )
    return sums
