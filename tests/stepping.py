"""Compiled steps that take NumPy arrays, for tests of what moves between ranks."""

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxcoll.hlo import collectives, totals
from jaxcoll.step import compile_step


def everywhere(topology):
    return P(topology.group("world"))


def step(topology, function, shapes, in_specs, out_specs):
    """A compiled step that takes NumPy arrays."""
    compiled = compile_step(function, topology, shapes, in_specs=in_specs, out_specs=out_specs)
    places = jax.tree.map(topology.sharding, tuple(in_specs), is_leaf=lambda node: isinstance(node, P))
    return lambda *args: compiled(*jax.device_put(args, places))


def shape(*dims, dtype="float32"):
    return jax.ShapeDtypeStruct(dims, dtype)


def copies(array):
    """What every device holds."""
    return [np.asarray(s.data) for s in sorted(array.addressable_shards, key=lambda s: s.device.id)]


def wire_bytes(topology, function, shapes, in_specs, out_specs):
    """Wire bytes per (kind, group) of the compiled step; groups of one member send nothing."""
    compiled = compile_step(function, topology, shapes, in_specs=in_specs, out_specs=out_specs).compiled
    return {key: t.wire_bytes for key, t in totals(collectives(compiled, topology)).items() if key[1] != "self"}
