"""Dispatch and combine around experts that multiply: what a test runs, and what NumPy says of it row by row."""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from stepping import everywhere, shape, step

from jaxcoll.collectives import declare_partial
from jaxcoll.dispatch import combine, dispatch
from jaxcoll.states import State, state


def as_documented(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`lax.ragged_all_to_all`, which XLA:CPU lacks, by its documentation; sizes that disagree give 99."""
    everyone = functools.partial(lax.all_gather, axis_name=axis_name)
    ranks, me = lax.axis_size(axis_name), lax.axis_index(axis_name)

    def for_me(table):  # [src, slice] of the slices that are sent to this rank
        return everyone(table).reshape(ranks, ranks, -1)[:, me]

    starts, sizes, targets = map(for_me, (input_offsets, send_sizes, output_offsets))
    row = jnp.arange(output.shape[0])[:, None, None]
    arrives = (row >= targets) & (row < targets + sizes)
    index = jnp.arange(ranks)[:, None] * operand.shape[0] + starts + row - targets
    index = jnp.sum(jnp.where(arrives, index, 0), axis=(1, 2))
    sent = everyone(operand).reshape(-1, *operand.shape[1:]).at[index].get(mode="clip")
    result = jnp.where(arrives.any((1, 2))[:, None], sent, output)
    agree = (recv_sizes.reshape(ranks, -1) == sizes).all()
    return jnp.where(agree, result, jnp.asarray(99, output.dtype))


def experts(received, spec, local, factor):
    """This rank's experts: e multiplies by `factor(e)`, and each rank of moe_tp adds a part; NaN past the counts."""
    first = lax.axis_index(spec.moe_ep) * local
    x = received.x.astype(jnp.float32)
    if spec.mode == "normal":
        mine = received.topk_ids >= 0
        weight = jnp.where(mine, received.topk_weights * factor(first + received.topk_ids), 0)
        y = x * jnp.sum(weight, axis=1)[:, None]
        real = jnp.arange(x.shape[0]) < jnp.sum(received.counts)
    else:
        y = x * factor(first + jnp.arange(local))[:, None, None]
        real = jnp.arange(x.shape[1]) < received.tokens_per_expert[:, None]
    y = jnp.where(real[..., None], y, jnp.nan)
    if not spec.moe_tp:
        return y
    return declare_partial(y * (1 + lax.axis_index(spec.moe_tp)), spec.moe_tp)


def parts(topology):
    """The sum of what the ranks of moe_tp multiply by."""
    return sum(range(1, topology.moe_tp + 1))


def number_plus_one(expert):
    """What expert e multiplies by, so that a row at the wrong expert shows."""
    return expert + 1


def layer(topology, spec, rows, k, width, dtype="float32", factor=number_plus_one):
    """A step (x, ids, weights, counts) of global arrays -> (output, everything received)."""

    def run(x, ids, weights, count):
        received, handle = dispatch(x, ids, weights, spec, count=count[0])
        y = experts(received, spec, spec.num_experts // topology.moe_ep, factor)
        out = combine(y, handle)
        assert state(out, spec.moe_ep + spec.moe_tp) is State.SHARD
        assert out.dtype == x.dtype
        return out, received

    world, n = everywhere(topology), topology.world
    shapes = [
        shape(n * rows, width, dtype=dtype),
        shape(n * rows, k, dtype="int32"),
        shape(n * rows, k),
        shape(n, dtype="int32"),
    ]
    return step(topology, run, shapes, [world] * 4, (world, P(spec.moe_ep)))


def in_rank_order(topology, group, x):
    """[world, ...] in rank order of the mesh -> in rank order of `group`, a permutation of its axes."""
    grid = x.reshape(*topology.axes.values(), *x.shape[1:])
    order = [list(topology.axes).index(a) for a in group]
    return grid.transpose(*order, *range(len(order), grid.ndim)).reshape(x.shape)


def merged(ids, weights, num_experts):
    """One row's {expert: weight}."""
    chosen = {}
    for expert, weight in zip(ids.tolist(), weights.tolist(), strict=True):
        if 0 <= expert < num_experts:
            chosen[expert] = chosen.get(expert, 0) + weight
    return chosen


def expected_output(x, ids, weights, counts, num_experts, times=1):
    """[n, T, D]: sum of weight * (expert + 1) * row."""
    out = np.zeros(x.shape, np.float32)
    for rank, row in np.ndindex(*x.shape[:2]):
        if row < counts[rank]:
            factor = sum(w * (e + 1) for e, w in merged(ids[rank, row], weights[rank, row], num_experts).items())
            if merged(ids[rank, row], weights[rank, row], num_experts):
                out[rank, row] = x[rank, row] * factor * times
    return out


def arrivals(x, ids, weights, counts, num_experts, owner, sources):
    """What one rank should get: [(source, row values, {local expert: weight})] in order.

    Args:
        x, ids, weights, counts: of all senders in rank order.
        owner: (first expert, experts) of the rank.
        sources: senders in order of arrival.
    """
    first, local = owner
    found = []
    for source in sources:
        for row in range(counts[source]):
            chosen = merged(ids[source, row], weights[source, row], num_experts)
            mine = {e - first: w for e, w in chosen.items() if first <= e < first + local}
            if mine:
                found.append((source, x[source, row], mine))
    return found


def random_rows(rng, ranks, rows, k, width, num_experts, *, nobody=0.2):
    """Integer rows that say where they come from, ids with repeats and -1, weights in eighths, NaN where unread."""
    x = np.empty((ranks, rows, width), np.float32)
    x[:] = (np.arange(ranks)[:, None] * 64 + np.arange(rows) + 1)[..., None]
    x[..., 1:] = rng.integers(-8, 9, (ranks, rows, width - 1))
    ids = rng.integers(0, num_experts, (ranks, rows, k)).astype(np.int32)
    ids[rng.random(ids.shape) < nobody] = -1
    weights = (rng.integers(-8, 9, ids.shape) / 8).astype(np.float32)
    counts = rng.integers(0, rows + 1, ranks).astype(np.int32)
    poison(x, ids, weights, counts)
    return x, ids, weights, counts


def poison(x, ids, weights, counts):
    """NaN in weights of nobody, and in rows that are padding or nobody's; padding keeps live-looking ids."""
    padding = np.arange(x.shape[1]) >= counts[:, None]
    weights[(ids < 0) | padding[..., None]] = np.nan
    x[(ids < 0).all(-1) | padding] = np.nan
