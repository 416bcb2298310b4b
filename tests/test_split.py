"""A replica's rows cut over its ranks and joined again, for every small number of rows."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from stepping import copies, everywhere, shape, step

from jaxcoll.split import chunk_rows, join_rows, own_count, split_rows
from jaxcoll.states import State, StateError, state
from jaxcoll.topology import Topology

SIX = Topology(2, 3)
TP = ("attn_tp",)


def cut(rows):
    def run(x, ids, count):
        mine, my_ids = split_rows(x, TP), split_rows(ids, TP, fill=-1)
        assert state(mine, TP) is State.SHARD
        joined = join_rows(mine, TP, rows=rows)
        assert state(joined, TP) is State.REPLICA
        return mine, my_ids, own_count(count[0], rows, TP)[None], joined

    shapes = [shape(2 * rows, 2), shape(2 * rows, dtype="int32"), shape(2, dtype="int32")]
    world, dp = everywhere(SIX), P("attn_dp")
    return step(SIX, run, shapes, [dp] * 3, (world, world, world, dp))


@pytest.mark.parametrize("rows", range(1, 8))
def test_every_row_and_its_id_lie_on_one_rank_and_come_back(rows):
    x = np.arange(4 * rows, dtype=np.float32).reshape(2 * rows, 2) + 1
    ids = np.arange(2 * rows, dtype=np.int32)
    compiled, size = cut(rows), chunk_rows(rows, 3)
    for count in range(rows + 1):
        mine, my_ids, counts, joined = compiled(x, ids, np.array([count, rows], np.int32))
        np.testing.assert_array_equal(joined, x)
        for rank, (chunk, chunk_ids) in enumerate(zip(copies(mine), copies(my_ids), strict=True)):
            replica, t = divmod(rank, 3)
            begin, end = replica * rows + min(t * size, rows), replica * rows + min((t + 1) * size, rows)
            np.testing.assert_array_equal(chunk, np.pad(x[begin:end], ((0, size - (end - begin)), (0, 0))))
            np.testing.assert_array_equal(
                chunk_ids, np.pad(ids[begin:end], (0, size - (end - begin)), constant_values=-1)
            )
        by_rank = np.asarray(counts).reshape(2, 3)
        assert by_rank.sum(1).tolist() == [count, rows]
        assert by_rank[0].tolist() == [min(max(count - t * size, 0), size) for t in range(3)]


def test_wrong_states_and_sizes_are_refused():
    with pytest.raises(StateError, match="take_shard over .* needs REPLICA"):
        step(SIX, lambda x: split_rows(x, TP), [shape(12, 2)], [everywhere(SIX)], everywhere(SIX))
    with pytest.raises(ValueError, match="join_rows makes 5 rows of 3 chunks of 2, not of 4"):
        step(SIX, lambda x: join_rows(x, TP, rows=5), [shape(24, 2)], [everywhere(SIX)], P("attn_dp"))


def test_one_rank_keeps_all():
    x = jnp.arange(6.0).reshape(3, 2)
    np.testing.assert_array_equal(split_rows(x, ()), x)
    np.testing.assert_array_equal(join_rows(x, (), rows=3), x)
    assert int(own_count(2, 3, ())) == 2
