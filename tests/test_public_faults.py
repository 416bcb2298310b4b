"""Faults that others met in this job: the smallest input that shows each, its right value, and the refusal of the wrong
program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxcoll import (
    Topology,
    all_gather,
    all_reduce,
    audit,
    declare_partial,
    reduce_scatter,
    take_shard,
    uniform_cond,
)

FACTORISATIONS = [
    (n // tp, tp, n // moe_tp)
    for n in (4, 6)
    for tp in range(1, n + 1)
    for moe_tp in range(1, n + 1)
    if n % tp == n % moe_tp == 0 and (tp % moe_tp == 0 or moe_tp % tp == 0)
]


def traced(topology, program, x, in_specs, out_specs):
    step = jax.shard_map(program, mesh=topology.mesh, in_specs=in_specs, out_specs=out_specs)
    traced = jax.jit(step).trace(x)
    audit(traced)
    return traced


def run(topology, program, x, in_specs, out_specs):
    return np.asarray(traced(topology, program, x, in_specs, out_specs).lower().compile()(x))


def refused(topology, program, x, in_specs, out_specs):
    """The words of whoever refuses: jax or a verb while tracing, or the audit after it."""
    try:
        traced(topology, program, x, in_specs, out_specs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    pytest.fail("the wrong program passed")


# 1. Reduced once in the model and again in the communicator.


def test_moe_output_is_summed_once():
    topology = Topology(2, 1, 2)  # moe_ep = attn_dp = 2; two tokens of width 4 per rank
    ep = topology.group("moe_ep")

    def experts(tokens):
        rows = all_gather(tokens, "attn_dp", 0)
        rank = lax.axis_index(ep).astype(jnp.float32)
        return declare_partial(0 * rows + rank + 1, ep)  # expert r returns the constant r + 1

    tokens, spec = jnp.ones((4, 4)), P("attn_dp")
    right = run(topology, lambda t: reduce_scatter(experts(t), ep, 0), tokens, spec, P(ep))
    np.testing.assert_array_equal(right, np.full((4, 4), 3.0))
    by_verb = refused(topology, lambda t: reduce_scatter(all_reduce(experts(t), ep), ep, 0), tokens, spec, P(ep))
    assert "reduce_scatter over (attn_dp, attn_tp) needs PARTIAL" in by_verb and "is REPLICA" in by_verb
    raw = refused(
        topology,
        lambda t: lax.psum_scatter(all_reduce(experts(t), ep), "attn_dp", scatter_dimension=0, tiled=True),
        tokens,
        spec,
        spec,
    )
    assert raw.startswith("StateError: reduce_scatter at test_public_faults.py:") and "counted once per rank" in raw


@pytest.mark.parametrize("sizes", FACTORISATIONS)
def test_each_partial_crosses_each_axis_once_in_every_factorisation(sizes):
    topology = Topology(*sizes)
    ep, tp, world = topology.group("moe_ep"), topology.group("moe_tp"), topology.group("world")

    def experts(tokens):
        rows = all_gather(tokens, "attn_dp" if "attn_dp" in topology.axes else topology.group("attn_dp"), 0)
        return declare_partial(rows * 10.0 ** lax.axis_index(world), world)

    def program(tokens):
        in_two_steps = all_reduce(all_reduce(experts(tokens), tp), ep)
        return all_reduce(experts(tokens), world), in_two_steps

    tokens = jnp.arange(1.0, 1 + 2 * topology.attn_dp).reshape(-1, 1)
    step = jax.shard_map(program, mesh=topology.mesh, in_specs=P(topology.group("attn_dp")), out_specs=P())
    mapped = jax.jit(step).trace(tokens)
    audit(mapped)
    once = np.asarray(tokens) * int("1" * topology.world)  # a rank counted twice would show as a digit 2
    for got in mapped.lower().compile()(tokens):
        np.testing.assert_array_equal(got, once)


# 2. A replica gathered as if it were a partial sum.


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32])
@pytest.mark.parametrize("dp, tp", [(2, 2), (4, 1), (1, 4), (2, 3), (3, 2), (6, 1), (1, 6), (4, 2), (2, 4)])
def test_gathering_replicas_gives_each_row_once(dp, tp, dtype):
    topology = Topology(dp, tp)
    rows = jnp.arange(1, dp + 1, dtype=dtype)[:, None] * jnp.ones(4, dtype)  # one token per group: dp index + 1
    whole = run(topology, lambda x: all_gather(x, "attn_dp", 0), rows, P("attn_dp"), P())
    assert whole.dtype == dtype
    np.testing.assert_array_equal(whole, rows)


def slot(x, dp):
    """The rank's row in its place of an otherwise empty global buffer."""
    return jnp.where(jnp.arange(dp)[:, None] == lax.axis_index("attn_dp"), x, 0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32])
def test_summing_replicas_into_the_global_buffer(dtype):
    topology = Topology(2, 2)
    rows = jnp.arange(1, 3, dtype=dtype)[:, None] * jnp.ones(4, dtype)
    both = ("attn_dp", "attn_tp")

    def over_dp(x):
        return all_reduce(declare_partial(slot(x, 2), "attn_dp"), "attn_dp")

    def over_both(x):
        return all_reduce(declare_partial(slot(x, 2), both), both)

    def raw(x):
        return lax.psum(lax.pcast(slot(x, 2), "attn_tp", to="varying"), both)

    np.testing.assert_array_equal(run(topology, over_dp, rows, P("attn_dp"), P()), rows)
    words = refused(topology, over_both, rows, P("attn_dp"), P())
    assert "declare_partial over (attn_dp, attn_tp) needs SHARD" in words
    assert "mixed: SHARD over attn_dp, REPLICA over attn_tp" in words
    assert "sums over (attn_tp), where every rank holds the same value" in refused(
        topology, raw, rows, P("attn_dp"), P()
    )


def test_gathering_partials_also_completes_them():
    topology = Topology(2, 2)
    addends = jnp.asarray([[1.0, 10.0], [2.0, 20.0]])  # [attn_dp, attn_tp]

    def program(x):
        return all_reduce(all_gather(declare_partial(x, "attn_dp"), "attn_tp", 1), "attn_dp")

    got = run(topology, program, addends, P("attn_dp", "attn_tp"), P())
    np.testing.assert_array_equal(got, [[3.0, 30.0]])


# 3. A shared expert kept whole on every rank and summed with the routed partials.


def test_a_whole_shared_expert_is_added_after_the_sum():
    topology = Topology(4, 1, 4)
    ep = topology.group("moe_ep")
    shared = jnp.asarray([[10.0, 0.0]])  # separate channels: each expert is non-zero where the other is zero
    routed = jnp.asarray([[0.0, 1.0]] * 4)

    def right(r):
        return all_reduce(declare_partial(r, ep), ep) + shared

    def too_early(r):
        return all_reduce(declare_partial(r, ep) + shared, ep)

    np.testing.assert_array_equal(run(topology, right, routed, P(ep), P()), [[10.0, 4.0]])
    words = refused(topology, too_early, routed, P(ep), P())
    assert "unreduced" in words  # jax itself: a partial sum and a replica do not add

    def hidden(r):  # by way of a concatenation and a sum, which jax lets pass
        return all_reduce(jnp.concatenate([declare_partial(r, ep), shared]).sum(0), ep)

    words = refused(topology, hidden, routed, P(ep), P())
    assert (
        words.startswith("StateError: concatenate at test_public_faults.py:") and "not; complete the partial" in words
    )


# 4. Experts cut over two groups and summed over one of them.


@pytest.mark.parametrize("group, sums", [("moe_ep", [[2.0, 4.0]]), ("moe_tp", [[1.0], [5.0]])])
def test_a_sum_over_one_of_two_groups_is_no_result(group, sums):
    topology = Topology(2, 2, 2)
    ep, tp = topology.group("moe_ep"), topology.group("moe_tp")
    values = jnp.arange(4.0).reshape(2, 2)

    def right(x):
        return all_reduce(declare_partial(x, ep + tp), ep + tp)

    def wrong(x):
        return all_reduce(declare_partial(x, ep + tp), topology.group(group))

    def too_narrow(x):
        return all_reduce(declare_partial(x, topology.group(group)), topology.group(group))

    np.testing.assert_array_equal(run(topology, right, values, P(*ep, *tp), P()), [[6.0]])
    for program in (wrong, too_narrow):
        assert "out_specs" in refused(topology, program, values, P(*ep, *tp), P())
    rest = P(None, *tp) if group == "moe_ep" else P(*ep)
    got = run(
        topology, too_narrow, values, P(*ep, *tp), rest
    )  # well-typed only as what it is: cut over the other group
    np.testing.assert_array_equal(got, sums)


# 5. Wrong member order: test_collectives.py runs every verb over every order; here the reported input.


def test_members_of_a_group_of_two_axes_come_in_rank_order():
    topology = Topology(2, 3)
    world = ("attn_dp", "attn_tp")
    ranks = jnp.arange(6)
    for group, order in [(world, [0, 1, 2, 3, 4, 5]), (world[::-1], [0, 3, 1, 4, 2, 5])]:
        got = run(topology, lambda r, g=group: all_gather(r, g, 0), ranks, P(world), P())
        np.testing.assert_array_equal(got, order)
        back = run(topology, lambda r, g=group: take_shard(all_gather(r, g, 0), g, 0), ranks, P(world), P(world))
        np.testing.assert_array_equal(back, ranks)
    swapped = run(topology, lambda r: take_shard(all_gather(r, world, 0), world[::-1], 0), ranks, P(world), P(world))
    np.testing.assert_array_equal(swapped, [0, 2, 4, 1, 3, 5])  # what mixing two orders would do


# 7. Ranks that issue different numbers of collectives.


@pytest.mark.parametrize("counts", [(3, 0), (3, 5), (0, 0)])
def test_the_number_of_rounds_is_the_same_on_every_rank(counts):
    topology = Topology(2, 1)
    chunk = 2

    def rounds(count, uniform):
        mine = (count[0] + chunk - 1) // chunk
        trips = lax.pmax(mine, "attn_dp") if uniform else mine

        def one_round(i, total):
            rows = jnp.clip(count[0] - i * chunk, 0, chunk)  # an idle rank sends none and takes part
            return total + all_reduce(declare_partial(rows, "attn_dp"), "attn_dp")

        start = all_reduce(declare_partial(0 * count[0], "attn_dp"), "attn_dp")
        return lax.fori_loop(0, trips, one_round, start)

    got = run(topology, lambda c: rounds(c, uniform=True), jnp.asarray(counts), P("attn_dp"), P())
    assert got == sum(counts)
    words = refused(topology, lambda c: rounds(c, uniform=False), jnp.asarray(counts), P("attn_dp"), P())
    assert "wait for each other for ever" in words or "differs over (attn_dp)" in words


def test_a_rank_may_not_skip_a_layer_alone():
    topology = Topology(2, 1)

    def program(count, choose):
        return choose(
            count[0] > 0,
            lambda c: all_reduce(declare_partial(c, "attn_dp"), "attn_dp"),
            lambda c: 0 * lax.pmax(c, "attn_dp"),
            count,
        )

    def uniform(pred, *rest):
        return uniform_cond(lax.pmax(pred.astype(int), "attn_dp") > 0, "attn_dp", *rest)

    counts = jnp.asarray([3, 0])
    assert run(topology, lambda c: program(c, uniform), counts, P("attn_dp"), P()) == 3
    words = refused(topology, lambda c: program(c, lax.cond), counts, P("attn_dp"), P())
    assert words.startswith("StateError: cond at test_public_faults.py:") and "wait for each other" in words
    words = refused(
        topology, lambda c: program(c, lambda p, *rest: uniform_cond(p, "attn_dp", *rest)), counts, P("attn_dp"), P()
    )
    assert "uniform_cond over (attn_dp) needs REPLICA" in words
