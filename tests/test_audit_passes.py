"""Right programs that a strict audit might trip over: all pass it, and most are run against NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxcoll import (
    State,
    Topology,
    all_gather,
    all_reduce,
    all_to_all,
    audit,
    contract,
    declare_partial,
    reduce_scatter,
    state,
    take_shard,
    uniform_cond,
)

MESH = Topology(4, 2).mesh
BOTH = ("attn_dp", "attn_tp")
CUT, DP, WHOLE = P("attn_dp", "attn_tp"), P("attn_dp"), P()
X = np.arange(8 * 16, dtype=np.float32).reshape(8, 16) - 50
SUM = X.reshape(8, 2, 8).sum(1)  # over attn_tp; every number is exact in float32


def run(program, *args, in_specs: Any = CUT, out_specs: Any = DP):
    args = args or (X,)
    traced = jax.jit(jax.shard_map(program, mesh=MESH, in_specs=in_specs, out_specs=out_specs)).trace(*args)
    audit(traced)
    return jax.tree.map(np.asarray, traced.lower().compile()(*args))


def u(x):
    return declare_partial(x, "attn_tp")


def total(x):
    return all_reduce(u(x), "attn_tp")


def vary(x, axes: str | tuple[str, ...] = "attn_tp"):
    return lax.pcast(x, axes, to="varying")


# What a partial sum may meet before its reduction: f(sum of addends) in NumPy.

LINEAR = {
    "nothing": (lambda v: v, lambda s: s),
    "plus": (lambda v: v + v[::1], lambda s: 2 * s),
    "minus": (lambda v: v - (v + v), lambda s: -s),
    "negated": (lambda v: -v, lambda s: -s),
    "reshape": (lambda v: v.reshape(-1, 4).ravel().reshape(2, 8), lambda s: s),
    "transpose": (lambda v: v.T.T, lambda s: s),
    "slice": (lambda v: v[:, 1:7:2], lambda s: s[:, 1:7:2]),
    "static row": (lambda v: v[None, :, 3:4].squeeze(0), lambda s: s[:, 3:4]),
    "new axis": (lambda v: v[:, None, :1, None][:, 0, :, 0], lambda s: s[:, :1]),
    "broadcast": (lambda v: jnp.broadcast_to(v[:, None], (2, 3, 8)), lambda s: np.repeat(s[:, None], 3, 1)),
    "repeat": (lambda v: jnp.repeat(v, 2, 1), lambda s: np.repeat(s, 2, 1)),
    "tile": (lambda v: jnp.tile(v, (1, 2)), lambda s: np.tile(s, (1, 2))),
    "roll": (lambda v: jnp.roll(v, 3, 1), lambda s: np.roll(s, 3, 1)),
    "sum": (lambda v: v.sum(1), lambda s: s.sum(1)),
    "einsum of one": (lambda v: jnp.einsum("ab->a", v), lambda s: s.sum(1)),
    "concatenate": (lambda v: jnp.concatenate([v, v + v], 1), lambda s: np.concatenate([s, 2 * s], 1)),
    "stack": (lambda v: jnp.stack([v, v + v], 1), lambda s: np.stack([s, 2 * s], 1)),
    "split": (lambda v: jnp.split(v, 2, 1)[1], lambda s: s[:, 4:]),
    "unstack": (lambda v: jnp.unstack(v, axis=1)[2], lambda s: s[:, 2]),
    "barrier": (lax.optimization_barrier, lambda s: s),
    "barrier with a replica": (lambda v: lax.optimization_barrier((v, jnp.ones(3)))[0], lambda s: s),
    "stop_gradient": (lax.stop_gradient, lambda s: s),
    "name for remat": (lambda v: checkpoint_name(v, "partial"), lambda s: s),
    "jit": (jax.jit(lambda v: v + v), lambda s: 2 * s),
    "branch on a replica": (
        lambda v: lax.cond(lax.axis_size("attn_tp") > 1, lambda a: a + a, lambda a: a, v),
        lambda s: 2 * s,
    ),
    "scan": (lambda v: lax.scan(lambda c, _: (c + v, None), v, None, length=2)[0], lambda s: 3 * s),
    "exchange over the other axis": (
        lambda v: all_to_all(all_to_all(v, "attn_dp", 1, 0), "attn_dp", 0, 1),
        lambda s: s,
    ),
}


@pytest.mark.parametrize("what", LINEAR)
def test_linear_work_on_a_partial_sum(what):
    program, expected = LINEAR[what]
    np.testing.assert_array_equal(run(lambda x: all_reduce(program(u(x)), "attn_tp")), expected(SUM))


def test_a_partial_gathered_and_summed_over_the_other_axis():
    gathered = run(lambda x: all_reduce(all_gather(u(x), "attn_dp", 0), "attn_tp"), out_specs=WHOLE)
    np.testing.assert_array_equal(gathered, SUM)
    summed = run(lambda x: all_reduce(lax.psum(u(x), "attn_dp"), "attn_tp"), out_specs=WHOLE)
    np.testing.assert_array_equal(summed, SUM.reshape(4, 2, 8).sum(0))
    axis_by_axis = run(
        lambda x: all_reduce(reduce_scatter(declare_partial(x, BOTH), "attn_dp", 1), "attn_tp"),
        out_specs=P(None, "attn_dp"),
    )
    np.testing.assert_array_equal(axis_by_axis, SUM.reshape(4, 2, 8).sum(0))


def test_masked_scaled_and_placed_before_it_is_declared():
    def program(x, keep):
        placed = jnp.zeros((4, 8)).at[jnp.array([3, 1])].add(jnp.where(keep[:, None], x * 0.5, 0))
        return reduce_scatter(u(placed), "attn_tp", 0)

    keep = np.array([True, False] * 4)
    poisoned = np.where(keep[:, None], X, np.nan)
    got = run(program, poisoned, keep, in_specs=(CUT, DP), out_specs=P(BOTH))
    expected = np.zeros((4, 4, 8), np.float32)
    expected[:, 3] = SUM.reshape(4, 2, 8)[:, 0] / 2
    np.testing.assert_array_equal(got, expected.reshape(16, 8))


def test_layers_scanned_with_a_reduction_inside():
    weights = np.random.default_rng(0).standard_normal((3, 16, 16), np.float32) / 4

    def program(x, ws):
        def layer(h, w):
            return jnp.tanh(take_shard(all_reduce(contract(h, w, "attn_tp"), "attn_tp"), "attn_tp", 1)), h.sum()

        h, sums = lax.scan(layer, x, ws)
        return all_gather(h, "attn_tp", 1), all_reduce(declare_partial(sums, BOTH), BOTH)

    h, sums = X, []
    for w in weights:
        sums.append(h.sum(dtype=np.float64))
        h = np.tanh(h @ w)
    got = run(program, X, weights, in_specs=(CUT, P(None, "attn_tp")), out_specs=(DP, WHOLE))
    np.testing.assert_allclose(got[0], h, atol=1e-5)  # float32 products in another order
    np.testing.assert_allclose(got[1], sums, atol=1e-3)  # sums of 128 numbers up to 77


def test_a_loop_of_a_number_of_rounds_that_all_agree_on():
    def program(x):
        rounds = lax.pmax(jnp.max(x), BOTH).astype(int) - 74  # 77 - 74
        carried = lax.fori_loop(0, rounds, lambda i, c: c + total(x), total(x))
        _, waited, kept = lax.while_loop(
            lambda c: c[0] < rounds, lambda c: (c[0] + 1, c[1] + total(x), c[2]), (0, total(x), total(x))
        )
        return carried, waited, kept

    for got, times in zip(run(program), (4, 4, 1), strict=True):
        np.testing.assert_array_equal(got, times * SUM)


@pytest.mark.parametrize("loop", ["scan", "while"])
def test_what_a_later_round_hands_on(loop):
    """Only in the third round does the last of the carried values differ between ranks."""

    def program(x):
        def shift(c):
            return x, c[0], c[1]

        start = (vary(total(x)),) * 3
        if loop == "scan":
            carried = lax.scan(lambda c, _: (shift(c), None), start, None, length=3)[0]
        else:
            rounds = lax.pmax(x[0, 0], BOTH).astype(int) * 0 + 3
            carried = lax.fori_loop(0, rounds, lambda i, c: shift(c), start)
        return lax.psum(carried[2], "attn_tp")

    np.testing.assert_array_equal(run(program), SUM)


def test_a_loop_of_its_own_without_communication():
    """Ranks may leave such a loop when they like, and values that it only passes through stay replicas."""

    def program(x):
        def body(c):
            return c[0] * 2 + c[1], c[1]

        alone, kept = lax.while_loop(lambda c: c[0] < 100, body, (1 + jnp.abs(x[0, 0]), vary(jnp.float32(1), BOTH)))
        return alone[None, None], kept[None, None], lax.pmax(alone, BOTH)

    alone, _, largest = run(program, out_specs=(CUT, CUT, WHOLE))
    expected = 1 + np.abs(X[::2, ::8])
    while (expected < 100).any():
        expected = np.where(expected < 100, 2 * expected + 1, expected)
    np.testing.assert_array_equal(alone, expected)
    assert largest == expected.max()


def test_a_loop_of_a_number_of_rounds_of_each_replica():
    """jax types the counter as a replica and nobody reads it afterwards; attn_tp is what talks, and agrees."""

    def program(x):
        mine = lax.axis_index("attn_dp")
        doubled = lax.fori_loop(0, mine, lambda i, v: v + v, u(x))
        return lax.fori_loop(0, mine, lambda i, c: c + total(x) * i, total(x)), all_reduce(doubled, "attn_tp")

    replica = np.arange(4).repeat(2)[:, None]
    added, doubled = run(program, out_specs=(DP, DP))
    np.testing.assert_array_equal(added, SUM * (1 + replica * (replica - 1) // 2))
    np.testing.assert_array_equal(doubled, SUM * 2**replica)


def test_a_branch_of_each_rank_makes_its_addend_or_lets_a_partial_pass():
    def program(x):
        positive = x[0, 0] > 0
        passed, turned = lax.cond(positive, lambda v, w: (v, w), lambda v, w: (v, -w), u(x), x)
        born = lax.cond(positive, lambda: u(x), lambda: u(-x))
        return [all_reduce(v, "attn_tp") for v in (passed, u(turned), born)]

    sign = np.where(X[::2, ::8] > 0, 1, -1).repeat(2, 0)  # [row, attn_tp]
    turned = (X.reshape(8, 2, 8) * sign[..., None]).sum(1)
    for got, expected in zip(run(program), (SUM, turned, turned), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_uniform_branches_on_reduced_counts():
    def program(x):
        counts = all_gather((x > 0).sum()[None], BOTH, 0)
        return uniform_cond(
            counts.max() > 16,
            BOTH,
            lambda v: all_gather(v, "attn_tp", 1),
            lambda v: vary(all_gather(v, "attn_tp", 1) * 0, ()),
            x,
        )

    np.testing.assert_array_equal(run(program), X * 0)
    np.testing.assert_array_equal(run(program, np.abs(X) + 1), X * 0)


@pytest.mark.parametrize("rows", ["replicas", "shards"])
def test_routing_with_top_k_sorts_counts_and_grouped_products(rows):
    """A small MoE layer: routed on gathered rows or on each rank's own, experts cut over attn_tp."""
    rng = np.random.default_rng(1)
    x, router = rng.standard_normal((8, 4), np.float32), rng.standard_normal((4, 6), np.float32)
    up = rng.standard_normal((6, 4, 10), np.float32)
    down = rng.standard_normal((6, 10, 4), np.float32)

    def program(x, router, up, down):
        if rows == "replicas":
            x = all_gather(x, "attn_dp", 0)
        scores, ids = lax.top_k(jax.nn.softmax(x @ router), 2)
        flat = ids.reshape(-1)
        order = jnp.lexsort((flat,))
        sizes = jnp.bincount(flat, length=6)
        tokens = order // 2
        hidden = jax.nn.silu(lax.ragged_dot(x[tokens], up, sizes))
        out = lax.ragged_dot(hidden, down, sizes) * scores.reshape(-1)[order][:, None]
        y = all_reduce(u(jnp.zeros_like(x).at[tokens].add(out)), "attn_tp")
        return take_shard(y, "attn_dp", 0) if rows == "replicas" else y

    specs = (DP, WHOLE, P(None, None, "attn_tp"), P(None, "attn_tp"))
    got = run(program, x, router, up, down, in_specs=specs)
    gates = np.exp(x @ router)
    gates /= gates.sum(1, keepdims=True)
    for row, gate, y in zip(x, gates, got, strict=True):
        best = np.argsort(-gate)[:2]
        hidden = [row @ up[e] for e in best]
        expected = sum(g * (h / (1 + np.exp(-h))) @ down[e] for g, h, e in zip(gate[best], hidden, best, strict=True))
        np.testing.assert_allclose(y, expected, atol=2e-5)  # float32 sums of 10 products in another order


def test_jax_functions_with_bodies_of_their_own():
    """Custom reductions, solvers and jax's high-level primitives work on shards and keep them."""

    def program(x):
        products = lax.reduce(x, np.float32(1), lambda a, b: a * b + 0, (0,))
        windows = lax.reduce_window(x, np.float32(0), lambda a, b: a + b, (2, 1), (1, 1), "VALID")
        places = jnp.searchsorted(jnp.sort(x[0]), x[1]) + jnp.nonzero(x[0] > -1000, size=8)[0]
        solved = lax.custom_linear_solve(lambda v: 2 * v, x, lambda _, b: b / 2)
        scanned = lax.associative_scan(jnp.add, x, axis=1)
        kept = [products, windows, places, solved, scanned, jnp.ldexp(x, 1), lax.map(jnp.sin, x)]
        assert all(state(v, BOTH) is State.SHARD for v in kept)
        return solved, windows, jnp.zeros((2, 8), int) + places

    half, windows, places = run(program, out_specs=CUT)
    np.testing.assert_array_equal(half, X / 2)
    np.testing.assert_array_equal(places[::2, :8], [[8, 9, 10, 11, 12, 13, 14, 15]] * 4)  # row 1 lies above row 0
    np.testing.assert_array_equal(windows, X[::2] + X[1::2])


def test_numbers_of_each_rank_and_prints():
    def program(x):
        mine = jax.random.normal(jax.random.fold_in(jax.random.key(0), lax.axis_index("attn_tp")), (1, 3))
        shared = jax.random.normal(jax.random.key(0), (1, 3))
        jax.debug.callback(lambda v: None, x)
        return lax.psum(mine, "attn_tp"), shared

    _, shared = run(program, out_specs=WHOLE)
    np.testing.assert_array_equal(shared, jax.random.normal(jax.random.key(0), (1, 3)))


def test_references_of_shards():
    """A reference holds what differs from the first write on that differs, in a loop also what later rounds write."""

    def program(x):
        ref = jax.new_ref(vary(total(x)))
        ref[...] -= x

        def later(c, _):
            c += lax.psum(ref[...], "attn_tp")
            ref[...] = x
            return c, None

        return lax.scan(later, total(x) * 0, None, length=2)[0]

    np.testing.assert_array_equal(run(program), (2 * SUM - SUM) + SUM)


@pytest.mark.parametrize("by", ["branch", "loop"])
def test_a_reference_that_each_rank_may_clear_is_no_replica(by):
    def program(x):
        ref = jax.new_ref(vary(total(x)))

        def clear():
            ref[...] *= 0

        if by == "branch":
            lax.cond(x[0, 0] > 0, clear, lambda: None)
        else:
            lax.fori_loop(0, (x[0, 0] > 0).astype(int), lambda i, _: clear(), None)
        return lax.psum(ref[...], "attn_tp")

    kept = (X[::2, ::8] <= 0).sum(1).repeat(2)[:, None]  # of two ranks
    np.testing.assert_array_equal(run(program), SUM * kept)


def test_a_nested_shard_map():
    def middle(x):
        inner = jax.shard_map(total, in_specs=P(None, "attn_tp"), out_specs=WHOLE, axis_names={"attn_tp"})
        return lax.cond(x[0, 0] > 0, lambda v: inner(v), lambda v: -inner(v), x)  # replicas may differ; theirs agree

    step = jax.jit(jax.shard_map(middle, mesh=MESH, in_specs=DP, out_specs=DP, axis_names={"attn_dp"}))
    audit(step.trace(X))
    sign = np.where(X[::2, :1] > 0, 1, -1).repeat(2, 0)
    np.testing.assert_array_equal(step(X), sign * SUM)


def test_gradients_of_scanned_layers_of_branches_and_of_the_gradient_itself():
    weights = np.random.default_rng(2).standard_normal((3, 16, 16)).astype(np.float32) / 4

    def loss(x, ws):
        def layer(h, w):
            return jnp.tanh(reduce_scatter(contract(h, w, "attn_tp"), "attn_tp", 1)), None

        h = jax.checkpoint(lambda h: lax.scan(layer, h, ws)[0])(x)
        largest = lax.pmax(jnp.max(lax.stop_gradient(h)), BOTH)
        y = uniform_cond(
            largest > 0, BOTH, lambda v: all_gather(v, "attn_tp", 1) ** 2, lambda v: all_gather(v, "attn_tp", 1), h
        )
        return all_reduce(declare_partial(jnp.sum(y), "attn_dp"), "attn_dp")

    def dense(x, ws):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    def step(x, ws):
        first, again = jax.grad(loss, argnums=(0, 1))(x, ws), jax.grad(lambda v: jnp.sum(jax.grad(loss)(v, ws) ** 2))(x)
        return *first, again

    x, specs = X / 50, (CUT, P(None, "attn_tp"))
    got = run(step, x, weights, in_specs=specs, out_specs=(*specs, CUT))
    expected = jax.grad(dense, argnums=(0, 1))(x, weights)
    again = jax.grad(lambda v: jnp.sum(jax.grad(dense)(v, weights) ** 2))(x)
    for g, e in zip(got, (*expected, again), strict=True):
        np.testing.assert_allclose(g, e, atol=2e-4)  # float32 sums of 16 products, three layers deep and back


@pytest.mark.parametrize("transform", ["vmap", "platform"])
def test_other_transformations(transform):
    if transform == "vmap":  # jax has no rule to batch a partial sum, but one for everything else
        got = run(lambda x: jax.vmap(lambda v: all_gather(v, "attn_tp", 0))(x))
        np.testing.assert_array_equal(got, X)
    else:
        got = run(lambda x: lax.platform_dependent(x, cpu=total, default=lambda v: total(v) * 1))
        np.testing.assert_array_equal(got, SUM)
