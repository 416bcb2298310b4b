"""Hyper-connections: Sinkhorn as written, comb summed over its first index, and complete outputs only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from reference import Reference
from reference import sinkhorn as exact_sinkhorn
from tiny_models import compile_module, parameters_of, published, random_tensors

from jaxcoll.collectives import declare_partial
from jaxcoll.states import StateError
from jaxcoll.topology import Topology
from models.deepseek_v4.config import Config
from models.deepseek_v4.hyper_connection import HyperConnection, HyperHead, Mix, sinkhorn

ONE = Topology(1, 1)
ROWS = P(ONE.group("attn_dp"))


@pytest.mark.parametrize("eps", [1e-6, 0.1])
@pytest.mark.parametrize("iterations", [1, 2, 20])
@pytest.mark.parametrize("n", [2, 4])
def test_sinkhorn_equals_the_loop(n, iterations, eps):
    logits = 2 * np.random.default_rng(n).standard_normal((5, n, n)).astype(np.float32)
    found = np.asarray(sinkhorn(jnp.asarray(logits), iterations, eps))
    np.testing.assert_allclose(found, [exact_sinkhorn(row, iterations, eps) for row in logits], rtol=5e-6)


def test_sinkhorn_ends_on_the_columns():
    logits = 2 * np.random.default_rng(0).standard_normal((3, 4, 4)).astype(np.float32)
    comb = np.asarray(sinkhorn(jnp.asarray(logits), 1, 1e-6))
    np.testing.assert_allclose(comb.sum(axis=1), 1, atol=1e-5)  # over the source stream
    assert np.max(np.abs(comb.sum(axis=2) - 1)) > 0.2
    assert np.max(np.abs(comb - comb.transpose(0, 2, 1))) > 0.1
    settled = np.asarray(sinkhorn(jnp.asarray(logits), 20, 1e-6))
    np.testing.assert_allclose(settled.sum(axis=2), 1, atol=1e-3)


def write_with(topology: Topology, y_of, streams, y, mix):
    """`HyperConnection.write` as each rank of the mesh sees it; y_of retypes y first."""
    n = streams.shape[1]
    module = HyperConnection(
        Config.from_dict(published(hc_mult=n, hidden_size=streams.shape[2])), topology.group("attn_tp")
    )
    rows = P(topology.group("attn_dp"))

    def write(streams, y, mix):
        return module.write(streams, y_of(y), mix)

    mapped = jax.shard_map(write, mesh=topology.mesh, in_specs=(rows, rows, rows), out_specs=rows)
    return jax.jit(mapped)(streams, y, mix)


def test_write_sums_over_the_first_stream_index():
    streams = np.array([[[1.0], [10.0]]], np.float32)
    mix = Mix(post=jnp.array([[0.5, 2.0]]), comb=jnp.array([[[1.0, 2.0], [3.0, 4.0]]]))
    found = write_with(ONE, lambda y: y, streams, np.array([[100.0]], np.float32), mix)
    # X'[0] = 0.5*100 + 1*1 + 3*10, X'[1] = 2*100 + 2*1 + 4*10
    np.testing.assert_array_equal(found, [[[81.0], [242.0]]])


def test_write_takes_a_complete_output_only():
    topology = Topology(2, 3)
    tp = topology.group("attn_tp")
    streams, y = np.ones((2, 2, 4), np.float32), np.ones((2, 4), np.float32)
    mix = Mix(jnp.ones((2, 2)), jnp.ones((2, 2, 2)))
    np.testing.assert_array_equal(write_with(topology, lambda y: y, streams, y, mix), 3 * streams)

    def as_shard(y):
        return lax.pcast(y, tp, to="varying")

    with pytest.raises(StateError, match="needs REPLICA.*is PARTIAL.*all_reduce"):
        write_with(topology, lambda y: declare_partial(as_shard(y), tp), streams, y, mix)
    with pytest.raises(StateError, match="needs REPLICA.*is SHARD"):
        write_with(topology, as_shard, streams, y, mix)


@pytest.mark.parametrize("eps", [1e-6, 0.05])
def test_read_and_write_equal_the_loop(eps):
    config = published(hc_eps=eps, hc_sinkhorn_iters=2, hc_mult=3, compress_ratios=[0])
    tensors = random_tensors(config)
    exact = Reference(config, tensors)
    module = HyperConnection(Config.from_dict(config), ONE.group("attn_tp"))
    parameters = parameters_of(module, tensors, "layers.0.hc_ffn", ONE)
    draw = np.random.default_rng(1)
    streams = draw.standard_normal((4, 3, 24)).astype(np.float32) * np.array([[[1]], [[1e-3]], [[30]], [[0]]])
    streams, y = streams.astype(np.float32), draw.standard_normal((4, 24)).astype(np.float32)

    def both(module, streams, y):
        x, mix = module.read(streams)
        return x, mix, module.write(streams, y, mix)

    step = compile_module(module, both, parameters, ONE, (streams, y), (ROWS, ROWS), ROWS)
    x, mix, written = step(streams, y)
    for t in range(4):
        pre, post, comb = exact.mixes(streams[t].astype(np.float64), "layers.0.hc_ffn")
        np.testing.assert_allclose(x[t], pre @ streams[t].astype(np.float64), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(mix.post[t], post, rtol=1e-5)
        np.testing.assert_allclose(mix.comb[t], comb, rtol=1e-5)
        wanted = exact.written(streams[t].astype(np.float64), y[t].astype(np.float64), post, comb)
        np.testing.assert_allclose(written[t], wanted, rtol=1e-5, atol=2e-5)
        assert np.max(np.abs(comb - comb.T)) > 0.05


def test_bfloat16_streams_are_mixed_in_float32():
    config = published(hc_mult=2, compress_ratios=[0])
    tensors = random_tensors(config)
    exact = Reference(config, tensors)
    module = HyperConnection(Config.from_dict(config), ONE.group("attn_tp"))
    parameters = parameters_of(module, tensors, "layers.0.hc_attn", ONE)
    streams = jnp.asarray(np.random.default_rng(2).standard_normal((3, 2, 24)), jnp.bfloat16)
    step = compile_module(module, lambda m, s: m.read(s), parameters, ONE, (streams,), (ROWS,), ROWS)
    x, mix = step(streams)
    assert (x.dtype, mix.post.dtype, mix.comb.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    for t in range(3):
        _, post, comb = exact.mixes(np.asarray(streams[t], np.float64), "layers.0.hc_attn")
        np.testing.assert_allclose(mix.post[t], post, rtol=1e-5)
        np.testing.assert_allclose(mix.comb[t], comb, rtol=1e-5)


def test_the_head_collapses_the_streams():
    config = published(hc_eps=0.05, hc_mult=3, compress_ratios=[0])
    tensors = random_tensors(config)
    exact = Reference(config, tensors)
    module = HyperHead(Config.from_dict(config))
    parameters = parameters_of(module, tensors, "hc_head", ONE)
    streams = np.random.default_rng(3).standard_normal((2, 3, 24)).astype(np.float32)
    step = compile_module(module, lambda m, s: m(s), parameters, ONE, (streams,), (ROWS,), ROWS)
    found = np.asarray(step(streams))
    identity = Reference(config, {**tensors, "head.weight": np.eye(24), "norm.weight": np.ones(24)})
    for t in range(2):
        normed = found[t] / np.sqrt(np.mean(found[t].astype(np.float64) ** 2) + 1e-6)
        np.testing.assert_allclose(normed, identity.head(streams[t].astype(np.float64)), atol=1e-5)
        scale = exact["hc_head_scale"], exact["hc_head_base"]
        flat = streams[t].reshape(-1).astype(np.float64)
        mix = exact["hc_head_fn"] @ (flat / np.sqrt(np.mean(flat**2) + 1e-6)) * scale[0] + scale[1]
        pre = 1 / (1 + np.exp(-mix)) + 0.05
        np.testing.assert_allclose(found[t], pre @ streams[t].astype(np.float64), rtol=1e-5, atol=1e-5)
