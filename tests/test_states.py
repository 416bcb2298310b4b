"""States read off JAX's types, and the refusal of every verb in every wrong state, with its words."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxcoll
from jaxcoll import State, StateError, Topology, collectives
from jaxcoll.states import require

MESH = Topology(2, 3).mesh
BOTH = ("attn_dp", "attn_tp")
R, S, PARTIAL = State.REPLICA, State.SHARD, State.PARTIAL


def trace(fn, *args, check_vma=True):
    """Traces a per-rank program whose arguments are cut over the whole mesh; its outputs may be anything varying."""
    args = args or (jax.ShapeDtypeStruct((36, 6), jnp.float32),)
    step = jax.shard_map(fn, mesh=MESH, in_specs=P(BOTH), out_specs=P(BOTH), check_vma=check_vma)
    return jax.jit(step).trace(*args)


def in_state(x, **wanted):
    """A value of x's shape in the wanted state over each axis, made with jax alone."""
    for axis, state in wanted.items():
        if state is R:
            x = lax.pmax(x, axis)
    partial = tuple(axis for axis, state in wanted.items() if state is PARTIAL)
    return lax.pcast(x, partial, to="unreduced") if partial else x


@pytest.mark.parametrize("dp, tp", list(itertools.product(State, State)))
def test_states_are_read_per_axis(dp, tp):
    seen = {}

    def program(x):
        v = in_state(x, attn_dp=dp, attn_tp=tp)
        seen["states"] = jaxcoll.states(v, BOTH)
        seen["one"] = {axis: jaxcoll.state(v, axis) for axis in BOTH}
        seen["both"] = jaxcoll.state(v, BOTH)
        seen["words"] = jaxcoll.describe(v, BOTH)
        seen["reversed"] = jaxcoll.describe(v, BOTH[::-1])
        return x

    trace(program)
    assert seen["states"] == seen["one"] == {"attn_dp": dp, "attn_tp": tp}
    if dp is tp:
        assert seen["both"] is dp and seen["words"] == seen["reversed"] == dp.value == str(dp)
    else:
        assert seen["both"] is None
        assert seen["words"] == f"mixed: {dp} over attn_dp, {tp} over attn_tp"
        assert seen["reversed"] == f"mixed: {tp} over attn_tp, {dp} over attn_dp"


def test_an_empty_group_has_no_state_and_asks_for_none():
    def program(x):
        assert jaxcoll.states(x, ()) == {}
        assert jaxcoll.state(x, ()) is None
        assert jaxcoll.describe(x, ()) == "no group"
        for state in State:
            require(x, (), state, "any")
        return x

    trace(program)


VERBS = {
    "contract": (S, lambda x, g: jaxcoll.contract(x, x, g)),
    "declare_partial": (S, jaxcoll.declare_partial),
    "all_reduce": (PARTIAL, jaxcoll.all_reduce),
    "reduce_scatter": (PARTIAL, lambda x, g: jaxcoll.reduce_scatter(x, g, 0)),
    "all_gather": (S, lambda x, g: jaxcoll.all_gather(x, g, 0)),
    "all_to_all": (S, lambda x, g: jaxcoll.all_to_all(x, g, 0, 1)),
    "take_shard": (R, lambda x, g: jaxcoll.take_shard(x, g, 0)),
    "uniform_cond": (R, lambda x, g: jaxcoll.uniform_cond(x[0, 0] > 0, g, lambda v: v, lambda v: v + 1, x)),
}
FITTING = {
    (PARTIAL, R): "all_reduce completes a partial sum",
    (PARTIAL, S): "reduce_scatter completes a partial sum and cuts it",
    (S, R): "all_gather completes shards",
    (S, PARTIAL): "contract makes a partial sum of two shards, declare_partial states that a contribution is one",
    (R, S): "take_shard cuts a replica without communication",
    (R, PARTIAL): "a replica is complete already and must not be summed again",
}


def test_every_public_verb_is_in_the_matrix():
    public = {n for n, f in inspect.getmembers(collectives, inspect.isfunction) if f.__module__ == collectives.__name__}
    assert {name for name in public if not name.startswith("_")} == set(VERBS)


@pytest.mark.parametrize("axis", BOTH)
@pytest.mark.parametrize("verb, state", [(v, s) for v, s in itertools.product(VERBS, State) if VERBS[v][0] is not s])
def test_a_wrong_state_is_refused_with_group_states_and_the_verb_that_fits(verb, state, axis):
    needed, call = VERBS[verb]

    def program(x):
        v = in_state(x, **{axis: state})
        if verb == "uniform_cond" and state is PARTIAL:  # a comparison of a partial sum is refused by jax already
            return jaxcoll.uniform_cond(v[0, 0], axis, lambda w: w, lambda w: w, x)
        call(v, axis)
        return x

    with pytest.raises(StateError) as error:
        trace(program)
    words = str(error.value)
    assert words.startswith(f"{verb} over ({axis}) needs {needed}, but this ")
    assert f" is {state}; {FITTING[state, needed]}" in words and words.endswith(FITTING[state, needed])


@pytest.mark.parametrize("verb, state", list(itertools.product(VERBS, State)))
def test_a_mixed_group_is_refused_axis_by_axis(verb, state):
    needed, call = VERBS[verb]
    if state is needed:  # right over attn_tp is not enough: attn_dp is wrong
        wrong = R if needed is S else S
        found, mixed = {"attn_dp": wrong, "attn_tp": needed}, f"mixed: {wrong} over attn_dp, {needed} over attn_tp"
    else:
        found, mixed = {"attn_dp": needed, "attn_tp": state}, f"mixed: {needed} over attn_dp, {state} over attn_tp"

    def program(x):
        v = in_state(x, **found)
        if verb == "uniform_cond" and PARTIAL in found.values():
            return jaxcoll.uniform_cond(v[0, 0], BOTH, lambda w: w, lambda w: w, x)
        call(v, BOTH)
        return x

    with pytest.raises(StateError) as error:
        trace(program)
    assert str(error.value).startswith(f"{verb} over (attn_dp, attn_tp) needs {needed}, but this ")
    assert str(error.value).endswith(f" is {mixed}")


def test_contract_looks_at_both_operands():
    for program in (
        lambda x: jaxcoll.contract(x, jnp.ones((6, 6)), "attn_tp"),
        lambda x: jaxcoll.contract(jnp.ones((6, 6)), x, "attn_tp"),
    ):
        with pytest.raises(StateError, match=r"contract over \(attn_tp\) needs SHARD, but this float32\[6,6\] is REPL"):
            trace(program)


def test_a_second_reduction_is_refused_whatever_the_verbs():
    def twice(first, second):
        def program(x):
            return second(first(jaxcoll.declare_partial(x, "attn_tp")))

        with pytest.raises(StateError) as error:
            trace(program)
        return str(error.value)

    reduce = VERBS["all_reduce"][1], VERBS["reduce_scatter"][1]
    for first, second in itertools.product(reduce, reduce):
        words = twice(lambda v, f=first: f(v, "attn_tp"), lambda v, f=second: f(v, "attn_tp"))
        assert "needs PARTIAL" in words


def test_a_partial_over_one_group_is_not_one_over_another():
    def program(x):
        return jaxcoll.all_reduce(jaxcoll.declare_partial(x, "attn_tp"), "attn_dp")

    with pytest.raises(StateError, match=r"all_reduce over \(attn_dp\) needs PARTIAL, but this .* is SHARD; contract"):
        trace(program)


@pytest.mark.parametrize("verb", VERBS)
def test_check_vma_off_is_refused_by_every_verb(verb):
    def program(x):
        VERBS[verb][1](x, "attn_tp")
        return x

    with pytest.raises(StateError) as error:
        trace(program, check_vma=False)
    words = "states over 'attn_tp' are unknown: this jax.shard_map was called with check_vma=False"
    assert str(error.value) == words


@pytest.mark.parametrize("verb", VERBS)
def test_outside_shard_map_is_refused_by_every_verb(verb):
    with pytest.raises(StateError) as error:
        VERBS[verb][1](jnp.ones((6, 6)), "attn_tp")
    assert str(error.value) == "'attn_tp' is no manual mesh axis here; call this inside jax.shard_map over it"


def test_an_axis_that_the_mesh_lacks():
    with pytest.raises(StateError, match="'tp' is no manual mesh axis here"):
        trace(lambda x: jaxcoll.all_gather(x, "tp", 0))


def test_an_axis_that_this_shard_map_leaves_alone():
    def program(x):
        return jaxcoll.all_gather(x, "attn_tp", 0)

    step = jax.shard_map(program, mesh=MESH, in_specs=P("attn_dp"), out_specs=P(), axis_names={"attn_dp"})
    with pytest.raises(StateError, match="'attn_tp' is no manual mesh axis here"):
        jax.jit(step).trace(jnp.ones((6, 6)))


def test_an_axis_named_twice():
    for call in (VERBS["all_gather"][1], VERBS["declare_partial"][1], jaxcoll.states):
        with pytest.raises(ValueError) as error:
            trace(lambda x, call=call: call(x, ("attn_tp", "attn_tp")))
        assert str(error.value) == "the group (attn_tp, attn_tp) names an axis twice"


@pytest.mark.parametrize("group", [{"attn_dp", "attn_tp"}, frozenset(BOTH), 3, None, (1,), (("attn_dp", "attn_tp"),)])
def test_a_group_that_is_no_axes_in_an_order_of_their_own(group):
    """The order of a set is another in every process, and with it the order of the ranks."""
    for call in (VERBS["all_gather"][1], VERBS["all_to_all"][1], jaxcoll.states):
        with pytest.raises(TypeError) as error:
            trace(lambda x, call=call: call(x, group))
        words = f"a group is an axis name or a tuple of axis names in rank order, not {group!r}"
        assert str(error.value) == words


def test_one_device_is_checked_like_many():
    """A size-1 axis is in the types, so a wrong program is refused before it meets a second device."""
    mesh = Topology(1, 1).mesh

    def mapped(program):
        return jax.jit(jax.shard_map(program, mesh=mesh, in_specs=P(BOTH), out_specs=P("attn_dp")))

    x = jnp.arange(6.0)
    right = mapped(lambda v: jaxcoll.all_reduce(jaxcoll.declare_partial(v, "attn_tp"), "attn_tp"))
    np.testing.assert_array_equal(right(x), x)
    with pytest.raises(StateError, match="all_reduce over .attn_tp. needs PARTIAL, but this .* is SHARD"):
        mapped(lambda v: jaxcoll.all_reduce(v, "attn_tp")).trace(x)
