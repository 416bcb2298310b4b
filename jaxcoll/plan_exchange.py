"""How an all-to-all carries rows to their experts and home: the choices of its form, and why; it runs nothing.

Source: communication semantics, section 5 (normal, low latency, overlap) and section 6 (one fused call).
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxcoll.hand_over import Alternative, HandOver, PlanError
from jaxcoll.level import Mode
from jaxcoll.settings import Settings
from jaxcoll.states import Group
from jaxcoll.topology import Topology, host_axes
from jaxcoll.wire import WireChoice, wire_impossible

Overlap = Literal["none", "shared_expert", "two_batch", "waves"]
_BY_NAME = "it was asked for by name"


@dataclasses.dataclass(frozen=True)
class Exchange:
    """How an all-to-all carries rows: mode, wire and hosts as in `dispatch.DispatchSpec`.

    Attributes:
        overlap: what is computed while rows travel: "none" leaves that to XLA; "shared_expert"; "two_batch": the other
            half of the rows, and the shared expert; "waves": other experts.
    """

    mode: Mode
    wire: WireChoice
    hosts: Group = ()
    overlap: Overlap = "shared_expert"


def choose_exchange(
    topology: Topology, settings: Settings, width: int | None = None
) -> tuple[Exchange, tuple[HandOver, HandOver]]:
    """The exchange and its two hand-overs, dispatch and combine.

    Args:
        width: channels of a row; None leaves to tracing whether the wire format fits them.

    Raises:
        PlanError: a named choice is impossible here.
    """
    for name in ("gather", "combine"):
        if (named := getattr(settings, name)) != "auto":
            what = "a fused call" if settings.backend == "fused" else "an all_to_all"
            why = "was asked for" if settings.moe_backend != "auto" else f"is what {settings.exchange_choice} needs"
            raise PlanError(f"{name} {named} is impossible here because {what} {why}, which has none")
    if width is not None and (obstacle := wire_impossible(settings.wire, width)):
        raise PlanError(f"wire {settings.wire} is impossible here because {obstacle}")
    mode: Mode = "low_latency" if settings.dispatch == "auto" else settings.dispatch
    why_mode = "every replica decodes" if settings.dispatch == "auto" else _BY_NAME
    others = [Alternative("low_latency" if mode == "normal" else "normal", False, why_mode)]
    hosts, why_hosts, other = _choose_levels(topology, settings)
    others.append(other)
    overlap, why_overlap, not_taken = _choose_overlap(settings)
    others += not_taken
    reason = f"{mode}: {why_mode}; {'hosts' if hosts else 'flat'}: {why_hosts}; overlap {overlap}: {why_overlap}"
    there, back = _collectives(topology, hosts)
    exchange = Exchange(mode, settings.wire, hosts, overlap)
    dispatch = HandOver("dispatch", mode, there, "(S, R)", "(S, S)", False, reason, tuple(others))
    way = "results go home the way rows came"
    return exchange, (dispatch, HandOver("combine", "all_to_all", back, "(S, S)", "(S, R)", True, way))


def refuse_exchange(settings: Settings) -> None:
    """Raises PlanError for a named choice that only an all-to-all has; for a plan that gathers."""
    if choice := settings.exchange_choice:
        raise PlanError(
            f"{choice} is impossible here because gather was asked for, which exchanges no rows; name moe_backend "
            "all_to_all or fused"
        )


def compiler_options(topology: Topology, exchange: Exchange | None, *, by_count: bool) -> dict[str, bool]:
    """XLA options under which rows travel as their plan says; none on CPU.

    The latency-hiding scheduler puts independent work between the start and the end of an exchange; XLA's default one
    does so for the shared expert alone. Over several hosts XLA replaces a ragged exchange, also that of gather_v and
    reduce_scatter_v, by an all_gather of the whole padded buffer and more, unless told not to; whether the plain
    exchange runs on real networks has not been measured.

    Args:
        exchange: of an all-to-all plan.
        by_count: see `LayerPlan.by_count`.
    """
    if topology.mesh.devices.flat[0].platform == "cpu":
        return {}
    options = {"xla_gpu_enable_latency_hiding_scheduler": True} if exchange else {}
    if by_count and topology.hosts != 1:
        options["xla_gpu_unsupported_enable_ragged_all_to_all_multi_host_decomposer"] = False
    return options


def _choose_levels(topology: Topology, settings: Settings) -> tuple[Group, str, Alternative]:
    found, why = host_axes(topology)
    if settings.levels == "hosts" and not found:
        raise PlanError(f"levels hosts is impossible here because {why}")
    if not found:
        return (), why, Alternative("levels hosts", True, why)
    if settings.levels == "flat":
        return (), _BY_NAME, Alternative("levels hosts", False, "flat was asked for by name")
    return found, why, Alternative("levels flat", False, "one copy per host is enough on the links between hosts")


def _choose_overlap(settings: Settings) -> tuple[Overlap, str, list[Alternative]]:
    named = settings.overlap
    if settings.moe_backend == "fused":
        why_not = "a fused call has no phases between which other work could be placed"
        if named != "auto":
            raise PlanError(f"overlap {named} is impossible here because {why_not}")
        others = [Alternative(f"overlap {name}", True, why_not) for name in ("none", "shared_expert", "two_batch")]
        return "waves", "a fused call cuts its experts into waves", others
    names: tuple[Overlap, ...] = ("none", "shared_expert", "two_batch")
    others = [Alternative("overlap waves", True, "only a fused call cuts its experts into waves")]
    if named == "auto":
        others.append(Alternative("overlap none", False, "the shared expert is free to work while rows travel"))
        others.append(Alternative("overlap two_batch", False, "each half reads all weights, which decoding pays for"))
        return "shared_expert", "it needs nothing of what travels", others
    others += [
        Alternative(f"overlap {name}", False, f"{named} was asked for by name") for name in names if name != named
    ]
    return named, _BY_NAME, others


def _collectives(topology: Topology, hosts: Group) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    """Verb and group of every collective on the way there and back; the counts that go before are not listed."""
    ep = topology.group("moe_ep")
    levels = (",".join(hosts), ",".join(ep[len(hosts) :])) if hosts else ("moe_ep",)
    there = tuple(("all_to_all", group) for group in levels) if topology.world > topology.moe_tp else ()
    back = there[::-1]
    if topology.moe_tp > 1:
        there, back = (("all_gather", "moe_tp"), *there), (*back, ("reduce_scatter", "moe_tp"))
    if topology.attn_tp > 1:
        back = (*back, ("all_gather", "attn_tp"))
    return there, back
