"""Gradients through dispatch, experts and combine: those of a dense layer on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dispatching import as_documented
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxcoll.dispatch import DispatchSpec, combine, dispatch
from jaxcoll.fused import fused_moe
from jaxcoll.topology import Topology

ROWS, K, WIDTH, LOCAL = 4, 3, 2, 2
TOPOLOGY = Topology(2, 2)
EXPERTS = 4 * LOCAL


def scaled(gains, received, cut):
    """Local expert l multiplies by gains[l]."""
    gains = gains[cut[0] : sum(cut)]
    if not hasattr(received, "topk_ids"):
        return received.x * gains[:, None]
    mine = (received.topk_ids >= 0)[..., None]
    return received.x * jnp.sum(jnp.where(mine, received.topk_weights[..., None] * gains[received.topk_ids], 0), 1)


def exchanged(spec, waves):
    def run(x, ids, weights, gains):
        if waves:
            return fused_moe(x, ids, weights, gains, scaled, spec, waves=waves)
        received, handle = dispatch(x, ids, weights, spec)
        return combine(scaled(gains, received, (0, LOCAL)), handle)

    world = P(TOPOLOGY.group("world"))
    return jax.shard_map(run, mesh=TOPOLOGY.mesh, in_specs=(world,) * 4, out_specs=world)


def dense(x, ids, weights, gains):
    real = (ids >= 0)[..., None]
    return x * jnp.sum(jnp.where(real, weights[..., None] * gains[ids], 0), 1)


@pytest.mark.parametrize(
    "choices, waves",
    [
        ({"mode": "normal", "small_pair": 2}, None),
        ({"mode": "low_latency"}, None),
        ({"mode": "normal", "hosts": ("attn_dp",)}, None),
        ({"mode": "low_latency", "hosts": ("attn_dp",)}, None),
        ({"mode": "normal"}, 2),
        ({"mode": "normal", "transport": "ragged"}, None),
    ],
)
def test_rows_weights_and_experts_get_the_gradients_of_a_dense_layer(choices, waves, monkeypatch):
    monkeypatch.setattr(lax, "ragged_all_to_all", as_documented)
    spec = DispatchSpec(EXPERTS, TOPOLOGY.group("world"), **choices)
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(-1, EXPERTS, (4 * ROWS, K)), jnp.int32)
    x, towards = (jnp.asarray(rng.normal(size=(4 * ROWS, WIDTH)), jnp.float32) for _ in range(2))
    weights = jnp.asarray(rng.normal(size=ids.shape), jnp.float32)
    gains = jnp.asarray(rng.normal(size=(EXPERTS, WIDTH)), jnp.float32)

    def gradients(layer):
        loss = jax.jit(jax.grad(lambda x, w, g: jnp.vdot(layer(x, ids, w, g), towards), argnums=(0, 1, 2)))
        return loss(x, weights, gains)

    # Sums of a few float32 products of order 1, in another order.
    for found, wanted in zip(gradients(exchanged(spec, waves)), gradients(dense), strict=True):
        assert float(jnp.max(jnp.abs(wanted))) > 1
        np.testing.assert_allclose(found, wanted, atol=1e-5)
