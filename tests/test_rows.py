"""Rows per replica: alignment, padding mode with its reason, slots and buckets, on the host and traced."""

import dataclasses
import itertools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcoll.rows import (
    Bucket,
    GatherMode,
    StepFacts,
    aligned_counts,
    bucket_rows,
    padding_mode,
    plan_rows,
    real_rows,
    slots,
)

# (attn_dp, attn_tp), real rows, facts, aligned, mode, total, starts: communication semantics, section 4.2.
CONFORMANCE = [
    ((4, 1), (5, 0, 1, 0), StepFacts(), (5, 0, 1, 0), "sum_len", 6, (0, 5, 5, 6)),
    ((4, 1), (2, 2, 1, 2), StepFacts(), (2, 2, 1, 2), "max_len", 8, (0, 2, 4, 6)),
    ((2, 2), (3, 0), StepFacts(), (4, 0), "max_len", 8, (0, 4)),
    ((2, 2), (3, 1), StepFacts(extend_in_batch=True), (4, 2), "sum_len", 6, (0, 4)),
    (
        (8, 1),
        (1, 0, 0, 0, 0, 0, 0, 0),
        StepFacts(graph="decode"),
        (1, 0, 0, 0, 0, 0, 0, 0),
        "max_len",
        8,
        tuple(range(8)),
    ),
]


@pytest.mark.parametrize("sizes, counts, facts, aligned, mode, total, starts", CONFORMANCE)
def test_conformance_vectors(sizes, counts, facts, aligned, mode, total, starts):
    plan = plan_rows(counts, sizes[1], facts=facts)
    assert len(counts) == sizes[0]
    assert (plan.counts, plan.aligned, plan.mode, plan.total, plan.starts) == (counts, aligned, mode, total, starts)
    assert plan.rows == max(aligned)
    assert plan.reason
    assert not plan.everyone_is_idle


def test_counts_are_rounded_up_to_the_ranks_of_a_replica():
    assert aligned_counts(np.array([0, 1, 2, 3, 4, 5]), 3).tolist() == [0, 3, 3, 3, 6, 6]
    assert aligned_counts(np.array([0, 1, 7]), 1).tolist() == [0, 1, 7]


# The padding rule: the first rule that matches decides.

EXTEND = StepFacts(extend_in_batch=True)


@pytest.mark.parametrize(
    "aligned, facts, mode, words",
    [
        ((2, 2), None, "max_len", "2*4 >= 4"),
        ((4, 0), None, "max_len", "2*4 >= 8"),  # a tie
        ((5, 0, 0), None, "sum_len", "2*5 < 15"),
        ((7,), None, "max_len", "2*7 >= 7"),
        ((9, 9), EXTEND, "sum_len", "extends"),
        ((7,), EXTEND, "max_len", "2*7 >= 7"),  # one replica has nobody to differ from
        ((9, 0), dataclasses.replace(EXTEND, hybrid_ssm=True), "max_len", "idle"),
        ((9, 1), dataclasses.replace(EXTEND, hybrid_ssm=True), "sum_len", "extends"),
        ((9, 0, 0), StepFacts(hybrid_ssm=True), "sum_len", "2*9 < 27"),
        ((9, 0, 0), StepFacts(a2a="pplx"), "max_len", "pplx"),
        ((9, 9), dataclasses.replace(EXTEND, a2a="pplx"), "max_len", "pplx"),
        ((9, 0, 0), StepFacts(a2a="deepep_v2", deepep_v2_force_max_len=True), "max_len", "deepep_v2"),
        ((9, 9), dataclasses.replace(EXTEND, a2a="deepep_v2", deepep_v2_force_max_len=True), "max_len", "deepep_v2"),
        ((9, 0, 0), StepFacts(a2a="deepep_v2"), "sum_len", "2*9 < 27"),
        ((9, 0, 0), StepFacts(a2a="deepep", deepep_v2_force_max_len=True), "sum_len", "2*9 < 27"),
        ((9, 8), StepFacts(elastic=True), "sum_len", "elastic"),
        ((9, 9), StepFacts(elastic=True), "max_len", "2*18 >= 18"),
        ((9, 8), StepFacts(elastic=True, a2a="pplx"), "sum_len", "elastic"),
        ((9, 0, 0), StepFacts(graph="decode"), "max_len", "captured"),
        ((9, 9), StepFacts(graph="decode", decode_graph_mode="sum_len"), "sum_len", "captured"),
        ((9, 0, 0), dataclasses.replace(EXTEND, graph="prefill"), "max_len", "bucket"),
    ],
)
def test_the_first_rule_that_matches_decides(aligned, facts, mode, words):
    found, reason = padding_mode(aligned, facts)
    assert found == mode
    assert words in reason


def test_the_rule_reads_aligned_counts():
    assert plan_rows((2, 0, 1)).mode == "max_len"  # 2*3 >= 3*2
    assert plan_rows((3, 0, 1)).mode == "sum_len"  # 2*4 < 3*3
    assert plan_rows((3, 0, 1), attn_tp=4).mode == "max_len"  # 2*8 >= 3*4


def test_a_named_mode_overrides_the_rule():
    plan = plan_rows((5, 0, 1, 0), mode="max_len", facts=EXTEND)
    assert (plan.mode, plan.rows, plan.total, plan.starts) == ("max_len", 5, 20, (0, 5, 10, 15))
    assert plan.reason == "max_len was asked for"


def test_when_every_replica_is_idle_nobody_runs():
    for mode, bucketed in itertools.product((None, "sum_len", "max_len"), (False, True)):
        plan = plan_rows((0, 0, 0), 2, mode=mode, bucketed=bucketed)
        assert plan.everyone_is_idle
        assert (plan.rows, plan.total, plan.starts) == (0, 0, (0, 0, 0))
        assert "nobody runs" in plan.reason
    assert plan_rows((0, 0, 0), 2).mode == "max_len"


# Buckets.


def test_buckets_are_powers_of_two_times_the_ranks_of_a_replica():
    assert [bucket_rows(n, 1) for n in range(10)] == [0, 1, 2, 4, 4, 8, 8, 8, 8, 16]
    assert [bucket_rows(n, 3) for n in (0, 1, 3, 4, 6, 7, 12, 13)] == [0, 3, 3, 6, 6, 12, 12, 24]


def test_a_bucketed_plan_keeps_its_slots_in_the_buffer():
    equal = plan_rows((5, 3), 2, bucketed=True)
    assert (equal.bucket, equal.starts) == (Bucket("max_len", 8, 16), (0, 8))
    by_count = plan_rows((5, 0, 1, 0), bucketed=True)
    assert (by_count.bucket, by_count.starts) == (Bucket("sum_len", 8, 8), (0, 5, 5, 6))
    capped = plan_rows((4, 4, 1), mode="sum_len", bucketed=True)
    assert capped.bucket == Bucket("sum_len", 4, 12)  # 16 would be more than all replicas hold


@pytest.mark.parametrize("attn_dp, attn_tp", [(2, 3), (4, 1), (3, 2)])
def test_few_buckets_serve_every_batch(attn_dp, attn_tp):
    found = set()
    for counts in itertools.product(range(6), repeat=attn_dp):
        plan, exact = plan_rows(counts, attn_tp, bucketed=True), plan_rows(counts, attn_tp)
        ends = [s + a for s, a in zip(plan.starts, plan.aligned, strict=True)]
        assert max(plan.aligned) <= plan.rows
        assert max(ends) <= plan.total
        assert plan.rows % attn_tp == plan.total % attn_tp == 0
        assert exact.rows <= plan.rows and exact.total <= plan.total < max(1, 2 * attn_dp * max(1, exact.rows))
        assert (plan.mode, plan.aligned, plan.reason) == (exact.mode, exact.aligned, exact.reason)
        found.add(plan.bucket)
    assert len(found) <= 16


# The same functions on the host and traced.


@pytest.mark.parametrize("attn_tp", [1, 2, 3])
@pytest.mark.parametrize("mode", get_args(GatherMode))
def test_traced_counts_give_the_plan_of_the_host(mode, attn_tp):
    rows, attn_dp = 6, 3
    total = attn_dp * rows

    @jax.jit
    def traced(counts):
        sizes, starts = slots(counts, mode, attn_tp=attn_tp, rows=rows)
        real = real_rows(counts, mode, attn_tp=attn_tp, rows=rows, total=total)
        return aligned_counts(counts, attn_tp), sizes, starts, real

    for counts in itertools.product((0, 1, 2, 5, 6), repeat=attn_dp):
        host = np.array(counts)
        plan = plan_rows(counts, attn_tp, mode="max_len" if mode == "max_len" else "sum_len")
        aligned, sizes, starts, real = traced(jnp.array(counts, jnp.int32))
        assert starts.dtype == jnp.int32
        assert aligned.tolist() == list(plan.aligned)
        if mode != "max_len":
            assert starts.tolist() == list(plan.starts)
        host_sizes, host_starts = slots(host, mode, attn_tp=attn_tp, rows=rows)
        assert (sizes.tolist(), starts.tolist()) == (host_sizes.tolist(), host_starts.tolist())
        host_real = real_rows(host, mode, attn_tp=attn_tp, rows=rows, total=total)
        assert real.tolist() == host_real.tolist()
        expected = [False] * total
        for start, count in zip(host_starts, counts, strict=True):
            expected[start : start + count] = [True] * count
        assert host_real.tolist() == expected


# Bad input.


@pytest.mark.parametrize("counts", [(), (1, -1), (1, 0.5), (1, None)])
def test_counts_that_are_none_are_refused(counts):
    with pytest.raises(ValueError, match="counts must be whole numbers of at least 0, one per replica, not"):
        plan_rows(counts)


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ((2**31,), "a replica would number 2147483648 rows"),
        ((2**64, 1), f"a replica would number {2**64} rows"),
        ((2**30, 2**30), "a step would number 2147483648 rows"),
    ],
)
def test_rows_that_32_bits_cannot_number_are_refused(counts, said):
    with pytest.raises(ValueError, match=f"{said}, which passes 2.31 - 1"):
        plan_rows(counts)


def test_unknown_words_are_refused():
    with pytest.raises(ValueError, match="unknown mode 'sum'; allowed are max_len, sum_len"):
        plan_rows((1,), mode="sum")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="unknown mode 'sum'; allowed are gather_v, sum_len, max_len"):
        slots(np.array([1]), "sum", attn_tp=1, rows=1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="unknown a2a 'nccl'; allowed are none, deepep, "):
        StepFacts(a2a="nccl")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="unknown graph 'both'; allowed are none, decode, prefill"):
        StepFacts(graph="both")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="unknown decode_graph_mode 'auto'; allowed are max_len, sum_len"):
        StepFacts(decode_graph_mode="auto")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="elastic must be True or False, not 'no'"):
        StepFacts(elastic="no")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="attn_tp must be a whole number of at least 1, not 1.5"):
        plan_rows((1,), 1.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="attn_tp must be a whole number of at least 1, not 0"):
        plan_rows((1,), 0)
