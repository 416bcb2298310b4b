"""Route and exchange plans against loops over rows: every integer, random and crafted routing."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcoll.placement import place_experts, to_physical
from jaxcoll.routing import (
    check_row_numbers,
    exclusive_sum,
    experts_per_rank,
    merge_repeats,
    plan_exchange,
    plan_routes,
    tokens_per_expert,
)

SIZES = [(5, 3, 8, 4), (7, 2, 6, 6), (4, 6, 6, 3), (1, 1, 4, 2), (6, 4, 5, 1)]  # T, K, E, R


def by_loops(ids, count, num_experts, num_ranks, unit, capacity):
    """A RoutePlan by its docstring."""
    rows, k = ids.shape
    local = num_experts // num_ranks
    plan = {"expert_ids": np.full((rows, k), -1), "slots": np.full((rows, k), -1)}
    plan["is_token_in_rank"] = np.zeros((rows, num_ranks), bool)
    plan["tokens_per_rank"], plan["tokens_per_expert"] = np.zeros(num_ranks, int), np.zeros(num_experts, int)  # pyright: ignore[reportArgumentType]
    copies = []  # (block, row, choice) in the order of rows
    for t in range(min(rows, count)):
        experts, ranks = [], []
        for j, e in enumerate(ids[t].tolist()):
            if not 0 <= e < num_experts or e in experts:
                continue
            experts.append(e)
            plan["expert_ids"][t, j] = e
            plan["tokens_per_expert"][e] += 1
            if unit == "expert":
                copies.append((e, t, j))
            elif e // local not in ranks:
                copies.append((e // local, t, j))
            ranks.append(e // local)
        for r in set(ranks):
            plan["is_token_in_rank"][t, r] = True
            plan["tokens_per_rank"][r] += 1
    blocks = num_ranks if unit == "rank" else num_experts
    plan["send_counts"] = np.bincount([c[0] for c in copies], minlength=blocks)[:blocks]
    plan["send_offsets"] = np.concatenate([[0], np.cumsum(plan["send_counts"])[:-1]])
    plan["rows"] = np.full(rows * min(k, blocks), -1)  # pyright: ignore[reportArgumentType]
    for slot, (_, t, j) in enumerate(sorted(copies)):
        plan["slots"][t, j], plan["rows"][slot] = slot, t
    plan["overflow"] = np.maximum(plan["send_counts"] - capacity, 0).sum()
    return plan


@functools.cache
def planner(num_experts, num_ranks, unit, capacity):
    plan = functools.partial(plan_routes, num_experts=num_experts, num_ranks=num_ranks, unit=unit, capacity=capacity)
    return jax.jit(lambda ids, count: plan(ids, count=count))


def assert_exact(ids, count, num_experts, num_ranks, unit, capacity=2):
    found = planner(num_experts, num_ranks, unit, capacity)(jnp.asarray(ids, jnp.int32), jnp.int32(count))
    for name, value in by_loops(np.asarray(ids), count, num_experts, num_ranks, unit, capacity).items():
        got = getattr(found, name)
        assert got.dtype == (bool if name == "is_token_in_rank" else jnp.int32), name
        np.testing.assert_array_equal(got, value, err_msg=name)


@pytest.mark.parametrize("unit", ["rank", "expert"])
@pytest.mark.parametrize("t, k, e, r", SIZES)
def test_random_routing_equals_the_loops(t, k, e, r, unit):
    rng = np.random.default_rng(t * 100 + k)
    for _ in range(60):
        ids = rng.integers(-2, e + 2, (t, k))  # -2, -1, e and e + 1 are nobody
        assert_exact(ids, int(rng.integers(0, t + 1)), e, r, unit)


CRAFTED = {
    "all to the first": [[0, 0, 0]] * 5,
    "all to a middle one": [[3, 3, 3]] * 5,
    "all to the last": [[7, 7, 7]] * 5,
    "twice the same, then its neighbour": [[2, 2, 3]] + [[-1, -1, -1]] * 4,
    "one row in the world": [[-1, -1, -1]] * 4 + [[6, -1, 1]],
    "nobody": [[-1, -1, -1]] * 5,
    "-1 before a live choice": [[-1, 7, 7], [-1, -1, 0], [8, 5, -3], [1, 0, 1], [4, 5, 4]],
}


@pytest.mark.parametrize("unit", ["rank", "expert"])
@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_routing_equals_the_loops(name, unit):
    for count in (0, 4, 5):
        assert_exact(CRAFTED[name], count, 8, 4, unit)


def test_the_defaults_are_all_rows_and_a_capacity_that_is_a_proof():
    ids = jnp.zeros((5, 3), jnp.int32)
    for unit in ("rank", "expert"):
        plan = plan_routes(ids, num_experts=8, num_ranks=4, unit=unit)
        assert (plan.overflow, plan.tokens_per_expert[0], plan.send_counts[0]) == (0, 5, 5)
        assert plan_routes(ids, num_experts=8, num_ranks=4, unit=unit, capacity=2).overflow == 3


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32"])
def test_ids_of_any_width_are_the_same_ids(dtype):
    """256 experts fit no int8, and no unsigned type has a -1."""
    ids = np.array([[3, 100, 3], [1, 1, 2]])
    given, wanted = jnp.asarray(ids, dtype), jnp.asarray(ids, jnp.int32)
    plans = [plan_routes(i, num_experts=256, num_ranks=4, count=jnp.int32(1)) for i in (given, wanted)]
    for found, want in zip(*map(jax.tree.leaves, plans), strict=True):
        assert found.dtype == want.dtype
        np.testing.assert_array_equal(found, want)
    assert plans[0].expert_ids.tolist() == [[3, 100, -1], [-1, -1, -1]]
    merged, summed = merge_repeats(given, jnp.ones((2, 3)))
    assert merged.tolist() == [[3, 100, -1], [1, -1, 2]] and summed.tolist() == [[2, 1, 0], [2, 0, 1]]
    for placement in (place_experts(4, 2), place_experts(4, 2, redundant=2)):
        np.testing.assert_array_equal(to_physical(given, placement), to_physical(wanted, placement))
    assert to_physical(given, place_experts(4, 2)).tolist() == [[3, -1, 3], [1, 1, 2]]


def test_ids_past_32_bits_are_nobody():
    with jax.enable_x64(True):
        ids = jnp.array([[3, 2**32 + 3, 2**33]], jnp.int64)
        assert plan_routes(ids, num_experts=8, num_ranks=4).expert_ids.tolist() == [[3, -1, -1]]
        assert merge_repeats(ids, jnp.ones((1, 3)))[1].tolist() == [[1, 0, 0]]
        assert tokens_per_expert(ids, 4).tolist() == [0, 0, 0, 1]


def test_ids_and_counts_that_are_none_are_refused():
    ids = jnp.zeros((2, 2), jnp.int32)
    plan = functools.partial(plan_routes, num_experts=4, num_ranks=2)
    with pytest.raises(ValueError, match=r"topk_ids are expert numbers, not float32\[2, 2\]: integers \[T, K\]"):
        plan(ids.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"not int32\[2\]: integers \[T, K\]"):
        plan(ids[0])
    with pytest.raises(ValueError, match=r"count must be one integer, not int32\[2\]"):
        plan(ids, count=jnp.array([0, 2]))
    with pytest.raises(ValueError, match="count must be one integer, not float32"):
        plan(ids, count=jnp.float32(1.5))
    with pytest.raises(ValueError, match="8 experts cannot be cut into 0 equal parts"):
        experts_per_rank(8, 0)


def test_repeats_are_merged_with_their_weights_and_nobody_weighs_nothing():
    ids = jnp.array([[2, 2, -1, 2], [-1, -1, 0, 1], [3, 1, 3, -5]])
    weights = jnp.array([[0.25, 0.5, jnp.nan, 0.125], [jnp.nan, 1, 2, 3], [1, 1, -1, jnp.inf]])
    merged, summed = merge_repeats(ids, weights)
    np.testing.assert_array_equal(merged, [[2, -1, -1, -1], [-1, -1, 0, 1], [3, 1, -1, -1]])
    np.testing.assert_array_equal(summed, [[0.875, 0, 0, 0], [0, 0, 2, 3], [0, 1, 0, 0]])


@pytest.mark.parametrize("ranks, slices", [(2, 1), (3, 2), (4, 3), (1, 2)])
def test_every_offset_of_an_exchange_follows_from_the_counts(ranks, slices):
    rng = np.random.default_rng(ranks)
    counts = rng.integers(0, 4, (ranks, ranks, slices))
    slab = int(counts.sum(0).max())
    plans = [plan_exchange(jnp.asarray(counts, jnp.int32), r, slab_rows=slab) for r in range(ranks)]
    received = [np.full(slices * slab, -1) for _ in range(ranks)]
    for src in range(ranks):
        position = 0
        for dst in range(ranks):
            for j in range(slices):
                here, there = dst * slices + j, src * slices + j
                sent, got, n = plans[src], plans[dst], counts[src, dst, j]
                assert sent.send_counts[here] == got.recv_counts[there] == n
                assert sent.send_offsets[here] == got.home_offsets[there] == position
                assert sent.landing_offsets[here] == got.recv_offsets[there]
                start = int(got.recv_offsets[there])
                assert (received[dst][start : start + n] == -1).all()
                received[dst][start : start + n] = src
                position += n
    for dst in range(ranks):
        for j, slab_rows in enumerate(received[dst].reshape(slices, slab)):
            in_source_order = np.repeat(np.arange(ranks), counts[:, dst, j])
            np.testing.assert_array_equal(
                slab_rows, np.pad(in_source_order, (0, slab - len(in_source_order)), constant_values=-1)
            )


def test_counting_experts_leaves_nobody_out():
    np.testing.assert_array_equal(tokens_per_expert(jnp.array([[-1, 0], [2, 2], [3, -7]]), 3), [1, 0, 2])
    np.testing.assert_array_equal(exclusive_sum(jnp.array([3, 0, 2])), [0, 3, 3])


def test_bad_sizes_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match="11 experts cannot be cut into 3 equal parts; redundant copies"):
        plan_routes(jnp.zeros((1, 1), jnp.int32), num_experts=11, num_ranks=3)
    with pytest.raises(ValueError, match="unknown unit 'token'; allowed are rank, expert"):
        wrong: Any = "token"
        plan_routes(jnp.zeros((1, 1), jnp.int32), num_experts=2, num_ranks=2, unit=wrong)
    assert experts_per_rank(12, 3) == 4
    assert check_row_numbers("a buffer", {"T": 2**16, "ranks": 2**15 - 1}) == 2**31 - 2**16
    with pytest.raises(ValueError, match=r"a buffer would number T \* ranks = 65536 \* 32768 = 2147483648 rows, which"):
        check_row_numbers("a buffer", {"T": 2**16, "ranks": 2**15})
    with pytest.raises(ValueError, match=r"T \* min\(K, blocks\) = 1000000000 \* 4"):
        jax.eval_shape(
            functools.partial(plan_routes, num_experts=8, num_ranks=4),
            jax.ShapeDtypeStruct((10**9, 5), jnp.int32),
        )


def test_repeats_are_merged_into_the_first_mention():
    ids = jnp.array([[2, 2, 5], [7, 1, 7], [4, 4, 4], [0, 1, 2], [-1, 3, -1]])
    weights = jnp.array([[0.25, 0.75, 1], [1, 2, 4], [1, 2, 4], [1, 2, 4], [jnp.nan, 2, 1]])
    merged, summed = merge_repeats(ids, weights)
    assert merged.tolist() == [[2, -1, 5], [7, 1, -1], [4, -1, -1], [0, 1, 2], [-1, 3, -1]]
    assert summed[:4].tolist() == [[1, 0, 1], [5, 2, 0], [7, 0, 0], [1, 2, 4]]
    assert summed[4].tolist() == [0, 2, 0]
