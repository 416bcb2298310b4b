"""Compressors: entries equal the explicit sum over their tokens, become visible in time, and outlive no request."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from reference import Reference, rope_frequencies, rotated
from tiny_models import Tensors, compile_module, filled_cache, parameters_of, published, random_tensors, rows_of

from jaxcoll.topology import Topology
from models.deepseek_v4.cache import CompressorCache
from models.deepseek_v4.compressor import MASS, PEAK, TOTAL, Compressor, absorb, join, nothing_seen, visible
from models.deepseek_v4.config import Config

ONE = Topology(1, 1)
REPLICA = P(ONE.group("attn_dp"))
SLOTS, NAME = 3, "layers.0.attn.compressor"
RATIOS = [1, 3, 4, 8, 16]
CLOSE: dict[str, Any] = dict(rtol=1e-5, atol=1e-5)

Feed = tuple[np.ndarray, int, int] | None  # x [D], position, slot; None is a padding row


class Driven:
    """One compressor of a ratio, two rows per step, all caches NaN before the first."""

    def __init__(self, ratio: int):
        self.ratio, self.length = ratio, 4 * ratio
        self.config = published(compress_ratios=[ratio])
        self.tensors = random_tensors(self.config, seed=ratio)
        config = Config.from_dict(self.config)
        self.width = config.head_dim
        self.module = Compressor(config, ratio, self.width, jnp.float32)
        self.fresh = filled_cache(config, 0, SLOTS, self.length, np.nan).compressor
        args = (np.zeros((2, config.hidden_size), np.float32), np.zeros((2, 4), np.int32), self.fresh)

        def fn(module: Any, x: Any, batch: Any, cache: Any) -> Any:
            rows = rows_of(batch)
            return module(x, rows, cache), visible(rows, cache.entries.shape[1], ratio)

        self.step = compile_module(self.module, fn, self.parameters(self.tensors), ONE, args, (REPLICA,) * 3, REPLICA)

    def parameters(self, tensors: Tensors) -> dict:
        return parameters_of(self.module, tensors, NAME, ONE)

    def with_tensors(self, tensors: Tensors) -> Any:
        return lambda *args: self.step.program(self.parameters(tensors), *args)

    def tokens(self, seed: int, count: int = 0) -> np.ndarray:
        draw = np.random.default_rng([self.ratio, seed])
        return draw.standard_normal((count or 3 * self.ratio + 1, 24)).astype(np.float32)

    def feed(self, cache: Any, *rows: Feed, step: Any = None) -> tuple[CompressorCache, np.ndarray]:
        x, batch = np.full((2, 24), np.nan, np.float32), np.full((2, 4), -7, np.int32)
        for i, row in enumerate(rows):
            if row is not None:
                x[i], batch[i] = row[0], (5, row[1], row[2], 1)
        return (step or self.step)(x, batch, cache)

    def exact(self, x: np.ndarray, tensors: Tensors | None = None) -> np.ndarray:
        reference = Reference(self.config, tensors or self.tensors)
        return reference.entries(x.astype(np.float64), NAME, self.ratio, self.width)


drive = functools.cache(Driven)


@pytest.fixture(params=RATIOS)
def driven(request) -> Driven:
    return drive(request.param)


@pytest.fixture
def csa() -> Driven:
    return drive(4)


def test_entries_equal_the_loop_at_every_position_and_phase(driven):
    """Two requests, the second starting one step later, in slots 2 and 0 of NaN."""
    x, other = driven.tokens(0), driven.tokens(1)
    wanted, wanted_other = driven.exact(x), driven.exact(other)
    cache = driven.fresh
    for t in range(len(x)):
        late = (other[t - 1], t - 1, 0) if t else None
        cache, seen = driven.feed(cache, (x[t], t, 2), late)
        for row, slot, expected, done in ((0, 2, wanted, t + 1), (1, 0, wanted_other, t)):
            if row == 1 and late is None:
                continue
            closed = done // driven.ratio
            np.testing.assert_array_equal(np.flatnonzero(seen[row]), np.arange(closed))
            found = np.asarray(cache.entries)[slot]
            np.testing.assert_allclose(found[:closed], expected[:closed], **CLOSE)
            assert np.all(np.isnan(found[closed:]))
    assert np.all(np.isnan(np.asarray(cache.entries)[1])) and np.all(np.isnan(np.asarray(cache.open)[1]))


def test_a_slot_is_reused_without_clearing(driven):
    long, x = driven.tokens(2), driven.tokens(3, 2 * driven.ratio)
    cache = driven.fresh
    for t in range(len(long) - 1):  # an open window stays behind
        cache, _ = driven.feed(cache, (100 * long[t], t, 1))
    used, clean = cache, driven.fresh
    for t in range(len(x)):
        used, _ = driven.feed(used, (x[t], t, 1))
        clean, _ = driven.feed(clean, (x[t], t, 1))
    np.testing.assert_array_equal(np.asarray(used.entries)[1, :2], np.asarray(clean.entries)[1, :2])
    np.testing.assert_allclose(np.asarray(used.entries)[1, :2], driven.exact(x), **CLOSE)


def test_padding_rows_change_nothing(driven):
    x, cache = driven.tokens(4), driven.fresh
    for t in range(driven.ratio):
        cache, _ = driven.feed(cache, (x[t], t, 0), (2 * x[t], t, 1))
    before = [np.asarray(a) for a in (cache.entries, cache.open)]
    after, _ = driven.feed(cache, None, None)
    np.testing.assert_array_equal(np.asarray(after.entries), before[0])
    np.testing.assert_array_equal(np.asarray(after.open), before[1])


def test_rows_may_swap_places(driven):
    x, other = driven.tokens(5), driven.tokens(6)
    straight = swapped = driven.fresh
    for t in range(2 * driven.ratio):
        rows = (x[t], t, 0), (other[t], t, 2)
        straight, _ = driven.feed(straight, *rows)
        swapped, _ = driven.feed(swapped, *rows[:: (-1) ** t])
    # A row's place may change which lanes of a matmul computes it, hence the last bits.
    np.testing.assert_allclose(np.asarray(swapped.entries), np.asarray(straight.entries), rtol=1e-6, atol=1e-6)


def test_scores_far_apart(driven):
    """Scores of +-80 and jumps of 200 either way: softmax over the window stays finite and right."""
    tensors = dict(driven.tensors)
    height = np.array([80, -80, 120, -80, 0, 200, 1, -120] * 2, np.float32)[: driven.ratio]
    channel = np.where(np.arange(tensors[f"{NAME}.ape"].shape[1]) % 3 == 0, -1, 1)
    tensors[f"{NAME}.ape"] = (height[:, None] * channel).astype(np.float32)
    step = driven.with_tensors(tensors)
    x, cache = driven.tokens(7, 3 * driven.ratio), driven.fresh
    for t in range(len(x)):
        cache, _ = driven.feed(cache, (x[t], t, 1), step=step)
    # Scores near 200 are rounded to 2^-17 before the softmax.
    np.testing.assert_allclose(np.asarray(cache.entries)[1, :3], driven.exact(x, tensors), rtol=1e-4, atol=1e-4)


def test_entries_turn_by_their_windows_first_position(driven):
    """Equal tokens and no ape: entries differ by their rotation alone, j * m for entry j."""
    tensors = {**driven.tensors, f"{NAME}.ape": np.zeros_like(driven.tensors[f"{NAME}.ape"])}
    wide = len(tensors[f"{NAME}.wkv.weight"])
    for name in ("wkv", "wgate"):  # CSA: both halves alike, so that the first entry is like the others
        weight = tensors[f"{NAME}.{name}.weight"]
        tensors[f"{NAME}.{name}.weight"] = np.tile(weight[: driven.width], (wide // driven.width, 1))
    step = driven.with_tensors(tensors)
    x, cache = driven.tokens(8)[0], driven.fresh
    for t in range(4 * driven.ratio):
        cache, _ = driven.feed(cache, (x, t, 0), step=step)
    entries = np.asarray(cache.entries, np.float64)[0]
    frequencies = rope_frequencies(Reference(driven.config, {}).c, True)
    for j in range(4):
        np.testing.assert_allclose(entries[j], rotated(entries[0], j * driven.ratio, frequencies), **CLOSE)
    assert np.max(np.abs(entries[1] - entries[0])) > 0.01


def test_the_first_csa_entry_has_no_a_half(csa):
    """Other a halves leave entry 0 as it was, to the bit, and change entry 1."""
    a_half = {name: value.copy() for name, value in csa.tensors.items() if name.startswith(NAME)}
    for name in ("wkv.weight", "wgate.weight"):
        a_half[f"{NAME}.{name}"][: csa.width] *= -3
    a_half[f"{NAME}.ape"][:, : csa.width] += 50
    x = csa.tokens(9)
    found = []
    for step in (csa.step, csa.with_tensors({**csa.tensors, **a_half})):
        cache = csa.fresh
        for t in range(8):
            cache, _ = csa.feed(cache, (x[t], t, 1), step=step)
        found.append(np.asarray(cache.entries)[1])
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert np.max(np.abs(found[0][1] - found[1][1])) > 0.1
    np.testing.assert_allclose(found[1][1], csa.exact(x, {**csa.tensors, **a_half})[1], **CLOSE)


def test_a_csa_entry_uses_the_a_halves_of_the_window_before_it(csa):
    """Token t reaches entry t // 4 by its b half and the next entry by its a half, and no other."""
    x = csa.tokens(10, 16)
    for changed in (0, 3, 4, 7):
        entries = []
        for tokens in (x, np.where(np.arange(16)[:, None] == changed, -x, x)):
            cache = csa.fresh
            for t in range(16):
                cache, _ = csa.feed(cache, (tokens[t], t, 0))
            entries.append(np.asarray(cache.entries)[0])
        moved = np.flatnonzero(np.any(entries[0] != entries[1], axis=1))
        np.testing.assert_array_equal(moved, [changed // 4, changed // 4 + 1])


@pytest.mark.parametrize(
    ("ratio", "counts"),
    [
        (1, {0: 1, 1: 2, 2: 3, 7: 8}),
        (3, {0: 0, 1: 0, 2: 1, 3: 1, 4: 1, 5: 2, 8: 3}),
        (4, {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 1, 6: 1, 7: 2, 8: 2, 127: 32, 128: 32}),
        (8, {0: 0, 6: 0, 7: 1, 8: 1, 14: 1, 15: 2}),
        (128, {0: 0, 126: 0, 127: 1, 128: 1, 254: 1, 255: 2}),
    ],
)
def test_how_many_entries_a_position_sees(ratio, counts):
    positions = np.array(list(counts))
    rows = rows_of(jnp.asarray(np.stack([0 * positions, positions, 0 * positions, 1 + 0 * positions], 1), jnp.int32))
    seen = np.asarray(visible(rows, 40, ratio))
    np.testing.assert_array_equal(seen.sum(axis=1), list(counts.values()))
    np.testing.assert_array_equal(seen, np.arange(40) < np.array(list(counts.values()))[:, None])


SCORES = [[0.0, 0.0, 0.0], [80.0, -80.0, 80.0], [-80.0, 120.0, -80.0], [200.0, 0.0, 199.0], [-200.0, -200.0, -400.0]]


@pytest.mark.parametrize("scores", SCORES)
def test_running_sums_equal_the_softmax(scores):
    values = [1.0, -2.0, 5.0]
    weights = np.exp(np.array(scores) - max(scores))
    wanted = float(weights @ np.array(values) / weights.sum())
    nothing = nothing_seen(jnp.zeros((3, 1)))
    states = [absorb(nothing, jnp.array([s]), jnp.array([v])) for s, v in zip(scores, values, strict=True)]
    run = nothing
    for s, v in zip(scores, values, strict=True):
        run = absorb(run, jnp.array([s]), jnp.array([v]))
    joined = join(join(states[0], states[1]), states[2])
    for state in (run, joined, join(states[2], join(states[1], states[0])), join(nothing, joined)):
        assert float(state[PEAK, 0]) == max(scores)
        assert float(state[TOTAL, 0] / state[MASS, 0]) == pytest.approx(wanted, rel=1e-6, abs=1e-6)
