"""`show_states`: which device holds what, for arrays, for shapes on absent devices, and for values in shard_map."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcoll
from jaxcoll import StateError, Topology, declare_partial, show_states

MESH = Topology(2, 3)


def placed(x, spec):
    return jax.device_put(x, MESH.sharding(spec))


def test_parts_and_copies_are_told_device_by_device():
    shown = show_states(placed(np.arange(8, dtype=np.int32).reshape(4, 2), P("attn_dp", None)))
    assert shown.states == {"attn_dp": "SHARD", "attn_tp": "REPLICA"}
    assert str(shown).splitlines() == [
        "int32[4, 2]: SHARD over attn_dp, REPLICA over attn_tp",
        "device 0 (attn_dp 0, attn_tp 0): [0:2, :]  [[0, 1], [2, 3]]",
        "device 1 (attn_dp 0, attn_tp 1): [0:2, :]  same as device 0  [[0, 1], [2, 3]]",
        "device 2 (attn_dp 0, attn_tp 2): [0:2, :]  same as device 0  [[0, 1], [2, 3]]",
        "device 3 (attn_dp 1, attn_tp 0): [2:4, :]  [[4, 5], [6, 7]]",
        "device 4 (attn_dp 1, attn_tp 1): [2:4, :]  same as device 3  [[4, 5], [6, 7]]",
        "device 5 (attn_dp 1, attn_tp 2): [2:4, :]  same as device 3  [[4, 5], [6, 7]]",
    ]


def test_a_part_has_one_colour_in_jupyter():
    html = show_states(placed(np.zeros((4, 6)), P("attn_dp", "attn_tp")))._repr_html_()
    colours = {row.split("background:")[1].split(";")[0] for row in html.split("<tr>")[2:]}
    assert len(colours) == 6 and "same as" not in html
    copies = show_states(placed(np.zeros((4, 6)), P(None, "attn_tp")))._repr_html_()
    assert len({row.split("background:")[1].split(";")[0] for row in copies.split("<tr>")[2:]}) == 3
    assert "[:, 2:4]" in copies and "same as device 1" in copies


def test_shapes_on_devices_that_hold_nothing_and_big_parts_show_no_numbers():
    shape = jax.ShapeDtypeStruct((6,), jnp.float32, sharding=MESH.sharding(P(("attn_dp", "attn_tp"))))
    shown = show_states(shape)  # pyright: ignore[reportArgumentType]
    assert [h.part for h in shown.devices] == [f"[{i}:{i + 1}]" for i in range(6)]
    assert {h.numbers for h in shown.devices} == {""} and shown.states == {"attn_dp": "SHARD", "attn_tp": "SHARD"}
    assert {h.numbers for h in show_states(placed(np.zeros(40), P())).devices} == {""}


def test_an_array_of_one_device_lies_on_no_mesh():
    shown = show_states(jnp.float32(3))
    assert (shown.states, len(shown.devices)) == ({}, 1)
    assert str(shown) == "float32[]\ndevice 0: []  3."


def test_inside_shard_map_the_type_tells_the_state():
    told = []

    def step(x):
        told.append(show_states(x))
        told.append(show_states(declare_partial(x, ("attn_tp",))))
        return x

    spec = P(("attn_dp", "attn_tp"))
    jax.make_jaxpr(jax.shard_map(step, mesh=MESH.mesh, in_specs=spec, out_specs=spec))(np.zeros(6, np.float32))
    assert str(told[0]) == "each rank's float32[1]: SHARD over attn_dp, SHARD over attn_tp"
    assert told[1].states == {"attn_dp": "SHARD", "attn_tp": "PARTIAL"}


def test_addends_between_steps_are_told_apart_and_are_no_copies():
    mesh = jax.make_mesh((2, 3), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    x, w = (jax.device_put(jnp.ones(shape), NamedSharding(mesh, P("a", "b"))) for shape in ((2, 6), (4, 6)))
    with jax.set_mesh(mesh):
        w = jax.reshard(w, P(None, "b"))
        summed = P("a", None, unreduced=frozenset({"b"}))
        y = jax.jit(lambda x, w: jnp.einsum("ij,kj->ik", x, w, out_sharding=summed))(x, w)
    shown = show_states(y)
    assert shown.states == {"a": "SHARD", "b": "PARTIAL"}
    assert [(h.part, h.numbers, h.copy_of) for h in shown.devices] == [
        (f"[{d // 3}:{d // 3 + 1}, :]", "[[2., 2., 2., 2.]]", d) for d in range(6)
    ]


def test_random_keys_show_where_they_lie_and_no_numbers():
    shown = show_states(placed(jax.random.split(jax.random.key(0), 2), P("attn_dp")))
    assert str(shown).splitlines()[:2] == [
        "key<fry>[2]: SHARD over attn_dp, REPLICA over attn_tp",
        "device 0 (attn_dp 0, attn_tp 0): [0:1]",
    ]


def test_without_checked_types_no_state_is_claimed():
    unchecked = jax.shard_map(
        lambda x: (show_states(x), x)[1], mesh=MESH.mesh, in_specs=P("attn_dp"), out_specs=P("attn_dp"), check_vma=False
    )
    with pytest.raises(StateError, match="called with check_vma=False"):
        jax.make_jaxpr(unchecked)(np.zeros(6, np.float32))


def test_what_is_no_array_is_refused():
    with pytest.raises(TypeError, match="shows arrays on devices, not ndarray"):
        jaxcoll.show_states(np.zeros(3))  # pyright: ignore[reportArgumentType]
