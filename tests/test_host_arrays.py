"""Arrays between hosts and mesh, and the counts that replicas exchange; on one process whose devices play several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxcoll import host_arrays, step_metadata
from jaxcoll.coordination import DisagreementError
from jaxcoll.host_arrays import Fetcher, place
from jaxcoll.step_metadata import StepExchange, own_replicas, own_rows
from jaxcoll.topology import Topology

TOPOLOGY = Topology(attn_dp=4, attn_tp=2)
BY_REPLICA = TOPOLOGY.group("attn_dp")


def numbers(*shape: int, dtype: str = "int32") -> np.ndarray:
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape)


@pytest.fixture
def spread(monkeypatch) -> None:
    """Nothing that is cut counts as being here, as in a job of several processes."""
    monkeypatch.setattr(host_arrays, "_all_here", lambda array: not isinstance(array, jax.Array))


def test_what_other_processes_hold_is_gathered_by_one_program_per_shapes(spread):
    fetch = Fetcher(TOPOLOGY)
    values = {"a": numbers(8, 3), "b": [numbers(4), numbers(16, 2, dtype="float32")]}
    sharding = TOPOLOGY.sharding(P(BY_REPLICA))
    for _ in range(2):
        found = fetch(jax.tree.map(lambda v: jax.device_put(v, sharding), values) | {"places": numbers(5)})
        jax.tree.map(np.testing.assert_array_equal, found, values | {"places": numbers(5)})
    assert len(fetch._programs) == 1
    whole = fetch(jax.device_put(numbers(16), TOPOLOGY.sharding(P(TOPOLOGY.group("world")))))
    np.testing.assert_array_equal(whole, numbers(16))
    assert len(fetch._programs) == 2


def test_arrays_cut_elsewhere_are_refused(spread):
    array = jax.device_put(numbers(4, 8), TOPOLOGY.sharding(P(None, BY_REPLICA)))
    with pytest.raises(ValueError, match="fetch takes arrays cut along dimension 0 only"):
        Fetcher(TOPOLOGY)(array)


def test_what_is_here_needs_no_program():
    fetch = Fetcher(TOPOLOGY)
    np.testing.assert_array_equal(fetch(jax.device_put(numbers(8), TOPOLOGY.sharding(P(BY_REPLICA)))), numbers(8))
    assert fetch._programs == {}


def test_placed_parts_are_those_of_their_devices(monkeypatch):
    sharding = TOPOLOGY.sharding(P(BY_REPLICA))
    [here] = place([numbers(8, 2)], [sharding])
    monkeypatch.setattr(type(sharding), "is_fully_addressable", False)
    [part_by_part] = place([numbers(8, 2)], [sharding])
    monkeypatch.undo()
    for array in (here, part_by_part):
        assert array.sharding == sharding
        np.testing.assert_array_equal(array, numbers(8, 2))


def test_rows_of_own_replicas():
    array = jax.device_put(numbers(12, 2), TOPOLOGY.sharding(P(BY_REPLICA)))
    held = own_rows(array, 3)
    assert sorted(held) == [0, 1, 2, 3] == list(own_replicas(TOPOLOGY))
    for replica, rows in held.items():
        np.testing.assert_array_equal(rows, numbers(12, 2)[3 * replica : 3 * replica + 3])
    whole = own_rows(jnp.asarray(numbers(12)), 3)  # one device holds all of it
    np.testing.assert_array_equal(whole[3], [9, 10, 11])


def test_one_process_knows_all_counts():
    exchange = StepExchange(TOPOLOGY)
    first, second = exchange({0: 3, 2: 1}), exchange({}, extends=True)
    assert (first.counts, first.everyone_is_idle, first.extend_in_batch, first.number) == (
        (3, 0, 1, 0),
        False,
        False,
        1,
    )
    assert (second.counts, second.everyone_is_idle, second.extend_in_batch, second.number) == ((0,) * 4, True, True, 2)
    for counts in ({4: 1}, {0: -1}):
        with pytest.raises(ValueError, match=r"this process's are \[0, 1, 2, 3\]"):
            exchange(counts)


class Elsewhere:
    """Devices 0-2 of process 0, 3 and 4 of process 1 (this one), 5-7 of process 2: replicas 1 and 2 are shared."""

    def __init__(self, monkeypatch, told: list[list[int]]):
        self.told = np.array(told, np.int32)  # what the others would have placed
        monkeypatch.setattr(step_metadata, "own_ranks", lambda topology: (3, 4))
        monkeypatch.setattr(step_metadata, "place", self.placed)
        monkeypatch.setattr(
            step_metadata.StepExchange, "_processes", property(lambda exchange: [0, 0, 0, 1, 1, 2, 2, 2])
        )

    def placed(self, values, shardings):
        mine = (np.arange(8) == 3) | (np.arange(8) == 4)
        return place([np.where(mine[:, None], values[0], self.told)], shardings)


def told(*rows: int, number: int = 1) -> list[list[int]]:
    return [[count, int(rank == 7), number] for rank, count in enumerate(rows)]


def test_counts_of_other_processes_come_over_the_devices(spread, monkeypatch):
    others = Elsewhere(monkeypatch, told(7, 7, 5, 0, 0, 0, 2, 2))
    exchange = StepExchange(TOPOLOGY)
    assert exchange.own == (1, 2)
    assert exchange({1: 5}) == step_metadata.StepMetadata((7, 5, 0, 2), True, 1)
    others.told[:3, 2] = 2
    with pytest.raises(DisagreementError) as raised:
        exchange({1: 5})
    assert str(raised.value) == (
        "the processes are not at the same step: process 0 at step 2, process 1 at step 2, process 2 at step 1"
    )


def test_processes_that_share_a_replica_must_bring_the_same_rows(spread, monkeypatch):
    Elsewhere(monkeypatch, told(7, 7, 5, 0, 0, 3, 2, 2))
    with pytest.raises(DisagreementError) as raised:
        StepExchange(TOPOLOGY)({1: 5, 2: 4})
    assert str(raised.value) == (
        "the processes that share replica 2 bring different rows: process 1 with 4 rows, process 2 with 3 rows"
    )
