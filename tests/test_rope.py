"""Rotary positions: both bases, YaRN's ramp, interleaved pairs, and the way back."""

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from reference import rope_frequencies, rotated
from tiny_models import published

from models.deepseek_v4.config import Config, RopeScaling
from models.deepseek_v4.rope import frequencies, rotate, rotation

LAST = 4095
# Angles are float32: at position p a frequency rounded by 2^-25 turns p * 2^-25 too far, and the product rounds again.
ANGLE = LAST * 2.0**-23


def config_of(**changes) -> tuple[Config, SimpleNamespace]:
    fields = published(**changes)
    return Config.from_dict(fields), SimpleNamespace(**fields)


def yarn(factor: float, length: int, fast: float = 32, slow: float = 1) -> dict:
    return dict(type="yarn", factor=factor, original_max_position_embeddings=length, beta_fast=fast, beta_slow=slow)


PUBLISHED_ROPE = dict(head_dim=512, qk_rope_head_dim=64, index_head_dim=128)
CASES = {
    "published": dict(**PUBLISHED_ROPE, rope_scaling=yarn(16, 65536)),
    "short": dict(**PUBLISHED_ROPE, rope_scaling=yarn(4, 64)),
    "steep": dict(**PUBLISHED_ROPE, rope_scaling=yarn(40, 4096, fast=2, slow=1)),
    "past the last pair": dict(**PUBLISHED_ROPE, compress_rope_theta=2, rope_scaling=yarn(4, 4096)),
    "past the last channel": dict(**PUBLISHED_ROPE, compress_rope_theta=25, rope_scaling=yarn(4, 4096)),
    "fractional factor": dict(**PUBLISHED_ROPE, rope_scaling=yarn(2.5, 1000, fast=8.5, slow=0.5)),
}


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_frequencies_equal_the_formula_in_float64(case, compressed):
    config, fields = config_of(**CASES[case])
    found = frequencies(config, compressed=compressed)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, rope_frequencies(fields, compressed), rtol=2e-7)


def test_window_layers_use_the_plain_base_and_no_scaling():
    config, _ = config_of(head_dim=16, qk_rope_head_dim=8, index_head_dim=8)
    np.testing.assert_allclose(frequencies(config, compressed=False), [1, 0.1, 0.01, 0.001], rtol=1e-6)


def test_layers_that_compress_use_their_own_base_and_yarn():
    # r = 8, base 16^4 = 65536, L = 64: rotations 32 fall below channel 0, rotation 1 at 0.84, so pairs 1.. are divided.
    config, _ = config_of(head_dim=16, qk_rope_head_dim=8, compress_rope_theta=65536)
    np.testing.assert_allclose(frequencies(config, compressed=True), [1, 2**-6, 2**-10, 2**-14], rtol=1e-6)


def test_the_ramp_between_kept_and_divided_pairs():
    config, _ = config_of(**CASES["published"])
    plain = 160000.0 ** (-2 * np.arange(32) / 64)
    kept = frequencies(config, compressed=True) / plain
    # Rotations 32 and 1 over 65536 positions fall at channels 15.5 and 24.7: lo = 15, hi = 25.
    np.testing.assert_allclose(kept[:16], 1, rtol=1e-6)
    np.testing.assert_allclose(kept[25:], 1 / 16, rtol=1e-6)
    np.testing.assert_allclose(kept[15:26], 1 - np.arange(11) / 10 * (15 / 16), rtol=1e-6)


@pytest.mark.parametrize(("length", "first_divided"), [(6, 1), (4, 1)])
def test_a_ramp_without_width_is_a_step(length, first_divided):
    # Both betas fall at or below channel 0: lo == hi == 0, so pair 0 is kept and every later one is divided.
    config, _ = config_of(head_dim=16, qk_rope_head_dim=8, rope_scaling=yarn(4, length, fast=1, slow=1))
    plain = 160000.0 ** (-2 * np.arange(4) / 8)
    factor = np.where(np.arange(4) < first_divided, 1, 4)
    np.testing.assert_allclose(frequencies(config, compressed=True), plain / factor, rtol=1e-6)


def test_a_step_between_two_pairs():
    # One rotation over L = 2*pi*100 positions at base 10000, r = 8, is channel 2 exactly: floor 2, ceil 2 or 3.
    scaling = RopeScaling(factor=4, original_max_position_embeddings=628, beta_fast=1, beta_slow=1)
    config, fields = config_of(head_dim=16, qk_rope_head_dim=8, compress_rope_theta=10000)
    config = dataclasses.replace(config, rope_scaling=scaling)
    fields.rope_scaling = dataclasses.asdict(scaling)
    found = frequencies(config, compressed=True)
    np.testing.assert_allclose(found, rope_frequencies(fields, True), rtol=2e-7)
    np.testing.assert_allclose(found, [1, 0.1, 0.01 / 4, 0.001 / 4], rtol=1e-6)


def test_the_bases_differ_as_much_as_positions_grow():
    config, _ = config_of(**PUBLISHED_ROPE)
    config = dataclasses.replace(config, rope_scaling=None)  # the bases alone
    both = [frequencies(config, compressed=compressed) for compressed in (False, True)]
    for position, apart in ((1, 0.04), (127, 1.6)):
        (cos, _), (other, _) = (rotation(jnp.array([position]), f) for f in both)
        assert float(jnp.max(jnp.abs(cos - other))) == pytest.approx(apart, rel=0.35)


@pytest.mark.parametrize("compressed", [False, True])
def test_every_position_up_to_the_last(compressed):
    config, fields = config_of(**CASES["published"])
    exact = np.arange(LAST + 1)[:, None] * np.array(rope_frequencies(fields, compressed))
    cos, sin = rotation(jnp.arange(LAST + 1), frequencies(config, compressed=compressed))
    assert cos.dtype == sin.dtype == jnp.float32
    np.testing.assert_allclose(cos, np.cos(exact), atol=ANGLE)
    np.testing.assert_allclose(sin, np.sin(exact), atol=ANGLE)


def test_pairs_are_interleaved_neighbours():
    x = jnp.array([[7.0, 8.0, 1.0, 0.0, 0.0, 1.0]])  # two channels that pass, then the pairs (1, 0) and (0, 1)
    quarter = jnp.cos(jnp.array([[jnp.pi / 2, 0.0]])), jnp.sin(jnp.array([[jnp.pi / 2, 0.0]]))
    np.testing.assert_allclose(rotate(x, quarter), [[7, 8, 0, 1, 0, 1]], atol=1e-6)
    other = jnp.cos(jnp.array([[0.0, jnp.pi / 2]])), jnp.sin(jnp.array([[0.0, jnp.pi / 2]]))
    np.testing.assert_allclose(rotate(x, other), [[7, 8, 1, 0, -1, 0]], atol=1e-6)


@pytest.mark.parametrize("heads", [(), (3,), (2, 3)])
def test_rows_turn_by_their_own_position_and_heads_alike(heads):
    config, fields = config_of(**PUBLISHED_ROPE)
    positions = np.array([0, 1, 127, LAST])
    x = np.random.default_rng(0).standard_normal((4, *heads, 70)).astype(np.float32)
    turn = rotation(jnp.asarray(positions), frequencies(config, compressed=True))
    found = np.asarray(rotate(jnp.asarray(x), turn))
    exact = [rotated(row, p, rope_frequencies(fields, True)) for row, p in zip(x, positions, strict=True)]
    np.testing.assert_allclose(found, exact, atol=4 * ANGLE)
    np.testing.assert_array_equal(found[..., :6], x[..., :6])
    np.testing.assert_array_equal(found[0], x[0])
    np.testing.assert_allclose(rotate(jnp.asarray(found), turn, inverse=True), x, atol=2e-6)


def test_the_way_back_is_the_angle_negated():
    config, fields = config_of(**PUBLISHED_ROPE)
    x = np.random.default_rng(1).standard_normal((1, 2, 64)).astype(np.float32)
    turn = rotation(jnp.array([37]), frequencies(config, compressed=False))
    found = rotate(jnp.asarray(x), turn, inverse=True)
    np.testing.assert_allclose(found[0], rotated(x[0], -37, rope_frequencies(fields, False)), atol=1e-5)


def test_scores_depend_on_the_difference_of_positions_only():
    config, _ = config_of(**PUBLISHED_ROPE)
    q, k = np.random.default_rng(2).standard_normal((2, 1, 64)).astype(np.float32)

    def score(at: int, other: int) -> float:
        turned = (
            rotate(jnp.asarray(v), rotation(jnp.array([p]), frequencies(config, compressed=True)))
            for v, p in ((q, at), (k, other))
        )
        return float(jnp.sum(next(turned) * next(turned)))

    assert score(19, 3) == pytest.approx(score(216, 200), abs=1e-3)
    assert score(19, 3) != pytest.approx(score(19, 4), abs=1e-2)


def test_bfloat16_is_turned_in_float32_and_stays_bfloat16():
    config, fields = config_of(**PUBLISHED_ROPE)
    x = jnp.asarray(np.random.default_rng(3).standard_normal((1, 64)), jnp.bfloat16)
    found = rotate(x, rotation(jnp.array([1000]), frequencies(config, compressed=True)))
    assert found.dtype == jnp.bfloat16
    exact = rotated(np.asarray(x, np.float64)[0], 1000, rope_frequencies(fields, True))
    # One rounding to 8 bits at the end, of values up to 4.
    np.testing.assert_allclose(np.asarray(found, np.float64)[0], exact, rtol=2.0**-8, atol=ANGLE * 4)
