"""A verb costs nothing over the lax call it stands for: the same equations, the same compiled instructions."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxcoll
from jaxcoll import Topology
from jaxcoll.primitives import COLLECTIVES

TOPOLOGY = Topology(4, 2)
BOTH = ("attn_dp", "attn_tp")
SHARD, REPLICA = P(BOTH), P("attn_dp")  # of a [64, 16] input; REPLICA is one over attn_tp


def partial(x, group):
    return lax.pcast(x, group, to="unreduced")


def lax_all_gather(x, group):
    try:
        return lax.all_gather(x, group, axis=0, tiled=True, to="invarying")
    except TypeError:  # jax < 0.12
        from jax._src.lax.parallel import all_gather_invariant  # pyright: ignore[reportAttributeAccessIssue]

        return all_gather_invariant(x, group, axis=0, tiled=True)


def lax_take_shard(x, group):
    size = x.shape[0] // lax.axis_size(group)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(group) * size, size, 0)


def lax_contract(x, group):
    return lax.psum(partial(lax.dot_general(x, x, (((1,), (1,)), ((), ()))), group), group)


CONTRACTED = (((1,), (1,)), ((), ()))
PAIRS = {  # verb, the same in lax, how the operand lies
    "contract": (
        lambda x, g: jaxcoll.all_reduce(jaxcoll.contract(x, x, g, dimension_numbers=CONTRACTED), g),
        lax_contract,
        SHARD,
    ),
    "all_reduce": (
        lambda x, g: jaxcoll.all_reduce(jaxcoll.declare_partial(x, g), g),
        lambda x, g: lax.psum(partial(x, g), g),
        SHARD,
    ),
    "reduce_scatter": (
        lambda x, g: jaxcoll.reduce_scatter(jaxcoll.declare_partial(x, g), g, 0),
        lambda x, g: lax.psum_scatter(partial(x, g), g, scatter_dimension=0, tiled=True),
        SHARD,
    ),
    "all_gather": (lambda x, g: jaxcoll.all_gather(x, g, 0), lax_all_gather, SHARD),
    "all_to_all": (
        lambda x, g: jaxcoll.all_to_all(x, g, 0, 1),
        lambda x, g: lax.all_to_all(x, g, 0, 1, tiled=True),
        SHARD,
    ),
    "take_shard": (lambda x, g: jaxcoll.take_shard(x, g, 0), lax_take_shard, REPLICA),
    "uniform_cond": (
        lambda x, g: jaxcoll.uniform_cond(x[0, 0] > 0, g, jnp.sin, jnp.cos, x),
        lambda x, g: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
        REPLICA,
    ),
}
COLLECTIVES_OF = {"contract": 1, "all_reduce": 1, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}
CASES = [
    (verb, group) for verb in PAIRS for group in [("attn_tp",), BOTH] if len(group) == 1 or PAIRS[verb][2] == SHARD
]


def traced(fn, group, spec):
    step = jax.shard_map(lambda x: fn(x, group), mesh=TOPOLOGY.mesh, in_specs=spec, out_specs=SHARD)
    x = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=TOPOLOGY.sharding(spec))
    return jax.jit(step).trace(x)


def equations(jaxpr):
    """Primitives in order, nested bodies included, without the look at an axis that asks whether states are known."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for value in eqn.params.values():
            for body in value if isinstance(value, tuple | list) else (value,):
                body = getattr(body, "jaxpr", body)
                if hasattr(body, "eqns"):
                    yield from equations(body)


def without(names, dropped):
    return [name for name in names if name != dropped]


def instructions(compiled):
    """Opcode -> count over every computation of an optimised program."""
    lines = re.findall(r"^\s*(?:ROOT )?%?[\w.-]+ = .*?(?<=[\])} ]) ?([a-z][a-z0-9-]*)\(", compiled.as_text(), re.M)
    return Counter(lines)


@pytest.mark.parametrize("verb, group", CASES)
def test_a_verb_is_the_equations_of_its_lax_call(verb, group):
    ours, theirs, spec = PAIRS[verb]
    got, expected = (list(equations(traced(fn, group, spec).jaxpr)) for fn in (ours, theirs))
    assert without(got, "axis_index") == without(expected, "axis_index")
    assert sum(name in COLLECTIVES for name in got) == COLLECTIVES_OF.get(verb, 0)


@pytest.mark.parametrize("verb, group", CASES)
def test_a_verb_compiles_to_the_instructions_of_its_lax_call(verb, group):
    ours, theirs, spec = PAIRS[verb]
    got, expected = (instructions(traced(fn, group, spec).lower().compile()) for fn in (ours, theirs))
    assert got == expected
    assert got["parameter"] >= 1 and sum(got.values()) >= 2, "the pattern no longer reads this text"
    communicating = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all")
    assert sum(got[op] for op in communicating) == COLLECTIVES_OF.get(verb, 0)


def test_a_chain_of_verbs_compiles_to_the_instructions_of_lax():
    def ours(x, group):
        y = jaxcoll.reduce_scatter(jaxcoll.contract(x, x, group, dimension_numbers=CONTRACTED), group, 0)
        return jaxcoll.all_gather(jnp.tanh(y), group, 0)

    def theirs(x, group):
        y = partial(lax.dot_general(x, x, CONTRACTED), group)
        return lax_all_gather(jnp.tanh(lax.psum_scatter(y, group, scatter_dimension=0, tiled=True)), group)

    programs = [traced(fn, ("attn_tp",), SHARD).lower().compile() for fn in (ours, theirs)]
    counts = [instructions(program) for program in programs]
    assert counts[0] == counts[1] and counts[0]["reduce-scatter"] == counts[0]["all-gather"] == 1
    x = jnp.arange(64 * 16.0).reshape(64, 16) / 1024
    np.testing.assert_array_equal(*(program(jax.device_put(x, TOPOLOGY.sharding(SHARD))) for program in programs))
