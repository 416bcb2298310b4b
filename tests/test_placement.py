"""Where experts live: redundant copies, refused sizes, and every (row, expert) computed exactly once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dispatching import merged, poison, random_rows
from jax import lax
from stepping import everywhere, shape, step

from jaxcoll.collectives import declare_partial
from jaxcoll.dispatch import DispatchSpec, combine, dispatch
from jaxcoll.placement import Placement, place_experts, to_physical
from jaxcoll.topology import Topology


def test_without_copies_the_experts_lie_in_order():
    placement = place_experts(8, 4)
    assert (placement.is_identity, placement.num_physical, placement.slots_per_rank) == (True, 8, 2)
    assert placement.physical_to_logical == tuple(range(8))
    np.testing.assert_array_equal(placement.replicas(), np.arange(8)[:, None])


def test_sizes_that_do_not_divide_are_refused_or_padded():
    words = "11 experts and 0 redundant copies cannot be cut into 3 equal parts; 1 more copies would make 12"
    with pytest.raises(ValueError, match=words):
        place_experts(11, 3)
    padded = place_experts(11, 3, pad=True)
    assert padded == place_experts(11, 3, redundant=1)
    assert padded.physical_to_logical == (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0)
    assert not padded.is_identity
    assert place_experts(2, 5, pad=True).physical_to_logical == (0, 1, 0, 1, 0)


def test_copies_go_to_the_loaded_experts_on_ranks_that_lack_them():
    placement = place_experts(6, 3, redundant=6, load=[1, 1, 1, 1, 9, 4])
    assert placement.copies().tolist() == [1, 1, 1, 1, 3, 3] or placement.copies()[4] == 3
    for rank in range(3):
        held = placement.physical_to_logical[rank * 4 : rank * 4 + 4]
        assert 4 in held
        assert len(set(held)) == 4
    most = placement.copies().max()
    table = placement.replicas()
    assert table.shape == (6, most)
    for logical in range(6):
        held = [i for i, e in enumerate(placement.physical_to_logical) if e == logical]
        assert table[logical].tolist() == held + [-1] * (most - len(held))


def test_a_map_with_a_hole_is_refused():
    with pytest.raises(ValueError, match="the placement holds no copy of expert 2"):
        Placement((0, 1, 1, 3), 4, 2)
    with pytest.raises(ValueError, match=r"names expert 4; experts are 0..3"):
        Placement((0, 1, 2, 4), 4, 2)
    with pytest.raises(ValueError, match="3 physical experts cannot be cut into 2 equal parts"):
        Placement((0, 1, 2), 3, 2)
    with pytest.raises(ValueError, match=r"names experts by whole numbers, not \(0.5, 1\)"):
        Placement((0.5, 1), 2, 1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="a placement is of at least one expert, not 0"):
        Placement((), 0, 1)
    with pytest.raises(ValueError, match="load must be 3 numbers of at least 0"):
        place_experts(3, 3, load=[1, -1, 2])
    with pytest.raises(ValueError, match="must be at least 1 .* not 0, 2 and 0"):
        place_experts(0, 2)


@pytest.mark.parametrize("given", [[0, 1, 2, 3], np.arange(4)])
def test_a_map_may_be_a_list_or_an_array(given):
    assert Placement(given, 4, 2) == place_experts(4, 2)
    assert Placement(given, 4, 2).is_identity
    assert hash(Placement(given, 4, 2)) == hash(place_experts(4, 2))


def test_copies_share_the_rows_and_repeats_stay_together():
    placement = Placement((0, 1, 2, 0, 1, 0), 3, 3)
    ids = jnp.tile(jnp.array([[0, 1, 0, -1, 2, 3]]), (12, 1))
    physical = np.asarray(to_physical(ids, placement, first_row=1))
    np.testing.assert_array_equal(physical[:, 0], [3, 5, 0] * 4)
    np.testing.assert_array_equal(physical[:, 2], physical[:, 0])
    np.testing.assert_array_equal(physical[:, 1], [4, 1] * 6)
    assert (physical[:, 3] == -1).all() and (physical[:, 4] == 2).all() and (physical[:, 5] == -1).all()
    assert np.asarray(to_physical(ids, place_experts(3, 3))).tolist() == [[0, 1, 0, -1, 2, -1]] * 12


CASES = [
    (Topology(3, 1), place_experts(11, 3, pad=True), "normal"),
    (Topology(2, 3), place_experts(11, 6, redundant=7, load=range(11)), "low_latency"),
    (Topology(2, 3, 2), Placement((4, 0, 1, 2, 3, 0), 5, 2), "normal"),
]


@pytest.mark.parametrize("topology, placement, mode", CASES)
def test_every_row_meets_each_of_its_experts_once_whichever_copy_serves(topology, placement, mode):
    spec = DispatchSpec.of(topology, placement.num_physical, mode=mode, hosts=())
    rows, k, width, logical = 6, 4, 3, placement.num_logical
    held = jnp.asarray(placement.physical_to_logical)

    def run(x, ids, weights, count):
        first = lax.axis_index(topology.group("world")) * rows
        physical = to_physical(ids, placement, first)
        received, handle = dispatch(x, physical, weights, spec, count=count[0])
        slots = lax.axis_index(spec.moe_ep) * placement.slots_per_rank
        if mode == "normal":
            factor = held[slots + received.topk_ids] + 1  # pyright: ignore[reportAttributeAccessIssue]
            y = received.x * jnp.sum(jnp.where(received.topk_ids >= 0, received.topk_weights * factor, 0), 1)[:, None]  # pyright: ignore[reportAttributeAccessIssue]
        else:
            y = received.x * (held[slots + jnp.arange(placement.slots_per_rank)] + 1)[:, None, None]
        if spec.moe_tp:
            y = declare_partial(y * (2 - lax.axis_index(spec.moe_tp)), spec.moe_tp)  # 2 + 1 + 0
        return combine(y, handle), received.tokens_per_expert

    world, n = everywhere(topology), topology.world
    shapes = [shape(n * rows, width), shape(n * rows, k, dtype="int32"), shape(n * rows, k), shape(n, dtype="int32")]
    compiled = step(topology, run, shapes, [world] * 4, (world, jax.P(spec.moe_ep)))
    for seed in range(4):
        x, ids, weights, counts = random_rows(np.random.default_rng(seed), n, rows, k, width, logical)
        poison(x, ids, weights, counts)
        out, per_slot = compiled(*(a.reshape(-1, a.shape[-1]) for a in (x, ids, weights)), counts)
        want, load = np.zeros_like(x), np.zeros(logical, int)
        for rank, row in np.ndindex(n, rows):
            chosen = merged(ids[rank, row], weights[rank, row], logical) if row < counts[rank] else {}
            if chosen:
                want[rank, row] = x[rank, row] * sum(w * (e + 1) for e, w in chosen.items())
            load[list(chosen)] += 1
        np.testing.assert_array_equal(np.asarray(out).reshape(x.shape), want * (3 if spec.moe_tp else 1))
        served = np.zeros(logical, int)
        np.add.at(served, list(placement.physical_to_logical), np.asarray(per_slot))
        np.testing.assert_array_equal(served, load)
