"""A sum over ranks that all hold the same value, wherever it hides, and programs of which nothing can be known."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxcoll import StateError, Topology, all_gather, all_reduce, audit, declare_partial, reduce_scatter
from jaxcoll.primitives import subjaxprs

MESH = Topology(4, 2).mesh
BOTH = ("attn_dp", "attn_tp")
CUT, DP = P("attn_dp", "attn_tp"), P("attn_dp")  # of a [8, 16] argument; DP is a replica over attn_tp
X = jax.ShapeDtypeStruct((8, 16), jnp.float32)


def traced(program, in_specs=DP, out_specs=DP, **options):
    step = jax.shard_map(program, mesh=MESH, in_specs=in_specs, out_specs=out_specs, **options)
    return jax.jit(step).trace(X)


def refused(step):
    with pytest.raises(StateError) as error:
        audit(step)
    words = str(error.value)
    assert re.search(r" at test_audit_replicas\.py:\d+ \(", words), words
    return words


def assert_counts_a_replica(step, axes="attn_tp"):
    words = refused(step)
    assert f" sums over ({axes}), where every rank holds the same value: a replica would be counted once per" in words


def vary(x, axes: str | tuple[str, ...] = "attn_tp"):
    """A replica that no longer says so."""
    return lax.pcast(x, axes, to="varying")


def total(x):
    return lax.psum(x, "attn_tp")


def summed_in_a_reference(x):
    ref = jax.new_ref(x * 0)

    def add(i, _):
        ref[...] += x

    lax.fori_loop(0, 3, add, None)
    return jax.freeze(ref)


SUMS = {
    "psum": total,
    "pmean": lambda x: lax.pmean(x, "attn_tp"),
    "psum_scatter": lambda x: lax.psum_scatter(x, "attn_tp", scatter_dimension=0, tiled=True),
    "psum of several": lambda x: lax.psum((vary(x) * lax.axis_index("attn_tp"), x), "attn_tp")[1],
    "psum, hidden": lambda x: total(vary(x)),
    "pmean, hidden": lambda x: lax.pmean(vary(x), "attn_tp"),
    "psum_scatter, hidden": lambda x: lax.psum_scatter(vary(x), "attn_tp", scatter_dimension=1, tiled=True),
    "declared": lambda x: all_reduce(declare_partial(vary(x), "attn_tp"), "attn_tp"),
    "declared, scattered": lambda x: reduce_scatter(declare_partial(vary(x), "attn_tp"), "attn_tp", 0),
    "declared over both": lambda x: all_reduce(declare_partial(vary(x), BOTH), BOTH),
    "after arithmetic": lambda x: total(jnp.tanh(vary(x)) * 2 + 1),
    "behind a barrier": lambda x: total(lax.optimization_barrier((vary(x), lax.axis_index("attn_tp")))[0]),
    "chosen by a replica": lambda x: total(jnp.where(x > 0, vary(x), -vary(x))),
    "a branch of its own": lambda x: total(lax.cond(x[0, 0] > 0, lambda v: v, lambda v: v * 2, vary(x))),
    "from a host": lambda x: total(
        vary(jax.pure_callback(lambda: np.ones((1, 3), np.float32), X.update(shape=(1, 3))), BOTH)
    ),
    "a broadcast": lambda x: total(lax.pbroadcast(vary(x) * lax.axis_index("attn_tp"), ("attn_tp",), 0)),
    "sent round": lambda x: total(lax.ppermute(vary(x), "attn_tp", [(0, 1), (1, 0)])),
    "from a reference": lambda x: total(jax.new_ref(vary(x))[...]),
    "from a reference that is given away": lambda x: total(jax.jit(lambda r: r[0:2] * 2)(jax.new_ref(vary(x)))),
    "from a reference that a loop fills": lambda x: total(summed_in_a_reference(vary(x))),
    "random numbers of one key": lambda x: total(vary(jax.random.normal(jax.random.key(0), (1, 3)), BOTH)),
}


@pytest.mark.parametrize("what", SUMS)
def test_a_replica_summed(what):
    assert_counts_a_replica(traced(SUMS[what], out_specs=CUT))


AGAIN = {
    "psum of psum": lambda x: total(total(x)),
    "psum of the square of psum": lambda x: total(jnp.square(total(x))),
    "psum of pmax": lambda x: total(lax.pmax(x, "attn_tp")),
    "psum of all_reduce": lambda x: total(all_reduce(declare_partial(x, "attn_tp"), "attn_tp")),
    "psum of all_gather": lambda x: total(all_gather(x, "attn_tp", 0)),
    "psum of the raw all_gather": lambda x: total(lax.all_gather(x, "attn_tp", tiled=True)),
    "psum_scatter of psum": lambda x: lax.psum_scatter(total(x), "attn_tp", scatter_dimension=0, tiled=True),
    "declared after psum": lambda x: all_reduce(declare_partial(vary(total(x)), "attn_tp"), "attn_tp"),
    "axis by axis": lambda x: lax.psum(vary(lax.psum(x, BOTH), BOTH), "attn_tp"),
}


@pytest.mark.parametrize("what", AGAIN)
def test_a_second_reduction(what):
    assert_counts_a_replica(traced(AGAIN[what], CUT, CUT))


def as_custom_jvp(f):
    g = jax.custom_jvp(f)
    g.defjvp(lambda primals, tangents: (g(*primals), g(*tangents)))
    return g


def as_custom_vjp(f):
    g = jax.custom_vjp(f)
    g.defvjp(lambda x: (g(x), None), lambda _, ct: (ct,))
    return g


def forward_rule(f):
    g = jax.custom_vjp(lambda x: x * 2)
    g.defvjp(lambda x: (f(x), None), lambda _, ct: (ct,))
    return jax.grad(lambda x: g(x).sum())


def backward_rule(f):
    g = jax.custom_vjp(lambda x: x * 2)
    g.defvjp(lambda x: (x * 2, None), lambda _, ct: (f(ct),))
    return jax.grad(lambda x: g(x).sum())


def in_a_root(f):
    return lambda x: lax.custom_root(lambda v: v - f(x)[0, 0], 0.0, lambda _, v: v + f(x)[0, 0], lambda _, y: y) * x


NESTED = {
    "jit": jax.jit,
    "jit in jit": lambda f: jax.jit(jax.jit(f)),
    "remat": jax.checkpoint,
    "custom_jvp": as_custom_jvp,
    "custom_vjp": as_custom_vjp,
    "custom_vjp forward": forward_rule,
    "custom_vjp backward": backward_rule,
    "vmap": jax.vmap,
    "map": lambda f: lambda x: lax.map(f, x),
    "scan over rows": lambda f: lambda x: lax.scan(lambda c, v: (c, f(v)), 0.0, x)[1],
    "scan carry": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    "scan carry that varies by type": lambda f: (
        lambda x: lax.scan(lambda c, _: (vary(f(c)), None), vary(x), None, length=2)[0]
    ),
    "scan constant": lambda f: lambda x: lax.scan(lambda c, _: (c + f(x), None), x, None, length=2)[0],
    "branch": lambda f: lambda x: lax.cond(lax.pmax(x[0, 0], "attn_dp") > 0, f, lambda v: v, x),
    "loop": lambda f: lambda x: lax.fori_loop(0, lax.pmax(x[0, 0], "attn_dp").astype(int), lambda i, c: f(c), x),
    "loop test": lambda f: lambda x: lax.while_loop(lambda c: lax.pmax(f(c)[0, 0], "attn_dp") < 3, lambda c: c + 1, x),
    "loop carry that varies by type": lambda f: (
        lambda x: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, vary(f(c[1]))), (0, vary(x)))[1]
    ),
    "linear solve": lambda f: lambda x: lax.custom_linear_solve(lambda v: f(v), x, lambda _, b: f(b)),
    "root": in_a_root,
    "scan of a jit of a remat of a branch": lambda f: (
        lambda x: lax.scan(
            lambda c, v: (
                c,
                jax.jit(jax.checkpoint(lambda w: lax.cond(lax.pmax(w[0], "attn_dp") > 0, f, lambda a: a, w)))(v),
            ),
            0.0,
            x,
        )[1]
    ),
}


@pytest.mark.parametrize("wrapper", NESTED)
def test_a_replica_summed_in_a_nested_body(wrapper):
    assert_counts_a_replica(traced(NESTED[wrapper](total), out_specs=CUT))


def test_a_replica_of_an_enclosing_shard_map():
    def outer(inner, x, **specs):
        def middle(v):
            return jax.shard_map(inner, axis_names={"attn_tp"}, **specs)(vary(lax.pmax(v, "attn_dp"), "attn_dp"))

        step = jax.shard_map(middle, mesh=MESH, in_specs=DP, out_specs=P(), axis_names={"attn_dp"})
        return jax.jit(step).trace(x)

    cut = {"in_specs": P(None, "attn_tp"), "out_specs": P(None, "attn_tp")}
    assert_counts_a_replica(outer(lambda v: lax.psum(v, "attn_dp"), X, **cut), "attn_dp")
    whole = {"in_specs": P(), "out_specs": P()}
    assert_counts_a_replica(outer(lambda v: lax.pmax(total(v), "attn_dp"), X, **whole))
    audit(outer(lambda v: lax.pmax(total(v), "attn_dp"), X, in_specs=P(None, "attn_tp"), out_specs=P()))


@pytest.mark.parametrize("total_loss", [lambda v: lax.psum(v, "attn_dp"), lambda v: lax.pmean(v, "attn_dp")])
def test_the_known_right_program_that_is_refused(total_loss):
    """The README says so: a raw psum's cotangent cannot be told from a replica; the verbs' loss passes."""

    def loss(bias, x):
        return total_loss(jnp.sum(x + bias))

    assert_counts_a_replica(traced(lambda x: jax.grad(loss)(jnp.ones(16), x), out_specs=P()), "attn_dp")
    by_verbs = jax.grad(lambda b, x: all_reduce(declare_partial(jnp.sum(x + b), "attn_dp"), "attn_dp"))
    audit(traced(lambda x: by_verbs(jnp.ones(16), x), out_specs=P()))


def test_a_shard_map_inside_other_bodies():
    step = jax.shard_map(total, mesh=MESH, in_specs=DP, out_specs=DP)
    for program in (
        jax.jit(step),
        lambda x: lax.scan(lambda c, _: (step(c), None), x, None, length=2)[0],
        lambda x: jax.vmap(jax.shard_map(total, mesh=MESH, in_specs=P(), out_specs=P()), spmd_axis_name="attn_dp")(x),
    ):
        assert_counts_a_replica(jax.jit(program).trace(X))


def test_any_form_of_a_traced_step_is_read():
    step = traced(total)
    for form in (step, step.jaxpr, jax.make_jaxpr(jax.shard_map(total, mesh=MESH, in_specs=DP, out_specs=DP))(X)):
        assert_counts_a_replica(form)


def test_a_jaxpr_may_hide_what_a_traced_step_shows():
    def program(x):
        return jnp.searchsorted(x[0], x[1])

    step = traced(program, CUT, P(BOTH))
    audit(step)
    if any(eqn.primitive.name == "call_hi_primitive" for eqn in inner_equations(step.jaxpr)):
        with pytest.raises(StateError, match="hides its body; audit the result of jax.jit"):
            audit(step.jaxpr)


def inner_equations(jaxpr):
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for body in subjaxprs(eqn):
            yield from inner_equations(body)


# Programs of which nothing can be known.


def test_check_vma_off():
    def right(x):
        return total(x)

    def whole(x):
        return jax.shard_map(right, mesh=MESH, in_specs=CUT, out_specs=DP, check_vma=False)(x)

    for program in (whole, lambda x: lax.scan(lambda c, _: (c, whole(x)), 0, None, length=2)[1]):
        assert refused(jax.jit(program).trace(X)).endswith(" has check_vma=False: states are unknown in it")
    with pytest.raises(StateError, match="shard_map at an unknown line has check_vma=False"):
        audit(traced(right, CUT, check_vma=False))


@pytest.mark.parametrize(
    "program",
    [
        lambda x, g: lax.all_gather(x, "attn_dp", axis_index_groups=g),
        lambda x, g: lax.psum_scatter(x, "attn_dp", axis_index_groups=g, scatter_dimension=0, tiled=True),
        lambda x, g: lax.all_to_all(x, "attn_dp", 0, 0, axis_index_groups=g, tiled=True),
        lambda x, g: lax.pmax(x, "attn_dp", axis_index_groups=g),
    ],
)
def test_groups_that_are_no_mesh_axes(program):
    step = traced(lambda x: program(x, [[0, 1], [2, 3]]), CUT, CUT)
    assert refused(step).endswith(" uses axis_index_groups: such groups are no mesh axes")
