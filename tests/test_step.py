"""compile_step: what it compiles is audited, keeps its shapes and places, and may reuse its arguments' memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxcoll import StateError, Topology, all_gather, all_reduce, declare_partial
from jaxcoll.step import Step, compile_step

TOPOLOGY = Topology(2, 3)
BOTH = ("attn_dp", "attn_tp")
ROWS = jax.ShapeDtypeStruct((12, 4), jnp.float32)


def total(x):
    return all_reduce(declare_partial(x, "attn_tp"), "attn_tp")


def add(cache, x):
    """The shape of a decode step: a cache that grows and an answer."""
    cache = {"sum": cache["sum"] + x, "steps": cache["steps"] + 1}
    return cache, all_gather(total(cache["sum"]), "attn_dp", 0)


def compiled(**options):
    cache = {"sum": ROWS, "steps": jax.ShapeDtypeStruct((), jnp.int32)}
    specs = {"sum": P(BOTH), "steps": P()}
    return compile_step(add, TOPOLOGY, (cache, ROWS), in_specs=(specs, P(BOTH)), out_specs=(specs, P()), **options)


def arguments(cache_sum=0.0):
    def placed(x, spec):
        return jax.device_put(jnp.asarray(x), TOPOLOGY.sharding(spec))

    x = np.arange(48, dtype=np.float32).reshape(12, 4)
    cache = {"sum": placed(np.full((12, 4), cache_sum, np.float32), P(BOTH)), "steps": placed(np.int32(0), P())}
    return cache, placed(x, P(BOTH))


def expected(x):
    return np.asarray(x).reshape(2, 3, 2, 4).sum(1).reshape(4, 4)


def test_a_step_runs_on_its_mesh_and_can_be_fed_its_own_output():
    step = compiled()
    assert isinstance(step, Step) and step.topology is TOPOLOGY
    cache, x = arguments()
    for n in (1, 2, 3):
        cache, answer = step(cache, x)
        np.testing.assert_array_equal(answer, n * expected(x))
        assert int(cache["steps"]) == n
    assert cache["sum"].sharding.is_equivalent_to(NamedSharding(TOPOLOGY.mesh, P(BOTH)), 2)
    assert [s.device for s in cache["sum"].addressable_shards] == TOPOLOGY.mesh.devices.ravel().tolist()


def test_one_spec_may_stand_for_a_whole_tree():
    step = compile_step(
        lambda tree, scale: jax.tree.map(lambda v: total(v) * scale, tree),
        TOPOLOGY,
        ({"a": ROWS, "b": [ROWS, ROWS]}, jax.ShapeDtypeStruct((), jnp.float32)),
        in_specs=(P(BOTH), P()),
        out_specs=P("attn_dp"),
    )
    _, x = arguments()
    out = step({"a": x, "b": [x, 2 * x]}, jax.device_put(jnp.float32(2), TOPOLOGY.sharding(P())))
    for value, factor in [(out["a"], 2), (out["b"][0], 2), (out["b"][1], 4)]:
        np.testing.assert_array_equal(value, factor * expected(x))


WRONG = {
    "touched": lambda x: all_reduce(jnp.sort(declare_partial(x, "attn_tp")), "attn_tp"),
    "summed twice": lambda x: lax.psum(total(x), "attn_tp"),
    "lonely": lambda x: lax.cond(x[0, 0] > 0, total, lambda v: lax.pmax(v, "attn_tp"), x),
    "mistyped": lambda x: jnp.argsort(lax.pmax(x, "attn_dp"), axis=0) * x[:1].astype(int),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_program_is_refused_before_it_is_lowered(what, monkeypatch):
    def lower(*_: Any):
        raise AssertionError("a program was lowered before it was audited")

    monkeypatch.setattr(jax.stages.Traced, "lower", lower)
    with pytest.raises(StateError, match=r" at test_step\.py:\d+ \("):
        compile_step(WRONG[what], TOPOLOGY, (ROWS,), in_specs=(P(BOTH),), out_specs=P(BOTH))
    with pytest.raises(AssertionError, match="before it was audited"):  # a right one goes on to be lowered
        compile_step(total, TOPOLOGY, (ROWS,), in_specs=(P(BOTH),), out_specs=P("attn_dp"))


def test_verbs_refuse_while_the_step_is_traced():
    with pytest.raises(StateError, match="all_reduce over .attn_tp. needs PARTIAL"):
        compile_step(lambda x: all_reduce(x, "attn_tp"), TOPOLOGY, (ROWS,), in_specs=(P(BOTH),), out_specs=P("attn_dp"))


@pytest.mark.parametrize("shape, dtype", [((24, 4), np.float32), ((12, 5), np.float32), ((12, 4), np.float16)])
def test_another_shape_or_type_is_an_error_and_no_second_program(shape, dtype):
    traces = []

    def counted(x):
        traces.append(x.shape)
        return total(x)

    step = compile_step(counted, TOPOLOGY, (ROWS,), in_specs=(P(BOTH),), out_specs=P("attn_dp"))
    other = jax.device_put(jnp.zeros(shape, dtype), TOPOLOGY.sharding(P(BOTH)))
    with pytest.raises(TypeError, match="Argument types differ"):
        step(other)
    _, x = arguments()
    np.testing.assert_array_equal(step(x), expected(x))
    assert traces == [(2, 4)]


def test_another_place_is_an_error():
    step = compiled()
    cache, x = arguments()
    with pytest.raises(ValueError, match="sharding"):
        step(cache, jax.device_put(x, TOPOLOGY.sharding(P("attn_dp"))))
    with pytest.raises(ValueError, match="sharding"):
        step(cache, jax.device_put(x, SingleDeviceSharding(jax.devices()[7])))


def test_a_wrong_number_of_arguments_or_specs():
    cache, x = arguments()
    with pytest.raises(TypeError):
        compiled()(cache)
    with pytest.raises(ValueError):
        compile_step(total, TOPOLOGY, (ROWS, ROWS), in_specs=(P(BOTH),), out_specs=P("attn_dp"))


def test_one_spec_may_stand_for_every_argument():
    _, x = arguments()
    step = compile_step(lambda a, b: total(a - b), TOPOLOGY, (ROWS, ROWS), in_specs=P(BOTH), out_specs=P("attn_dp"))
    np.testing.assert_array_equal(step(3 * x, x), 2 * expected(x))


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="step has 2 arguments and 1 in_specs; each needs one of its own"):
        compile_step(total, TOPOLOGY, (ROWS, ROWS), in_specs=(P(BOTH),), out_specs=P("attn_dp"))
    with pytest.raises(TypeError, match="a step takes arrays or jax.ShapeDtypeStructs, not 2.5"):
        compile_step(lambda x, f: x * f, TOPOLOGY, (ROWS, 2.5), in_specs=(P(BOTH), P()), out_specs=P(BOTH))


def test_donated_arguments_are_given_up_and_others_are_kept():
    step = compiled(donate_argnums=(0,))
    cache, x = arguments(cache_sum=1.0)
    places = [s.data.unsafe_buffer_pointer() for s in cache["sum"].addressable_shards]
    grown, answer = step(cache, x)
    assert cache["sum"].is_deleted() and not x.is_deleted()
    assert [s.data.unsafe_buffer_pointer() for s in grown["sum"].addressable_shards] == places
    np.testing.assert_array_equal(answer, expected(x) + 3)
    kept, _ = arguments()
    compiled()(kept, x)
    assert not kept["sum"].is_deleted()


def test_arrays_may_stand_for_their_shapes():
    _, x = arguments()
    unplaced = np.asarray(x)
    step = compile_step(total, TOPOLOGY, (unplaced,), in_specs=(P(BOTH),), out_specs=P("attn_dp"))
    np.testing.assert_array_equal(step(x), expected(x))
