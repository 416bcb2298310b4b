"""Wrong sums, one kind each: partial sums touched, mixed or lost, and replicas summed. The audit names the line."""

import inspect
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

from jaxcoll import StateError, Topology, all_gather, all_reduce, all_to_all, audit, declare_partial

MESH = Topology(4, 2).mesh
BOTH = ("attn_dp", "attn_tp")
CUT, DP, WHOLE = P("attn_dp", "attn_tp"), P("attn_dp"), P()  # of a [8, 16] argument
X = jax.ShapeDtypeStruct((8, 16), jnp.float32)


def traced(program, in_specs=CUT, out_specs=DP, **options):
    step = jax.shard_map(program, mesh=MESH, in_specs=in_specs, out_specs=out_specs, **options)
    return jax.jit(step).trace(X)


def audit_refuses(program, in_specs=CUT, out_specs=DP):
    """What the audit says of a program that jax and the verbs let pass; it must name a line of this file."""
    step = traced(program, in_specs, out_specs)
    with pytest.raises(StateError) as error:
        audit(step)
    words = str(error.value)
    assert re.search(r" at test_audit_refuses\.py:\d+ \(", words), words
    return words


def u(x):
    """This rank's addend of a sum over attn_tp."""
    return declare_partial(x, "attn_tp")


def vary(x, axes: str | tuple[str, ...] = "attn_tp"):
    """A replica that no longer says so."""
    return lax.pcast(x, axes, to="varying")


def replica(x):
    return lax.pmax(x, "attn_tp")


def test_the_line_is_the_line():
    def program(x):
        v = u(x)
        w = v + v
        return all_reduce(jnp.sort(w), "attn_tp")

    words = audit_refuses(program)
    assert words == (
        f"sort at test_audit_refuses.py:{inspect.getsourcelines(program)[1] + 3} "
        "(test_the_line_is_the_line.<locals>.program) touches a value that is PARTIAL over (attn_tp); until "
        "all_reduce or reduce_scatter completes it only + - reshape transpose slice broadcast sum and concatenation "
        "of partials keep the sum right"
    )


def test_a_cached_body_without_a_line_gets_that_of_its_caller():
    def program(x):
        return jnp.where(replica(x) > 0, u(x), 0)

    for _ in range(2):  # the second time jax reuses what it traced for the first
        words = audit_refuses(program)
        assert f" at test_audit_refuses.py:{inspect.getsourcelines(program)[1] + 1} (" in words


def test_a_verb_is_named_by_the_line_that_called_it():
    def program(x):
        return all_reduce(u(vary(x)), "attn_tp")

    assert f":{inspect.getsourcelines(u)[1] + 2} (u) sums over" in audit_refuses(program, DP)


# What drops or wrongly keeps the mark of a partial sum.

TOUCHED = {
    "where on a replica": lambda x: jnp.where(replica(x) > 0, u(x), 0),
    "power": lambda x: u(x) ** 2,
    "cumsum": lambda x: jnp.cumsum(u(x), 0),
    "cummax": lambda x: lax.cummax(u(x)),
    "prod": lambda x: jnp.prod(u(x), 0),
    "argmax": lambda x: jnp.argmax(u(x), 0),
    "flip": lambda x: jnp.flip(u(x), 0),
    "bitcast": lambda x: lax.bitcast_convert_type(u(x), jnp.int32),
    "ragged dot": lambda x: lax.ragged_dot(u(x), jnp.ones((1, 8, 3)), jnp.array([2])),
    "static set": lambda x: jnp.zeros((2, 8)).at[0:2].set(u(x)),
    "triangle": lambda x: jnp.tril(u(x)),
    "qr": lambda x: jnp.linalg.qr(u(x))[0],
    "svd": lambda x: jnp.linalg.svd(u(x))[1],
    "convolution": lambda x: lax.conv(u(x)[None], jnp.ones((1, 2, 1)), (1,), "SAME")[0],
    "custom reduction": lambda x: lax.reduce(u(x), np.float32(0), lambda a, b: lax.max(a, b) * 1, (0,)),
    "pure callback": lambda x: jax.pure_callback(lambda v: v, X.update(shape=x.shape), u(x)),
    "io callback": lambda x: io_callback(lambda v: v, X.update(shape=x.shape), u(x)),
    "print": lambda x: (jax.debug.print("{}", u(x)), replica(x))[1],
    "pad": lambda x: all_reduce(jnp.pad(u(x), 1), "attn_tp"),
    "precision": lambda x: all_reduce(lax.reduce_precision(u(x), 5, 5), "attn_tp"),
    "scale by a reduced": lambda x: all_reduce(u(x) * lax.pcast(jnp.ones(8), "attn_tp", to="reduced"), "attn_tp"),
    "sort": lambda x: all_reduce(jnp.sort(u(x)), "attn_tp"),
    "top_k": lambda x: all_reduce(lax.top_k(u(x), 2)[0], "attn_tp"),
    "to integer": lambda x: all_reduce(u(x).astype(int), "attn_tp"),
    "to bfloat16": lambda x: all_reduce(u(x).astype(jnp.bfloat16), "attn_tp"),
    "reference": lambda x: all_reduce(jax.new_ref(u(x))[...], "attn_tp"),
}


@pytest.mark.parametrize("what", TOUCHED)
def test_touching_a_partial_sum(what):
    assert " touches a value that is PARTIAL over (attn_tp); until all_reduce or" in audit_refuses(TOUCHED[what])


WRAPPERS = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "jit in remat": lambda f: jax.checkpoint(jax.jit(f)),
    "map": lambda f: lambda x: lax.map(f, x[None])[0],
    "scan carry": lambda f: lambda x: lax.scan(lambda c, _: (vary(f(x) + 0 * c, ()), None), f(x), None, length=1)[0],
    "one branch": lambda f: lambda x: lax.cond(lax.pmax(x[0, 0], BOTH) > 0, f, lambda v: 0 * f(v), x),
    "loop": lambda f: lambda x: lax.fori_loop(0, lax.pmax(x[0, 0], BOTH).astype(int), lambda i, c: c + f(x), 0 * f(x)),
    "linear solve": lambda f: lambda x: lax.custom_linear_solve(lambda v: v * 2, f(x), lambda _, b: b + 0 * f(x)),
}


def as_custom_jvp(f):
    g = jax.custom_jvp(f)
    g.defjvp(lambda primals, tangents: (g(*primals), g(*tangents)))
    return g


def as_custom_vjp(f):
    g = jax.custom_vjp(f)
    g.defvjp(lambda x: (g(x), None), lambda _, ct: (vary(ct),))
    return g


WRAPPERS |= {"custom_jvp": as_custom_jvp, "custom_vjp": as_custom_vjp}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_touching_a_partial_sum_in_a_nested_body(wrapper):
    words = audit_refuses(WRAPPERS[wrapper](lambda x: all_reduce(jnp.sort(u(x)), "attn_tp")), out_specs=CUT)
    assert "sort at " in words and " touches a value that is PARTIAL over (attn_tp)" in words


def write_to_a_replica(x):
    ref = jax.new_ref(jnp.zeros((2, 8)))
    ref[...] = x
    return ref[...]


LEFT_TO_JAX = {
    "where on a shard": lambda x: jnp.where(x > 0, u(x), 0),
    "plus a number": lambda x: u(x) + 1,
    "plus a replica": lambda x: u(x) + replica(x),
    "plus a random number": lambda x: u(x) + jax.random.normal(jax.random.key(0), (2, 8)),
    "times a number": lambda x: u(x) * 1.5,
    "mean": lambda x: jnp.mean(u(x), 0),
    "times itself": lambda x: u(x) * u(x),
    "product of two": lambda x: u(x) @ u(x).T,
    "exp": lambda x: jnp.exp(u(x)),
    "silu": lambda x: jax.nn.silu(u(x)),
    "max": lambda x: jnp.maximum(u(x), 0),
    "norm": lambda x: jnp.linalg.norm(u(x)),
    "comparison": lambda x: u(x) > 0,
    "gather": lambda x: u(x)[jnp.array([1, 0])],
    "dynamic slice": lambda x: lax.dynamic_slice(u(x), (x[0, 0].astype(int), 0), (1, 8)),
    "scatter-add": lambda x: jnp.zeros((4, 8)).at[jnp.array([0, 1])].add(u(x)),
    "update slice": lambda x: lax.dynamic_update_slice(jnp.zeros((4, 8)), u(x), (0, 0)),
    "windows": lambda x: lax.reduce_window(u(x), np.float32(0), lambda a, b: a + b, (2, 1), (1, 1), "VALID"),
    "extreme": lambda x: lax.pmax(u(x), "attn_tp"),
    "extreme over the other axis": lambda x: all_reduce(lax.pmax(u(x), "attn_dp"), "attn_tp"),
    "sum over more axes": lambda x: lax.psum(u(lax.pmax(x, "attn_dp")), BOTH),
    "scan over its rows": lambda x: lax.scan(lambda c, v: (c + v, None), u(x)[0], u(x))[0],
    "raw gather": lambda x: lax.all_gather(u(x), "attn_tp"),
    "raw exchange": lambda x: lax.all_to_all(u(x), "attn_tp", 0, 0, tiled=True),
    "scan into a replica": lambda x: lax.scan(lambda c, v: (c + u(v), None), jnp.zeros(8), x)[0],
    "no reduction": u,
    "shard written to a replica's reference": write_to_a_replica,
}


@pytest.mark.parametrize("what", LEFT_TO_JAX)
def test_what_jax_refuses_by_itself(what):
    """These are refused with or without jaxcoll; should a new jax let one pass, the audit has to see it."""
    try:
        step = traced(LEFT_TO_JAX[what])
    except Exception as error:
        assert not isinstance(error, StateError)
        return
    with pytest.raises(StateError, match="touches a value that is PARTIAL|mixes a value|its result differs over"):
        audit(step)


def test_a_gather_or_exchange_of_a_partial_sum():
    for verb in (partial(all_gather, dim=0), partial(all_to_all, split=0, concat=0)):
        with pytest.raises(StateError, match="needs SHARD, but this .* is PARTIAL"):
            traced(lambda x, verb=verb: verb(u(x), "attn_tp"))


MIXED = {
    "concatenated": lambda x: all_reduce(jnp.concatenate([u(x), replica(x)]), "attn_tp"),
    "stacked": lambda x: all_reduce(jnp.stack([u(x[0]), replica(x[0])]), "attn_tp"),
    "partial over more": lambda x: all_reduce(
        jnp.concatenate([u(lax.pmax(x, "attn_dp")), all_reduce(declare_partial(x, BOTH), "attn_dp"), replica(x) * 0]),
        "attn_tp",
    ),
}


@pytest.mark.parametrize("what", MIXED)
def test_mixing_a_partial_with_a_complete_value(what):
    words = audit_refuses(MIXED[what])
    assert " mixes a value that is PARTIAL over (attn_tp) with one that is not; complete the partial first" in words


# A value that differs between ranks and does not say so.

LOST = {
    "callback": lambda x: jax.pure_callback(lambda v: v, X.update(shape=x.shape), x),
    "what each host says": lambda x: io_callback(lambda: np.ones(1, np.float32), X.update(shape=(1,))),
    "exponents of frexp": lambda x: jnp.frexp(x)[1],
    "positions of an argsort": lambda x: jnp.argsort(x, axis=1),
    "branches on a shard": lambda x: lax.cond(x[0, 0] > 0, lambda: jnp.ones(3), lambda: jnp.zeros(3)),
    "branches over replicas": lambda x: lax.cond(x[0, 0] > 0, lambda a: a, lambda a: a * 2, lax.pmax(x, BOTH)),
    "switch on a shard": lambda x: lax.switch(x[0, 0].astype(int), [lambda: jnp.ones(3), lambda: jnp.zeros(3)]),
    "branches in a jit": lambda x: jax.jit(lambda p: lax.cond(p, lambda: jnp.ones(3), lambda: jnp.zeros(3)))(
        x[0, 0] > 0
    ),
    "rounds by a shard": lambda x: lax.while_loop(lambda c: c[0] < x[0, 0], lambda c: c + 1, jnp.zeros(1)),
    "rounds by a carried shard": lambda x: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (x[0, 0], jnp.ones(3))
    )[1],
    "rounds that end in a constant": lambda x: (
        lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, 5.0), (x[0, 0], 0.0))[1] * jnp.ones(1)
    ),
    "rounds that swap": lambda x: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[2], c[1]), (x[0, 0], jnp.ones(3), jnp.zeros(3))
    )[1],
    "bound by a shard": lambda x: lax.fori_loop(0, x[0, 0].astype(int), lambda i, c: c + 1, jnp.zeros(3)),
    "ragged exchange": lambda x: lax.ragged_all_to_all(
        x, jnp.zeros((8, 8)), *[jnp.array([0, 0])] * 4, axis_name="attn_tp"
    ),
}


@pytest.mark.parametrize("what", LOST)
def test_a_difference_between_ranks_that_the_type_lost(what):
    words = audit_refuses(LOST[what], out_specs=WHOLE if "ragged" not in what else DP)
    assert re.search(r": its result differs over \(.*attn_tp\) but is typed as a replica there; ", words)
    if "argsort" in what:
        assert words.endswith("jax.numpy.argsort(x) mistypes positions, jax.numpy.lexsort((x,)) does not")


@pytest.mark.parametrize(
    "talk", [lambda x, g: lax.psum(x, g), lambda x, g: lax.pmax(x, g), lambda x, g: lax.all_gather(x, g, tiled=True)]
)
def test_an_axis_named_twice_by_a_raw_collective(talk):
    """XLA ends the process over it."""
    words = audit_refuses(lambda x: talk(x, ("attn_tp", "attn_tp")), out_specs=CUT)
    assert words.endswith(" names (attn_tp) twice in its group; name each axis once")


# Each rank goes its own way with its addend of a partial sum.

CHOSEN = {
    "branches on a shard": lambda x: lax.cond(x[0, 0] > 0, lambda v: v, lambda v: -v, u(x)),
    "passed on and used": lambda x: lax.cond(x[0, 0] > 0, lambda v: (v, v + v), lambda v: (v, -v), u(x))[1],
    "one of two partials": lambda x: lax.cond(x[0, 0] > 0, lambda v, w: v, lambda v, w: w, u(x), u(-x)),
    "branches on the rank": lambda x: lax.cond(lax.axis_index("attn_tp") == 0, lambda v: v, lambda v: v - v, u(x)),
    "switch on the rank": lambda x: lax.switch(lax.axis_index("attn_tp"), [lambda v: v + v, lambda v: v], u(x)),
    "rounds by a shard": lambda x: lax.while_loop(
        lambda c: c[0] < x[0, 0], lambda c: (c[0] + 1, c[1] + c[1]), (vary(0.0, BOTH), u(x))
    )[1],
    "rounds by the rank": lambda x: lax.fori_loop(0, lax.axis_index("attn_tp"), lambda i, c: c + c, u(x)),
    "in a jit in a scan": lambda x: lax.scan(
        lambda c, _: (jax.jit(lambda v: lax.cond(x[0, 0] > 0, lambda w: w, lambda w: -w, v))(c), None),
        u(x),
        None,
        length=2,
    )[0],
}


@pytest.mark.parametrize("what", CHOSEN)
def test_a_predicate_of_each_rank_decides_about_a_partial_sum(what):
    words = audit_refuses(lambda x: all_reduce(CHOSEN[what](x), "attn_tp"))
    assert re.match(r"(cond|while) at .*\) has a predicate that differs over \(attn_tp\), where a value that it", words)
    assert words.endswith("choose before the partial is declared, or reduce the predicate first")
