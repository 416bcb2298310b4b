"""Sizes to axes, groups and ranks: against the formulas of SGLang's group tables, and against real collectives."""

import collections
import itertools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxcoll import Topology, TopologyError
from jaxcoll.topology import GroupName

NAMES: tuple[GroupName, ...] = get_args(GroupName)


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def refines(attn_tp, moe_tp):
    return attn_tp % moe_tp == 0 or moe_tp % attn_tp == 0


FACTORISATIONS = [
    (world // attn_tp, attn_tp, moe_ep)
    for world in range(1, 17)
    for attn_tp, moe_ep in itertools.product(divisors(world), divisors(world))
]
LEGAL = [sizes for sizes in FACTORISATIONS if refines(sizes[1], sizes[0] * sizes[1] // sizes[2])]
WORLDS = {n: [sizes for sizes in LEGAL if sizes[0] * sizes[1] == n] for n in range(1, 17)}
ON_DEVICES = [(2, 3, 6), (2, 3, 2), (4, 2, 8), (4, 2, 4), (4, 2, 2), (4, 2, 1), (2, 4, 4), (8, 1, 4), (1, 6, 3)]


def expected_members(topology):
    """Groups from t = r % T, d = r // T, f = r % F, e = r // F alone, each in the order of the rank inside it."""
    T, F = topology.attn_tp, topology.moe_tp
    shared_and_rank = {
        "attn_dp": (lambda r: r % T, lambda r: r // T),
        "attn_tp": (lambda r: r // T, lambda r: r % T),
        "moe_ep": (lambda r: r % F, lambda r: r // F),
        "moe_tp": (lambda r: r // F, lambda r: r % F),
        "world": (lambda r: 0, lambda r: r),
    }
    groups = {}
    for name, (shared, rank) in shared_and_rank.items():
        by_shared = {}
        for r in range(topology.world):
            by_shared.setdefault(shared(r), []).append(r)
        groups[name] = sorted(sorted(members, key=rank) for members in by_shared.values())
    return groups


@pytest.mark.parametrize("world", WORLDS)
def test_every_factorisation_has_its_axes_sizes_and_members(world):
    for sizes in WORLDS[world]:
        topology = Topology(*sizes)
        assert topology.world == world == sizes[2] * topology.moe_tp
        assert np.prod(list(topology.axes.values())) == world
        expected_sizes = dict(zip(NAMES, (*sizes, world // sizes[2], world), strict=True))
        for name in NAMES:
            group = topology.group(name)
            assert topology.size(group) == expected_sizes[name], (sizes, name)
            assert list(group) == [a for a in topology.axes if a in group], "groups follow the mesh's axis order"
        assert topology.group("attn_dp") + topology.group("attn_tp") == topology.group("world")
        assert topology.group("moe_ep") + topology.group("moe_tp") == topology.group("world")
        assert {name: sorted(topology.members(name)) for name in NAMES} == expected_members(topology), sizes


@pytest.mark.parametrize("world", WORLDS)
def test_rank_formulas_are_inverse_and_row_major(world):
    for topology, r in itertools.product([Topology(*sizes) for sizes in WORLDS[world]], range(world)):
        T, F = topology.attn_tp, topology.moe_tp
        d, t = topology.attention_ranks(r)
        e, f = topology.expert_ranks(r)
        assert (d, t, e, f) == (r // T, r % T, r // F, r % F)
        assert topology.attention_rank(d, t) == r == topology.expert_rank(e, f)
        # The position in the mesh as a mixed-radix number: a group's rank is that of its own axes' digits.
        position = dict(zip(topology.axes, np.unravel_index(r, tuple(topology.axes.values())), strict=True))
        for name, rank in zip(NAMES, (d, t, e, f, r), strict=True):
            value = 0
            for axis in topology.group(name):
                value = value * topology.axes[axis] + position[axis]
            assert value == rank, (topology, name, r)


def test_exactly_the_factorisations_without_a_common_refinement_are_refused():
    refused = []
    for dp, tp, ep in FACTORISATIONS:
        try:
            Topology(dp, tp, ep)
        except TopologyError as error:
            refused.append((dp, tp, ep))
            assert f"{dp}x{tp}" in str(error) and f"{ep}x{dp * tp // ep}" in str(error)
    assert refused == [sizes for sizes in FACTORISATIONS if sizes not in LEGAL]
    assert (3, 2, 2) in refused and (2, 3, 3) in refused and (6, 2, 4) in refused
    assert len(refused) == 14  # worlds of 6, 10, 14, 15: two each; 12: six


@pytest.mark.parametrize(
    "sizes, axes",
    [
        ((4, 2, 8), {"attn_dp": 4, "attn_tp": 2}),
        ((4, 2, 4), {"attn_dp": 4, "attn_tp": 2}),
        ((4, 2, 1), {"attn_dp": 4, "attn_tp": 2}),
        ((8, 2, 4), {"attn_dp_outer": 4, "attn_dp_inner": 2, "attn_tp": 2}),
        ((4, 2, 2), {"attn_dp_outer": 2, "attn_dp_inner": 2, "attn_tp": 2}),
        ((2, 4, 4), {"attn_dp": 2, "attn_tp_outer": 2, "attn_tp_inner": 2}),
        ((1, 6, 3), {"attn_dp": 1, "attn_tp_outer": 3, "attn_tp_inner": 2}),
        ((1, 1, 1), {"attn_dp": 1, "attn_tp": 1}),
    ],
)
def test_axes_are_the_common_refinement_outermost_first(sizes, axes):
    assert list(Topology(*sizes).axes.items()) == list(axes.items())


def test_the_design_page_examples():
    assert Topology(4, 2).group("moe_ep") == ("attn_dp", "attn_tp") and Topology(4, 2).group("moe_tp") == ()
    split = Topology(8, 2, 4)
    assert split.group("attn_dp") == ("attn_dp_outer", "attn_dp_inner")
    assert split.group("moe_ep") == ("attn_dp_outer",) and split.group("moe_tp") == ("attn_dp_inner", "attn_tp")
    assert Topology(4, 2, 1).group("moe_ep") == () and Topology(4, 2, 1).group("moe_tp") == ("attn_dp", "attn_tp")
    # A size-1 axis at the cut belongs to moe_ep.
    assert Topology(4, 1).group("moe_ep") == ("attn_dp", "attn_tp") and Topology(4, 1).group("moe_tp") == ()
    assert Topology(1, 4, 1).group("moe_ep") == ("attn_dp",) and Topology(1, 4, 1).group("moe_tp") == ("attn_tp",)


@pytest.mark.parametrize("sizes", ON_DEVICES)
def test_members_and_ranks_are_those_of_real_collectives(sizes):
    topology = Topology(*sizes)
    named = {name: topology.group(name) for name in NAMES if topology.group(name)}

    def ranks():
        me = lax.axis_index(topology.group("world"))[None]
        inside = {name: lax.axis_index(group)[None] for name, group in named.items()}
        peers = {name: lax.all_gather(me, group, tiled=True)[None] for name, group in named.items()}
        return me, inside, peers

    world = P(topology.group("world"))
    me, inside, peers = jax.jit(jax.shard_map(ranks, mesh=topology.mesh, in_specs=(), out_specs=world))()
    np.testing.assert_array_equal(me, np.arange(topology.world))
    assert [d.id for d in topology.mesh.devices.ravel()] == [d.id for d in jax.devices()[: topology.world]]
    for name in named:
        group_of = {r: members for members in expected_members(topology)[name] for r in members}
        np.testing.assert_array_equal(peers[name], [group_of[r] for r in range(topology.world)], err_msg=name)
        np.testing.assert_array_equal(inside[name], [group_of[r].index(r) for r in range(topology.world)])


def test_mesh_places_global_rows_on_ranks_in_order():
    topology = Topology(2, 3)
    x = jax.device_put(jnp.arange(6), topology.sharding(P(topology.group("world"))))
    assert {s.device: int(s.data[0]) for s in x.addressable_shards} == dict(
        zip(jax.devices()[:6], range(6), strict=True)
    )


def test_given_devices_are_used_in_their_order():
    devices = jax.devices()[6:2:-1]
    topology = Topology(2, 2, devices=devices)
    assert topology.mesh.devices.ravel().tolist() == devices
    assert topology == Topology(2, 2) and hash(topology) == hash(Topology(2, 2))


@pytest.mark.parametrize("name", ["attn_dp", "attn_tp", "moe_ep"])
@pytest.mark.parametrize("size", [0, -1, 2.0, True, "2", np.float32(2)])
def test_a_size_that_is_no_positive_whole_number(name, size):
    with pytest.raises(TopologyError) as error:
        Topology(**{"attn_dp": 2, "attn_tp": 2, name: size})
    assert str(error.value) == f"{name} must be a whole number of at least 1, not {size!r}"


def test_numpys_whole_numbers_are_sizes():
    topology = Topology(np.int64(2), np.int32(2), np.uint8(2), hosts=np.int64(2))  # pyright: ignore[reportArgumentType]
    assert topology == Topology(2, 2, 2, hosts=2) and topology.axes == {"attn_dp": 2, "attn_tp": 2}
    assert {type(size) for size in (topology.attn_dp, topology.moe_ep, topology.hosts, topology.world)} == {int}


@pytest.mark.parametrize("hosts", [0, -1, True, 2.0, "2", [1]])
def test_hosts_that_are_no_positive_whole_number(hosts):
    with pytest.raises(TopologyError) as error:
        Topology(2, 2, hosts=hosts)
    assert str(error.value) == f"hosts must be a whole number of at least 1, not {hosts!r}"


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "2", None])
def test_sizes_are_refused_before_devices_are_asked_for(size):
    with pytest.raises(TopologyError) as error:
        Topology.here(size, 2)
    assert str(error.value) == f"attn_dp must be a whole number of at least 1, not {size!r}"


def test_none_is_a_size_for_moe_ep_only():
    assert Topology(2, 3, None).moe_ep == 6
    with pytest.raises(TopologyError, match="attn_dp must be a whole number of at least 1, not None"):
        Topology(None, None)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Topology(4, 2, 3), "moe_ep=3 does not divide the world of attn_dp*attn_tp = 4*2 = 8 devices"),
        (lambda: Topology(2, 2, 8), "moe_ep=8 does not divide the world of attn_dp*attn_tp = 2*2 = 4 devices"),
        (
            lambda: Topology(3, 2, 2),
            "attn_dp x attn_tp = 3x2 and moe_ep x moe_tp = 2x3 have no common refinement: "
            "neither attn_tp=2 nor moe_tp=3 divides the other",
        ),
        (lambda: Topology(2, 2, devices=jax.devices()[:3]), "3 devices given for a world of 4"),
        (lambda: Topology(4, 3).mesh, "a world of 12 needs 12 devices; this process sees 8"),
        (lambda: Topology(2, 2).group("tp"), "unknown group 'tp'; groups are attn_dp, attn_tp, moe_ep, moe_tp, world"),  # pyright: ignore[reportArgumentType]
        (lambda: Topology(2, 3).attention_rank(2, 0), "rank (2, 0) lies outside 2 x 3"),
        (lambda: Topology(2, 3).attention_rank(0, 3), "rank (0, 3) lies outside 2 x 3"),
        (lambda: Topology(2, 3, 2).expert_rank(-1, 0), "rank (-1, 0) lies outside 2 x 3"),
        (lambda: Topology(2, 3).attention_ranks(6), "rank (6, 0) lies outside 6 x 1"),
        (lambda: Topology(2, 3).expert_ranks(-1), "rank (-1, 0) lies outside 6 x 1"),
    ],
)
def test_refusals_carry_the_numbers(make, message):
    with pytest.raises(TopologyError) as error:
        make()
    assert str(error.value) == message


def test_a_device_given_twice():
    with pytest.raises(TopologyError, match="a device is given twice"):
        Topology(2, 1, devices=[jax.devices()[0]] * 2)


def test_sizes_cannot_change_afterwards():
    with pytest.raises(AttributeError):
        Topology(2, 2).attn_dp = 4  # pyright: ignore[reportAttributeAccessIssue]


HOSTS = {
    "replicas over hosts": ((16, 1, 16, 2), {"attn_dp_outer": 2, "attn_dp_inner": 8, "attn_tp": 1}),
    "a cut that is there already": ((2, 8, 16, 2), {"attn_dp": 2, "attn_tp": 8}),
    "three pieces": ((8, 1, 4, 2), {"attn_dp_outer": 2, "attn_dp_middle": 2, "attn_dp_inner": 2, "attn_tp": 1}),
    "heads over hosts": ((1, 8, 8, 2), {"attn_dp": 1, "attn_tp_outer": 2, "attn_tp_inner": 4}),
    "no refinement": ((2, 3, 6, 3), {"attn_dp": 2, "attn_tp": 3}),
}


@pytest.mark.parametrize(("sizes", "axes"), HOSTS.values(), ids=HOSTS)
def test_a_cut_into_hosts_becomes_an_axis_where_it_refines_the_others(sizes, axes):
    dp, tp, ep, hosts = sizes
    topology = Topology(dp, tp, ep, hosts=hosts)
    assert topology.axes == axes
    assert [topology.size(topology.group(name)) for name in ("attn_dp", "attn_tp", "moe_ep")] == [dp, tp, ep]
    assert topology.group("moe_ep") + topology.group("moe_tp") == tuple(axes) or 1 in axes.values()


def test_hosts_are_read_off_the_devices():
    device = collections.namedtuple("device", "id process_index")
    by_host = [device(i, i // 4) for i in range(8)]
    assert Topology(8, 1, devices=by_host).axes == {"attn_dp_outer": 2, "attn_dp_inner": 4, "attn_tp": 1}
    for mixed in ([*by_host[::2], *by_host[1::2]], [*by_host[:3], *by_host[4:], by_host[3]]):
        assert Topology(8, 1, devices=mixed).axes == {"attn_dp": 8, "attn_tp": 1}


def test_hosts_that_do_not_divide_the_world_are_refused():
    with pytest.raises(TopologyError, match="hosts=3 does not divide the world of 8 devices"):
        Topology(4, 2, hosts=3)
