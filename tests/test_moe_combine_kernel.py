"""Combine: the interpreted kernel, with race detection, and the plain version against NumPy."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted import run_apart, run_here

from pallas_kernels.launch import SMEM_PER_BLOCK
from pallas_kernels.moe_combine import combine_rows
from pallas_kernels.moe_combine.kernel import column_pieces

BF16, F32 = jnp.bfloat16, jnp.float32
XLA: dict[str, Any] = {"kernels": "xla"}
PALLAS: dict[str, Any] = {"kernels": "pallas", "interpret": True}


@dataclasses.dataclass(frozen=True)
class Shape:
    """T tokens that name K of R rows of D channels."""

    tokens: int
    width: int
    fanout: int
    rows: int
    dtype: Any
    weighted: bool = True

    def __str__(self) -> str:
        kind = "" if self.weighted else "-unweighted"
        return f"T{self.tokens}-D{self.width}-K{self.fanout}-R{self.rows}-{self.dtype.__name__}{kind}"

    def tables(self) -> list[np.ndarray]:
        """Rows for tokens: any, some twice by one token; some with -1; the last token's last only; none."""
        random = np.random.default_rng(self.rows)
        shape = (self.tokens, self.fanout)
        full = random.integers(0, self.rows, shape)
        full[:, -1] = full[:, 0]
        some = np.where(random.random(shape) < 0.4, random.choice([-1, -9, self.rows], shape), full)
        last, none = np.full(shape, -1), np.full(shape, -1)
        last[-1, -1] = self.rows - 1
        return [table.astype(np.int32) for table in (full, some, last, none)]

    def arguments(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """With NaN in every row that is not named, and beside every entry that names none."""
        random = np.random.default_rng(self.width)
        rows = random.normal(size=(self.rows, self.width)) * np.exp2(random.integers(-6, 6, (self.rows, 1)))
        rows[~np.isin(np.arange(self.rows), index)] = np.nan
        named = (index >= 0) & (index < self.rows)
        weights = np.where(named, random.random(index.shape), np.nan).astype(np.float32)
        return rows.astype(self.dtype), index, weights if self.weighted else None


SHAPES = [
    Shape(5, 256, 1, 3, BF16),
    Shape(1, 7168, 2, 9, BF16),
    Shape(4, 512, 3, 20, F32),
    Shape(3, 4096, 4, 2, BF16),
    Shape(7, 256, 5, 40, F32),
    Shape(3, 7168, 6, 30, BF16),
    Shape(9, 256, 7, 5, BF16),
    Shape(2, 7168, 8, 11, BF16),  # eight rows do not fit: each is cut in two
    Shape(5, 512, 4, 17, BF16, weighted=False),
    Shape(6, 256, 2, 4, F32, weighted=False),
]


def summed(rows: np.ndarray, index: np.ndarray, weights: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """What combine is to give, in float64, and the sum of the magnitudes of its terms."""
    total, size = np.zeros((2, len(index), rows.shape[1]))
    for t, k in np.ndindex(index.shape):
        if 0 <= index[t, k] < len(rows):
            term = rows[index[t, k]].astype(np.float64) * (1 if weights is None else weights[t, k])
            total[t] += term
            size[t] += np.abs(term)
    return total, size


def assert_close(found: jax.Array, expected: np.ndarray, size: np.ndarray) -> None:
    """Float32 sums of at most 8 terms, rounded once to the rows' type (bfloat16 keeps 8 bits)."""
    rounding = 2.0**-8 if found.dtype == BF16 else 0
    error = np.abs(np.asarray(found, np.float64) - expected)
    assert (error <= rounding * np.abs(expected) + 2.0**-20 * size).all()


def check(shape: Shape) -> None:
    xla, pallas = (jax.jit(partial(combine_rows, **how)) for how in (XLA, PALLAS))
    for index in shape.tables():
        arguments = shape.arguments(index)
        expected, size = summed(*arguments)
        found = pallas(*arguments)
        assert (found.shape, found.dtype) == (expected.shape, shape.dtype)
        assert_close(found, expected, size)
        assert_close(xla(*arguments), expected, size)
        unnamed = ~((index >= 0) & (index < shape.rows)).any(axis=1)
        assert not np.asarray(found)[unnamed].any()


def check_order() -> None:
    """Rows are added in the order of k: 2**24 + 1 is 2**24 in float32, so that only a lone 1 is seen in the sum."""
    rows = np.repeat(np.array([[2.0**24], [1], [-(2.0**24)]], np.float32), 256, axis=1)
    index = np.array([[0, 1, 2], [0, 2, 1], [1, 0, 2]], np.int32)
    for how in (XLA, PALLAS):
        for weights in (None, np.ones(index.shape, np.float32)):
            found = jax.jit(partial(combine_rows, **how))(rows, index, weights)
            np.testing.assert_array_equal(found, np.repeat([[0], [1], [0]], 256, axis=1))


def check_gradients(repeats: bool, weighted: bool) -> None:
    """Of rows and weights, against float64; rows that several tokens name take another way back."""
    shape = Shape(4, 256, 3, 14, F32, weighted)
    index = np.random.default_rng(0).permutation(shape.rows)[:12].reshape(4, 3).astype(np.int32)
    index[1, 2] = index[0, 0] if repeats else -1
    rows, index, weights = shape.arguments(index)
    weights = None if weights is None else np.nan_to_num(weights)
    output = np.random.default_rng(1).normal(size=(4, 256)).astype(np.float32)
    to_rows, to_weights = np.zeros(rows.shape), np.zeros(index.shape)
    for t, k in np.ndindex(index.shape):
        if index[t, k] >= 0:
            to_rows[index[t, k]] += output[t] * (1.0 if weights is None else weights[t, k])
            to_weights[t, k] = np.vdot(output[t].astype(np.float64), rows[index[t, k]])

    def loss(rows, weights, how):
        return jnp.vdot(combine_rows(rows, jnp.asarray(index), weights, **how), output)

    for how in (XLA, PALLAS):
        found = jax.jit(jax.grad(partial(loss, how=how), argnums=(0, 1) if weighted else (0,)))(rows, weights)
        np.testing.assert_allclose(found[0], to_rows, rtol=1e-6, atol=1e-6)
        if weighted:
            np.testing.assert_allclose(found[1], to_weights, rtol=1e-5, atol=1e-4)


def check_shard_map() -> None:
    """Inside shard_map the result, and the gradient of replicated rows, have the types that JAX asks for."""
    shape = Shape(4, 256, 2, 9, F32)
    index = shape.tables()[1]
    rows, index, weights = shape.arguments(index)
    assert weights is not None
    rows, weights = np.nan_to_num(rows), np.nan_to_num(weights)
    mesh = jax.make_mesh((1,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    whole, cut = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("ep")

    def combine(rows, index, weights):
        def total(rows):
            result = combine_rows(rows, index, weights, **PALLAS)
            assert jax.typeof(result).mat.varying == {"ep"}
            return result.sum(), result

        gradient, result = jax.grad(total, has_aux=True)(rows)
        return result, gradient

    mapped = jax.jit(jax.shard_map(combine, mesh=mesh, in_specs=(whole, cut, cut), out_specs=(cut, whole)))
    result, gradient = mapped(rows, index, weights)
    assert_close(result, *summed(rows, index, weights))
    taken = np.zeros(shape.rows)
    named = (index >= 0) & (index < shape.rows)
    np.add.at(taken, index[named], weights[named])
    np.testing.assert_allclose(gradient, np.broadcast_to(taken[:, None], rows.shape), rtol=1e-6)


CHECKS = {
    **{str(shape): partial(check, shape) for shape in SHAPES},
    "order": check_order,
    "gradients": partial(check_gradients, repeats=False, weighted=True),
    "gradients of repeated rows": partial(check_gradients, repeats=True, weighted=True),
    "gradients unweighted": partial(check_gradients, repeats=False, weighted=False),
    "shard_map": check_shard_map,
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return run_apart(__file__)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_the_interpreted_kernel(outcomes, name):
    assert outcomes[name] == "", outcomes[name]


@pytest.mark.parametrize(
    ("width", "fanout", "itemsize", "pieces"),
    [(7168, 6, 2, 1), (4096, 6, 2, 1), (7168, 8, 2, 2), (7168, 6, 4, 2), (7168, 32, 2, 7), (8192, 32, 4, 16)],
)
def test_rows_are_cut_until_they_fit_twice_into_a_core(width, fanout, itemsize, pieces):
    assert column_pieces(width, fanout, itemsize) == pieces
    assert (fanout + 1) * width // pieces * itemsize <= SMEM_PER_BLOCK
    assert width // pieces % 256 == 0


@pytest.mark.parametrize("how", [XLA, PALLAS], ids=["xla", "pallas"])
@pytest.mark.parametrize(("tokens", "fanout", "rows"), [(0, 2, 3), (2, 0, 3), (2, 2, 0), (0, 0, 0)])
def test_nothing_to_sum_is_zeros_without_a_kernel(how, tokens, fanout, rows):
    index, weights = jnp.zeros((tokens, fanout), jnp.int32), jnp.ones((tokens, fanout))
    result = combine_rows(jnp.full((rows, 512), jnp.nan, BF16), index, weights, **how)
    assert (result.shape, result.dtype) == ((tokens, 512), BF16)
    assert not np.asarray(result).any()
    gradients = jax.grad(lambda r, w: combine_rows(r, index, w, **how).sum(), argnums=(0, 1))(
        jnp.ones((rows, 512)), weights
    )
    np.testing.assert_array_equal(gradients[0], np.zeros((rows, 512)))
    np.testing.assert_array_equal(gradients[1], np.zeros((tokens, fanout)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": np.zeros((3, 256), np.int32)}, r"rows must be .* float type, not int32\[3, 256\]"),
        ({"index": np.zeros((2, 2), np.uint8)}, r"index must be int32\[rows, fanout\], not uint8\[2, 2\]"),
        ({"weights": np.zeros((2, 3), np.float32)}, r"weights must be float32\[2, 2\], not float32\[2, 3\]"),
        ({"weights": np.zeros((2, 2), np.float16)}, r"weights must be float32\[2, 2\], not float16\[2, 2\]"),
        ({"kernels": "pallas"}, "'pallas' cannot run here: the device is cpu"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    arguments: dict[str, Any] = {
        "rows": np.zeros((3, 256), np.float32),
        "index": np.zeros((2, 2), np.int32),
        "weights": np.zeros((2, 2), np.float32),
    }
    changed: dict[str, Any] = {
        name: jnp.asarray(v) if isinstance(v, np.ndarray) else v for name, v in (arguments | change).items()
    }
    with pytest.raises(ValueError, match=message):
        combine_rows(**changed)


if __name__ == "__main__":
    run_here(CHECKS)
