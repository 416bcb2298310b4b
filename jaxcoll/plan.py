"""Which path each hand-over of a layer takes, why, why not another, and who reduces: exactly one.

Rules follow communication semantics, sections 2-4 and 8. A named choice overrides rules; only what is impossible is
refused. A plan is made of sizes and counts that every rank holds alike; it runs nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, get_args

from jaxcoll.combine import Way, combine_impossible
from jaxcoll.gather import gather_impossible
from jaxcoll.hand_over import Alternative, HandOver, PlanError
from jaxcoll.html import table_html
from jaxcoll.kernels import NO_KERNELS, KernelPlan, RowShape, plan_kernels
from jaxcoll.plan_exchange import Exchange, choose_exchange, refuse_exchange
from jaxcoll.routing import check_numbered
from jaxcoll.rows import GatherMode, RowPlan, StepFacts, plan_rows, whole_counts
from jaxcoll.settings import Settings
from jaxcoll.topology import Topology
from jaxcoll.whole import whole_number

Gather = GatherMode | Literal["none"]
SharedExpert = Literal["sharded", "replicated", "replicated_local"]
Head = Literal["attn_tp", "world"]
Backend = Literal["gather", "all_to_all", "fused"]


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """How every MoE layer of a step moves its rows, and its head.

    Attributes:
        gather, combine, shared_expert, head: the chosen paths; an all-to-all needs no gather, and brings complete
            rows home.
        backend: what brings rows to the experts; `exchange` says how an all-to-all does.
        rows: where every replica's rows lie; its bucket gives the static shapes.
        mask_dp_pad: padding rows are no expert's.
        hand_overs: all of them, explained.
        kernels: what packs an all-to-all's rows, explained.
    """

    gather: Gather
    combine: Way | Literal["all_to_all"]
    shared_expert: SharedExpert
    head: Head
    rows: RowPlan
    mask_dp_pad: bool
    hand_overs: tuple[HandOver, ...]
    exchange: Exchange | None = None
    kernels: KernelPlan = NO_KERNELS

    @property
    def backend(self) -> Backend:
        if self.exchange is None:
            return "gather"
        return "fused" if self.exchange.overlap == "waves" else "all_to_all"

    @property
    def mode(self) -> GatherMode:
        """How the rows of all replicas lie: with one replica there is one slot, which max_len describes."""
        return _mode(self.gather)

    @property
    def by_count(self) -> bool:
        """Whether rows travel by their counts, where the transport can: padding stays behind."""
        return self.exchange is not None or self.gather == "gather_v" or self.combine == "reduce_scatter_v"

    @property
    def batches(self) -> int:
        """Parts in which a replica's rows pass a layer."""
        return 2 if self.exchange and self.exchange.overlap == "two_batch" else 1

    def one_batch(self) -> LayerPlan:
        """The plan of one of them: its rows are this step's over `batches`, rounded up."""
        rows = -(-self.rows.rows // self.batches)
        return dataclasses.replace(self, rows=dataclasses.replace(self.rows, rows=rows))

    @property
    def program(self) -> tuple:
        """What decides the compiled program; counts are its data."""
        paths = self.gather, self.combine, self.shared_expert, self.head, self.exchange
        return *paths, self.kernels.path, self.kernels.interpret, self.rows.bucket, self.mask_dp_pad

    def _repr_html_(self) -> str:
        """How Jupyter shows a plan."""
        header = "hand-over", "path", "states before", "after", "collectives", "because", "others"
        rows = [
            (
                h.name,
                h.path,
                h.before,
                h.after,
                ", ".join(f"{verb}({group})" for verb, group in h.collectives) or "nothing is sent",
                h.reason,
                "; ".join(map(str, h.others)) or "-",
            )
            for h in self.hand_overs
        ]
        return table_html("The plan of every layer; states over (attn_dp, attn_tp)", header, rows)

    def reducers(self) -> list[str]:
        """Hand-overs that complete the experts' partial sum; a right plan has exactly one."""
        return [h.name for h in self.hand_overs if h.reduces and h.name != "attention"]


def _mode(gather: Gather) -> GatherMode:
    return "max_len" if gather == "none" else gather


def plan_layer(
    topology: Topology,
    counts: Sequence[int],
    settings: Settings | None = None,
    *,
    shared_width: int,
    facts: StepFacts | None = None,
    room: Sequence[int] | None = None,
    row: RowShape | None = None,
) -> LayerPlan:
    """Chooses the paths of one step.

    Args:
        counts: real rows per replica, at least one in all.
        settings: what the user asked for; None is all defaults.
        shared_width: intermediate width of the shared expert; where the world does not divide it, it stays whole.
        facts: what else the padding rule reads.
        room: rows per replica to choose paths and shapes for, each at least its count; a batch that shrinks keeps its
            program by keeping its room. None is the counts.
        row: what an all-to-all's wire format and kernels must know of a row; None leaves that to tracing.

    Raises:
        PlanError: a named path is impossible here, or no replica holds a row.
        ValueError: not one whole count per replica, a count beyond its room, rows that 32 bits cannot number, or no
            whole width.
    """
    settings = settings or Settings()
    counts, roomy = _checked_room(topology, counts, room)
    shared_width = whole_number("shared_width", shared_width)
    if settings.backend != "gather":
        return _plan_all_to_all(topology, counts, roomy, settings, shared_width, row)
    return _plan_gather(topology, counts, roomy, settings, shared_width, facts)


def _plan_gather(
    topology: Topology,
    counts: Sequence[int],
    roomy: Sequence[int],
    settings: Settings,
    shared_width: int,
    facts: StepFacts | None,
) -> LayerPlan:
    """Every rank sees every row, and partial sums go home (communication semantics, sections 2-4)."""
    refuse_exchange(settings)
    ruled = plan_rows(roomy, topology.attn_tp, facts=facts, bucketed=True)
    gather, why_gather = _choose_gather(topology, ruled, settings, elastic=facts is not None and facts.elastic)
    combine, why_combine = _choose_combine(topology, settings, gather)
    shared, why_shared = choose_shared_expert(topology, settings, shared_width)
    rows = _rows_in_room(topology, counts, roomy, gather, why_gather)
    hand_overs = (
        _attention(topology),
        _gather_hand_over(topology, gather, why_gather, settings),
        _combine_hand_over(topology, combine, gather, why_combine, settings),
        _shared_hand_over(topology, shared, why_shared, shared_width),
        _head(topology, settings.head),
    )
    return LayerPlan(gather, combine, shared, settings.head, rows, settings.mask_dp_pad, hand_overs)


def _plan_all_to_all(
    topology: Topology,
    counts: Sequence[int],
    room: Sequence[int],
    settings: Settings,
    shared_width: int,
    row: RowShape | None,
) -> LayerPlan:
    """Each row goes to its experts' ranks and home again, where it is added up (communication semantics, section 5)."""
    exchange, (there, back) = choose_exchange(topology, settings, row.width if row else None)
    shared, why_shared = choose_shared_expert(topology, settings, shared_width)
    hand_overs = (
        _attention(topology),
        there,
        back,
        _shared_hand_over(topology, shared, why_shared, shared_width),
        _head(topology, settings.head),
    )
    rows = _rows_in_room(topology, counts, room, "none", settings.why_backend)
    kernels, mask = plan_kernels(settings, topology, exchange, rows.rows, row), settings.mask_dp_pad
    return LayerPlan("none", "all_to_all", shared, settings.head, rows, mask, hand_overs, exchange, kernels)


def _rows_in_room(
    topology: Topology, counts: Sequence[int], room: Sequence[int], gather: Gather, reason: str
) -> RowPlan:
    """The rows of `counts` in the static shapes of `room`."""
    mode = "max_len" if gather in ("max_len", "none") else "sum_len"
    shapes = plan_rows(room, topology.attn_tp, mode=mode, bucketed=True)
    check_numbered("a step, with padding,", max(shapes.total, topology.attn_dp * shapes.rows))
    exact = plan_rows(counts, topology.attn_tp, mode=mode)
    starts = shapes.starts if mode == "max_len" else exact.starts
    return dataclasses.replace(exact, reason=reason, rows=shapes.rows, total=shapes.total, starts=starts)


def _checked_room(
    topology: Topology, counts: Sequence[int], room: Sequence[int] | None
) -> tuple[Sequence[int], Sequence[int]]:
    """The counts, and the room for them."""
    counts = whole_counts(counts)
    roomy = counts if room is None else whole_counts(room, "room")
    for name, given in (("counts", counts), ("room", roomy)):
        if len(given) != topology.attn_dp:
            raise ValueError(f"{name} {list(given)} must be one per replica: attn_dp is {topology.attn_dp}")
    if not any(counts):
        raise PlanError("no replica holds a row, so nobody runs: a plan needs at least one row")
    if any(count > space for count, space in zip(counts, roomy, strict=True)):
        raise ValueError(f"counts {list(counts)} do not fit the room {list(roomy)} planned for them")
    return counts, roomy


def _choose_gather(topology: Topology, rows: RowPlan, settings: Settings, *, elastic: bool) -> tuple[Gather, str]:
    if settings.gather != "auto":
        if why := gather_impossible(settings.gather, topology):
            raise PlanError(f"gather {settings.gather} is impossible here because {why}")
        return settings.gather, "it was asked for by name"
    if settings.combine == "reduce_scatter":
        return "max_len", "the named reduce_scatter needs equal slots"
    if topology.attn_dp == 1:
        return "none", "there is one replica, whose rows every rank holds already"
    if rows.mode == "max_len":
        return "max_len", rows.reason
    if settings.use_gatherv and topology.attn_tp == 1 and not elastic:
        return "gather_v", f"use_gatherv is on and attn_tp is 1; {rows.reason}"
    return "sum_len", rows.reason


def _choose_combine(topology: Topology, settings: Settings, gather: Gather) -> tuple[Way, str]:
    if settings.combine != "auto":
        if why := combine_impossible(settings.combine, _mode(gather), topology):
            raise PlanError(f"combine {settings.combine} is impossible here because {why}")
        return settings.combine, "it was asked for by name"
    if topology.attn_dp == 1:
        return "all_reduce", "there is one replica, which needs every row"
    if expert_parallel_rule(topology):
        return "reduce_scatter_v", "attn_tp is 1 and every replica owns its own experts (attn_dp = moe_ep > 1)"
    if gather == "gather_v" and settings.use_gatherv:
        return "reduce_scatter_v", "rows came by gather_v, and chunks by count go back the same way"
    if gather == "max_len" and topology.attn_tp == 1 and settings.reduce_scatter_allowed():
        return "reduce_scatter", "use_reduce_scatter is on, slots are equal and attn_tp is 1"
    return "all_reduce", "no rule asks for a reduce_scatter here"


def expert_parallel_rule(topology: Topology) -> bool:
    """The rule that selects reduce_scatter_v in both modes: attn_dp = world = moe_ep > 1 (section 4, EP_V)."""
    return topology.attn_dp > 1 and topology.attn_tp == 1 and topology.moe_tp == 1


def choose_shared_expert(topology: Topology, settings: Settings, width: int) -> tuple[SharedExpert, str]:
    """How the shared expert is held, and why: it decides where its weights live, so counts have no say."""
    local = settings.shared_expert_local
    if settings.backend != "gather":
        return "replicated_local", "an all_to_all leaves each rank its own rows, so each needs the whole expert"
    if width % topology.world:
        kind: SharedExpert = "replicated_local" if local else "replicated"
        return kind, f"its width {width} does not divide by the world of {topology.world}"
    if settings.shared_expert_tp1:
        return ("replicated_local" if local else "replicated"), "shared_expert_tp1 is on"
    return "sharded", f"the world of {topology.world} divides its width {width}"


def _attention(topology: Topology) -> HandOver:
    size = topology.attn_tp
    which = "the world" if size == topology.world else "between one and the world" if size > 1 else "one rank"
    collectives = (("all_reduce", "attn_tp"),) if size > 1 else ()
    reason = f"attn_tp={size} is {which}: wo_b's partial sum is completed over attn_tp and nowhere else"
    return HandOver("attention", "all_reduce", collectives, "(S, P)", "(S, R)", size > 1, reason)


def _gather_collectives(topology: Topology, path: Gather) -> tuple[tuple[str, str], ...]:
    if path == "none" or topology.world == 1:
        return ()
    return {
        "gather_v": (("all_gather_v", "attn_dp"),),  # attn_tp is 1: the same ranks as the world
        "sum_len": (("all_reduce", "world"),),
        "max_len": (("all_gather", "world"),),
    }[path]


def _gather_hand_over(topology: Topology, path: Gather, reason: str, settings: Settings) -> HandOver:
    others = []
    for other in get_args(GatherMode):
        if other == path:
            continue
        why = gather_impossible(other, topology)
        if why is None and settings.gather != "auto":
            others.append(Alternative(other, False, f"{path} was asked for by name"))
        elif why is None and other == "gather_v" and path == "sum_len" and not settings.use_gatherv:
            others.append(Alternative(other, False, f"use_gatherv is off; {reason}"))
        else:
            others.append(Alternative(other, why is not None, why or reason))
    return HandOver(
        "gather", path, _gather_collectives(topology, path), "(S, R)", "(R, R)", False, reason, tuple(others)
    )


def _combine_hand_over(topology: Topology, path: Way, gather: Gather, reason: str, settings: Settings) -> HandOver:
    others = []
    for other in get_args(Way):
        if other == path:
            continue
        why = combine_impossible(other, _mode(gather), topology)
        if why is None and settings.combine != "auto":
            others.append(Alternative(other, False, f"{path} was asked for by name"))
        elif why is None and other == "reduce_scatter" and path == "all_reduce":
            others.append(Alternative(other, False, _why_no_reduce_scatter(topology)))
        else:
            others.append(Alternative(other, why is not None, why or reason))
    collectives = ((path, "world"),) if topology.world > 1 else ()
    if path == "reduce_scatter" and topology.attn_tp > 1:
        collectives += (("all_gather", "attn_tp"),)
    return HandOver("combine", path, collectives, "(P, P)", "(S, R)", True, reason, tuple(others))


def _why_no_reduce_scatter(topology: Topology) -> str:
    if topology.attn_dp == 1:
        return "there is one replica, which needs every row"
    return "use_reduce_scatter is off" if topology.attn_tp == 1 else "the rules take it only where attn_tp is 1"


def _shared_hand_over(topology: Topology, kind: SharedExpert, reason: str, width: int) -> HandOver:
    where = {
        "sharded": "each rank adds its slice to its experts' partial sum, before the one reduction",
        "replicated": "complete on every rank, it is added to own rows after the one reduction",
        "replicated_local": "computed on own rows before the gather, it is added to them after the one reduction",
    }
    others = []
    for other in where:
        if other == kind:
            continue
        impossible = other == "sharded" and bool(width % topology.world)
        others.append(Alternative(other, impossible, reason))
    before, after = ("(P, P)", "(P, P)") if kind == "sharded" else ("(S, R)", "(S, R)")
    return HandOver("shared_expert", kind, (), before, after, False, f"{reason}; {where[kind]}", tuple(others))


def _head(topology: Topology, head: Head) -> HandOver:
    if head == "world":
        collectives = (("all_reduce", "world"), ("all_gather", "world")) if topology.world > 1 else ()
        reason = "it was asked for by name: every replica's rows (sum_len), vocabulary cut over the world"
        other = Alternative("attn_tp", False, "world was asked for by name")
        return HandOver("head", head, collectives, "(S, S)", "(S, R)", False, reason, (other,))
    collectives = (("all_gather", "attn_tp"),) if topology.attn_tp > 1 else ()
    reason = "each replica's own rows, vocabulary cut over attn_tp: no row leaves its replica"
    other = Alternative("world", False, "it moves every replica's rows to every rank")
    return HandOver("head", head, collectives, "(S, S)", "(S, R)", False, reason, (other,))


def plan_records(plan: LayerPlan) -> list[dict[str, Any]]:
    """The plan as records for JSON."""
    return [
        {
            "name": h.name,
            "path": h.path,
            "collectives": [{"verb": verb, "group": group} for verb, group in h.collectives],
            "before": h.before,
            "after": h.after,
            "reduces": h.reduces,
            "reason": h.reason,
            "not_chosen": {o.path: o.reason for o in h.others if not o.impossible},
            "impossible": {o.path: o.reason for o in h.others if o.impossible},
        }
        for h in plan.hand_overs
    ]
