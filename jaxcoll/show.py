"""Which device holds what of an array: as text, and in Jupyter as a coloured table. Nothing is computed or moved."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.sharding import NamedSharding, PartitionSpec

from jaxcoll.html import COLOURS, table_html
from jaxcoll.states import State, states

_MOST_NUMBERS = 16  # of a shard, beyond which only its shape is told


@dataclasses.dataclass(frozen=True)
class Holding:
    """What one device holds.

    Attributes:
        device: its id.
        place: coordinates on the mesh, such as "attn_dp 1, attn_tp 0"; "" where the array lies on no mesh.
        part: index ranges of the whole array, such as "[2:4, :]".
        shape: of the part.
        numbers: the part's numbers, where they are few and here; else "".
        copy_of: the first device that holds the same part; its own id where it is the first. Addends of one part are
            no copies.
    """

    device: int
    place: str
    part: str
    shape: tuple[int, ...]
    numbers: str
    copy_of: int


@dataclasses.dataclass(frozen=True)
class Holdings:
    """What `show_states` returns: prints as text, and Jupyter shows it as a table with one colour per part.

    Attributes:
        title: of the array.
        states: over each mesh axis, "REPLICA", "SHARD" or "PARTIAL".
        devices: in order of their ids; empty for a value inside shard_map, where one program stands for all devices.
    """

    title: str
    states: dict[str, str]
    devices: tuple[Holding, ...]

    def __str__(self) -> str:
        lines = [self.title]
        for h in self.devices:
            same = f"  same as device {h.copy_of}" if h.copy_of != h.device else ""
            place = f" ({h.place})" if h.place else ""
            numbers = f"  {h.numbers}" if h.numbers else ""
            lines.append(f"device {h.device}{place}: {h.part}{same}{numbers}")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        header = "device", "place on the mesh", "part", "shape", "numbers", ""
        parts = list(dict.fromkeys(h.copy_of for h in self.devices))
        rows = [
            (
                str(h.device),
                h.place or "-",
                h.part,
                str(list(h.shape)),
                h.numbers or "-",
                f"same as device {h.copy_of}" if h.copy_of != h.device else "",
            )
            for h in self.devices
        ]
        colours = [COLOURS[parts.index(h.copy_of) % len(COLOURS)] for h in self.devices]
        return table_html(self.title, header, rows, colours)


def show_states(x: jax.Array) -> Holdings:
    """Draws which device holds what of an array.

    Args:
        x: an array on devices; a `jax.ShapeDtypeStruct` with a sharding, whose devices need not exist; or a value
            inside `jax.shard_map`, of which the type tells states and nothing lies anywhere yet.

    Returns:
        Text when printed, a table in Jupyter. Devices with the same part have the same colour: a replica.

    Raises:
        TypeError: `x` is none of these.
        StateError: a value inside a shard_map with check_vma=False, whose type tells no state.
    """
    if isinstance(x, core.Tracer):
        return _of_a_type(x)
    sharding = getattr(x, "sharding", None)
    if sharding is None:
        raise TypeError(f"show_states shows arrays on devices, not {type(x).__name__}")
    here = {s.device.id: s.data for s in x.addressable_shards} if isinstance(x, jax.Array) else {}
    first: dict[tuple[str, ...], int] = {}
    found, kinds = [], _states(sharding)
    addends = {axis for axis, state in kinds.items() if state == str(State.PARTIAL)}
    cut = sorted(_whole_or_cut(sharding).devices_indices_map(x.shape).items(), key=lambda item: item[0].id)
    for device, index in cut:
        part, shape = _part(index or (), x.shape)
        at = _coordinates(sharding, device)
        copy_of = first.setdefault((part, *(f"{axis} {at[axis]}" for axis in addends)), device.id)
        place = ", ".join(f"{axis} {n}" for axis, n in at.items())
        found.append(Holding(device.id, place, part, shape, _numbers(here.get(device.id), shape), copy_of))
    told = ", ".join(f"{state} over {axis}" for axis, state in kinds.items())
    name = f"{x.dtype}{list(x.shape)}"
    return Holdings(f"{name}: {told}" if told else name, kinds, tuple(found))


def _of_a_type(x: Any) -> Holdings:
    aval = jax.typeof(x)
    axes = jax.sharding.get_abstract_mesh().manual_axes
    found = {axis: str(state) for axis, state in states(x, axes).items()}
    told = ", ".join(f"{state} over {axis}" for axis, state in found.items())
    return Holdings(f"each rank's {aval.dtype}{list(aval.shape)}: {told or 'outside shard_map'}", found, ())


def _part(index: tuple[slice, ...], whole: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    ranges = [s.indices(size) for s, size in zip(index, whole, strict=True)]
    words = [":" if (a, b) == (0, size) else f"{a}:{b}" for (a, b, _), size in zip(ranges, whole, strict=True)]
    return f"[{', '.join(words)}]", tuple(b - a for a, b, _ in ranges)


def _coordinates(sharding: Any, device: Any) -> dict[str, int]:
    """A device's place on the mesh; empty where there is none."""
    if not isinstance(sharding, NamedSharding):
        return {}
    (at,) = np.argwhere(sharding.mesh.devices == device)
    return dict(zip(sharding.mesh.axis_names, at.tolist(), strict=True))


def _whole_or_cut(sharding: Any) -> Any:
    """The same sharding for JAX's index maps, which know no addends: each device's has the size of what it adds to."""
    if not isinstance(sharding, NamedSharding) or not sharding.spec.unreduced:
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*_cuts(sharding.spec)))


def _cuts(spec: PartitionSpec) -> tuple[Any, ...]:
    """What cuts each dimension; in 0.12 a spec that names addends refuses to be unpacked."""
    return tuple(getattr(spec, "partitions", spec))


def _states(sharding: Any) -> dict[str, str]:
    """Over each axis with members."""
    if not isinstance(sharding, NamedSharding):
        return {}
    cut = {axis for part in _cuts(sharding.spec) if part for axis in (part if isinstance(part, tuple) else (part,))}
    partial = sharding.spec.unreduced
    return {
        axis: str(State.PARTIAL if axis in partial else State.SHARD if axis in cut else State.REPLICA)
        for axis, size in sharding.mesh.shape.items()
        if size > 1
    }


def _numbers(data: Any, shape: tuple[int, ...]) -> str:
    if data is None or np.prod(shape) > _MOST_NUMBERS or jnp.issubdtype(data.dtype, jax.dtypes.extended):
        return ""
    return np.array2string(np.asarray(data), precision=4, separator=", ").replace("\n", "")
