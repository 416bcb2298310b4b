# ruff: noqa: E501  (HLO has one instruction a line)
"""The schedule and the matmul work of a compiled program, read from texts in which both are known."""

import pytest

from jaxcoll.schedule import matmul_flops, schedule
from jaxcoll.timeline import bars
from jaxcoll.topology import Topology

MESH = Topology(2, 2, devices=range(4))  # axes attn_dp, attn_tp
HEAD = "HloModule jit_f, is_scheduled=true, num_partitions=4\n"
CONFIG = 'backend_config={"collective_backend_config":{"is_sync":false,"kernel_strategy":"KERNEL_STRATEGY_ONE_SHOT"}}'
NAMED = 'metadata={op_name="jit(f)/shard_map/%s"}'

OVERLAPPED = (
    HEAD
    + f"""
%sum (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}}

%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %s = (s32[], f32[8]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %v = f32[8]{{0}} get-tuple-element(%s), index=1
  %inner = f32[8]{{0}} all-reduce(%v), channel_id=2, replica_groups={{{{0,1}},{{2,3}}}}, use_global_device_ids=true, to_apply=%sum
  ROOT %t = (s32[], f32[8]{{0}}) tuple(%i, %inner)
}}

%cond (s: (s32[], f32[8])) -> pred[] {{
  %s = (s32[], f32[8]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(3)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}}

ENTRY %main (x: f32[8], y: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  %y = f32[8]{{0}} parameter(1)
  %gather-start = (f32[8]{{0}}, f32[32]{{0}}) all-gather-start(%x), channel_id=1, replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}, use_global_device_ids=true, {NAMED % "layer/gather/all_gather"}, {CONFIG}
  %b = f32[8]{{0}} bitcast(%y)
  %work = f32[8]{{0}} negate(%b), {NAMED % "layer/shared/neg"}
  %again = f32[8]{{0}} negate(%work), {NAMED % "layer/shared/neg"}
  %gather-done = f32[32]{{0}} all-gather-done(%gather-start)
  %zero = s32[] constant(0)
  %init = (s32[], f32[8]{{0}}) tuple(%zero, %again)
  %loop = (s32[], f32[8]{{0}}) while(%init), condition=%cond, body=%body
  %odd = f32[8]{{0}} all-reduce(%y), channel_id=3, replica_groups={{{{0,3}},{{1,2}}}}, use_global_device_ids=true, to_apply=%sum
  ROOT %r = f32[8]{{0}} get-tuple-element(%loop), index=1
}}
"""
)


def test_collectives_stand_in_the_order_of_their_start_with_what_is_computed_meanwhile():
    gather, inner, odd = schedule(OVERLAPPED, MESH)
    assert (gather.collective.kind, gather.collective.group, gather.collective.result_bytes) == (
        "all_gather",
        "attn_dp,attn_tp",
        128,
    )
    assert gather.meanwhile == ("layer/shared/neg",) and gather.collective.is_async
    assert (gather.kernel_strategy, gather.in_branch) == ("one_shot", False)
    assert (inner.collective.name, inner.collective.group, inner.in_branch) == ("inner", "attn_tp", True)
    assert (inner.meanwhile, inner.kernel_strategy) == ((), None)
    assert odd.collective.group == "irregular"


def test_a_loop_of_known_length_runs_for_sure():
    known = OVERLAPPED.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"3"}}')
    assert [s.in_branch for s in schedule(known, MESH)] == [False, False, False]


def test_groups_that_the_mesh_does_not_name_are_named_by_machines():
    crossed = OVERLAPPED.replace("{{0,3},{1,2}}", "{{0,2},{1,3}}")
    mesh = Topology(4, 1, devices=range(4))
    names = [s.collective.group for s in schedule(crossed, mesh, machines=(("hosts", 2), ("gpus", 2)))]
    assert names == ["attn_dp", "gpus", "hosts"]


MATMULS = (
    HEAD
    + f"""
%fused (w: bf16[6,8], x: bf16[3,8]) -> bf16[3,6] {{
  %w = bf16[6,8]{{1,0}} parameter(0)
  %x = bf16[3,8]{{1,0}} parameter(1)
  ROOT %dot.1 = bf16[3,6]{{1,0}} dot(%x, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
}}

%sum (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}}

%one_row (w: f32[6,8], x: f32[8]) -> f32[6] {{
  %w = f32[6,8]{{1,0}} parameter(0)
  %x = f32[8]{{0}} parameter(1)
  %wide = f32[6,8]{{1,0}} broadcast(%x), dimensions={{1}}
  %product = f32[6,8]{{1,0}} multiply(%w, %wide)
  %same = f32[6,8]{{1,0}} bitcast(%product)
  %nought = f32[] constant(0)
  ROOT %summed = f32[6]{{0}} reduce(%same, %nought), dimensions={{1}}, to_apply=%sum
}}

%body (s: (bf16[6,8], bf16[3,8])) -> (bf16[6,8], bf16[3,8]) {{
  %s = (bf16[6,8]{{1,0}}, bf16[3,8]{{1,0}}) parameter(0)
  %w = bf16[6,8]{{1,0}} get-tuple-element(%s), index=0
  %x = bf16[3,8]{{1,0}} get-tuple-element(%s), index=1
  %y = bf16[3,6]{{1,0}} fusion(%w, %x), kind=kCustom, calls=%fused
  ROOT %t = (bf16[6,8]{{1,0}}, bf16[3,8]{{1,0}}) tuple(%w, %x)
}}

%cond (s: (bf16[6,8], bf16[3,8])) -> pred[] {{
  %s = (bf16[6,8]{{1,0}}, bf16[3,8]{{1,0}}) parameter(0)
  ROOT %yes = pred[] constant(true)
}}

ENTRY %main (w: bf16[6,8], x: bf16[3,8], v: f32[6,8], u: f32[8]) -> bf16[3,6] {{
  %w = bf16[6,8]{{1,0}} parameter(0)
  %x = bf16[3,8]{{1,0}} parameter(1)
  %v = f32[6,8]{{1,0}} parameter(2)
  %u = f32[8]{{0}} parameter(3)
  %init = (bf16[6,8]{{1,0}}, bf16[3,8]{{1,0}}) tuple(%w, %x)
  %loop = (bf16[6,8]{{1,0}}, bf16[3,8]{{1,0}}) while(%init), condition=%cond, body=%body, {NAMED % "moe/routed_experts/while"}
  %row = f32[6]{{0}} fusion(%v, %u), kind=kInput, calls=%one_row, {NAMED % "moe/routed_experts/reduce_sum"}
  %cublas = (bf16[3,6]{{1,0}}, s8[64]{{0}}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul", {NAMED % "moe/routed_experts/dot_general"}, backend_config={{"gemm_backend_config":{{"dot_dimension_numbers":{{"lhs_contracting_dimensions":["1"]}}}}}}
  ROOT %other = bf16[3,6]{{1,0}} fusion(%w, %x), kind=kCustom, calls=%fused, {NAMED % "moe/router/dot_general"}
}}
"""
)


RUNS_ANOTHER = (
    HEAD
    + """
%fused (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %r = f32[8]{0} all-reduce(%q), channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true
}

%wrapped (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %f = f32[8]{0} fusion(%q), kind=kCustom, calls=%fused
}

%asks (q: f32[8]) -> pred[] {
  %q = f32[8]{0} parameter(0)
  %again = f32[8]{0} call(%q), to_apply=%fused
  ROOT %yes = pred[] constant(true)
}

%same (q: f32[8]) -> f32[8] {
  ROOT %q = f32[8]{0} parameter(0)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  BODY
  ROOT %end = f32[8]{0} bitcast(%x)
}
"""
)


@pytest.mark.parametrize(
    ("body", "is_async", "meanwhile", "in_branch"),
    [
        ("%f = f32[8]{0} fusion(%x), kind=kCustom, calls=%fused", False, (), False),
        ('%c = f32[8]{0} custom-call(%x), custom_call_target="t", called_computations={%same, %fused}', False, (), False),
        ("%w = f32[8]{0} while(%x), condition=%asks, body=%same", False, (), True),
        (
            "%s = ((f32[8]{0}), f32[8]{0}, u32[]) call-start(%x), to_apply=%fused\n"
            "  %work = f32[8]{0} negate(%x)\n  %d = f32[8]{0} call-done(((f32[8]{0}), f32[8]{0}, u32[]) %s)",
            True,
            ("work",),
            False,
        ),
        (
            "%s = ((f32[8]{0}), f32[8]{0}, u32[]) async-start(%x), calls=%wrapped\n  %work = f32[8]{0} negate(%x)\n"
            "  %u = ((f32[8]{0}), f32[8]{0}, u32[]) async-update(%s)\n  %more = f32[8]{0} abs(%x)\n"
            "  %d = f32[8]{0} async-done(%u)",
            True,
            ("work", "more"),
            False,
        ),
    ],
)
def test_a_collective_is_found_however_deep_it_runs(body, is_async, meanwhile, in_branch):
    text = RUNS_ANOTHER.replace("BODY", body)
    (found,) = schedule(text, MESH)
    assert (found.collective.group, found.collective.operand_bytes) == ("attn_tp", 32)
    assert (found.collective.is_async, found.meanwhile, found.in_branch) == (is_async, meanwhile, in_branch)
    (sent,) = [bar for bar in bars(text, MESH) if bar.lane == "communication"]
    assert (sent.label, sent.start, sent.end) == ("all_reduce(attn_tp)", 0, 1 + len(meanwhile))


@pytest.mark.parametrize(
    ("scope", "trips", "wanted"),
    [
        ("routed_experts", 5, 5 * 2 * 3 * 6 * 8 + 2 * 6 * 8 + 2 * 3 * 6 * 8),
        ("routed_experts", 0, 2 * 6 * 8 + 2 * 3 * 6 * 8),
        ("router", 5, 2 * 3 * 6 * 8),
        ("nowhere", 5, 0),
    ],
)
def test_matmul_work_counts_dots_sums_of_products_and_trips(scope, trips, wanted):
    assert matmul_flops(MATMULS, 4, scope, trips) == wanted


def test_a_known_trip_count_wins_over_the_one_that_is_told():
    known = MATMULS.replace("body=%body,", 'body=%body, backend_config={"known_trip_count":{"n":"7"}},')
    assert matmul_flops(known, 4, "routed_experts/while", 5) == 7 * 2 * 3 * 6 * 8


def test_loops_of_several_waves_share_the_trips():
    second = "  %loop.2 = (bf16[6,8]{1,0}, bf16[3,8]{1,0}) while(%init), condition=%cond, body=%body, "
    second += NAMED % "moe/routed_experts/while" + "\n  %row ="
    assert matmul_flops(MATMULS.replace("  %row =", second), 4, "routed_experts/while", 5) == 5 * 2 * 3 * 6 * 8
