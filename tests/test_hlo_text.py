"""Collectives in hand-written HLO: every way of writing them, also those that no compiler here writes."""

import math

import pytest

from jaxcoll.hlo import Collective, Totals, collectives, mosaic_kernels, summary, totals, wire_bytes
from jaxcoll.topology import Topology


def size_of(c: Collective):
    return c.operand_bytes, c.result_bytes, c.wire_bytes


def snippet(body, header="HloModule m, num_partitions=8", before=""):
    return f"{header}\n\n{before}\n\nENTRY %main (p: f32[8,4]) -> f32[8,4] {{\n{body}\n}}\n"


def of_snippet(body, topology=None, **parts):
    return collectives(snippet(body, **parts), topology or Topology(4, 2))


@pytest.mark.parametrize(
    "groups, name, size",
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", "attn_tp", 2),
        ("{{6,4,2,0},{1,3,5,7}}", "attn_dp", 4),
        ("{{0,1,2,3,4,5,6,7}}", "attn_dp,attn_tp", 8),
        ("{}", "attn_dp,attn_tp", 8),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", "self", 1),
        ("{{0,1,2},{3,4,5,6,7}}", "irregular", 5),
        ("{{0,1},{2,3},{4,5}}", "irregular", 2),
        ("[4,2]<=[8]", "attn_tp", 2),
        ("[2,4]<=[4,2]T(1,0)", "attn_dp", 4),
        ("[2,4]<=[2,2,2]T(2,1,0)", "attn_dp", 4),
        ("[4,2]<=[2,4]T(1,0)", "irregular", 2),
        ("[1,8]<=[8]", "attn_dp,attn_tp", 8),
        ("[8,1]<=[8]", "self", 1),
        ("mesh['attn_dp'=4,'attn_tp'=2] {'attn_tp'}", "attn_tp", 2),
        ("mesh['attn_dp'=4,'attn_tp'=2] {'attn_tp','attn_dp'}", "attn_dp,attn_tp", 8),
        ("mesh['axis_0'=2,'axis_1'=2,'axis_2'=2] {'axis_0','axis_1'}", "attn_dp", 4),
        ("mesh[a=4,b=2] {b}", "attn_tp", 2),
        ("mesh['d'=8,'t'=1] {'d'}", "attn_dp,attn_tp", 8),
        ("mesh['d'=8] {}", "self", 1),
        ("mesh['x'=8] {'x':(4)2}", "attn_tp", 2),
        ("mesh['x'=8] {'x':(1)4}", "attn_dp", 4),
        ("mesh['x'=8] {'x':(1)2,'x':(2)2}", "attn_dp", 4),
        ("mesh['x'=8] {'x':(1)2,'x':(4)2}", "irregular", 4),
        ("mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}", "attn_dp", 4),
        ("mesh['x'=2,'y'=4], device_ids=(0,2,4,6,1,3,5,7) {'x'}", "attn_tp", 2),
    ],
)
def test_replica_groups_in_every_form(groups, name, size):
    body = f"""  %p = f32[8,4]{{1,0}} parameter(0)
  ROOT %r = f32[8,4] all-reduce(%p), channel_id=1, replica_groups={groups}, use_global_device_ids=true"""
    (c,) = of_snippet(body)
    assert (c.group, c.group_size, c.operand_bytes) == (name, size, 128)


@pytest.mark.parametrize(
    "opcode, counts, attributes, name",
    [
        # One replica spanning all partitions; one replica, each partition for itself; partitions by number.
        ("all-reduce", "num_partitions=8", "channel_id=1, replica_groups={{0}}", "attn_dp,attn_tp"),
        ("all-reduce", "num_partitions=8", "replica_groups={{0}}", "self"),
        ("all-to-all", "num_partitions=8", "channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}", "attn_tp"),
        ("all-reduce", "replica_count=8", "replica_groups={{0,4},{1,5},{2,6},{3,7}}", "attn_dp"),
        (
            "all-reduce",
            "replica_count=2, num_partitions=4",
            "channel_id=1, replica_groups={{0},{1}}",
            "attn_tp",
        ),
        ("all-reduce", "replica_count=2, num_partitions=4", "replica_groups={{0,1}}", "attn_dp"),
        ("all-reduce", "replica_count=2, num_partitions=4", "replica_groups={}", "attn_dp"),
        (
            "all-to-all",
            "replica_count=2, num_partitions=4",
            "channel_id=1, replica_groups={{0,1,2,3}}",
            "attn_tp",
        ),
        ("all-to-all", "replica_count=2, num_partitions=4", "channel_id=1, replica_groups={}", "attn_tp"),
        (
            "all-gather",
            "replica_count=2, num_partitions=4",
            "channel_id=1, replica_groups={}, use_global_device_ids=true",
            "attn_dp,attn_tp",
        ),
    ],
)
def test_what_the_numbers_in_the_groups_count(opcode, counts, attributes, name):
    body = f"  %p = f32[8] parameter(0)\n  ROOT %r = f32[8] {opcode}(%p), {attributes}, dimensions={{0}}"
    (c,) = of_snippet(body, Topology(2, 4), header=f"HloModule m, {counts}")
    assert c.group == name


@pytest.mark.parametrize(
    "pairs, name, size, wire",
    [
        ("{{0,1},{1,0},{2,3},{3,2}}", "attn_tp", 2, 16),
        ("{{0,2}}", "attn_dp", 4, 16),
        ("{{0,3}}", "attn_dp,attn_tp", 8, 16),
        ("{{5,5}}", "self", 1, 0),
    ],
)
def test_a_permute_is_in_the_smallest_group_that_holds_its_pairs(pairs, name, size, wire):
    (c,) = of_snippet(f"""  %p = f32[4] parameter(0)
  ROOT %r = f32[4] collective-permute(%p), channel_id=1, source_target_pairs={pairs}""")
    assert (c.group, c.group_size, *size_of(c)) == (name, size, 16, 16, wire)


GLOBAL = "use_global_device_ids=true"
GROUPS = f"channel_id=1, replica_groups={{{{0,2,4,6}},{{1,3,5,7}}}}, {GLOBAL}"


@pytest.mark.parametrize(
    "line, kind, operand_bytes, result_bytes",
    [
        ("((f32[8,4], s8[9]), (f32[8,4], s8[9])) all-reduce-start(%p, %q)", "all_reduce", 137, 137),
        ("(f32[8,4], s8[9]) all-reduce-start(%p, %q)", "all_reduce", 137, 137),
        ("f32[8,4]{1,0} all-reduce-start(%p)", "all_reduce", 128, 128),
        ("(f32[8,4], f32[32,4]) all-gather-start(%p)", "all_gather", 128, 512),
        (
            "((f32[8,4], s8[9]), (f32[32,4], s8[36])) all-gather-start(%p, /*index=1*/%q)",
            "all_gather",
            137,
            548,
        ),
        ("((f32[8,4]), f32[2,4], u32[]) reduce-scatter-start(%p)", "reduce_scatter", 128, 32),
        ("((f32[8,4]), f32[8,4]) all-to-all-start(%p), dimensions={0}", "all_to_all", 128, 128),
    ],
)
def test_a_start_counts_its_operands_and_its_result_once(line, kind, operand_bytes, result_bytes):
    (c,) = of_snippet(f"""  %p = f32[8,4]{{1,0}} parameter(0)
  %q = s8[9] parameter(1)
  %start = {line}, {GROUPS}
  ROOT %done = f32[8,4]{{1,0}} {kind.replace("_", "-")}-done(%start)""")
    assert (c.kind, c.group, c.is_async) == (kind, "attn_dp", True)
    assert (c.operand_bytes, c.result_bytes) == (operand_bytes, result_bytes)


def test_a_permute_start_counts_its_second_element_as_result():
    (c,) = of_snippet("""  %p = f32[8,4] parameter(0)
  %s = (f32[8,4], f32[8,4], u32[]) collective-permute-start(%p), channel_id=1, source_target_pairs={{0,1}}
  ROOT %d = f32[8,4] collective-permute-done(%s)""")
    assert (size_of(c), c.is_async) == ((128, 128, 128), True)


def test_a_start_that_the_scheduler_made_synchronous_is_not_async():
    (c,) = of_snippet(f"""  %p = f32[8,4] parameter(0)
  %s = ((f32[8,4]), f32[8,4]) all-reduce-start(%p), {GROUPS}, backend_config={{"x":{{"is_sync":true}}}}
  ROOT %d = f32[8,4] all-reduce-done(%s)""")
    assert not c.is_async


def test_a_collective_that_an_async_start_wraps_is_found_once():
    inner = f"""%wrapped (q: f32[8,4]) -> f32[2,4] {{
  %q = f32[8,4]{{1,0}} parameter(0)
  ROOT %rs = f32[2,4]{{1,0}} reduce-scatter(%q), {GROUPS}, dimensions={{0}}
}}, execution_thread="comm\""""
    (c,) = of_snippet(
        """  %p = f32[8,4]{1,0} parameter(0)
  %s = ((f32[8,4]), f32[2,4], u32[]) async-start(%p), calls=%wrapped, metadata={op_name="jit(f)/moe/psum"}
  %u = ((f32[8,4]), f32[2,4], u32[]) async-update(%s)
  ROOT %d = f32[2,4]{1,0} async-done(%u)""",
        before=inner,
    )
    assert (c.kind, c.is_async, c.name, c.computation, c.source) == (
        "reduce_scatter",
        True,
        "rs",
        "wrapped",
        "moe/psum",
    )
    assert size_of(c) == (128, 32, 96)


def test_collectives_of_a_called_computation_and_of_a_fusion_are_found():
    def inner(name, line):
        body = f"  %q = f32[8,4] parameter(0)\n  ROOT %r = f32[8,4] {line}\n"
        return f"%{name} (q: f32[8,4]) -> f32[8,4] {{\n{body}}}\n"

    found = of_snippet(
        """  %p = f32[8,4] parameter(0)
  %s = ((f32[8,4]), f32[8,4], u32[]) call-start(%p), to_apply=%one
  %d = f32[8,4] call-done(%s)
  ROOT %f = f32[8,4] fusion(%d), kind=kCustom, calls=%two""",
        before=inner("one", f"all-reduce(%q), {GROUPS}") + inner("two", f"all-to-all(%q), {GROUPS}, dimensions={{0}}"),
    )
    assert [(c.kind, c.is_async, c.computation) for c in found] == [
        ("all_reduce", True, "one"),
        ("all_to_all", False, "two"),
    ]


def test_an_all_to_all_of_several_operands_counts_them_all():
    (c,) = of_snippet(f"""  %a = f32[2,4] parameter(0)
  %b = f32[2,4] parameter(1)
  %t = (f32[2,4], f32[2,4], f32[2,4], f32[2,4]) all-to-all(%a, %b, f32[2,4]{{1,0}} %a, %b), {GROUPS}""")
    assert size_of(c) == (128, 128, 96)


def test_a_decomposed_permute_is_its_send_and_host_transfers_are_none():
    pairs = 'frontend_attributes={_xla_send_recv_source_target_pairs="{{0,2},{2,4}}"}'
    (c,) = of_snippet(f"""  %p = f32[8,4] parameter(0)
  %token = token[] after-all()
  %recv = (f32[8,4], u32[], token[]) recv(%token), channel_id=1, {pairs}
  %send = (f32[8,4], u32[], token[]) send(%p, %token), channel_id=1, {pairs}
  %host = (f32[8,4], u32[], token[]) send(%p, %token), channel_id=2, is_host_transfer=true""")
    assert (c.kind, c.group, c.name, c.is_async, size_of(c)) == (
        "collective_permute",
        "attn_dp",
        "send",
        True,
        (128, 128, 128),
    )


def test_a_broadcast_and_an_instruction_without_percent_signs():
    (c,) = of_snippet(f"  p = f32[8,4]{{1,0}} parameter(0)\n  ROOT b = f32[8,4] collective-broadcast(p), {GROUPS}")
    assert (c.kind, c.name, size_of(c)) == ("collective_broadcast", "b", (128, 128, 96))


@pytest.mark.parametrize(
    "dtype, bits",
    [
        ("pred", 8),
        ("s4", 4),
        ("u4", 4),
        ("s8", 8),
        ("u16", 16),
        ("s64", 64),
        ("f16", 16),
        ("bf16", 16),
        ("f32", 32),
    ]
    + [
        ("f64", 64),
        ("c64", 64),
        ("c128", 128),
        ("f8e4m3fn", 8),
        ("f8e5m2", 8),
        ("f8e8m0fnu", 8),
        ("f4e2m1fn", 4),
    ]
    + [("f8e4m3b11fnuz", 8), ("s2", 2), ("token", 0)],
)
def test_element_sizes(dtype, bits):
    (c,) = of_snippet(f"""  %p = {dtype}[3,5]{{1,0:T(8,128)(2,1)S(1)}} parameter(0)
  ROOT %g = {dtype}[3,20]{{1,0:T(8,128)(2,1)E(4)}} all-gather(%p), {GROUPS}, dimensions={{1}}""")
    assert (c.operand_bytes, c.result_bytes) == (math.ceil(15 * bits / 8), math.ceil(60 * bits / 8))
    assert c.dtypes == (dtype,)


def test_scalars_and_bounded_sizes():
    found = of_snippet(f"""  %p = s32[] parameter(0)
  %r = s32[] all-reduce(%p), {GROUPS}
  %q = f32[<=6,2] parameter(1)
  ROOT %s = f32[<=6,2] all-reduce(%q), {GROUPS}""")
    assert [c.operand_bytes for c in found] == [4, 48]


def test_older_metadata_names_file_and_line_and_none_means_inserted():
    old = 'op_name="jit(f)/x/psum" source_file="/a/b/layer.py" source_line=7'
    found = of_snippet(f"""  %p = f32[4] parameter(0)
  %a = f32[4] all-reduce(%p), {GROUPS}, metadata={{{old}}}
  %b = f32[4] all-reduce(%a), {GROUPS}
  ROOT %c = f32[4] all-reduce(%b), {GROUPS}, metadata={{op_name="jit(f)/shard_map"}}""")
    assert [(c.source, c.source_line) for c in found] == [
        ("x/psum", "layer.py:7"),
        ("inserted by XLA", None),
        ("inserted by XLA", None),
    ]


def test_wire_bytes_of_the_formulas():
    assert wire_bytes("all_reduce", 4, 400, 400) == 600
    assert wire_bytes("reduce_scatter", 4, 400, 100) == 300
    assert wire_bytes("all_gather", 4, 100, 400) == 300
    assert wire_bytes("all_to_all", 4, 400, 400) == 300
    assert wire_bytes("ragged_all_to_all", 4, 400, 800) == 300
    assert wire_bytes("collective_permute", 4, 400, 400) == 400
    assert wire_bytes("collective_broadcast", 4, 400, 400) == 300
    assert wire_bytes("all_reduce", 1, 400, 400) == 0


def test_totals_of_groups_of_unequal_sizes_and_summary_by_source():
    def line(name, source, groups):
        metadata = f'metadata={{op_name="jit(f)/{source}/psum"}}'
        return f"  %{name} = f32[9] all-reduce(%p), replica_groups={groups}, channel_id=1, {GLOBAL}, {metadata}"

    lines = [
        line("a", "x", "{{0,2,1},{3,4,5},{6,7}}"),
        line("b", "y", "{{0,4},{1,2},{3,5},{6,7}}"),
        line("c", "x", "{{0,2,1},{3,4,5},{6,7}}"),
    ]
    found = of_snippet("  %p = f32[9] parameter(0)\n" + "\n".join(lines))
    assert totals(found) == {("all_reduce", "irregular"): Totals(3, 108, 108, 2 * 72 * 2 / 3 + 36)}
    assert [(r["source"], r["count"], r["operand_bytes"]) for r in summary(found)] == [
        ("x/psum", 2, 72),
        ("y/psum", 1, 36),
    ]


def test_wire_totals_do_not_depend_on_how_xla_merges():
    groups = "channel_id=1, replica_groups=[2,3]<=[6], use_global_device_ids=true"
    line = f"  %p{{0}} = f32[{{1}}] parameter({{0}})\n  %r{{0}} = f32[{{1}}] all-reduce(%p{{0}}), {groups}\n"
    parts, merged = "".join(line.format(i, 10) for i in range(11)), line.format(0, 110)
    found = [
        totals(of_snippet(body, Topology(2, 3), header="HloModule m, num_partitions=6")) for body in (parts, merged)
    ]
    assert found[0]["all_reduce", "attn_tp"].wire_bytes == found[1]["all_reduce", "attn_tp"].wire_bytes
    assert found[1]["all_reduce", "attn_tp"] == Totals(1, 440, 440, 2 * 440 * 2 / 3)


def test_groups_beyond_the_programs_devices_are_refused():
    with pytest.raises(ValueError, match="groups name device 8, but the program has 8"):
        of_snippet("  %p = f32[4] parameter(0)\n  %r = f32[4] all-to-all(%p), channel_id=1, replica_groups={{0,8}}")


def test_unknown_groups_and_element_types_are_refused():
    with pytest.raises(ValueError, match="unknown form of replica groups: 'spiral"):
        of_snippet("  %p = f32[4] parameter(0)\n  %r = f32[4] all-reduce(%p), replica_groups=spiral(3)")
    with pytest.raises(ValueError, match="unknown HLO element type 'q9'"):
        of_snippet(f"  %p = q9[4] parameter(0)\n  %r = q9[4] all-reduce(%p), {GROUPS}")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("f32[?,4] all-reduce(%p)", r"unknown size of an HLO shape: 'f32\[\?,4\]'"),
        ("f32[8,4] collective-mix(%p)", "unknown collective 'collective-mix'"),
        ("f32[8,4] all-reduce(%gone)", "main does not have: gone"),
    ],
)
def test_what_cannot_be_counted_is_refused(line, problem):
    with pytest.raises(ValueError, match=problem):
        of_snippet(f"  %p = f32[8,4] parameter(0)\n  ROOT %r = {line}, {GROUPS}")


def test_what_ends_a_collective_may_repeat_its_groups():
    (c,) = of_snippet(f"""  %p = f32[8,4] parameter(0)
  %s = ((f32[8,4]), f32[8,4]) all-reduce-start(%p), {GROUPS}
  ROOT %d = f32[8,4] all-reduce-done(%s), {GROUPS}""")
    assert (c.name, c.is_async) == ("s", True)


MOSAIC_CALLS = """HloModule jit_step
ENTRY %main (x: f32[2,1,256]) -> f32[2,1,256] {
  %x = f32[2,1,256]{2,1,0} parameter(0)
  %a = f32[2,1,256]{2,1,0} custom-call(%x), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/shard_map/layer.0/moe/moe_rows/mpmd_map" stack_frame_id=6}, backend_config={module = "op_name=\\"no\\""}
  %b = f32[2,1,256]{2,1,0} custom-call(%a), custom_call_target="__cublas$gemm", metadata={op_name="jit(step)/dot"}
  ROOT %c = f32[2,1,256]{2,1,0} custom-call(%b), custom_call_target="mosaic_gpu_v2", metadata={}
}
"""  # noqa: E501


def test_calls_of_pallas_kernels_are_told_by_scope_and_name():
    assert mosaic_kernels(MOSAIC_CALLS) == ("layer.0/moe/moe_rows", "no name")
    assert mosaic_kernels(MOSAIC_CALLS.replace("mosaic_gpu_v2", "triton")) == ()
