"""Programs in which a rank would wait for ever for one that took another branch or left a loop earlier."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxcoll import (
    StateError,
    Topology,
    all_gather,
    all_reduce,
    all_to_all,
    audit,
    declare_partial,
    reduce_scatter,
    uniform_cond,
)

MESH = Topology(4, 2).mesh
BOTH = ("attn_dp", "attn_tp")
CUT, DP = P("attn_dp", "attn_tp"), P("attn_dp")
X = jax.ShapeDtypeStruct((8, 16), jnp.float32)


def traced(program):
    return jax.jit(jax.shard_map(program, mesh=MESH, in_specs=CUT, out_specs=CUT)).trace(X)


def audit_refuses(program):
    step = traced(program)
    with pytest.raises(StateError) as error:
        audit(step)
    words = str(error.value)
    assert re.search(r" at test_audit_waits\.py:\d+ \(", words), words
    return words


def vary(x, axes: str | tuple[str, ...] = "attn_tp"):
    return lax.pcast(x, axes, to="varying")


def top(x):
    return lax.pmax(x, "attn_tp")


def u(x):
    return declare_partial(x, "attn_tp")


def one_sided(talk):
    """Ranks with a positive first number talk, the others do not."""
    return lambda x: lax.cond(x[0, 0] > 0, talk, lambda v: v, x)


TALKS = {
    "pmax": lambda v: vary(top(v)),
    "psum": lambda v: vary(lax.psum(v, "attn_tp")),
    "raw all_gather": lambda v: lax.all_gather(v, "attn_tp", tiled=True)[:2],
    "ppermute": lambda v: lax.ppermute(v, "attn_tp", [(0, 1), (1, 0)]),
    "pbroadcast": lambda v: lax.pbroadcast(v, ("attn_tp",), 0),
    "all_reduce": lambda v: vary(all_reduce(u(v), "attn_tp")),
    "reduce_scatter": lambda v: jnp.tile(reduce_scatter(u(v), "attn_tp", 0), (2, 1)),
    "all_gather": lambda v: vary(all_gather(v, "attn_tp", 0)[:2]),
    "all_to_all": lambda v: all_to_all(v, "attn_tp", 0, 0),
    "over both axes": lambda v: vary(lax.psum(v, BOTH), BOTH),
    "in a jit": jax.jit(lambda v: vary(top(v))),
    "in a remat": jax.checkpoint(lambda v: vary(top(v))),
    "in a scan": lambda v: lax.scan(lambda c, w: (c, vary(top(w))), 0, v)[1],
    "in a loop": lambda v: lax.fori_loop(0, 3, lambda i, c: vary(top(c)), v),
    "in a loop's test": lambda v: lax.while_loop(lambda c: lax.pmax(c[0, 0], BOTH) < 3, lambda c: c + 1, v),
    "in a uniform branch": lambda v: lax.cond(lax.pmax(v[0, 0], BOTH) > 0, lambda w: vary(top(w)), lambda w: w, v),
}


@pytest.mark.parametrize("talk", TALKS)
def test_a_branch_that_a_rank_takes_alone(talk):
    words = audit_refuses(one_sided(TALKS[talk]))
    assert words.startswith("cond at test_audit_waits.py:") and " communicates over (" in words
    assert " under a predicate that differs over (attn_dp, attn_tp): ranks that disagree would wait for each" in words
    assert words.endswith("reduce the predicate first and use uniform_cond")


DECIDED = {
    "a shard": lambda x: x[0, 0] > 0,
    "the rank": lambda x: lax.axis_index("attn_tp") == 0,
    "a partial's scatter": lambda x: reduce_scatter(u(x), "attn_tp", 0)[0, 0] > 0,
    "an exchange": lambda x: all_to_all(x, "attn_tp", 0, 0)[0, 0] > 0,
    "a replica over the other axis": lambda x: lax.pmax(x[0, 0], "attn_dp") > 0,
    "a replica that varies by type": lambda x: vary(top(x[0, 0])) > 0,
    "an index": lambda x: jnp.argmax(x[0]) > 3,
    "a branch on a shard": lambda x: lax.cond(x[0, 0] > 0, lambda: vary(True, BOTH), lambda: vary(False, BOTH)),
    "a scan": lambda x: lax.scan(lambda c, v: (c + v[0], None), vary(0.0, BOTH), x)[0] > 0,
    "a number of its own": lambda x: jax.random.uniform(jax.random.key(lax.axis_index("attn_tp"))) > 0.5,
}


@pytest.mark.parametrize("what", DECIDED)
def test_a_predicate_on_which_ranks_may_disagree(what):
    def program(x):
        return lax.cond(DECIDED[what](x), lambda v: vary(top(v)), lambda v: v, x)

    assert "ranks that disagree would wait for each other for ever" in audit_refuses(program)


def as_custom_jvp(f):
    g = jax.custom_jvp(f)
    g.defjvp(lambda primals, tangents: (g(*primals), g(*tangents)))
    return g


def as_custom_vjp(f):
    g = jax.custom_vjp(f)
    g.defvjp(lambda x: (g(x), None), lambda _, ct: (ct,))
    return g


NESTED = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "custom_jvp": as_custom_jvp,
    "custom_vjp": as_custom_vjp,
    "scan": lambda f: lambda x: lax.scan(lambda c, v: (c, f(v)), 0, x[None])[1][0],
    "map": lambda f: lambda x: lax.map(f, x[None])[0],
    "vmap of the rest": lambda f: lambda x: jax.vmap(lambda w: f(x) + w)(x),
    "uniform branch": lambda f: lambda x: lax.cond(lax.pmax(x[0, 0], BOTH) > 0, f, lambda v: v, x),
    "uniform loop": lambda f: lambda x: lax.fori_loop(0, 3, lambda i, c: f(c), x),
}


@pytest.mark.parametrize("wrapper", NESTED)
def test_a_lonely_branch_in_a_nested_body(wrapper):
    words = audit_refuses(NESTED[wrapper](one_sided(TALKS["pmax"])))
    assert words.startswith("cond at ") and "wait for each other for ever" in words


def test_a_lonely_branch_in_a_nested_shard_map():
    def middle(x):
        inner = jax.shard_map(
            one_sided(TALKS["pmax"]), in_specs=P(None, "attn_tp"), out_specs=P(None, "attn_tp"), axis_names={"attn_tp"}
        )
        return inner(x)

    step = jax.shard_map(middle, mesh=MESH, in_specs=DP, out_specs=DP, axis_names={"attn_dp"})
    with pytest.raises(StateError, match="cond at test_audit_waits.py:.* wait for each other for ever"):
        audit(jax.jit(step).trace(X))


LOOPS = {
    "by a shard": lambda x: lax.while_loop(
        lambda c: c[0] < x[0, 0], lambda c: (c[0] + 1, top(c[1] + x)), (0.0, top(x))
    ),
    "by a carried shard": lambda x: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, top(c[1] + x)), (x[0, 0], top(x))
    ),
    "by a carried flag": lambda x: lax.while_loop(
        lambda c: c[0], lambda c: (c[0] & False, top(c[1] + x)), (x[0, 0] > 0, top(x))
    ),
    "that talks in its test": lambda x: lax.while_loop(
        lambda c: top(c[0]) < c[0] + 1, lambda c: (c[0] + 1, c[1]), (x[0, 0], top(x))
    ),
    "by a count of its own": lambda x: (0, lax.fori_loop(0, x[0, 0].astype(int), lambda i, c: top(c + x), top(x))),
}


@pytest.mark.parametrize("what", LOOPS)
def test_a_loop_that_ranks_leave_at_different_times(what):
    words = audit_refuses(lambda x: LOOPS[what](x)[1])
    assert words.startswith("while at test_audit_waits.py:") and "wait for each other for ever" in words


def test_a_permute_waits_for_devices_that_are_no_peers():
    """XLA:CPU hangs in this program, although ranks that agree exchange only with each other."""

    def program(talk):
        return lambda x: lax.cond(lax.axis_index("attn_dp") < 2, talk, lambda v: v, x)

    for talk in (TALKS["psum"], TALKS["all_to_all"], TALKS["raw all_gather"]):
        audit(traced(program(talk)))  # groups of one replica each: its ranks agree
    words = audit_refuses(program(TALKS["ppermute"]))
    assert "communicates over (attn_tp) (ppermute) under a predicate that differs over (attn_dp)" in words


def test_uniform_cond_refuses_while_tracing():
    for pred in (lambda x: x[0, 0] > 0, lambda x: lax.pmax(x[0, 0], "attn_dp") > 0):
        with pytest.raises(
            StateError, match=r"uniform_cond over \(attn_tp\) needs REPLICA, but this bool\[\].* is SHARD"
        ):
            traced(lambda x, p=pred: uniform_cond(p(x), "attn_tp", TALKS["pmax"], lambda v: v, x))


def test_uniform_over_one_axis_does_not_allow_talk_over_another():
    def program(x):
        return uniform_cond(top(x[0, 0]) > 0, "attn_tp", TALKS["over both axes"], lambda v: v, x)

    words = audit_refuses(program)
    assert "communicates over (attn_dp, attn_tp) (psum" in words and "differs over (attn_dp)" in words
