"""The verbs against a NumPy model on rank-coded data, the states they leave, and what they cost: one lax call each."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

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

R, S, PARTIAL = State.REPLICA, State.SHARD, State.PARTIAL


def run(topology, program, *per_rank):
    """Runs a per-rank program on [world, ...] arrays and stacks what every rank got; the program is audited."""
    world = P(tuple(topology.axes))

    def step(*args):
        return jax.tree.map(lambda out: out[None], program(*(a[0] for a in args)))

    traced = jax.jit(jax.shard_map(step, mesh=topology.mesh, in_specs=world, out_specs=world)).trace(*per_rank)
    audit(traced)
    return jax.tree.map(np.asarray, traced.lower().compile()(*map(jnp.asarray, per_rank)))


def coded(topology, *shape: int, dtype: DTypeLike = np.float32):
    """[world, *shape]: each number names its rank and its place, and sums of 8 of them are exact in float32."""
    places = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    return (np.arange(topology.world).reshape(-1, *[1] * len(shape)) * 1000 + places).astype(dtype)


def groups_of(topology, group):
    """World ranks of each group, in the order of the group's own tuple: row-major in the tuple's axes."""
    ranks = np.arange(topology.world).reshape(tuple(topology.axes.values()))
    inside = [list(topology.axes).index(axis) for axis in group]
    outside = [i for i in range(ranks.ndim) if i not in inside]
    return ranks.transpose(outside + inside).reshape(-1, topology.size(group)).tolist()


def model(topology, group, fn):
    """Applies `fn`, from a group's list of values to the list of its results, to every group; [world, ...]."""

    def apply(x):
        out = [None] * topology.world
        for members in groups_of(topology, group):
            for rank, value in zip(members, fn([x[m] for m in members]), strict=True):
                out[rank] = value
        return np.stack(out)

    return apply


def cases():
    for sizes in [(2, 3), (4, 2), (4, 2, 2), (2, 4, 4)]:
        axes = tuple(Topology(*sizes).axes)
        for count in range(1, len(axes) + 1):
            for group in itertools.permutations(axes, count):
                if len(axes) < 3 or count == 1 or group in (axes[::2], axes[:0:-1], axes, axes[1:] + axes[:1]):
                    yield pytest.param(sizes, group, id="x".join(map(str, sizes)) + "-" + ",".join(group))


@pytest.mark.parametrize("sizes, group", list(cases()))
def test_values_and_states_over_every_group_in_every_order(sizes, group):
    topology = Topology(*sizes)
    n = topology.size(group)
    x = coded(topology, 2 * n, n, 3)

    def program(v):
        u = declare_partial(v, group)
        r = all_gather(v, group, 0)
        out = {
            "all_reduce": (all_reduce(u, group), R),
            "reduce_scatter 0": (reduce_scatter(u, group, 0), S),
            "all_gather 0": (r, R),
            "all_to_all 1 -1": (all_to_all(v, group, 1, -1), S),
            "take_shard": (take_shard(r, group, 0), S),
        }
        assert state(v, group) is S and state(u, group) is PARTIAL
        for name, (value, expected) in out.items():
            assert state(value, group) is expected, name
            for axis in set(topology.axes) - set(group):
                assert state(value, axis) is S, f"{name} changed the state over {axis}"
        return {name: value for name, (value, _) in out.items()}

    got = run(topology, program, x)

    def over(fn):
        return model(topology, group, fn)(x)

    expected = {
        "all_reduce": over(lambda v: [sum(v)] * n),
        "reduce_scatter 0": over(lambda v: np.split(sum(v), n)),
        "all_gather 0": over(lambda v: [np.concatenate(v)] * n),
        "all_to_all 1 -1": over(lambda v: [np.concatenate([np.split(a, n, 1)[j] for a in v], 2) for j in range(n)]),
        "take_shard": x,
    }
    assert got.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)


def test_verbs_undo_each_other_along_any_dimension():
    topology, group = Topology(2, 3), ("attn_tp", "attn_dp")
    x = coded(topology, 6, 12, 3)

    def program(v):
        u = declare_partial(v, group)
        return {
            "there and back": all_to_all(all_to_all(v, group, 1, -1), group, 2, 1),
            "cut and joined": all_gather(take_shard(all_gather(v, group, 0), group, -2), group, 1),
            "gathered": all_gather(v, group, -3),
            "summed in two steps": all_gather(reduce_scatter(u, group, -2), group, -2),
            "summed": all_reduce(u, group),
            "summed axis by axis": all_reduce(all_reduce(u, "attn_dp"), "attn_tp"),
        }

    got = run(topology, program, x)
    np.testing.assert_array_equal(got["there and back"], x)
    np.testing.assert_array_equal(got["cut and joined"], got["gathered"])
    for name in ("summed in two steps", "summed", "summed axis by axis"):
        np.testing.assert_array_equal(got[name], np.broadcast_to(x.sum(0), x.shape), err_msg=name)


def test_reversed_tuples_run_row_major_in_their_own_order():
    topology = Topology(2, 3)
    me = np.arange(6, dtype=np.int32).reshape(6, 1)
    got = run(
        topology,
        lambda r: (all_gather(r, ("attn_dp", "attn_tp"), 0), all_gather(r, ("attn_tp", "attn_dp"), 0)),
        me,
    )
    np.testing.assert_array_equal(got[0], [[0, 1, 2, 3, 4, 5]] * 6)
    np.testing.assert_array_equal(got[1], [[0, 3, 1, 4, 2, 5]] * 6)


@pytest.mark.parametrize("group", [("attn_dp",), ("attn_tp",), ("attn_dp", "attn_tp"), ("attn_tp", "attn_dp")])
def test_contract_adds_up_to_the_whole_product(group):
    topology = Topology(2, 3)
    n = topology.size(group)
    x, w = coded(topology, 2, 4) % 7, coded(topology, 4, 5) % 11  # small integers: float32 products are exact

    def program(a, b):
        u = contract(a, b, group)
        flipped = contract(a, b.T, group, dimension_numbers=(((1,), (1,)), ((), ())))
        wide = contract(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), group, preferred_element_type=jnp.float32)
        assert state(u, group) is state(flipped, group) is state(wide, group) is PARTIAL
        assert wide.dtype == jnp.float32
        return [all_reduce(v, group) for v in (u, flipped, wide)]

    products = np.einsum("rik,rko->rio", x, w)
    expected = model(topology, group, lambda v: [sum(v)] * n)(products)
    for got in run(topology, program, x, w):
        np.testing.assert_array_equal(got, expected)


def test_contract_needs_something_to_sum_over():
    for numbers in ((((), ()), ((), ())), (((), ()), ((0, 1), (0, 1)))):
        with pytest.raises(ValueError, match=r"contract over \(attn_tp\) needs a dimension to sum over, not "):
            run(
                Topology(2, 3),
                lambda x, numbers=numbers: contract(x, x, "attn_tp", dimension_numbers=numbers),
                np.zeros((6, 2, 3), np.float32),
            )


def test_a_group_may_be_an_axis_name_a_tuple_or_a_list():
    topology = Topology(2, 3)
    got = run(
        topology, lambda x: [all_gather(x, g, 0) for g in ("attn_tp", ("attn_tp",), ["attn_tp"])], coded(topology, 2)
    )
    expected = model(topology, ("attn_tp",), lambda v: [np.concatenate(v)] * 3)(coded(topology, 2))
    for value in got:
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.bool_, jnp.bfloat16, np.float16])
def test_verbs_that_move_data_keep_every_dtype(dtype):
    topology = Topology(2, 3)
    x = (coded(topology, 6, 1) % 5).astype(dtype)
    group = ("attn_tp", "attn_dp")

    def program(v):
        r = all_gather(v, group, 0)
        return r, take_shard(r, group, 0), all_to_all(all_to_all(v, group, 0, 1), group, 1, 0)

    gathered, *same = run(topology, program, x)
    np.testing.assert_array_equal(gathered, model(topology, group, lambda v: [np.concatenate(v)] * 6)(x))
    for value in same:
        assert value.dtype == dtype
        np.testing.assert_array_equal(value, x)


def test_integer_sums_are_integers():
    topology = Topology(4, 2)
    x = coded(topology, 8, dtype=np.int32)
    got = run(topology, lambda v: all_reduce(declare_partial(v, "attn_tp"), "attn_tp"), x)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, model(topology, ("attn_tp",), lambda v: [sum(v)] * 2)(x))


@pytest.mark.parametrize("group", [("attn_tp",), ("attn_tp", "attn_dp")])
@pytest.mark.parametrize("rows, width", [(0, 6), (6, 0)])
def test_empty_arrays_pass_every_verb_with_shape_type_and_no_communication(group, rows, width):
    topology = Topology(2, 3)
    n = topology.size(group)
    x = np.zeros((6, rows, width), np.float32)

    def program(v):
        u = declare_partial(v, group)
        out = [
            (all_reduce(u, group), (rows, width), R),
            (reduce_scatter(u, group, 0), (rows // n, width), S),
            (reduce_scatter(u, group, 1), (rows, width // n), S),
            (all_gather(v, group, 0), (rows * n, width), R),
            (all_gather(v, group, 1), (rows, width * n), R),
            (all_to_all(v, group, 0, 1), (rows // n, width * n), S),
            (take_shard(all_gather(v, group, 0), group, 0), (rows, width), S),
        ]
        for value, shape, expected in out:
            assert value.shape == shape and state(value, group) is expected
            for axis in set(topology.axes) - set(group):
                assert state(value, axis) is S
        return [value for value, _, _ in out]

    assert all(value.size == 0 for value in run(topology, program, x))


def test_empty_arrays_keep_a_partial_mark_over_another_axis():
    topology = Topology(2, 3)

    def program(v):
        u = declare_partial(v[:0], ("attn_dp", "attn_tp"))
        scattered = reduce_scatter(u, "attn_dp", 0)
        gathered = all_gather(declare_partial(v[:, :0], "attn_tp"), "attn_dp", 0)
        assert state(scattered, "attn_tp") is state(gathered, "attn_tp") is PARTIAL
        assert (scattered.shape, gathered.shape) == ((0, 3), (4, 0))
        assert all_gather(v[:0] > 0, "attn_dp", 0).dtype == jnp.bool_
        return all_reduce(scattered, "attn_tp")

    assert run(topology, program, np.zeros((6, 2, 3), np.float32)).shape == (6, 0, 3)


def test_one_member_groups_change_the_state_and_not_the_value():
    topology = Topology(4, 1)
    x = coded(topology, 3, 2)

    def program(v):
        u = declare_partial(v, "attn_tp")
        out = [
            (all_reduce(u, "attn_tp"), R),
            (reduce_scatter(u, "attn_tp", 0), S),
            (all_gather(v, "attn_tp", 0), R),
            (all_to_all(v, "attn_tp", 0, 1), S),
            (take_shard(all_gather(v, "attn_tp", 0), "attn_tp", 0), S),
        ]
        assert [state(value, "attn_tp") for value, _ in out] == [expected for _, expected in out]
        return [value for value, _ in out]

    for value in run(topology, program, x):
        np.testing.assert_array_equal(value, x)


def test_empty_groups_give_the_operand_back():
    topology = Topology(4, 2)
    assert topology.group("moe_tp") == ()

    def program(v):
        none = topology.group("moe_tp")
        for value in (
            declare_partial(v, none),
            all_reduce(v, none),
            reduce_scatter(v, none, 0),
            all_gather(v, none, 0),
            all_to_all(v, none, 0, 1),
            take_shard(v, none, 0),
        ):
            assert value is v
        product = contract(v, v.T, none)
        assert state(product, ("attn_dp", "attn_tp")) is S
        return product, uniform_cond(v[0, 0] > 30, none, lambda a: a, lambda a: -a, v)

    x = coded(topology, 3, 2) // 100
    product, chosen = run(topology, program, x)
    np.testing.assert_array_equal(product, np.einsum("rik,rjk->rij", x, x))
    np.testing.assert_array_equal(chosen, np.where(np.arange(8)[:, None, None] > 3, x, -x))


def test_uniform_cond_may_communicate_in_both_branches():
    topology = Topology(2, 3)

    def program(v):
        largest = lax.pmax(v[0], ("attn_dp", "attn_tp"))
        return [
            uniform_cond(
                largest > limit,
                ("attn_dp", "attn_tp"),
                lambda a: all_gather(a, "attn_tp", 0).sum(),
                lambda a: -all_reduce(declare_partial(a[0], "attn_tp"), "attn_tp"),
                v,
            )
            for limit in (4000, 6000)
        ]

    x = coded(topology, 1)
    above, below = run(topology, program, x)
    np.testing.assert_array_equal(above, [3000.0] * 3 + [12000.0] * 3)
    np.testing.assert_array_equal(below, [-3000.0] * 3 + [-12000.0] * 3)


@pytest.mark.parametrize(
    "verb, call, size",
    [
        ("reduce_scatter", lambda x: reduce_scatter(declare_partial(x, "attn_tp"), "attn_tp", 1), 4),
        ("all_to_all", lambda x: all_to_all(x, "attn_tp", 1, 0), 4),
        ("take_shard", lambda x: take_shard(lax.pmax(x, "attn_tp"), "attn_tp", -1), 4),
    ],
)
def test_a_dimension_that_does_not_divide(verb, call, size):
    with pytest.raises(ValueError) as error:
        run(Topology(2, 3), call, np.zeros((6, 3, size), np.float32))
    assert str(error.value) == (
        f"{verb} over (attn_tp) cuts dimension 1 into 3 equal chunks, which its size {size} does not allow"
    )


@pytest.mark.parametrize("dim", [2, -3, 0.0, None, "0"])
@pytest.mark.parametrize(
    "verb, call",
    [
        ("reduce_scatter", lambda x, d: reduce_scatter(declare_partial(x, "attn_tp"), "attn_tp", d)),
        ("all_gather", lambda x, d: all_gather(x, "attn_tp", d)),
        ("all_to_all", lambda x, d: all_to_all(x, "attn_tp", d, 0)),
        ("all_to_all", lambda x, d: all_to_all(x, "attn_tp", 0, d)),
        ("take_shard", lambda x, d: take_shard(lax.pmax(x, "attn_tp"), "attn_tp", d)),
    ],
)
def test_a_dimension_that_is_not_there(verb, call, dim):
    with pytest.raises(ValueError) as error:
        run(Topology(2, 3), lambda x: call(x, dim), np.zeros((6, 3, 3), np.float32))
    assert str(error.value) == f"{verb} is asked for dimension {dim} of a value of shape (3, 3)"
