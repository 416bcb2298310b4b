"""Dispatch packing: the interpreted kernels, with race detection, and the plain versions against NumPy."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted import run_apart, run_here

from pallas_kernels.moe_combine import combine_rows
from pallas_kernels.moe_dispatch import ScaleKind, dispatch_rows, dispatch_rows_fp8, kernel
from pallas_kernels.moe_dispatch.quantize import group_scales

BF16, F32 = jnp.bfloat16, jnp.float32
XLA: dict[str, Any] = {"kernels": "xla"}
PALLAS: dict[str, Any] = {"kernels": "pallas", "interpret": True}


@dataclasses.dataclass(frozen=True)
class Shape:
    """T rows of D channels, P slots a row at most, S slots."""

    tokens: int
    width: int
    fanout: int
    slots: int
    dtype: Any

    def __str__(self) -> str:
        return f"T{self.tokens}-D{self.width}-P{self.fanout}-S{self.slots}-{self.dtype.__name__}"

    def rows(self) -> np.ndarray:
        random = np.random.default_rng(self.width)
        rows = random.normal(size=(self.tokens, self.width)) * np.exp2(random.integers(-6, 6, (self.tokens, 1)))
        return rows.astype(self.dtype)

    def tables(self) -> list[np.ndarray]:
        """Slots for rows: as many as there are, some, one by the last row only, none."""
        random = np.random.default_rng(self.slots)
        entries = self.tokens * self.fanout
        named = min(entries, self.slots)
        full = np.full(entries, -1, np.int32)
        full[random.permutation(entries)[:named]] = random.permutation(self.slots)[:named]
        some = np.where(random.random(entries) < 0.4, random.choice([-1, -7, self.slots], entries), full)
        last, none = np.full(entries, -1), np.full(entries, -1)
        last[-1] = self.slots - 1
        return [t.reshape(self.tokens, self.fanout).astype(np.int32) for t in (full, some, last, none)]


SHAPES = [
    Shape(6, 256, 1, 4, BF16),  # fewer slots than rows
    Shape(1, 7168, 2, 3, BF16),
    Shape(5, 512, 3, 12, F32),
    Shape(3, 256, 4, 61, F32),  # far more slots than rows: units that only clear
    Shape(4, 4096, 5, 20, BF16),
    Shape(1, 256, 6, 25, BF16),
    Shape(19, 256, 7, 100, BF16),  # more rows than a block has buffers
    Shape(2, 512, 8, 16, BF16),
]
KINDS: tuple[ScaleKind, ...] = ("float32", "power_of_two")
FP8_SHAPES: list[tuple[Shape, ScaleKind]] = [
    (shape, KINDS[n % 2]) for n, shape in enumerate([*SHAPES[:7], *SHAPES[6:]])
]


def with_poison(rows: np.ndarray, slots: np.ndarray, num_slots: int) -> np.ndarray:
    """NaN in every row that no slot is given for."""
    named = ((slots >= 0) & (slots < num_slots)).any(axis=1, keepdims=True)
    return np.where(named, rows, np.array(np.nan, rows.dtype))


def packed(rows: np.ndarray, slots: np.ndarray, num_slots: int) -> np.ndarray:
    """What dispatch is to give, a row at a time."""
    result = np.zeros((num_slots, rows.shape[1]), rows.dtype)
    for row, its_slots in zip(rows, slots, strict=True):
        for slot in its_slots:
            if 0 <= slot < num_slots:
                result[slot] = row
    return result


def bits(array: object) -> np.ndarray:
    return np.asarray(array).view(np.uint8)


def check_rows(shape: Shape) -> None:
    xla, pallas = (jax.jit(partial(dispatch_rows, num_slots=shape.slots, **how)) for how in (XLA, PALLAS))
    for slots in shape.tables():
        rows = with_poison(shape.rows(), slots, shape.slots)
        expected = bits(packed(rows, slots, shape.slots))
        np.testing.assert_array_equal(bits(xla(rows, slots)), expected)
        np.testing.assert_array_equal(bits(pallas(rows, slots)), expected)


def check_fp8(shape: Shape, kind: ScaleKind) -> None:
    xla, pallas = (
        jax.jit(partial(dispatch_rows_fp8, num_slots=shape.slots, scale_kind=kind, **how)) for how in (XLA, PALLAS)
    )
    for slots in shape.tables():
        rows = with_poison(shape.rows(), slots, shape.slots)
        values, scales = pallas(rows, slots)
        for found, plain in zip((values, scales), xla(rows, slots), strict=True):
            np.testing.assert_array_equal(bits(found), bits(plain))
        check_quantized(packed(rows, slots, shape.slots), slots, np.asarray(values), np.asarray(scales), kind)


def check_quantized(rows: np.ndarray, slots: np.ndarray, values: np.ndarray, scales: np.ndarray, kind: str) -> None:
    """Every scale is what the format asks for, and every channel is within half a step of e4m3."""
    named = np.zeros(len(rows), bool)
    named[slots[(slots >= 0) & (slots < len(rows))]] = True
    assert not bits(values[~named]).any() and not bits(scales[~named]).any()
    groups = rows[named].astype(np.float32).reshape(named.sum(), rows.shape[1] // 128, 128)
    amax = np.maximum(np.abs(groups).max(axis=-1), np.float32(1e-4))
    exact = amax * np.float32(1 / 448)
    expected = exact if kind == "float32" else np.exp2(np.ceil(np.log2(exact.astype(np.float64))))
    np.testing.assert_array_equal(scales[named], expected.astype(np.float32))
    back = values[named].astype(np.float32).reshape(groups.shape) * scales[named][..., None]
    # e4m3 has 4 significant bits, and steps of 2**-9 below 2**-6; the inverse scale is good to 2**-20.
    half_step = np.maximum(np.abs(groups) * 2.0**-4, scales[named][..., None] * 2.0**-10)
    assert (np.abs(back - groups) <= half_step * (1 + 2.0**-15)).all()


def check_ring(fp8: bool) -> None:
    """Buffers are not written while the last step's stores may read them, where every step stores one row.

    Only there do the interpreter's count of copies and a GPU's count of groups agree.
    """
    kernel.INTERPRETED_COPIES_IN_FLIGHT = 2 if fp8 else 1
    try:
        slots = jnp.asarray(np.random.default_rng(0).permutation(40)[:, None], jnp.int32)
        rows = jnp.asarray(Shape(40, 512, 1, 40, F32).rows())
        if fp8:
            values, _ = dispatch_rows_fp8(rows, slots, 40, "power_of_two", **PALLAS)
            expected, _ = dispatch_rows_fp8(rows, slots, 40, "power_of_two", **XLA)
        else:
            values, expected = dispatch_rows(rows, slots, 40, **PALLAS), rows[jnp.argsort(slots[:, 0])]
        np.testing.assert_array_equal(bits(values), bits(expected))
    finally:
        kernel.INTERPRETED_COPIES_IN_FLIGHT = 0


def check_gradient() -> None:
    """The kernel's gradient is the plain sum over the slots that each row was sent to."""
    shape = Shape(5, 256, 3, 13, F32)
    rows, slots = shape.rows(), shape.tables()[1]
    table = jnp.asarray(slots)
    weight = np.random.default_rng(1).normal(size=(shape.slots, shape.width)).astype(np.float32)
    expected = np.zeros_like(rows)
    for t, its_slots in enumerate(slots):
        for slot in its_slots:
            expected[t] += weight[slot] if 0 <= slot < shape.slots else 0

    for how in (XLA, PALLAS):
        loss = jax.jit(jax.grad(lambda x, how=how: jnp.vdot(dispatch_rows(x, table, shape.slots, **how), weight)))
        np.testing.assert_allclose(loss(rows), expected, rtol=1e-6, atol=1e-6)


def check_shard_map() -> None:
    """Inside shard_map the kernel's result varies over the axes of its rows and of its slots."""
    shape = Shape(4, 256, 2, 9, F32)
    rows, slots = shape.rows(), shape.tables()[1]
    mesh = jax.make_mesh((1,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("ep")

    def dispatch(x, slots):
        sent = dispatch_rows(x, slots, shape.slots, **PALLAS)
        assert jax.typeof(sent).mat.varying == {"ep"}
        return sent

    mapped = jax.jit(jax.shard_map(dispatch, mesh=mesh, in_specs=(jax.sharding.PartitionSpec(), spec), out_specs=spec))
    np.testing.assert_array_equal(mapped(rows, slots), packed(rows, slots, shape.slots))


CHECKS = {
    **{f"rows {shape}": partial(check_rows, shape) for shape in SHAPES},
    **{f"fp8 {kind} {shape}": partial(check_fp8, shape, kind) for shape, kind in FP8_SHAPES},
    "ring": partial(check_ring, fp8=False),
    "ring fp8": partial(check_ring, fp8=True),
    "gradient": check_gradient,
    "shard_map": check_shard_map,
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return run_apart(__file__)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_the_interpreted_kernel(outcomes, name):
    assert outcomes[name] == "", outcomes[name]


@pytest.mark.parametrize("kind", KINDS)
def test_inverse_scales_are_good_for_any_magnitude(kind):
    amax = np.exp(np.random.default_rng(0).uniform(-9, 80, 100_000)).astype(np.float32)
    scales, inverse = (np.asarray(a, np.float64) for a in jax.jit(partial(group_scales, scale_kind=kind))(amax))
    error = np.abs(scales * inverse - 1).max()
    assert error <= 2.0**-20 if kind == "float32" else error == 0
    shares = np.maximum(amax, 1e-4) / 448 / scales
    assert (np.abs(shares - 1) <= 2.0**-22).all() if kind == "float32" else ((0.5 < shares) & (shares <= 1)).all()


def test_a_group_of_448s_has_scale_one():
    rows = jnp.full((1, 256), 448, BF16)
    for kind in KINDS:
        values, scales = dispatch_rows_fp8(rows, jnp.zeros((1, 1), jnp.int32), 1, kind, **XLA)
        np.testing.assert_array_equal(scales, [[1, 1]])
        np.testing.assert_array_equal(values.astype(F32), rows.astype(F32))


@pytest.mark.parametrize("how", [XLA, PALLAS], ids=["xla", "pallas"])
@pytest.mark.parametrize(("tokens", "fanout", "slots"), [(0, 2, 3), (2, 0, 3), (2, 2, 0), (0, 0, 0)])
def test_nothing_to_send_is_zeros_without_a_kernel(how, tokens, fanout, slots):
    rows, table = jnp.full((tokens, 512), jnp.nan, BF16), jnp.zeros((tokens, fanout), jnp.int32)
    sent = dispatch_rows(rows, table, slots, **how)
    values, scales = dispatch_rows_fp8(rows, table, slots, "float32", **how)
    assert (sent.shape, sent.dtype) == ((slots, 512), BF16)
    assert (values.shape, values.dtype) == ((slots, 512), jnp.float8_e4m3fn)
    assert (scales.shape, scales.dtype) == ((slots, 4), F32)
    assert not bits(sent).any() and not bits(values).any() and not bits(scales).any()
    gradient = jax.grad(lambda x: dispatch_rows(x, table, slots, **how).sum())(rows.astype(F32))
    np.testing.assert_array_equal(gradient, np.zeros((tokens, 512)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((2, 3, 256), np.float32)}, r"x must be \[rows, channels\] of a float type, not float32\[2, 3"),
        ({"x": np.zeros((2, 256), np.int32)}, r"x must be .* float type, not int32\[2, 256\]"),
        ({"slots": np.zeros((2, 2), np.float32)}, r"slots must be int32\[rows, fanout\], not float32\[2, 2\]"),
        ({"slots": np.zeros(2, np.int32)}, r"slots must be int32\[rows, fanout\], not int32\[2\]"),
        ({"slots": np.zeros((3, 2), np.int32)}, "slots has 3 rows, but x has 2"),
        ({"num_slots": -1}, r"num_slots must be a whole number from 0 to 2\^31 - 1, but is -1"),
        ({"num_slots": 2**31}, "num_slots must be a whole number .* but is 2147483648"),
        ({"num_slots": 2.5}, "num_slots must be a whole number .* but is 2.5"),
        ({"kernels": "triton"}, "kernels must be 'xla', 'pallas' or None, not 'triton'"),
        ({"scale_kind": "e8m0"}, "scale_kind must be one of float32, power_of_two, not 'e8m0'"),
        ({"x": np.zeros((2, 192), np.float32)}, "a scale covers 128 channels, which does not divide the 192 of x"),
        ({"kernels": "pallas"}, "'pallas' cannot run here: the device is cpu .cpu., and the kernels are for Hopper"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    arguments: dict[str, Any] = {
        "x": np.zeros((2, 256), np.float32),
        "slots": np.zeros((2, 2), np.int32),
        "num_slots": 4,
        "scale_kind": "float32",
    }
    changed: dict[str, Any] = {
        name: jnp.asarray(v) if isinstance(v, np.ndarray) else v for name, v in (arguments | change).items()
    }
    with pytest.raises(ValueError, match=message):
        dispatch_rows_fp8(**changed)


def test_numpy_arrays_are_taken_too():
    rows, table = np.arange(512, dtype=np.float32).reshape(2, 256), np.array([[1], [0]], np.int32)
    np.testing.assert_array_equal(dispatch_rows(rows, table, 2), rows[::-1])  # pyright: ignore[reportArgumentType]
    np.testing.assert_array_equal(combine_rows(rows, table, None), rows[::-1])  # pyright: ignore[reportArgumentType]


def test_partial_sums_are_refused():
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec("tp")

    def dispatch(x, slots):
        partial_sum = jax.lax.pcast(x, "tp", to="unreduced")
        return dispatch_rows(partial_sum, slots, 4)

    mapped = jax.shard_map(dispatch, mesh=mesh, in_specs=spec, out_specs=spec)
    with pytest.raises(ValueError, match="x holds partial sums over tp: reduce it first"):
        jax.jit(mapped).trace(jnp.zeros((2, 256)), jnp.zeros((2, 1), jnp.int32))


def test_quantised_rows_have_no_gradient():
    with pytest.raises(NotImplementedError, match="has no gradient, since it rounds: train with dispatch_rows"):
        jax.grad(lambda x: dispatch_rows_fp8(x, jnp.zeros((1, 1), jnp.int32), 1, "float32")[1].sum())(
            jnp.ones((1, 256))
        )


if __name__ == "__main__":
    run_here(CHECKS)
