"""One call in waves of experts: the sums of NumPy row by row, and in low latency the bits of the single exchange."""

import jax.numpy as jnp
import numpy as np
import pytest
from dispatching import as_documented, expected_output, layer, parts, random_rows
from jax import lax
from stepping import everywhere, shape, step

from jaxcoll.dispatch import DispatchSpec
from jaxcoll.fused import MOST_WAVES, default_waves, fused_moe, wave_cuts
from jaxcoll.topology import Topology

ROWS, K, WIDTH, LOCAL = 5, 3, 4, 3
CASES = [
    (Topology(2, 3), {"mode": "low_latency"}, 2),
    (Topology(2, 3), {"mode": "normal"}, 3),
    (Topology(4, 2), {"mode": "low_latency", "small_pair": 1}, 3),
    (Topology(4, 2, 4), {"mode": "low_latency"}, 2),  # moe_tp 2
    (Topology(6, 1, 3), {"mode": "normal", "small_pair": 1}, 2),
    (Topology(4, 2), {"mode": "normal", "hosts": ("attn_dp",)}, 2),
    (Topology(2, 3), {"mode": "low_latency", "hosts": ("attn_dp",)}, None),
    (Topology(3, 2), {"mode": "low_latency", "transport": "ragged"}, 2),
]


@pytest.fixture(autouse=True)
def _ragged_as_documented(monkeypatch):
    monkeypatch.setattr(lax, "ragged_all_to_all", as_documented)


def multiply(factors, received, cut):
    """Expert l multiplies by factors[l]; what nobody may read becomes NaN."""
    factors = factors[cut[0] : sum(cut)]
    x = received.x.astype(jnp.float32)
    if hasattr(received, "topk_ids"):
        weight = jnp.where(received.topk_ids >= 0, received.topk_weights * factors[received.topk_ids], 0)
        y, real = x * weight.sum(1)[:, None], jnp.arange(len(x)) < received.counts.sum()
    else:
        y, real = x * factors[:, None, None], jnp.arange(x.shape[1]) < received.tokens_per_expert[:, None]
    return jnp.where(real[..., None], y, jnp.nan)


def program(topology, spec, waves, dtype="float32"):
    """A step (x, ids, weights, counts) of global arrays -> output; experts multiply by their number plus one."""
    local = spec.num_experts // topology.moe_ep

    def run(x, ids, weights, count):
        part = 1 + lax.axis_index(spec.moe_tp) if spec.moe_tp else 1
        factors = (lax.axis_index(spec.moe_ep) * local + jnp.arange(local) + 1.0) * part
        return fused_moe(x, ids, weights, factors, multiply, spec, waves=waves, count=count[0])

    world, n = everywhere(topology), topology.world
    shapes = [shape(n * ROWS, WIDTH, dtype=dtype), shape(n * ROWS, K, dtype="int32"), shape(n * ROWS, K)]
    return step(topology, run, [*shapes, shape(n, dtype="int32")], [world] * 4, world)


def spec_of(topology, choices):
    return DispatchSpec.of(topology, topology.moe_ep * LOCAL, **({"hosts": (), "transport": "dense"} | choices))


@pytest.mark.parametrize("index", range(len(CASES)))
def test_every_row_meets_each_of_its_experts_once_in_some_wave(index):
    topology, choices, waves = CASES[index]
    spec = spec_of(topology, choices)
    run = program(topology, spec, waves)
    rng = np.random.default_rng(index)
    for nobody in (0.0, 0.3, 1.0):
        x, ids, weights, counts = random_rows(rng, topology.world, ROWS, K, WIDTH, spec.num_experts, nobody=nobody)
        out = run(*(a.reshape(-1, a.shape[-1]) for a in (x, ids, weights)), counts)
        want = expected_output(x, ids, weights, counts, spec.num_experts, parts(topology))
        np.testing.assert_array_equal(np.asarray(out).reshape(x.shape), want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_waves_change_no_bit_of_low_latency(dtype):
    topology = Topology(2, 3)
    spec = spec_of(topology, {"mode": "low_latency"})
    rng = np.random.default_rng(7)
    _, ids, _, _ = random_rows(rng, 6, ROWS, K, WIDTH, spec.num_experts)
    x = jnp.asarray(rng.normal(size=(6 * ROWS, WIDTH)), dtype)
    weights = rng.normal(size=(6 * ROWS, K)).astype(np.float32)
    args = x, ids.reshape(-1, K), weights, np.full(6, ROWS, np.int32)
    once, _ = layer(topology, spec, ROWS, K, WIDTH, dtype)(*args)
    for waves in (1, 2, 3):
        np.testing.assert_array_equal(program(topology, spec, waves, dtype)(*args), once)


def test_waves_are_as_equal_as_possible():
    assert wave_cuts(7, 3) == [(0, 3), (3, 2), (5, 2)]
    assert wave_cuts(4, 1) == [(0, 4)]
    assert default_waves(2) == 2 and default_waves(384) == MOST_WAVES


@pytest.mark.parametrize("waves", [0, 4])
def test_waves_that_cannot_be_are_refused(waves):
    with pytest.raises(ValueError, match=f"waves must be from 1 to the 3 experts of a rank, not {waves}"):
        wave_cuts(LOCAL, waves)
