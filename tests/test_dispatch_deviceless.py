"""Dispatch and combine compiled for H200s that are not there: only ragged exchanges carry rows, and asynchronously."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxcoll.audit import audit
from jaxcoll.dispatch import DispatchSpec, combine_finish, combine_start, dispatch_finish, dispatch_start, meanwhile
from jaxcoll.hlo import collectives
from jaxcoll.targets import compile_only, gpu_devices
from jaxcoll.topology import Topology
from jaxcoll.wire import resolve, row_bytes

ROWS, K, WIDTH, EXPERTS, SHARED = 64, 6, 1024, 256, 512
# Over several hosts XLA replaces a ragged exchange by an all_gather of the whole padded buffer and more, unless told
# not to. Whether the plain exchange runs on real networks has not been measured.
PLAIN_RAGGED = {"xla_gpu_unsupported_enable_ragged_all_to_all_multi_host_decomposer": False}


@functools.cache
def program(hosts, mode, wire="auto", two_levels=False, option=True):
    """The compiled exchange around a stand-in for the experts, with a shared expert's matmuls, and its topology."""
    topology = Topology(hosts, 8, devices=gpu_devices("h200", hosts, 8))
    spec = DispatchSpec.of(topology, EXPERTS, mode=mode, wire=wire, kernels="xla", hosts=None if two_levels else ())
    assert (spec.transport, bool(spec.hosts)) == ("ragged", two_levels)

    def run(x, ids, weights, w1, w2):
        sent = dispatch_start(x, ids, weights, spec)
        sent, shared = meanwhile(sent, jax.nn.silu(x @ w1) @ w2)
        received, handle = dispatch_finish(sent)
        y = received.x * 2
        if mode == "normal":
            y = y * jnp.sum(received.topk_weights, axis=1).astype(x.dtype)[:, None]  # pyright: ignore[reportAttributeAccessIssue]
        return combine_finish(combine_start(y, handle)) + shared

    world = P(topology.group("world"))
    specs = (world, world, world, P(), P())
    shapes = [(ROWS, WIDTH, "bfloat16"), (ROWS, K, "int32"), (ROWS, K, "float32")]
    shapes = [(topology.world * n, *rest) for n, *rest in shapes]
    shapes += [(WIDTH, SHARED, "bfloat16"), (SHARED, WIDTH, "bfloat16")]
    args = [
        jax.ShapeDtypeStruct(s[:2], s[2], sharding=topology.sharding(p)) for s, p in zip(shapes, specs, strict=True)
    ]
    traced = jax.jit(jax.shard_map(run, mesh=topology.mesh, in_specs=specs, out_specs=world)).trace(*args)
    audit(traced)
    return compile_only(traced.lower(), PLAIN_RAGGED if option and hosts > 1 else None), topology


def rows_and_rest(compiled, topology):
    """Ragged exchanges of whole rows, those of what lies beside them, and all other collectives."""
    ragged = [c for c in collectives(compiled, topology) if c.kind == "ragged_all_to_all"]
    rest = [c for c in collectives(compiled, topology) if c.kind != "ragged_all_to_all"]
    return [c for c in ragged if "s32" not in c.dtypes], [c for c in ragged if "s32" in c.dtypes], rest


def counts_bytes(ranks, blocks):
    return 4 * ranks * blocks


@pytest.mark.parametrize("wire", ["auto", "fp8"])
@pytest.mark.parametrize("mode", ["normal", "low_latency"])
def test_on_one_host_only_ragged_exchanges_carry_rows(mode, wire):
    compiled, topology = program(1, mode, wire)
    rows, beside, rest = rows_and_rest(compiled, topology)
    there, home = row_bytes(resolve(wire, jnp.bfloat16, WIDTH), WIDTH)
    values = WIDTH if wire == "fp8" else there  # the scales travel beside them
    packed, slabs = ROWS * K, 8 * ROWS * (1 if mode == "normal" else EXPERTS // 8)
    found = [(c.operand_bytes, c.result_bytes) for c in rows]
    assert found == [(packed * values, slabs * values), (slabs * home, packed * home)]
    per_row = (8 * K if mode == "normal" else 0) + (there - values)
    assert [c.operand_bytes for c in beside] == ([packed * per_row] if per_row else [])
    blocks = 8 if mode == "normal" else EXPERTS
    assert [(c.kind, c.result_bytes) for c in rest] == [("all_gather", counts_bytes(8, blocks))]


@pytest.mark.parametrize(
    "hosts, mode, two_levels",
    [
        (2, "normal", False),
        (2, "low_latency", False),
        (32, "low_latency", False),
        (2, "normal", True),
        (32, "normal", True),
        (32, "low_latency", True),
    ],
)
def test_over_hosts_too_with_the_compiler_option(hosts, mode, two_levels):
    compiled, topology = program(hosts, mode, two_levels=two_levels)
    rows, beside, rest = rows_and_rest(compiled, topology)
    smallest = min(c.operand_bytes for c in rows)
    assert {c.kind for c in rest} == {"all_gather"}
    assert len(rest) == (2 if two_levels else 1)  # the counts, once a level
    blocks = [hosts, 8 if mode == "normal" else EXPERTS // hosts] if two_levels else [EXPERTS]
    largest = max(counts_bytes(8 * hosts, EXPERTS) if not two_levels else 0, *(counts_bytes(32, b) for b in blocks))
    assert max(c.result_bytes for c in rest) <= largest
    assert max(c.operand_bytes for c in rest) < smallest
    groups = [c.group for c in rows]
    if not two_levels:
        assert groups == ["attn_dp,attn_tp"] * 2
    else:
        assert groups == ["attn_dp", "attn_tp", "attn_tp", "attn_dp"]
        over_hosts = [rows[0].operand_bytes, rows[-1].result_bytes]
        assert over_hosts == [ROWS * min(K, hosts) * WIDTH * 2] * 2  # at most one copy per host
    assert len(beside) == (mode == "normal") + two_levels


def test_without_the_option_xla_gathers_the_whole_buffer_across_hosts():
    compiled, topology = program(2, "normal", option=False)
    _, _, rest = rows_and_rest(compiled, topology)
    gathered = max(c.result_bytes for c in rest if c.kind == "all_gather" and c.group == "attn_dp")
    assert gathered >= 2 * ROWS * K * WIDTH * 2


@pytest.mark.parametrize(
    "hosts, mode, wire, two_levels",
    [
        (1, "low_latency", "auto", False),
        (1, "normal", "fp8", False),
        (2, "normal", "auto", False),
        (32, "low_latency", "auto", False),
        (2, "normal", "auto", True),
    ],
)
def test_rows_travel_while_the_shared_expert_computes(hosts, mode, wire, two_levels):
    compiled, _ = program(hosts, mode, wire, two_levels)
    lines = compiled.as_text().splitlines()  # pyright: ignore[reportOptionalMemberAccess]
    starts = [
        i
        for i, line in enumerate(lines)
        if "ragged-all-to-all-start(" in line and "s32[" not in line.split("=")[1][:30]
    ]
    spans = [(i, next(j for j in range(i, len(lines)) if "ragged-all-to-all-done(" in lines[j])) for i in starts]
    assert any("gemm" in line for i, j in spans for line in lines[i:j])


def test_memory_is_that_of_the_bounds():
    compiled, _ = program(1, "low_latency")
    held = compiled.memory_analysis().temp_size_in_bytes  # pyright: ignore[reportOptionalMemberAccess]
    slab = 8 * ROWS * (EXPERTS // 8) * WIDTH * 2
    assert slab <= held <= 2.1 * slab + math.prod((ROWS, K, WIDTH, 2, 2))
