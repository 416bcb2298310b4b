"""The two lanes of a compiled program: where bars start and end, what they are called, and what they hide."""

import jax.numpy as jnp
import pytest
from jax import named_scope
from jax.sharding import PartitionSpec as P

import jaxcoll as jc
from jaxcoll.step import compile_step
from jaxcoll.timeline import Bar, bars

TOPOLOGY = jc.Topology(4, 2)
SCHEDULE = """HloModule m, is_scheduled=true, num_partitions=8

%branch.a (a: f32[8,4]) -> f32[8,4] {
  %a = f32[8,4] parameter(0)
  ROOT %exchange = f32[8,4] all-to-all(%a), channel_id=2, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
}

%branch.b (b: f32[8,4]) -> f32[8,4] {
  ROOT %b = f32[8,4] parameter(0)
}

%wrapped (w: f32[8,4]) -> f32[8,4] {
  %w = f32[8,4] parameter(0)
  ROOT %inner = f32[8,4] all-reduce(%w), channel_id=3, replica_groups={{0,2,4,6},{1,3,5,7}}, use_global_device_ids=true, to_apply=%add
}

ENTRY %main (p: f32[8,4], i: pred[]) -> f32[8,4] {
  %p = f32[8,4] parameter(0)
  %i = pred[] parameter(1)
  %one = f32[8,4] fusion(%p), kind=kLoop, calls=%f, metadata={op_name="jit(step)/shard_map/layer.1/attn/dot"}
  %start = f32[8,4] all-reduce-start(%one), channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}}, use_global_device_ids=true, to_apply=%add, metadata={op_name="jit(step)/shard_map/layer.1/attn.all_reduce/psum"}
  %two = f32[8,4] fusion(%p), kind=kLoop, calls=%f, metadata={op_name="jit(step)/shard_map/layer.1/moe/dot"}
  %name = f32[8,4] bitcast(%two), metadata={op_name="jit(step)/shard_map/layer.1/moe/dot"}
  %three = f32[8,4] fusion(%p), kind=kLoop, calls=%f, metadata={op_name="jit(step)/shard_map/layer.1/moe/mul"}
  %done = f32[8,4] all-reduce-done(%start)
  %unnamed = f32[8,4] fusion(%p), kind=kLoop, calls=%f
  %call-start = ((f32[8,4]), f32[8,4]) fusion-start(%done), kind=kCustom, calls=%wrapped
  %call-done = f32[8,4] fusion-done(%call-start)
  %either = f32[8,4] conditional(%i, %p, %p), branch_computations={%branch.a, %branch.b}, metadata={op_name="jit(step)/shard_map/layer.2/moe/cond"}
  ROOT %last = f32[8,4] copy(%either)
}
"""  # noqa: E501


def test_a_started_collective_spans_what_is_scheduled_before_its_end():
    assert bars(SCHEDULE, TOPOLOGY) == [
        Bar("computation", 0, 1, "layer.1"),
        Bar("communication", 1, 4, "layer.1", "all_reduce(attn_tp)", 128.0),
        Bar("computation", 2, 3, "layer.1"),
        Bar("computation", 3, 4, "layer.1"),
        Bar("computation", 4, 5, "other"),
        Bar("communication", 5, 6, "layer.1", "all_reduce(attn_dp)", 192.0),  # unnamed, after layer.1/moe
        Bar("communication", 6, 7, "layer.2", "all_to_all(world)", 112.0),
        Bar("computation", 7, 8, "other"),
    ]


def test_a_prefix_keeps_one_layer_and_counts_from_its_start():
    found = bars(SCHEDULE, TOPOLOGY, prefix="layer.1/")
    assert [(b.start, b.end, b.scope) for b in found] == [
        (0, 1, "attn"), (1, 4, "attn.all_reduce"), (2, 3, "moe"), (3, 4, "moe"), (4, 5, "moe")
    ]  # fmt: skip
    assert [b.scope for b in bars(SCHEDULE, TOPOLOGY, prefix="layer.1/", depth=2)][-2] == "moe/mul"


def test_groups_that_are_no_axes_keep_their_name():
    odd = SCHEDULE.replace("{{0,1},{2,3},{4,5},{6,7}}", "{{0,1,2},{3,4,5,6,7}}")
    assert bars(odd, TOPOLOGY)[1].label == "all_reduce(irregular)"


def test_a_real_program_communicates_where_it_says():
    def step(x):
        with named_scope("sum"):
            y = jc.all_reduce(jc.declare_partial(jnp.sin(x), "attn_tp"), "attn_tp")
        with named_scope("after"):
            return jnp.cos(y) @ jnp.ones((4, 4))

    x = jnp.ones((8, 4))
    program = compile_step(step, TOPOLOGY, (x,), in_specs=(P(("attn_dp", "attn_tp")),), out_specs=P("attn_dp"))
    found = bars(program.compiled, TOPOLOGY)
    (sent,) = (b for b in found if b.lane == "communication")
    assert (sent.scope, sent.label, sent.wire_bytes) == ("sum", "all_reduce(attn_tp)", 16.0)
    assert {b.scope for b in found if b.end <= sent.start} >= {"sum"}
    assert {b.scope for b in found if b.start >= sent.end} >= {"after"}


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="not the HLO text"):
        bars("once upon a time", TOPOLOGY)
    with pytest.raises(ValueError, match="8 devices, but the topology's world has 4"):
        bars(SCHEDULE, jc.Topology(4, 1))


def test_a_permute_needs_no_machines():
    text = """HloModule m, num_partitions=8

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4] parameter(0)
  ROOT %r = f32[4] collective-permute(%p), channel_id=1, source_target_pairs={{0,1},{1,0}}
}
"""
    assert bars(text, TOPOLOGY) == [Bar("communication", 0, 1, "other", "collective_permute(attn_tp)", 16.0)]
