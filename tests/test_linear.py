"""Column- and row-parallel layers against one dense layer: values, states, and gradients on the way back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxcoll import (
    State,
    StateError,
    Topology,
    all_gather,
    all_reduce,
    all_to_all,
    audit,
    declare_partial,
    reduce_scatter,
    state,
    states,
    take_shard,
)
from jaxcoll.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear, partition_specs

IN, OUT, ROWS = 24, 48, 4
# Results are about 1 and are sums of 24 to 48 float32 products, each rounded at 6e-8 and added in another order.
TOLERANCE = 1e-6
REPLICA, SHARD, PARTIAL = State.REPLICA, State.SHARD, State.PARTIAL


def normal(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def mapped(topology, layers, program, x_spec, out_specs):
    """program(layers, x) over the mesh, as a function of (parameters, x)."""
    graph, abstract = nnx.split(layers)

    def step(parameters, x):
        loaded = jax.tree.map(lambda leaf: leaf, abstract)
        nnx.replace_by_pure_dict(loaded, parameters)
        return program(nnx.merge(graph, loaded), x)

    specs = (partition_specs(layers), x_spec)
    return jax.shard_map(step, mesh=topology.mesh, in_specs=specs, out_specs=out_specs)


def run(topology, layers, program, x, x_spec: Any, out_specs: Any):
    traced = jax.jit(mapped(topology, layers, program, x_spec, out_specs)).trace(parameters(layers), x)
    audit(traced)
    return jax.tree.map(np.asarray, traced.lower().compile()(parameters(layers), x))


def parameters(layers):
    return nnx.to_pure_dict(nnx.split(layers)[1])


def dense(x, *layers):
    """float64 product with the layers' global weights, [out, in] each."""
    for layer in layers:
        x = x @ np.asarray(layer.weight[...], np.float64).T
    return x


GROUPS = [
    ((2, 3), ("attn_dp",)),
    ((2, 3), ("attn_tp",)),
    ((2, 3), ("attn_dp", "attn_tp")),
    ((2, 3), ("attn_tp", "attn_dp")),
    ((4, 2, 2), ("attn_dp_inner", "attn_tp")),
    ((4, 2, 2), ("attn_tp", "attn_dp_outer")),
    ((4, 1), ("attn_tp",)),
    ((4, 2), ()),
]


@pytest.mark.parametrize("sizes, group", GROUPS)
def test_every_layer_and_flag_equals_the_dense_layer(sizes, group):
    topology = Topology(*sizes)
    args: Any = dict(topology=topology, group=group)
    layers = nnx.Dict(
        column=ColumnParallelLinear(IN, OUT, rngs=nnx.Rngs(0), **args),
        gathered=ColumnParallelLinear(IN, OUT, gather_output=True, rngs=nnx.Rngs(1), **args),
        row=RowParallelLinear(OUT, IN, rngs=nnx.Rngs(2), **args),
        deferred=RowParallelLinear(OUT, IN, reduce_results=False, rngs=nnx.Rngs(3), **args),
    )
    x = normal(ROWS, IN)

    def program(m, v):
        y, whole = m.column(v), m.gathered(v)
        z, addend = m.row(y), m.deferred(y)
        found = [states(value, group) for value in (y, whole, z, addend)]
        assert found == [dict.fromkeys(group, s) for s in (SHARD, REPLICA, REPLICA, PARTIAL)]
        completed = all_gather(reduce_scatter(addend, group, 1), group, 1)  # the type carried the duty here
        return y, whole, z, completed

    y, whole, z, completed = run(topology, layers, program, x, P(), (P(None, group or None), P(), P(), P()))
    np.testing.assert_allclose(y, dense(x, layers.column), atol=TOLERANCE)
    np.testing.assert_allclose(whole, dense(x, layers.gathered), atol=TOLERANCE)
    np.testing.assert_allclose(z, dense(x, layers.column, layers.row), atol=TOLERANCE)
    np.testing.assert_allclose(completed, dense(x, layers.column, layers.deferred), atol=TOLERANCE)


def test_a_forgotten_reduction_does_not_compile():
    topology = Topology(2, 3)
    layer = RowParallelLinear(IN, OUT, topology=topology, group=("attn_tp",), reduce_results=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="out_specs"):
        run(topology, layer, lambda m, v: m(v), normal(ROWS, IN), P(None, "attn_tp"), P())
    reduced = RowParallelLinear(IN, OUT, topology=topology, group=("attn_tp",), rngs=nnx.Rngs(0))
    with pytest.raises(StateError, match="all_reduce over .attn_tp. needs PARTIAL, but this .* is REPLICA"):
        run(topology, reduced, lambda m, v: all_reduce(m(v), "attn_tp"), normal(ROWS, IN), P(None, "attn_tp"), P())


def test_replicated_keeps_the_state_of_its_input():
    topology = Topology(2, 3)
    layer = ReplicatedLinear(IN, OUT, rngs=nnx.Rngs(0))
    x = normal(ROWS, IN)

    def program(layer, v):
        assert states(layer(v), ("attn_dp", "attn_tp")) == {"attn_dp": SHARD, "attn_tp": REPLICA}
        return layer(v)

    np.testing.assert_allclose(
        run(topology, layer, program, x, P("attn_dp"), P("attn_dp")), dense(x, layer), atol=TOLERANCE
    )


def test_a_projection_pair_over_each_replica_of_many_rows():
    """wo_b's middle case: heads cut over attn_tp, rows of other requests over attn_dp; [B, T, in] inputs."""
    topology = Topology(2, 3)
    group = ("attn_tp",)
    layers = nnx.Dict(
        up=ColumnParallelLinear(IN, OUT, topology=topology, group=group, rngs=nnx.Rngs(0)),
        down=RowParallelLinear(OUT, IN, topology=topology, group=group, rngs=nnx.Rngs(1)),
    )
    x = normal(4, 3, IN)

    def program(m, v):
        y = m.down(m.up(v))
        assert state(y, "attn_tp") is REPLICA and state(y, "attn_dp") is SHARD
        return y

    got = run(topology, layers, program, x, P("attn_dp"), P("attn_dp"))
    np.testing.assert_allclose(got, dense(x, layers.up, layers.down), atol=TOLERANCE)


@pytest.mark.parametrize(
    "layer, x_spec, words",
    [
        (ColumnParallelLinear, P(None, "attn_tp"), "ColumnParallelLinear over (attn_tp) needs REPLICA"),
        (RowParallelLinear, P(), "RowParallelLinear over (attn_tp) needs SHARD"),
    ],
)
def test_an_input_in_the_wrong_state(layer, x_spec, words):
    topology = Topology(2, 3)
    made = layer(IN, OUT, topology=topology, group=("attn_tp",), rngs=nnx.Rngs(0))
    with pytest.raises(StateError) as error:
        run(topology, made, lambda m, v: m(v), normal(ROWS, IN), x_spec, P())
    assert str(error.value).startswith(words)


@pytest.mark.parametrize(
    "make, words",
    [
        (
            lambda t: ColumnParallelLinear(IN, 10, topology=t, group=("attn_tp",)),
            "out_features=10 cannot be cut into 3 equal parts over (attn_tp)",
        ),
        (
            lambda t: RowParallelLinear(20, OUT, topology=t, group=("attn_dp", "attn_tp")),
            "in_features=20 cannot be cut into 6 equal parts over (attn_dp, attn_tp)",
        ),
    ],
)
def test_sizes_that_the_group_does_not_divide(make, words):
    with pytest.raises(ValueError) as error:
        make(Topology(2, 3))
    assert str(error.value) == words


def test_weights_are_abstract_until_drawn_and_know_their_place():
    topology = Topology(2, 3)
    args: Any = dict(topology=topology, group=("attn_tp",), dtype=jnp.bfloat16)
    column, row = ColumnParallelLinear(IN, OUT, **args), RowParallelLinear(IN, OUT, **args)
    assert parameters(column)["weight"] == jax.ShapeDtypeStruct((OUT, IN), jnp.bfloat16)
    assert partition_specs(column) == {"weight": P(("attn_tp",), None)}
    assert partition_specs(row) == {"weight": P(None, ("attn_tp",))}
    assert partition_specs(ReplicatedLinear(IN, OUT)) == {"weight": P(None, None)}
    drawn = ColumnParallelLinear(IN, OUT, rngs=nnx.Rngs(0), **args).weight[...]
    assert (drawn.shape, drawn.dtype) == ((OUT, IN), jnp.bfloat16)
    assert abs(float(jnp.std(drawn.astype(jnp.float32))) * IN**0.5 - 1) < 0.1  # 1152 numbers of variance 1/IN


def test_a_group_may_be_an_axis_name():
    topology = Topology(2, 3)
    for kind in (ColumnParallelLinear, RowParallelLinear):
        named, listed = (kind(IN, OUT, topology=topology, group=group) for group in ("attn_tp", ["attn_tp"]))
        assert named.group == listed.group == ("attn_tp",)
        assert partition_specs(named) == partition_specs(listed)


@pytest.mark.parametrize("kind, name", [(ColumnParallelLinear, "out_features"), (RowParallelLinear, "in_features")])
def test_an_axis_or_a_size_that_is_none(kind, name):
    sizes = {"in_features": IN, "out_features": OUT}
    with pytest.raises(ValueError, match="the mesh has no axis 'tp'; its axes are attn_dp, attn_tp"):
        kind(**sizes, topology=Topology(2, 3), group=("tp",))
    for size in (0, -3, 3.0, "3"):
        with pytest.raises(ValueError) as error:
            kind(**sizes | {name: size}, topology=Topology(2, 3), group=("attn_tp",))
        assert str(error.value) == f"{name} must be a whole number of at least 1, not {size!r}"


# Gradients against one device. Each is a sum of up to 48 products of numbers about 1, so 1e-6 per product.
GRADIENT_TOLERANCE = 5e-5


def three_ways(m, v):
    """From [rows, in] to a loss through every verb that has a gradient; the loss is the same on every rank."""
    h = jnp.tanh(m.up(v))
    y = m.down(h)
    a = all_reduce(y, "attn_tp")
    b = all_gather(jax.nn.silu(reduce_scatter(y, "attn_tp", 1)), "attn_tp", 1)
    c = all_to_all(all_to_all(take_shard(a, "attn_tp", 1), "attn_tp", 1, 0), "attn_tp", 0, 1)
    c = all_gather(jnp.sin(c), "attn_tp", 1)
    mine = jnp.sum(a * b + jnp.cos(c) + m.bias[...])
    return all_reduce(declare_partial(mine, "attn_dp"), "attn_dp")


def one_device(parameters, x):
    y = jnp.tanh(x @ parameters["up"]["weight"].T) @ parameters["down"]["weight"].T
    return jnp.sum(y * jax.nn.silu(y) + jnp.cos(jnp.sin(y)) + parameters["bias"])


def gradient_case():
    topology = Topology(2, 3)
    group = ("attn_tp",)
    layers = nnx.Dict(
        up=ColumnParallelLinear(IN, OUT, topology=topology, group=group, rngs=nnx.Rngs(0)),
        down=RowParallelLinear(OUT, 9, topology=topology, group=group, reduce_results=False, rngs=nnx.Rngs(1)),
        bias=nnx.Param(jnp.ones(9), spec=P()),  # enters the loss linearly: its cotangent is equal on every rank
    )
    return topology, layers, normal(6, IN)


def close(got, expected):
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, atol=GRADIENT_TOLERANCE), got, expected)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "remat"])
def test_gradients_inside_the_mesh_are_those_of_one_device(wrap):
    topology, layers, x = gradient_case()
    graph, abstract = nnx.split(layers)

    def step(parameters, v):
        def loss(parameters, v):
            loaded = jax.tree.map(lambda leaf: leaf, abstract)
            nnx.replace_by_pure_dict(loaded, parameters)
            return three_ways(nnx.merge(graph, loaded), v)

        return jax.value_and_grad(wrap(loss), argnums=(0, 1))(parameters, v)

    specs = partition_specs(layers)
    step = jax.shard_map(
        step, mesh=topology.mesh, in_specs=(specs, P("attn_dp")), out_specs=(P(), (specs, P("attn_dp")))
    )
    traced = jax.jit(step).trace(parameters(layers), x)
    audit(traced)
    value, gradients = traced.lower().compile()(parameters(layers), x)
    expected_value, expected = jax.value_and_grad(one_device, argnums=(0, 1))(parameters(layers), x)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    close(gradients, expected)
    np.testing.assert_array_equal(gradients[0]["bias"], np.full(9, 6.0))  # once per row, not once per rank


def test_gradients_through_the_whole_mapped_step():
    topology, layers, x = gradient_case()
    loss = mapped(topology, layers, three_ways, P("attn_dp"), P())
    traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(parameters(layers), x)
    audit(traced)
    close(
        traced.lower().compile()(parameters(layers), x),
        jax.grad(one_device, argnums=(0, 1))(parameters(layers), x),
    )


def test_forward_mode():
    topology, layers, x = gradient_case()
    step = jax.tree.map(jnp.ones_like, parameters(layers))

    def directional(loss):
        return lambda p, v: jax.jvp(lambda q: loss(q, v), (p,), (step,))[1]

    traced = jax.jit(directional(mapped(topology, layers, three_ways, P("attn_dp"), P()))).trace(parameters(layers), x)
    audit(traced)
    got = traced.lower().compile()(parameters(layers), x)
    # A sum over some 1600 gradient entries of up to 10 each.
    np.testing.assert_allclose(got, directional(one_device)(parameters(layers), x), atol=1e-3)
