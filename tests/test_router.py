"""Routing: scores that neither vanish nor overflow, ties, a bias that only picks, and tables by token id."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from reference import Reference, softplus
from tiny_models import Tensors, compile_module, parameters_of, published, random_tensors

from jaxcoll.topology import Topology
from models.deepseek_v4.config import Config
from models.deepseek_v4.router import Router, scores_of, weights_of

ONE = Topology(1, 1)
ROWS = P(ONE.group("attn_dp"))
# 24 channels and 12 experts; layer 0 routes by hash, layer 1 by score.
CONFIG = published(compress_ratios=[0, 0])
TENSORS = random_tensors(CONFIG)
EXPERTS, K, COUNT = 12, 3, 8


def routed(layer: int, x: np.ndarray, tokens: np.ndarray, tensors: Tensors = TENSORS) -> tuple[np.ndarray, np.ndarray]:
    module = Router(Config.from_dict(CONFIG), layer, jnp.float32)
    parameters = parameters_of(module, tensors, f"layers.{layer}.ffn.gate", ONE)

    def fn(module: Any, x: Any, tokens: Any) -> Any:
        return module(x, tokens)

    x, tokens = x.astype(np.float32), tokens.astype(np.int32)
    step = compile_module(module, fn, parameters, ONE, (x, tokens), (ROWS, ROWS), ROWS)
    ids, weights = step(x, tokens)
    return np.asarray(ids), np.asarray(weights)


def by_logit(logits: np.ndarray, bias: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Routes rows whose logits [T, E] are given."""
    gate = np.eye(EXPERTS, 24, dtype=np.float32)
    bias = np.zeros(EXPERTS, np.float32) if bias is None else bias
    tensors = {**TENSORS, "layers.1.ffn.gate.weight": gate, "layers.1.ffn.gate.bias": bias.astype(np.float32)}
    x = np.zeros((len(logits), 24), np.float32)
    x[:, :EXPERTS] = logits
    return routed(1, x, np.zeros(len(logits)), tensors)


SWEEP = np.unique(np.concatenate([np.arange(-250, 201), np.linspace(-110, -80, 61), np.linspace(-22, -15, 57)]))


def test_scores_are_right_from_minus_250_to_200():
    found = np.asarray(jax.jit(scores_of)(jnp.asarray(SWEEP, jnp.float32)), np.float64)
    exact = np.sqrt(softplus(SWEEP.astype(np.float32).astype(np.float64)))
    assert np.all(np.isfinite(found)) and np.all(np.diff(found) >= 0)
    normal = exact > 2.0**-125
    assert np.sum(~normal) > 50  # the sweep goes past the last normal number
    np.testing.assert_allclose(found[normal], exact[normal], rtol=1e-5)  # exp of an argument rounded near 100
    np.testing.assert_allclose(found[~normal], 0, atol=2.0**-125)


def test_weights_are_right_from_minus_250_to_200():
    """All chosen experts at one logit, and one of them far above the others."""
    same = np.repeat(SWEEP[:, None], 4, axis=1)
    apart = same + np.array([0, 0, 30, 1])
    for logits in (same, apart):
        logits = logits.astype(np.float32)
        scores = jax.jit(scores_of)(jnp.asarray(logits))
        ids = jnp.broadcast_to(jnp.arange(4), logits.shape)
        found = np.asarray(jax.jit(weights_of, static_argnums=2)(scores, ids, 1.5))
        exact = np.sqrt(softplus(logits.astype(np.float64)))
        exact = exact / (exact.sum(axis=1, keepdims=True) + 1e-20) * 1.5
        assert np.all(np.isfinite(found))
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("logit", "weight"), [(-30, 0.5), (-90, 0.4478), (-250, 0), (0, 0.5), (200, 0.5)])
def test_three_equal_logits(logit, weight):
    logits = np.full((1, EXPERTS), logit - 40.0)
    logits[0, [2, 5, 11]] = logit
    bias = np.zeros(EXPERTS)
    bias[[2, 5, 11]] = 1
    ids, weights = by_logit(logits, bias)
    assert sorted(ids[0]) == [2, 5, 11]
    np.testing.assert_allclose(weights[0], weight, rtol=1e-3)


def test_random_rows_equal_the_loop():
    draw = np.random.default_rng(0)
    x, tokens = draw.standard_normal((COUNT, 24)), draw.integers(0, 61, COUNT)
    exact = Reference(CONFIG, TENSORS)
    for layer in (0, 1):
        ids, weights = routed(layer, 3 * x, tokens)
        for t in range(COUNT):
            wanted_ids, wanted = exact.route(3 * x[t].astype(np.float32), tokens[t], layer)
            assert ids[t].tolist() == wanted_ids
            np.testing.assert_allclose(weights[t], wanted, rtol=1e-5)
    np.testing.assert_allclose(weights.sum(axis=1), 1.5, rtol=1e-6)


def test_ties_go_to_the_lowest_expert():
    logits = np.zeros((3, EXPERTS))
    logits[1, [4, 6, 7, 9, 10]] = 2
    logits[2] = -500  # all scores are exactly 0
    ids, weights = by_logit(logits)
    np.testing.assert_array_equal(ids, [[0, 1, 2], [4, 6, 7], [0, 1, 2]])
    np.testing.assert_allclose(weights, [[0.5] * 3, [0.5] * 3, [0] * 3], rtol=1e-6)


def test_the_bias_picks_but_does_not_weigh():
    logits = np.linspace(3, -3, EXPERTS)[None]
    bias = np.zeros(EXPERTS)
    bias[[3, 8, 11]] = 50, 40, 60
    ids, weights = by_logit(logits, bias)
    assert ids[0].tolist() == [11, 3, 8]
    scores = np.sqrt(softplus(logits[0, [11, 3, 8]]))
    np.testing.assert_allclose(weights[0], scores / scores.sum() * 1.5, rtol=1e-5)
    bias[[3, 8, 11]] = -50
    ids, _ = by_logit(logits, bias)
    assert ids[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("rows", [[0, 1, 2], [5, 6, 7], [9, 10, 11]])
def test_every_row_to_the_first_the_middle_or_the_last_experts(rows):
    logits = np.full((COUNT, EXPERTS), -20.0)
    logits[:, rows] = [3, 2, 1]
    ids, weights = by_logit(logits)
    np.testing.assert_array_equal(ids, [rows] * COUNT)
    scores = np.sqrt(softplus(np.array([3.0, 2.0, 1.0])))
    np.testing.assert_allclose(weights, [scores / scores.sum() * 1.5] * COUNT, rtol=1e-5)


def test_a_table_row_that_names_an_expert_twice_weighs_it_twice():
    """ids [5, 5, 1]: the sum runs over the three mentions."""
    table = np.tile(np.array([5, 5, 1], np.int32), (61, 1))
    gate = np.eye(EXPERTS, 24, dtype=np.float32)
    tensors = {**TENSORS, "layers.0.ffn.gate.weight": gate, "layers.0.ffn.gate.tid2eid": table}
    x = np.zeros((1, 24))
    x[0, [5, 1]] = 2, -1
    ids, weights = routed(0, x, np.array([60]), tensors)
    assert ids[0].tolist() == [5, 5, 1]
    high, low = np.sqrt(softplus(2.0)), np.sqrt(softplus(-1.0))
    np.testing.assert_allclose(weights[0], np.array([high, high, low]) / (2 * high + low) * 1.5, rtol=1e-5)


def test_the_table_is_read_by_token_id():
    draw = np.random.default_rng(1)
    x = np.repeat(draw.standard_normal((1, 24)), 61, axis=0)
    ids, _ = routed(0, x, np.arange(61))
    np.testing.assert_array_equal(ids, TENSORS["layers.0.ffn.gate.tid2eid"])
    ids, _ = routed(0, x, np.arange(61)[::-1])
    np.testing.assert_array_equal(ids, TENSORS["layers.0.ffn.gate.tid2eid"][::-1])


def test_a_row_of_nan_reaches_no_other_row():
    x = np.random.default_rng(2).standard_normal((COUNT, 24))
    wanted_ids, wanted = routed(1, x, np.zeros(COUNT))
    for junk in (np.nan, 1e30, -np.inf):
        ids, weights = routed(1, np.where(np.arange(COUNT)[:, None] % 3 == 1, junk, x), np.zeros(COUNT))
        real = np.arange(COUNT) % 3 != 1
        np.testing.assert_array_equal(ids[real], wanted_ids[real])
        np.testing.assert_array_equal(weights[real], wanted[real])
        assert np.all((ids >= 0) & (ids < EXPERTS))
