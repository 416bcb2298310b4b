"""Collectives of programs compiled for 8 CPU devices and for H200s that are not there, with exact bytes."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxcoll.collectives import all_reduce, declare_partial
from jaxcoll.hlo import Collective, Totals, collectives, summary, totals
from jaxcoll.targets import compile_only, gpu_devices
from jaxcoll.topology import Topology

ROWS, WIDTH = 12, 6  # of one rank; 12 x 6 float32 = 288 bytes
LOCAL = ROWS * WIDTH * 4


def compiled(topology, function, dtype=jnp.float32, check_vma=False):
    """Compiles `function` of one rank's [12, 6] rows; the result may be anything, varying over the mesh."""
    spec = P(tuple(topology.axes))
    x = jax.ShapeDtypeStruct((ROWS * topology.world, WIDTH), dtype, sharding=topology.sharding(spec))
    step = jax.shard_map(function, mesh=topology.mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
    return jax.jit(step).lower(x).compile()


def only(topology, function, dtype=jnp.float32) -> Collective:
    found = collectives(compiled(topology, function, dtype), topology)
    assert len(found) == 1
    return found[0]


def size_of(c: Collective):
    return c.operand_bytes, c.result_bytes, c.wire_bytes


# What XLA compiles for CPU.


@pytest.mark.parametrize("attn_dp, attn_tp", [(4, 2), (2, 3)])
@pytest.mark.parametrize("group", ["attn_dp", "attn_tp", "world"])
def test_each_kind_over_each_group_has_exact_bytes(attn_dp, attn_tp, group):
    topology = Topology(attn_dp, attn_tp)
    axes, name = topology.group(group), ",".join(topology.group(group))
    n = topology.size(axes)
    ring = LOCAL * (n - 1) // n if LOCAL * (n - 1) % n == 0 else LOCAL * (n - 1) / n
    if ROWS % n:  # 8 ranks do not divide 12 rows
        cases = {}
    else:
        cases = {
            "reduce_scatter": (lambda x: lax.psum_scatter(x, axes, tiled=True), (LOCAL, LOCAL // n, ring)),
            "all_to_all": (lambda x: lax.all_to_all(x, axes, 0, 1, tiled=True), (LOCAL, LOCAL, ring)),
        }
    cases["all_reduce"] = (lambda x: lax.psum(x, axes), (LOCAL, LOCAL, 2 * LOCAL * (n - 1) / n))
    cases["all_gather"] = (lambda x: lax.all_gather(x, axes, tiled=True), (LOCAL, LOCAL * n, LOCAL * (n - 1)))
    cases["collective_permute"] = (
        lambda x: lax.ppermute(x, axes, [(i, (i + 1) % n) for i in range(n)]),
        (LOCAL, LOCAL, LOCAL),
    )
    for kind, (function, expected) in cases.items():
        c = only(topology, function)
        assert (c.kind, c.group, c.group_size, *size_of(c)) == (kind, name, n, *expected)
        assert (c.is_async, c.dtypes) == (False, ("f32",))


@pytest.mark.parametrize(
    "group, name, size",
    [
        ("attn_dp", "attn_dp_outer,attn_dp_inner", 4),
        ("attn_tp", "attn_tp", 2),
        ("moe_ep", "attn_dp_outer", 2),
        ("moe_tp", "attn_dp_inner,attn_tp", 4),
        ("world", "attn_dp_outer,attn_dp_inner,attn_tp", 8),
    ],
)
def test_groups_of_a_split_mesh_are_named_by_their_axes(group, name, size):
    topology = Topology(4, 2, moe_ep=2)
    c = only(topology, lambda x: lax.psum(x, topology.group(group)))
    assert (c.group, c.group_size) == (name, size)


def test_groups_are_named_in_mesh_order_whatever_order_the_program_has():
    topology = Topology(2, 3)
    c = only(topology, lambda x: lax.all_gather(x, ("attn_tp", "attn_dp"), tiled=True))
    assert (c.group, c.group_size, c.result_bytes) == ("attn_dp,attn_tp", 6, 6 * LOCAL)


def test_axes_of_size_one_do_not_count():
    topology = Topology(8, 1)
    alone = only(topology, lambda x: lax.psum(x, "attn_tp"))
    assert (alone.group, alone.group_size, *size_of(alone)) == ("self", 1, LOCAL, LOCAL, 0)
    whole = only(topology, lambda x: lax.psum(x, ("attn_dp", "attn_tp")))
    assert (whole.group, whole.group_size) == ("attn_dp", 8)


def test_groups_that_are_no_product_of_axes_are_irregular():
    topology = Topology(6, 1)
    c = only(topology, lambda x: lax.psum(x, "attn_dp", axis_index_groups=[[0, 1], [2, 5], [3, 4]]))
    assert (c.group, c.group_size) == ("irregular", 2)


def test_merged_collectives_are_one_record_with_the_sum_of_the_bytes():
    topology = Topology(4, 2)
    c = only(topology, lambda x: (lax.psum(x, "attn_tp"), lax.psum(x[:2] * 2, "attn_tp")))
    assert size_of(c) == (LOCAL + 48, LOCAL + 48, LOCAL + 48)


def test_a_collective_in_a_loop_is_one_record():
    topology = Topology(2, 3)

    def step(x):
        with jax.named_scope("layer.0"):
            return lax.scan(lambda c, _: (lax.psum(jnp.sin(c), "attn_tp"), None), x, None, length=5)[0]

    c = only(topology, step)
    assert (c.kind, c.group, c.operand_bytes) == ("all_reduce", "attn_tp", LOCAL)
    assert c.source == "layer.0/while/body/psum"
    assert c.computation != "main"


def test_both_branches_of_a_cond_are_found():
    topology = Topology(4, 2)

    def step(x):
        def gather(x):
            return lax.all_gather(x[:3], "attn_dp", tiled=True)

        return lax.cond(lax.pmax(x.sum(), ("attn_dp", "attn_tp")) > 0, lambda x: lax.psum(x, "attn_dp"), gather, x)

    found = {(c.kind, c.group): c for c in collectives(compiled(topology, step), topology)}
    assert set(found) == {
        ("all_reduce", "attn_dp,attn_tp"),
        ("all_reduce", "attn_dp"),
        ("all_gather", "attn_dp"),
    }
    assert size_of(found["all_reduce", "attn_dp"]) == (LOCAL, LOCAL, LOCAL * 3 / 2)
    assert size_of(found["all_gather", "attn_dp"]) == (72, 288, 216)
    assert size_of(found["all_reduce", "attn_dp,attn_tp"]) == (4, 4, 7)
    assert len({c.computation for c in found.values()}) == 3


def test_a_program_without_collectives_has_none():
    topology = Topology(4, 2)
    found = collectives(compiled(topology, lambda x: jnp.sin(x) @ x.T), topology)
    assert (found, totals(found), summary(found)) == ((), {}, [])


def test_cpu_widens_bf16_so_its_bytes_are_those_of_float32():
    topology = Topology(4, 2)
    c = only(topology, lambda x: lax.psum_scatter(x, "attn_dp", tiled=True), jnp.bfloat16)
    assert (c.dtypes, *size_of(c)) == (("f32",), LOCAL, LOCAL // 4, LOCAL * 3 // 4)


def test_the_source_is_the_scope_path_and_the_line():
    topology = Topology(4, 2)

    def step(x):
        with jax.named_scope("layer.3"), jax.named_scope("attn"):
            return jax.jit(lambda x: jax.vmap(lambda v: lax.psum(v, "attn_tp"))(x))(x)

    c = only(topology, step)
    assert c.source == "layer.3/attn/psum"
    assert c.source_line == f"test_hlo.py:{step.__code__.co_firstlineno + 2}"


def test_the_line_is_the_one_that_called_the_verb():
    topology = Topology(4, 2)

    def step(x):
        partial = declare_partial(x, "attn_tp")
        return all_reduce(partial, "attn_tp")

    (c,) = collectives(compiled(topology, step, check_vma=True), topology)
    assert c.source_line == f"test_hlo.py:{step.__code__.co_firstlineno + 2}"


def test_a_collective_that_the_partitioner_adds_is_said_to_be_inserted():
    topology = Topology(4, 2)
    x = jax.ShapeDtypeStruct((8, 6), jnp.float32, sharding=topology.sharding(P("attn_dp", "attn_tp")))
    w = jax.ShapeDtypeStruct((6, 5), jnp.float32, sharding=topology.sharding(P("attn_tp", None)))
    program = jax.jit(jnp.dot, out_shardings=topology.sharding(P("attn_dp"))).lower(x, w).compile()
    (c,) = collectives(program, topology)
    assert (c.kind, c.group, c.operand_bytes) == ("all_reduce", "attn_tp", 2 * 5 * 4)
    assert c.source == "inserted by XLA for dot_general"


def test_totals_and_summary_add_up():
    topology = Topology(2, 3)

    def step(x):
        with jax.named_scope("a"):
            y = lax.all_gather(x, "attn_tp", tiled=True)
        with jax.named_scope("b"):
            return lax.psum(jnp.sin(lax.psum(jnp.sin(y), "attn_tp")), "attn_tp")

    found = collectives(compiled(topology, step), topology)
    assert totals(found) == {
        ("all_gather", "attn_tp"): Totals(1, LOCAL, 3 * LOCAL, 2 * LOCAL),
        ("all_reduce", "attn_tp"): Totals(2, 6 * LOCAL, 6 * LOCAL, 8 * LOCAL),
    }
    records = json.loads(json.dumps(summary(found)))
    assert sorted(records, key=lambda r: r["kind"]) == [
        {
            "kind": "all_gather",
            "group": "attn_tp",
            "source": "a/all_gather",
            "count": 1,
            "operand_bytes": LOCAL,
            "result_bytes": 3 * LOCAL,
        },
        {
            "kind": "all_reduce",
            "group": "attn_tp",
            "source": "b/psum",
            "count": 2,
            "operand_bytes": 6 * LOCAL,
            "result_bytes": 6 * LOCAL,
        },
    ]


# What XLA compiles for an H200 that is not there.


def h200(attn_dp, attn_tp, function, *shapes):
    topology = Topology(attn_dp, attn_tp, devices=gpu_devices("h200", 1, attn_dp * attn_tp))
    spec = P(tuple(topology.axes))
    step = jax.shard_map(function, mesh=topology.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    arguments = [
        jax.ShapeDtypeStruct((n * topology.world, *rest), dtype, sharding=topology.sharding(spec))
        for (n, *rest), dtype in shapes
    ]
    return compile_only(jax.jit(step).lower(*arguments)), topology


def test_a_gpu_program_keeps_bf16_and_pairs_count_once():
    def step(x):
        with jax.named_scope("moe"):
            full = lax.all_gather(x, ("attn_dp", "attn_tp"), tiled=True)
            own = lax.psum_scatter(full, "attn_dp", tiled=True)
            swapped = lax.all_to_all(x.reshape(8, 8, 16), "attn_dp", 0, 0, tiled=True)
            return own, swapped, lax.psum(jnp.sin(x), "attn_tp"), lax.ppermute(x, "attn_tp", [(0, 1), (1, 0)])

    program, topology = h200(4, 2, step, ((64, 16), jnp.bfloat16))
    found = collectives(program, topology)
    local = 64 * 16 * 2
    assert totals(found) == {
        ("all_gather", "attn_dp,attn_tp"): Totals(1, local, 8 * local, 7 * local),
        ("reduce_scatter", "attn_dp"): Totals(1, 8 * local, 2 * local, 6 * local),
        ("all_to_all", "attn_dp"): Totals(1, local, local, local * 3 / 4),
        ("all_reduce", "attn_tp"): Totals(1, local, local, local),
        ("collective_permute", "attn_tp"): Totals(1, local, local, local),
    }
    assert {c.dtypes for c in found} == {("bf16",)}
    assert all(c.source.startswith("moe/") for c in found)
    assert all(c.source_line and c.source_line.startswith("test_hlo.py:") for c in found)
    text = program.as_text() or ""
    starts = [c for c in found if c.is_async]
    assert len(starts) == text.count("-start(") == text.count("-done(") > 0


def test_a_gpu_program_drops_one_member_groups():
    program, topology = h200(8, 1, lambda x: (lax.psum(x, "attn_tp"), lax.psum(x, "attn_dp")), ((4, 16), jnp.float32))
    assert totals(collectives(program, topology)) == {("all_reduce", "attn_dp"): Totals(1, 256, 256, 448)}


def test_a_ragged_exchange_counts_the_capacity_of_its_rows():
    def step(rows, sent_at, sent, lands_at, received):
        out = jnp.zeros((128, 16), rows.dtype)
        return lax.ragged_all_to_all(rows, out, sent_at, sent, lands_at, received, axis_name="attn_dp")

    counts = ((8,), jnp.int32)
    program, topology = h200(8, 1, step, ((64, 16), jnp.bfloat16), counts, counts, counts, counts)
    found = [c for c in collectives(program, topology) if c.kind == "ragged_all_to_all"]
    assert len(found) == 1
    assert (found[0].group, found[0].group_size, found[0].dtypes) == ("attn_dp", 8, ("bf16",))
    assert size_of(found[0]) == (64 * 16 * 2, 128 * 16 * 2, 64 * 16 * 2 * 7 / 8)
    assert found[0].source.startswith("ragged_all_to_all")


# What is refused.


def test_a_text_that_is_no_compiled_program_is_refused():
    topology = Topology(4, 2)
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    with pytest.raises(ValueError, match="not the HLO text of a compiled program"):
        collectives(jax.jit(jnp.sin).lower(x).as_text(), topology)


def test_a_program_for_another_number_of_devices_is_refused():
    program = compiled(Topology(4, 2), lambda x: lax.psum(x, "attn_tp"))
    with pytest.raises(ValueError, match="runs on 8 devices, but the topology's world has 6"):
        collectives(program, Topology(2, 3))
