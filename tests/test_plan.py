"""Plans against SGLang's rules, written down a second time from their description: every mesh of up to 8 devices."""

import itertools
import json
from typing import Any, NamedTuple

import pytest

from jaxcoll import cost
from jaxcoll.plan import LayerPlan, PlanError, SharedExpert, plan_layer, plan_records
from jaxcoll.rows import StepFacts
from jaxcoll.settings import Settings
from jaxcoll.topology import Topology

WIDTH = 840  # divides by every world up to 8
GATHERS, COMBINES = ("gather_v", "sum_len", "max_len"), ("all_reduce", "reduce_scatter_v", "reduce_scatter")
SHARED = ("sharded", "replicated", "replicated_local")
FACTS = [
    StepFacts(),
    StepFacts(extend_in_batch=True),
    StepFacts(graph="decode"),
    StepFacts(graph="decode", decode_graph_mode="sum_len"),
    StepFacts(elastic=True),
]


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def topologies(worlds: Any = range(1, 9)) -> list[Topology]:
    """Every (attn_dp, attn_tp, moe_ep) whose two factorisations refine each other."""
    found = []
    for world in worlds:
        for tp, ep in itertools.product(divisors(world), divisors(world)):
            moe_tp = world // ep
            if tp % moe_tp == 0 or moe_tp % tp == 0:
                found.append(Topology(world // tp, tp, ep))
    return found


TOPOLOGIES = topologies()
each_topology = pytest.mark.parametrize(
    "topology", TOPOLOGIES, ids=lambda t: f"{t.attn_dp}x{t.attn_tp}-ep{t.world // t.moe_tp}"
)


def test_all_meshes_are_here():
    assert [len(topologies([n])) for n in range(1, 9)] == [1, 4, 4, 9, 4, 14, 4, 16]


def batches(replicas: int) -> list[tuple[int, ...]]:
    """Equal, uneven, a tie of the padding rule where there is one, idle replicas, all on the last."""
    last = (0,) * (replicas - 1)
    uneven = tuple(1 + 2 * (r % 3) for r in range(replicas))
    return [(1,) * replicas, (3,) * replicas, uneven, (*last, 1), (*last, 5), (5, *(0, 1) * 4)[:replicas]]


class Expected(NamedTuple):
    """What section 4 of the communication semantics says: a row of its table, and how rows get there."""

    row: str
    gather: str
    combine: str


def expected(topology: Topology, counts: tuple[int, ...], settings: Settings, facts: StepFacts) -> Expected:
    d, t = topology.attn_dp, topology.attn_tp
    p_tp, e = d * t, topology.world // topology.moe_tp
    n = [-(-m // t) * t for m in counts]
    if facts.graph == "decode":
        mode = facts.decode_graph_mode
    elif (facts.elastic and len(set(n)) > 1) or (facts.extend_in_batch and d > 1):
        mode = "sum_len"
    else:
        mode = "max_len" if 2 * sum(n) >= d * max(n) else "sum_len"
    gather = d > 1
    v_env = gather and settings.use_gatherv and not facts.elastic and t == 1 and mode == "sum_len"
    ep_v = d > 1 and p_tp == d and e == d
    r_env = settings.use_reduce_scatter and gather and not v_env and not ep_v and mode == "max_len" and p_tp == d
    if not gather:
        return Expected("0", "none", "all_reduce")
    way = "gather_v" if v_env else mode
    if ep_v:
        return Expected("B1", way, "reduce_scatter_v")
    if v_env:
        return Expected("B2", way, "reduce_scatter_v")
    if r_env:
        return Expected("C", way, "reduce_scatter")
    return Expected("A1" if mode == "max_len" else "A2", way, "all_reduce")


def cases(topology: Topology):
    flags = itertools.product((False, True), repeat=2)
    for counts, (gatherv, scatter), facts in itertools.product(batches(topology.attn_dp), flags, FACTS):
        yield counts, Settings(use_gatherv=gatherv, use_reduce_scatter=scatter), facts


def plan_of(topology: Topology, counts: Any, settings: Settings | None = None, **more: Any) -> LayerPlan:
    settings = settings or Settings(use_reduce_scatter=False)
    return plan_layer(topology, counts, settings, **{"shared_width": WIDTH, **more})


@each_topology
def test_rules_choose_the_row_of_the_table(topology):
    for counts, settings, facts in cases(topology):
        plan, row = plan_of(topology, counts, settings, facts=facts), expected(topology, counts, settings, facts)
        assert (plan.gather, plan.combine) == (row.gather, row.combine), (counts, settings, facts, row)
        assert plan.mode == ("max_len" if plan.gather == "none" else plan.gather)


def test_every_row_of_the_table_is_reached():
    rows = {expected(t, *case).row for t in TOPOLOGIES for case in cases(t)}
    assert rows == {"0", "B1", "B2", "C", "A1", "A2"}
    all_b1 = {e.gather for t in TOPOLOGIES for case in cases(t) if (e := expected(t, *case)).row == "B1"}
    assert all_b1 == set(GATHERS), "the expert-parallel rule holds whatever the mode"


# Named paths: they run whatever the rules say, and only what is impossible is refused.


def impossible(topology: Topology, gather: str, combine: str) -> str | None:
    """Which of the two cannot be, by the issue's sentence: gather_v and B need attn_tp = 1, C equal slots."""
    if gather == "gather_v" and topology.attn_tp > 1:
        return "gather gather_v"
    if combine == "reduce_scatter_v" and topology.attn_tp > 1:
        return "combine reduce_scatter_v"
    if combine == "reduce_scatter" and gather not in ("max_len", "auto", "none"):
        return "combine reduce_scatter"
    return None


@each_topology
def test_a_named_path_runs_or_is_impossible(topology):
    named: Any = itertools.product(("auto", *GATHERS), ("auto", *COMBINES))
    equal, _, _, last, *_ = batches(topology.attn_dp)
    for (gather, combine), counts, on in itertools.product(named, (equal, last), (False, True)):
        settings = Settings(gather=gather, combine=combine, use_gatherv=on, use_reduce_scatter=on)
        if refused := impossible(topology, gather, combine):
            with pytest.raises(PlanError, match=f"^{refused} is impossible here because .*, not "):
                plan_of(topology, counts, settings)
            continue
        plan, by_rules = plan_of(topology, counts, settings), expected(topology, counts, settings, StepFacts())
        if gather == "auto":
            assert plan.gather == ("max_len" if combine == "reduce_scatter" else by_rules.gather)
        else:
            assert plan.gather == gather
            assert hand_over(plan, "gather").reason == "it was asked for by name"
        if combine != "auto":
            assert plan.combine == combine
            assert hand_over(plan, "combine").reason == "it was asked for by name"
        elif gather == "auto":
            assert plan.combine == by_rules.combine
        assert_sound(topology, plan)


@pytest.mark.parametrize(("gather", "combine"), [("gather_v", "reduce_scatter_v"), ("max_len", "reduce_scatter")])
def test_rules_go_on_from_a_named_gather(gather: Any, combine):
    """With both variables on, what comes back follows how the rows went."""
    settings = Settings(gather=gather, use_gatherv=True, use_reduce_scatter=True)
    for counts in ((1, 1, 1, 1), (0, 0, 0, 5)):
        assert plan_of(Topology(4, 1, 2), counts, settings).combine == combine
        off = Settings(gather=gather, use_reduce_scatter=False)
        assert plan_of(Topology(4, 1, 2), counts, off).combine == "all_reduce"


def hand_over(plan: LayerPlan, name: str):
    (found,) = (h for h in plan.hand_overs if h.name == name)
    return found


def assert_sound(topology: Topology, plan: LayerPlan, width: int = WIDTH) -> None:
    """Exactly one reducer; every path is taken, not chosen or impossible, with a sentence; states join up."""
    assert plan.reducers() == ["combine"]
    assert [h.name for h in plan.hand_overs] == ["attention", "gather", "combine", "shared_expert", "head"]
    attention, gather, combine, shared, head = plan.hand_overs
    assert attention.reduces == (topology.attn_tp > 1)
    for h, paths in ((gather, GATHERS), (combine, COMBINES), (shared, SHARED), (head, ("attn_tp", "world"))):
        assert sorted({h.path, *(o.path for o in h.others)} - {"none"}) == sorted(paths)
        assert len(h.others) == len(set(paths) - {h.path})
        assert not any(o.path == h.path for o in h.others)
        assert all(len(reason) > 10 and "\n" not in reason for reason in (h.reason, *(o.reason for o in h.others)))
    cannot = {o.path for h in plan.hand_overs for o in h.others if o.impossible}
    split = topology.attn_tp > 1
    assert ("gather_v" in cannot) == split and ("reduce_scatter_v" in cannot) == split
    assert ("reduce_scatter" in cannot) == (plan.gather in ("gather_v", "sum_len"))
    assert ("sharded" in cannot) == (width % topology.world > 0)
    assert cannot <= {"gather_v", "reduce_scatter_v", "reduce_scatter", "sharded"}
    assert attention.after == gather.before == combine.after == "(S, R)"
    assert (gather.after, combine.before) == ("(R, R)", "(P, P)")


@each_topology
def test_plans_by_rules_are_sound(topology):
    for counts, settings, facts in cases(topology):
        assert_sound(topology, plan_of(topology, counts, settings, facts=facts))


@pytest.mark.parametrize(
    ("topology", "counts", "settings", "name", "path", "sentence"),
    [
        (Topology(4, 1, 2), (5, 0, 1, 0), Settings(), "gather", "max_len", "not chosen because equal slots would"),
        (Topology(4, 1, 2), (5, 0, 1, 0), Settings(), "gather", "gather_v", "not chosen because use_gatherv is off;"),
        (Topology(4, 1, 2), (2, 2, 1, 2), Settings(), "gather", "sum_len", "not chosen because equal slots at most"),
        (Topology(4, 1, 2), (2, 2, 1, 2), Settings(), "gather", "gather_v", "not chosen because equal slots at most"),
        (Topology(2, 2), (1, 1), Settings(), "gather", "gather_v", "impossible because gather_v sends each rank's own"),
        (Topology(1, 4), (3,), Settings(), "gather", "max_len", "not chosen because there is one replica"),
        (Topology(4, 1), (1,) * 4, Settings(gather="sum_len"), "gather", "max_len", "not chosen because sum_len was"),
        (Topology(4, 1), (5, 0, 1, 0), Settings(combine="reduce_scatter"), "gather", "sum_len",
         "not chosen because the named reduce_scatter needs equal slots"),
        (Topology(4, 1, 2), (1,) * 4, Settings(use_reduce_scatter=False), "combine", "reduce_scatter",
         "not chosen because use_reduce_scatter is off"),
        (Topology(4, 1, 2), (1,) * 4, Settings(use_reduce_scatter=False), "combine", "reduce_scatter_v",
         "not chosen because no rule asks for"),
        (Topology(4, 1, 2), (5, 0, 1, 0), Settings(), "combine", "reduce_scatter",
         "impossible because reduce_scatter cuts all rows into equal chunks"),
        (Topology(2, 2), (1, 1), Settings(), "combine", "reduce_scatter",
         "not chosen because the rules take it only where attn_tp is 1"),
        (Topology(2, 2), (1, 1), Settings(), "combine", "reduce_scatter_v",
         "impossible because reduce_scatter_v leaves each rank its own rows, so it needs attn_tp = 1, not 2"),
        (Topology(1, 4), (3,), Settings(), "combine", "reduce_scatter", "not chosen because there is one replica"),
        (Topology(4, 1), (1,) * 4, Settings(), "combine", "all_reduce",
         "not chosen because attn_tp is 1 and every replica owns its own experts"),
        (Topology(2, 2), (1, 1), Settings(), "head", "world", "not chosen because it moves every replica's rows"),
        (Topology(2, 2), (1, 1), Settings(head="world"), "head", "attn_tp", "not chosen because world was asked for"),
    ],
)  # fmt: skip
def test_why_another_path_is_not_taken(topology, counts, settings, name, path, sentence):
    others = {o.path: str(o) for o in hand_over(plan_of(topology, counts, settings), name).others}
    assert others[path].startswith(f"{path}: {sentence}"), others[path]


@each_topology
def test_the_shared_expert_is_cut_where_it_can_be(topology):
    for width, tp1, local in itertools.product((WIDTH, 11, 4), (False, True), (False, True)):
        assert_shared_expert(topology, tp1, local, width)


def assert_shared_expert(topology: Topology, tp1: bool, local: bool, width: int) -> None:
    settings = Settings(shared_expert_tp1=tp1, shared_expert_local=local, use_reduce_scatter=False)
    plan = plan_of(topology, (1,) * topology.attn_dp, settings, shared_width=width)
    divides = width % topology.world == 0
    whole: SharedExpert = "replicated_local" if local else "replicated"
    assert plan.shared_expert == (whole if tp1 or not divides else "sharded")
    reason = hand_over(plan, "shared_expert").reason
    if not divides:
        assert reason.startswith(f"its width {width} does not divide by the world of {topology.world}")
    elif tp1:
        assert reason.startswith("shared_expert_tp1 is on")
    assert_sound(topology, plan, width)
    joined = "before the one reduction" if plan.shared_expert == "sharded" else "after the one reduction"
    assert reason.endswith(joined)


# Who communicates with whom: section 4.1.

WORLD, TP, DP = "world", "attn_tp", "attn_dp"
PER_LAYER: list[tuple[Topology, tuple[int, ...], Settings, list[tuple[str, str]]]] = [
    (Topology(1, 4), (3,), Settings(), [("all_reduce", TP), ("all_reduce", WORLD)]),
    (Topology(4, 1, 2), (1,) * 4, Settings(), [("all_gather", WORLD), ("all_reduce", WORLD)]),
    (Topology(4, 1, 2), (5, 0, 1, 0), Settings(), [("all_reduce", WORLD), ("all_reduce", WORLD)]),
    (Topology(4, 1, 2), (5, 0, 1, 0), Settings(use_gatherv=True),
     [("all_gather_v", DP), ("reduce_scatter_v", WORLD)]),
    (Topology(4, 1, 2), (1,) * 4, Settings(use_reduce_scatter=True),
     [("all_gather", WORLD), ("reduce_scatter", WORLD)]),
    (Topology(4, 1), (1,) * 4, Settings(), [("all_gather", WORLD), ("reduce_scatter_v", WORLD)]),
    (Topology(4, 1), (5, 0, 1, 0), Settings(), [("all_reduce", WORLD), ("reduce_scatter_v", WORLD)]),
    (Topology(4, 1), (5, 0, 1, 0), Settings(use_gatherv=True), [("all_gather_v", DP), ("reduce_scatter_v", WORLD)]),
    (Topology(2, 2), (3, 0), Settings(), [("all_reduce", TP), ("all_gather", WORLD), ("all_reduce", WORLD)]),
    (Topology(4, 2), (9, 0, 0, 0), Settings(), [("all_reduce", TP), ("all_reduce", WORLD), ("all_reduce", WORLD)]),
    (Topology(4, 2), (9, 0, 0, 0), Settings(combine="reduce_scatter"),
     [("all_reduce", TP), ("all_gather", WORLD), ("reduce_scatter", WORLD), ("all_gather", TP)]),
    (Topology(1, 1), (3,), Settings(), []),
]  # fmt: skip


@pytest.mark.parametrize(("topology", "counts", "settings", "collectives"), PER_LAYER)
def test_a_layers_collectives_in_order(topology, counts, settings, collectives):
    plan = plan_of(topology, counts, settings)
    assert [c for h in plan.hand_overs if h.name != "head" for c in h.collectives] == collectives


def test_the_heads_collectives():
    for topology in (Topology(2, 2), Topology(4, 1), Topology(1, 4)):
        own = hand_over(plan_of(topology, (1,) * topology.attn_dp), "head")
        assert own.collectives == ((("all_gather", TP),) if topology.attn_tp > 1 else ())
        over_world = hand_over(plan_of(topology, (1,) * topology.attn_dp, Settings(head="world")), "head")
        assert over_world.collectives == (("all_reduce", WORLD), ("all_gather", WORLD))
    assert hand_over(plan_of(Topology(1, 1), (1,), Settings(head="world")), "head").collectives == ()


DENSE_KIND = {"all_gather_v": "all_gather", "reduce_scatter_v": "reduce_scatter"}


@each_topology
def test_the_priced_transfers_are_the_planned_collectives(topology):
    """What a compiled program shows is compared with these transfers in test_cost."""
    named: Any = itertools.product(GATHERS, COMBINES, ("attn_tp", "world"))
    for gather, combine, head in named:
        if not impossible(topology, gather, combine):
            assert_priced_as_planned(topology, Settings(gather=gather, combine=combine, head=head))


def assert_priced_as_planned(topology: Topology, settings: Settings) -> None:
    plan = plan_of(topology, (1,) * topology.attn_dp, settings)
    priced = {
        "attention": cost.attention_transfers(topology, plan, 8),
        "gather": cost.gather_transfers(topology, plan, 8, transport="dense"),
        "combine": cost.combine_transfers(topology, plan, 8, transport="dense"),
        "shared_expert": [],
        "head": cost.head_transfers(topology, plan, 8, 840),
    }
    for h in plan.hand_overs:
        planned = [(DENSE_KIND.get(v, v), axes(topology, group)) for v, group in h.collectives]
        assert [(t.kind, t.group) for t in priced[h.name]] == planned, h.name


def axes(topology: Topology, group: Any) -> str:
    return ",".join(a for a in topology.group(group) if topology.axes[a] > 1)


# Rows: room, buckets, programs.


def test_a_shrinking_batch_keeps_its_program_by_keeping_its_room():
    topology, room = Topology(4, 1), (5, 0, 1, 0)
    whole = plan_of(topology, room)
    assert whole.gather == "sum_len" and astuple(whole) == ("sum_len", 8, 8)
    for counts in [(5, 0, 1, 0), (3, 0, 1, 0), (1, 0, 0, 0), (0, 0, 1, 0)]:
        plan = plan_of(topology, counts, room=room)
        assert plan.program == whole.program and plan.rows.counts == counts
        assert plan.rows.starts == tuple(sum(counts[:r]) for r in range(4)), "slots follow the real counts"
    assert plan_of(topology, (0, 0, 1, 0)).program != whole.program, "without room the smaller batch has its own"
    assert plan_of(topology, (1, 1, 1, 1)).gather == "max_len"


def astuple(plan: LayerPlan) -> tuple:
    return plan.rows.bucket.mode, plan.rows.bucket.rows, plan.rows.bucket.total


def test_equal_slots_start_at_multiples_of_the_bucket():
    plan = plan_of(Topology(4, 2), (3, 0, 1, 2), Settings(gather="max_len"), room=(5, 5, 5, 5))
    assert astuple(plan) == ("max_len", 8, 32) and plan.rows.starts == (0, 8, 16, 24)
    assert plan.rows.counts == (3, 0, 1, 2) and plan.rows.aligned == (4, 0, 2, 2)


@pytest.mark.parametrize("gather", GATHERS)
def test_counts_are_data_of_one_program_for_every_split_that_fits(gather):
    programs = set()
    for counts in itertools.product(range(3), repeat=4):
        if any(counts):
            programs.add(plan_of(Topology(4, 1), counts, Settings(gather=gather), room=(2, 2, 2, 2)).program)
    assert len(programs) == 1


def test_a_program_differs_where_its_paths_or_shapes_do():
    topology, one = Topology(4, 1), (1, 1, 1, 1)
    plans = [
        plan_of(topology, one),
        plan_of(topology, (2, 2, 2, 2)),
        plan_of(topology, one, Settings(gather="sum_len")),
        plan_of(topology, one, Settings(gather="gather_v")),
        plan_of(topology, one, Settings(combine="all_reduce")),
        plan_of(topology, one, Settings(combine="reduce_scatter")),
        plan_of(topology, one, Settings(shared_expert_tp1=True)),
        plan_of(topology, one, Settings(head="world")),
        plan_of(topology, one, Settings(mask_dp_pad=False)),
    ]
    assert len({plan.program for plan in plans}) == len(plans)


@pytest.mark.parametrize(
    ("counts", "room", "words"),
    [
        ((2, 1), (1, 1), r"counts \[2, 1\] do not fit the room \[1, 1\] planned for them"),
        ((2, 1), (2,), r"room \[2\] must be one per replica: attn_dp is 2"),
        ((2,), None, r"counts \[2\] must be one per replica: attn_dp is 2"),
        ((2, 1, 0), None, r"counts \[2, 1, 0\] must be one per replica"),
        ((0, 0), None, "no replica holds a row, so nobody runs"),
        ((0, 0), (1, 1), "no replica holds a row, so nobody runs"),
        ((2, -1), None, "counts must be whole numbers of at least 0"),
        ((None, None), None, "counts must be whole numbers of at least 0"),
        (None, None, "counts must be whole numbers of at least 0, one per replica, not None"),
        ((1, 1), (2.5, 2.5), "room must be whole numbers of at least 0"),
    ],
)
def test_counts_that_cannot_be_are_refused(counts: Any, room, words):
    with pytest.raises(ValueError, match=words):
        plan_of(Topology(2, 2), counts, room=room)


def test_a_plan_as_records_is_json_and_keeps_impossible_apart():
    plan = plan_of(Topology(2, 2), (3, 1), Settings(gather="sum_len"))
    records = json.loads(json.dumps(plan_records(plan)))
    assert [r["name"] for r in records] == ["attention", "gather", "combine", "shared_expert", "head"]
    gather, combine = records[1], records[2]
    assert gather["path"] == "sum_len" and gather["collectives"] == [{"verb": "all_reduce", "group": "world"}]
    assert list(gather["not_chosen"]) == ["max_len"] and list(gather["impossible"]) == ["gather_v"]
    assert combine["not_chosen"] == {} and sorted(combine["impossible"]) == ["reduce_scatter", "reduce_scatter_v"]
    assert [r["reduces"] for r in records] == [True, False, True, False, False]
