"""Attention: window, CSA and HCA equal the loop over positions, whatever lies in the caches that they do not own."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from reference import Reference
from tiny_models import (
    Tensors,
    compile_module,
    filled_cache,
    not_owned,
    parameters_of,
    published,
    random_tensors,
    rows_of,
)

from jaxcoll.collectives import all_reduce
from jaxcoll.topology import Topology
from models.deepseek_v4.attention import Attention, attend
from models.deepseek_v4.cache import LayerCache
from models.deepseek_v4.config import Config
from models.deepseek_v4.indexer import highest

# Layer 0 window, 1 CSA, the others HCA. 27 positions: five windows and a ring that went round, 24 crossed by none.
CONFIG = published(compress_ratios=[0, 4, 8, 1, 3, 16])
RATIOS, WINDOW, LENGTH, SLOTS = CONFIG["compress_ratios"], CONFIG["sliding_window"], 27, 4
TENSORS = random_tensors(CONFIG)
EXACT = Reference(CONFIG, TENSORS)
MODEL = Config.from_dict(CONFIG)
LAYERS = pytest.mark.parametrize("layer", range(len(RATIOS)), ids=[f"ratio-{m}" for m in RATIOS])
COMPRESSED = pytest.mark.parametrize("layer", [1, 2, 4], ids=["csa", "hca-8", "hca-3"])
# Values of order 1 in float32: rounding of some 50 additions.
CLOSE: dict[str, Any] = dict(rtol=1e-5, atol=2e-5)

Feed = tuple[np.ndarray, int, int] | None  # x [D], position, slot; None is a padding row


class Driven:
    """One layer's attention, three rows a step per replica; `feed` gives outputs in the order of the rows."""

    def __init__(self, layer: int, topology: Topology, length: int):
        self.layer, self.length, self.topology = layer, length, topology
        self.module = Attention(MODEL, layer, topology, jnp.float32)
        tp, rows = topology.group("attn_tp"), P(topology.group("attn_dp"))
        self.poison = filled_cache(MODEL, layer, SLOTS * topology.attn_dp, length, np.nan)
        self.count = 3 * topology.attn_dp
        args = np.zeros((self.count, 24), np.float32), np.zeros((self.count, 4), np.int32), self.poison

        def fn(module: Any, x: Any, batch: Any, cache: LayerCache) -> Any:
            y, cache = module(x, rows_of(batch), cache)
            return all_reduce(y, tp), cache

        self.step = compile_module(self.module, fn, self.parameters(TENSORS), topology, args, (rows,) * 3, rows)

    def parameters(self, tensors: Tensors) -> dict:
        return parameters_of(self.module, tensors, f"layers.{self.layer}.attn", self.topology)

    def with_tensors(self, tensors: Tensors) -> Any:
        return lambda *args: self.step.program(self.parameters(tensors), *args)

    def feed(self, cache: Any, *rows: Feed, junk: float = np.nan, step: Any = None) -> tuple[np.ndarray, Any]:
        x, batch = np.full((self.count, 24), junk, np.float32), np.full((self.count, 4), -9, np.int32)
        for i, row in enumerate(rows):
            if row is not None:
                x[i], batch[i] = row[0], (5, row[1], row[2], 1)
        y, cache = (step or self.step)(x, batch, cache)
        return np.asarray(y)[: len(rows)], cache

    def run(self, x: np.ndarray, cache: Any = None, slot: int = 1, step: Any = None) -> np.ndarray:
        """All outputs of one request alone."""
        cache, out = self.poison if cache is None else cache, []
        for t in range(len(x)):
            y, cache = self.feed(cache, None, (x[t], t, slot), step=step)
            out.append(y[1])
        return np.stack(out)


@functools.cache
def drive(layer: int, attn_dp: int = 1, attn_tp: int = 1, length: int = LENGTH) -> Driven:
    return Driven(layer, Topology(attn_dp, attn_tp), length)


def tokens(seed: int, count: int = LENGTH) -> np.ndarray:
    return np.random.default_rng([7, seed]).standard_normal((count, 24)).astype(np.float32)


def exact(x: np.ndarray, layer: int, tensors: Tensors | None = None, **changes: Any) -> np.ndarray:
    reference = Reference({**CONFIG, **changes}, tensors or TENSORS)
    return reference.attention(x.astype(np.float64), layer)


@LAYERS
def test_every_position_equals_the_loop(layer):
    """Positions below w, w-1, w, w+1 and beyond 3w, from caches full of NaN."""
    x = tokens(0)
    np.testing.assert_allclose(drive(layer).run(x), exact(x, layer), **CLOSE)


@LAYERS
@pytest.mark.parametrize("junk", [np.nan, 1e30])
def test_places_that_no_request_owns_reach_nobody(layer, junk):
    """Two requests three positions apart; junk before the start, and again after every step, changes no bit."""
    driven, x, other = drive(layer), tokens(1), tokens(2)
    clean = filled_cache(MODEL, layer, SLOTS, LENGTH, 0.0)
    dirty = filled_cache(MODEL, layer, SLOTS, LENGTH, junk)
    for t in range(LENGTH):
        late = (other[t - 3], t - 3, 0) if t >= 3 else None
        wanted, clean = driven.feed(clean, (x[t], t, 3), None, late, junk=0)
        found, dirty = driven.feed(dirty, (x[t], t, 3), None, late, junk=junk)
        for row in (0, 2) if late else (0,):
            np.testing.assert_array_equal(found[row], wanted[row])
        dirty = not_owned(dirty, {3: t + 1, 0: max(t - 2, 0)}, RATIOS[layer], junk)


@LAYERS
def test_a_slot_is_reused_without_clearing(layer):
    driven, cache, x = drive(layer), drive(layer).poison, tokens(3, 20)
    for t, token in enumerate(tokens(4)):
        _, cache = driven.feed(cache, (30 * token, t, 1))
    np.testing.assert_array_equal(driven.run(x, cache), driven.run(x))


@LAYERS
def test_requests_at_their_own_positions_and_in_any_order(layer):
    driven, cache = drive(layer), drive(layer).poison
    starts, slots, all_x = (0, 5, 2), (2, 0, 3), [tokens(10 + i, 14) for i in range(3)]
    alone = [driven.run(x) for x in all_x]
    draw = np.random.default_rng(layer)
    for t in range(19):
        going = [i for i in draw.permutation(3) if 0 <= t - starts[i] < 14]
        rows = [(all_x[i][t - starts[i]], t - starts[i], slots[i]) for i in going]
        found, cache = driven.feed(cache, *rows)
        for i, y in zip(going, found, strict=True):
            np.testing.assert_allclose(y, alone[i][t - starts[i]], rtol=1e-6, atol=2e-6)


def test_the_window_ends_where_it_should():
    """At t the token of t - w + 1 still counts, to the bit none before it does."""
    x, layer = tokens(5), drive(0)
    base = layer.run(x)
    for changed in (0, 3, 11):
        moved = layer.run(np.where(np.arange(LENGTH)[:, None] == changed, -x, x))
        differs = np.flatnonzero(np.any(moved != base, axis=1))
        np.testing.assert_array_equal(differs, np.arange(changed, changed + WINDOW))


@COMPRESSED
def test_a_token_counts_beyond_its_window_once_its_entry_is_complete(layer):
    """Token 2 reaches positions 2..w+1 by the window; later ones by its entry, so from the end of its m tokens on."""
    x, ratio = tokens(6), RATIOS[layer]
    moved = drive(layer).run(np.where(np.arange(LENGTH)[:, None] == 2, -x, x)) != drive(layer).run(x)
    differs = set(np.flatnonzero(np.any(moved, axis=1)))
    assert set(range(2, 2 + WINDOW)) <= differs and not differs & {0, 1}
    gap = set(range(2 + WINDOW, ratio - 1))  # past the window, and its entry is still open
    assert not gap & differs
    if ratio != 4:  # HCA keeps every entry for ever
        assert set(range(max(ratio - 1, 2), LENGTH)) <= differs


@LAYERS
@pytest.mark.parametrize("sizes", [(1, 3), (2, 3)])
def test_heads_cut_over_attn_tp(layer, sizes):
    driven, cache, x, other = drive(layer, *sizes), drive(layer, *sizes).poison, tokens(7, 18), tokens(8, 18)
    wanted, wanted_other = exact(x, layer), exact(other, layer)
    last = driven.count - 1  # a row of the last replica
    for t in range(18):
        rows: list[Feed] = [None] * driven.count
        rows[0], rows[last] = (x[t], t, 2), (other[t], t, 0)
        found, cache = driven.feed(cache, *rows)
        np.testing.assert_allclose(found[0], wanted[t], **CLOSE)
        np.testing.assert_allclose(found[last], wanted_other[t], **CLOSE)


@pytest.mark.parametrize("layer", [0, 1, 2], ids=["window", "csa", "hca"])
@pytest.mark.parametrize("sink", [-100.0, 60.0])
def test_sinks_take_their_share(layer, sink):
    tensors = {**TENSORS, f"layers.{layer}.attn.attn_sink": np.array([sink, 0, sink, 1, 0, sink], np.float32)}
    x = tokens(9, 12)
    found = drive(layer).run(x, step=drive(layer).with_tensors(tensors))
    np.testing.assert_allclose(found, exact(x, layer, tensors), **CLOSE)


def test_csa_with_fewer_entries_than_it_may_choose():
    """A cache of two entries, both below and at top-k."""
    x = tokens(11, 11)
    np.testing.assert_allclose(drive(1, length=11).run(x), exact(x, 1), **CLOSE)


@LAYERS
def test_a_cache_shorter_than_the_window_and_the_ratio(layer):
    x = tokens(12, 2)
    np.testing.assert_allclose(drive(layer, length=2).run(x), exact(x, layer), **CLOSE)


@pytest.mark.parametrize("sign", [1, -1])
def test_equal_zero_scores_keep_the_first_entries(sign):
    """No head agrees with any key: relu gives exact zeros, of the sign of the head's weight; the lowest indices win."""
    tensors = dict(TENSORS)
    indexer, compressor = "layers.1.attn.indexer", "layers.1.attn.indexer.compressor"
    # The keys' rope channels are silenced by the norm; the rest is a positive constant and every query minus that.
    norm = np.where(np.arange(8) < 4, 1, 0).astype(np.float32)
    tensors[f"{compressor}.norm.weight"] = norm
    x = tokens(13)
    x[:, 0] = 3
    kv = np.zeros((16, 24), np.float32)
    kv[:, 0] = 1
    tensors[f"{compressor}.wkv.weight"] = kv
    wq_a = np.zeros((16, 24), np.float32)
    wq_a[:, 0] = 1
    tensors["layers.1.attn.wq_a.weight"] = wq_a
    tensors["layers.1.attn.q_norm.weight"] = np.ones(16, np.float32)
    tensors[f"{indexer}.wq_b.weight"] = -np.ones((24, 16), np.float32)
    heads = np.zeros((3, 24), np.float32)
    heads[:, 0] = sign
    heads[1, 0] = -sign
    tensors[f"{indexer}.weights_proj.weight"] = heads
    layer = drive(1)
    found = layer.run(x, step=layer.with_tensors(tensors))
    np.testing.assert_allclose(found, exact(x, 1, tensors), **CLOSE)
    scores = Reference(CONFIG, tensors).index_scores(x[26], np.ones(16), 26, np.ones((6, 8)) * norm, indexer)
    assert scores == [0] * 6
    assert np.max(np.abs(exact(x, 1, tensors, index_topk=3) - found)) > 0.01  # one entry more would show


def test_ties_go_to_the_lowest_index_and_zero_has_no_sign():
    pick = jax.jit(highest, static_argnums=2)
    everything = jnp.ones((1, 6), bool)
    for scores, wanted in (
        ([-0.0, 0.0, -0.0, 0.0, 0.0, -0.0], [0, 1, 2]),
        ([-1.0, -0.0, 0.0, -0.0, 1.0, -0.0], [4, 1, 2]),
        ([2.0, 3.0, 2.0, 3.0, 2.0, 1.0], [1, 3, 0]),
        ([-2.0, -3.0, -2.0, -3.0, -2.0, -1.0], [5, 0, 2]),
    ):
        index, chosen = pick(jnp.array([scores]), everything, 3)
        assert (index.tolist(), chosen.tolist()) == ([wanted], [[True] * 3])


def test_invisible_entries_are_never_chosen():
    pick = jax.jit(highest, static_argnums=2)
    seen = jnp.array([[True, True, False, False], [False] * 4, [True] * 4])
    scores = jnp.array([[-5.0, 1.0, jnp.nan, 1e30], [jnp.nan] * 4, [0.0, 1.0, 2.0, 3.0]])
    index, chosen = pick(scores, seen, 3)
    assert chosen.tolist() == [[True, True, False], [False] * 3, [True] * 3]
    assert index[0, :2].tolist() == [1, 0] and index[2].tolist() == [3, 2, 1]
    assert np.all((np.asarray(index) >= 0) & (np.asarray(index) < 4))


@pytest.mark.parametrize("sink", [-50.0, 0.0, 50.0])
def test_attend_equals_the_loop(sink):
    draw = np.random.default_rng(0)
    q, keys = draw.standard_normal((2, 3, 4)).astype(np.float32), draw.standard_normal((2, 5, 4)).astype(np.float32)
    valid = np.array([[True, False, True, True, False], [False, False, False, True, False]])
    sinks = np.array([sink, 0, -sink], np.float32)
    keys[~valid] = np.nan
    found = attend(jnp.asarray(q), jnp.asarray(keys), jnp.asarray(valid), jnp.asarray(sinks))
    for t in range(2):
        k = keys[t, valid[t]].astype(np.float64)
        for h in range(3):
            weights = np.exp(np.append(k @ q[t, h] / 2, sinks[h]))
            np.testing.assert_allclose(found[t, h], (weights / weights.sum())[:-1] @ k, rtol=1e-5, atol=1e-6)
