"""Rows on the wire: the derived bound of fp8 holds and is tight, bytes follow from counts, nothing is rounded twice."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from stepping import everywhere, shape, step

from jaxcoll.dispatch import DispatchSpec, Received, combine, dispatch
from jaxcoll.hlo import collectives
from jaxcoll.step import compile_step
from jaxcoll.topology import Topology
from jaxcoll.wire import fp8_error_bound, home_dtype, pack, resolve, row_bytes, sent_bytes, unpack

KINDS = ["float32", "power_of_two"]
DTYPES = [jnp.float32, jnp.bfloat16]


def packed_as_is(x, wire, kind="float32"):
    slots = jnp.arange(len(x), dtype=jnp.int32)[:, None]
    return pack(x, slots, len(x), wire, kind)  # pyright: ignore[reportArgumentType]


def wide_range(seed):
    """Rows of 3 groups of 128 whose magnitudes differ by up to 2^40 between and inside groups, with zeros and signs."""
    rng = np.random.default_rng(seed)
    scale = 2.0 ** rng.integers(-20, 20, (64, 3, 1))
    inside = 2.0 ** -rng.integers(0, 20, (64, 3, 128))
    x = rng.standard_normal((64, 3, 128)) * scale * inside
    x[:, 1, :64] = 0
    x[0] = 0
    return x.reshape(64, 384)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_no_channel_is_further_off_than_the_bound_and_some_nearly_reach_it(kind, dtype):
    worst = 0.0
    for seed in range(8):
        x = jnp.asarray(wide_range(seed), dtype)
        back = unpack(packed_as_is(x, "fp8", kind), dtype)
        error = np.abs(np.asarray(back, np.float64) - np.asarray(x, np.float64))
        bound = np.asarray(fp8_error_bound(x, kind, dtype), np.float64)
        assert (error <= bound).all()
        worst = max(worst, (error / bound).max())
    assert worst > 0.95


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_is_that_of_the_format(kind):
    x = np.zeros((1, 128), np.float32)
    x[0, :4] = 448, 17, -0.25, 2**-7  # the largest magnitude is e4m3's own: the scale is 1
    bound = np.asarray(fp8_error_bound(jnp.asarray(x), kind, jnp.float32))
    np.testing.assert_allclose(bound[0, :5], [28, 17 / 16, 0.25 / 16, 2**-10, 2**-10], rtol=1e-4)
    back = np.asarray(unpack(packed_as_is(jnp.asarray(x), "fp8", kind), jnp.float32))
    np.testing.assert_allclose(back[0, :5], [448, 16, -0.25, 2**-7, 0], rtol=1e-6)  # 17 lies between 16 and 18


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strange", [np.inf, -np.inf, np.nan])
def test_zeros_stay_zeros_and_a_group_with_no_finite_scale_comes_back_as_nan(strange, kind):
    x = np.zeros((2, 256), np.float32)
    x[1] = np.linspace(-4, 4, 256)
    x[1, 3] = strange
    for dtype in DTYPES:
        back = np.asarray(unpack(packed_as_is(jnp.asarray(x, dtype), "fp8", kind), jnp.float32))
        assert not back[0].any()
        assert np.isnan(back[1, :128]).all() and np.isfinite(back[1, 128:]).all()


@pytest.mark.parametrize("mode", ["normal", "low_latency"])
def test_results_that_come_home_in_float32_are_rounded_once(mode):
    """bfloat16 rows on a float32 wire: addends that cancel but for what bfloat16 cannot hold of them."""
    spec = DispatchSpec(8, TOPOLOGY.group("moe_ep"), mode=mode, wire="f32")

    def run(x, ids, weights):
        received, handle = dispatch(x, ids, weights, spec)
        weight = jnp.sum(received.topk_weights, 1)[:, None] if isinstance(received, Received) else 1
        factor = jnp.where(lax.axis_index(spec.moe_ep) == 0, 1 + 2.0**-12, 1)
        return combine(received.x.astype(jnp.float32) * weight * factor, handle)

    world = everywhere(TOPOLOGY)
    shapes = [shape(8, 128, dtype="bfloat16"), shape(8, 2, dtype="int32"), shape(8, 2)]
    x, ids = np.ones((8, 128), jnp.bfloat16), np.tile(np.array([[0, 7]], np.int32), (8, 1))
    weights = np.tile(np.array([[1, -1]], np.float32), (8, 1))
    out = step(TOPOLOGY, run, shapes, [world] * 3, world)(x, ids, weights)
    np.testing.assert_array_equal(np.asarray(out, np.float32), 2.0**-12)


def test_scales_of_the_other_kind_are_powers_of_two():
    scales = packed_as_is(jnp.asarray(wide_range(0)), "fp8", "power_of_two").scales
    mantissas, _ = np.frexp(np.asarray(scales))
    assert (mantissas == 0.5).all()
    assert packed_as_is(jnp.asarray(wide_range(0)), "fp8").scales.shape == (64, 3)  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize("wire", ["f32", "bf16", "fp8"])
def test_packing_copies_encoded_rows_to_their_slots(wire):
    x = jnp.asarray(wide_range(1)[:3]).at[1].set(jnp.nan)
    slots = jnp.array([[4, -1, 0], [-1, -1, -1], [-1, 2, -1]], jnp.int32)
    rows = pack(x, slots, 6, wire, "float32")
    whole = packed_as_is(x, wire)
    for found, source in zip(rows, whole, strict=True):
        if found is None:
            assert wire != "fp8"
            continue
        want = np.zeros((6, *source.shape[1:]), source.dtype)  # pyright: ignore[reportOptionalMemberAccess]
        want[[4, 0, 2]] = np.asarray(source)[[0, 0, 2]]
        np.testing.assert_array_equal(found, want)
    assert rows.values.dtype == {"f32": jnp.float32, "bf16": jnp.bfloat16, "fp8": jnp.uint8}[wire]


def test_auto_is_the_activations_own_type_and_fp8_comes_home_in_bf16():
    assert resolve("auto", jnp.float32, 7) == "f32"
    assert resolve("auto", jnp.bfloat16, 7) == "bf16"
    assert resolve("fp8", jnp.bfloat16, 256) == "fp8"
    assert [home_dtype(w) for w in ("f32", "bf16", "fp8")] == [jnp.float32, jnp.bfloat16, jnp.bfloat16]
    with pytest.raises(ValueError, match="one scale per 128 channels, which do not divide D=192"):
        resolve("fp8", jnp.bfloat16, 192)
    with pytest.raises(ValueError, match="unknown wire format 'int8'; allowed are auto, f32, bf16, fp8"):
        resolve("int8", jnp.bfloat16, 256)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="rows of float16 have no wire format of their own"):
        resolve("auto", jnp.float16, 256)


def test_bytes_follow_from_counts():
    assert row_bytes("f32", 7168) == (28672, 28672)
    assert row_bytes("bf16", 7168) == (14336, 14336)
    there, home = row_bytes("fp8", 7168)
    assert (there, home) == (7168 + 4 * 56, 14336)
    copies = np.array([[9, 1, 2], [0, 5, 0], [3, 3, 0]])
    np.testing.assert_array_equal(sent_bytes(copies, there), [3 * there, 0, 6 * there])
    assert sent_bytes(np.full((2, 2), 2**20), 2**15).tolist() == [2**35, 2**35]


TOPOLOGY = Topology(2, 2)
CASES = [(mode, hosts, kind) for mode in ("normal", "low_latency") for hosts in ((), ("attn_dp",)) for kind in KINDS]


@pytest.mark.parametrize("mode, hosts, kind", CASES)
def test_rows_are_rounded_once_on_the_way_and_results_to_bfloat16_on_theirs(mode, hosts, kind):
    spec = DispatchSpec(8, TOPOLOGY.group("moe_ep"), hosts=hosts, mode=mode, wire="fp8", scale_kind=kind)

    def run(x, ids, weights):
        received, handle = dispatch(x, ids, weights, spec)
        return combine(received.x, handle), received.x

    world = everywhere(TOPOLOGY)
    shapes = [shape(12, 384), shape(12, 1, dtype="int32"), shape(12, 1)]
    x = wide_range(2)[:12].astype(np.float32)
    x[:, 0] = np.arange(1, 13) * 2.0**20  # the largest of its group: comes back as it is, and names the row
    ids = np.arange(12, dtype=np.int32)[:, None] * 5 % 8
    out, arrived = step(TOPOLOGY, run, shapes, [world] * 3, (world, world))(x, ids, np.ones((12, 1), np.float32))
    once = np.asarray(unpack(packed_as_is(jnp.asarray(x), "fp8", kind), jnp.float32))
    arrived = np.asarray(arrived).reshape(-1, 384)
    for row in once:
        assert (arrived == row).all(1).sum() == 1  # to the last bit, also after two levels
    np.testing.assert_array_equal(out, once.astype(jnp.bfloat16).astype(np.float32))
    assert (np.abs(once - x) <= np.asarray(fp8_error_bound(jnp.asarray(x), kind, jnp.float32))).all()


@pytest.mark.parametrize("wire, there, home", [("auto", "f32", "f32"), ("bf16", "bf16", "bf16"), ("fp8", "u8", "bf16")])
def test_the_compiled_program_sends_the_type_that_was_asked_for(wire, there, home):
    spec = DispatchSpec(8, TOPOLOGY.group("moe_ep"), mode="low_latency", wire=wire)

    def run(x, ids, weights):
        received, handle = dispatch(x, ids, weights, spec)
        return combine(received.x, handle)

    shapes = [shape(12, 384), shape(12, 1, dtype="int32"), shape(12, 1)]
    world = everywhere(TOPOLOGY)
    compiled = compile_step(run, TOPOLOGY, shapes, in_specs=[world] * 3, out_specs=world)
    # XLA:CPU widens bfloat16, so the traced program says what is sent.
    sent = [str(e.invars[0].aval.dtype) for e in all_to_alls(compiled.traced.jaxpr)]
    names = {"f32": "float32", "bf16": "bfloat16", "u8": "uint8"}
    assert names[there] in sent and sent[-1] == names[home]
    if there == "u8":
        rows = [c for c in collectives(compiled.compiled, TOPOLOGY) if "u8" in c.dtypes]
        assert [c.operand_bytes for c in rows] == [4 * 3 * 384]  # a byte per channel


def all_to_alls(jaxpr):
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "all_to_all":
            yield eqn
        for value in eqn.params.values():
            for body in value if isinstance(value, tuple | list) else (value,):
                if hasattr(getattr(body, "jaxpr", body), "eqns"):
                    yield from all_to_alls(body)
