"""Dispatch, identity experts, combine: each row times its weight sum, exactly, whatever the counts and the routing.

Rows are integers and weights eighths, so float32 sums are exact in any order. Every row and weight that nobody may
read is NaN, on the way there (rows past the count, rows of nobody) and back (results past the counts).
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from dispatching import layer, parts, poison
from hypothesis import event, given, settings
from hypothesis import strategies as st

from jaxcoll.dispatch import DispatchSpec
from jaxcoll.topology import Topology

ROWS, K, WIDTH, LOCAL = 4, 3, 2, 2
EXAMPLES = 45  # for each of 8 programs
PROGRAMS = [
    (Topology(2, 1), {"mode": "normal"}),
    (Topology(3, 1), {"mode": "low_latency", "small_pair": 2}),
    (Topology(2, 3), {"mode": "normal", "small_pair": 1}),
    (Topology(2, 3, 2), {"mode": "low_latency"}),
    (Topology(4, 2), {"mode": "normal", "hosts": ("attn_dp",), "small_pair": 1}),
    (Topology(2, 4), {"mode": "low_latency", "hosts": ("attn_dp",)}),
    (Topology(4, 2, 4), {"mode": "normal"}),
    (Topology(8, 1), {"mode": "low_latency", "small_pair": 1}),
]


@functools.cache
def identity(index):
    topology, choices = PROGRAMS[index]
    spec = DispatchSpec.of(topology, topology.moe_ep * LOCAL, **({"hosts": ()} | choices))
    return layer(topology, spec, ROWS, K, WIDTH, factor=jnp.ones_like)


@st.composite
def batches(draw, world, experts):
    """Counts, ids and weights of every rank; often few experts, so that names repeat and blocks run full."""
    counts = draw(st.lists(st.integers(0, ROWS), min_size=world, max_size=world))
    named = st.sampled_from([-1, *draw(st.lists(st.integers(0, experts - 1), min_size=1, max_size=4))])
    expert = draw(st.sampled_from([named, st.integers(-1, experts - 1)]))
    choices = sum(counts) * K
    ids = draw(st.lists(expert, min_size=choices, max_size=choices))
    eighths = draw(st.lists(st.integers(-16, 16), min_size=choices, max_size=choices))
    return counts, ids, eighths


def test_enough_examples_are_tried():
    assert EXAMPLES * len(PROGRAMS) >= 300


@pytest.mark.parametrize("index", range(len(PROGRAMS)))
def test_each_row_comes_home_times_its_weight_sum(index):
    topology, choices = PROGRAMS[index]
    world, num_experts = topology.world, topology.moe_ep * LOCAL

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
    @given(batches(world, num_experts))
    def check(batch):
        counts = np.array(batch[0], np.int32)
        real = np.arange(ROWS) < counts[:, None]
        ids = np.full((world, ROWS, K), num_experts - 1, np.int32)  # padding names a live expert
        weights = np.ones((world, ROWS, K), np.float32)
        ids[real] = np.array(batch[1], np.int32).reshape(-1, K)
        weights[real] = np.array(batch[2]).reshape(-1, K) / 8
        x = np.arange(world * ROWS * WIDTH, dtype=np.float32).reshape(world, ROWS, WIDTH) - 40
        total = np.where((ids >= 0) & real[..., None], weights, 0).sum(-1, keepdims=True) * parts(topology)
        want = x * total
        poison(x, ids, weights, counts)
        event(f"{int(counts.sum())} rows")
        out, _ = identity(index)(*(a.reshape(-1, a.shape[-1]) for a in (x, ids, weights)), counts)
        np.testing.assert_array_equal(np.asarray(out).reshape(want.shape), want)

    check()
