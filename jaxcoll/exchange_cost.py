"""What an all-to-all plan's rows communicate, in exact bytes, before anything is compiled: dispatch, combine, join.

Shapes cost what a compiled program shows: the dense transport both of its branches, of which one runs, the ragged one
its proven bound. What really travels is the routing's to say; `wire_bytes_from_counts` is its mean for even routing.
Source: dispatch.py, level.py and exchange.py, whose shapes this follows.
"""

from __future__ import annotations

import math

from jaxcoll.cost import Transfer, transfer
from jaxcoll.dispatch import DispatchSpec
from jaxcoll.fused import wave_cuts, wave_spec
from jaxcoll.kernels import RowShape
from jaxcoll.level import Level
from jaxcoll.plan import LayerPlan
from jaxcoll.ragged import Transport, transport_for
from jaxcoll.split import chunk_rows
from jaxcoll.topology import Topology
from jaxcoll.wire import resolve, row_bytes

_INT = 4  # bytes of a count, an expert id, a weight, a scale


def exchange_transfers(
    topology: Topology,
    plan: LayerPlan,
    row: RowShape,
    experts: int,
    *,
    transport: Transport | None = None,
) -> list[Transfer]:
    """What one layer of an all-to-all plan communicates for its experts.

    Args:
        plan: its `exchange` says how rows travel, its rows the static shapes; counts are of real rows.
        row, experts: of the model; with copies of experts the physical ones.
        transport: None is what the topology's devices take.

    Raises:
        ValueError: the plan gathers rows, or a wire format that does not fit the width.
    """
    if plan.exchange is None:
        raise ValueError("this plan gathers rows: cost.py prices them")
    own = chunk_rows(plan.one_batch().rows.rows, topology.attn_tp)
    real = sum(plan.rows.counts) / topology.world / own / plan.batches  # of a rank's rows, on average
    moe_tp, attn_tp = topology.group("moe_tp"), topology.group("attn_tp")
    there, home = row_bytes(resolve(plan.exchange.wire, row.dtype, row.width), row.width)
    moved = []
    for levels in _waves(topology, plan, experts, transport):
        rows, senders, back = own * topology.moe_tp, 1, []
        for level in levels:
            each = rows * real * copies_per_row(level, row.fanout, senders)  # copies that a rank sends on average
            moved += _out(level, topology, row, rows * senders, each, there)
            back = _sent(level, topology, row, rows * senders, each, home, "combine", True) + back
            senders *= level.ranks
        moved += back
    shared = 2 * row.fanout * _INT  # ids and weights go with the rows
    spread = own * (row.bytes + shared)
    before = transfer("all_gather", moe_tp, topology, spread, spread * topology.moe_tp, "dispatch")
    whole, part = own * topology.moe_tp * row.bytes, own * row.bytes
    after = transfer("reduce_scatter", moe_tp, topology, whole, part, "combine")
    join = transfer("all_gather", attn_tp, topology, part, part * topology.attn_tp, "join")
    return plan.batches * (before + moved + after + join)


def _waves(topology: Topology, plan: LayerPlan, experts: int, transport: Transport | None) -> list[tuple[Level, ...]]:
    """The levels of every wave of experts; one where it is not fused."""
    assert plan.exchange is not None
    local = experts * topology.moe_tp // topology.world
    spec = DispatchSpec(
        experts,
        topology.group("moe_ep"),
        hosts=plan.exchange.hosts,
        mode=plan.exchange.mode,
        transport=transport or transport_for(topology),
    )
    cuts = wave_cuts(local, None if plan.backend == "fused" else 1)
    return [wave_spec(spec, local, size).levels(topology.size) for _, size in cuts]


def _out(level: Level, topology: Topology, row: RowShape, rows: int, copies: float, encoded: int) -> list[Transfer]:
    """Counts, then rows: values and, beside them as integers, ids and weights in normal mode and fp8 scales."""
    counts = (level.ranks if level.mode == "normal" else level.ranks * level.experts) * _INT
    agreed = transfer("all_gather", level.group, topology, counts, counts * level.ranks, "counts")
    beside = 2 * row.fanout * _INT if level.mode == "normal" else 0
    return agreed + _sent(level, topology, row, rows, copies, encoded + beside, "dispatch", False)


def _sent(
    level: Level,
    topology: Topology,
    row: RowShape,
    rows: int,
    copies: float,
    each: int,
    purpose: str,
    home: bool,
) -> list[Transfer]:
    """Rows of `each` bytes to their experts' ranks, or home."""
    room = level.capacities(rows, row.fanout)
    slabs = 1 if level.mode == "normal" else level.experts
    if level.transport == "dense":
        blocks = sorted({room.small_pair, room.pair})
        sizes = [level.ranks * block * each for block in blocks]
        names = [purpose] if len(blocks) == 1 else [f"{purpose} (small blocks)", f"{purpose} (full blocks)"]
        found = (transfer("all_to_all", level.group, topology, s, s, n) for s, n in zip(sizes, names, strict=True))
        return [t for branch in found for t in branch]
    operand, result = room.send * each, slabs * room.slab * each
    if home:
        operand, result = result, operand
    return transfer("ragged_all_to_all", level.group, topology, operand, result, purpose, round(copies * each))


def copies_per_row(level: Level, choices: int, senders: int = 1) -> float:
    """Copies that a row's K distinct experts cause, the row's own rank included, if every choice is as likely.

    One per expert in low latency; in normal mode one per rank: R * (1 - chance that none of its L experts is chosen).

    Args:
        senders: ranks of the levels before this one, which pass on what they got: R is then all ranks that a row can
            reach, and copies are counted per row of its first sender.
    """
    if level.mode == "low_latency":
        return choices * level.share
    ranks = level.ranks * senders
    total = round(ranks * level.experts / level.share)
    missed = math.comb(total - level.experts, choices) / math.comb(total, choices)
    return ranks * (1 - missed)
