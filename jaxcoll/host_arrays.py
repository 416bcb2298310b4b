"""Arrays between a host and a mesh that may span several: placing what every process knows, fetching what none holds.

With one process both are JAX's own copies; nothing is compiled for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxcoll.collectives import all_gather
from jaxcoll.step import Step, compile_step
from jaxcoll.topology import Topology
from jaxcoll.watchdog import current


def place(values: Sequence[np.ndarray], shardings: Sequence[NamedSharding]) -> list[jax.Array]:
    """Puts host arrays on the mesh; every process passes the parts that its own devices hold, and sends nothing.

    Args:
        values: of global shape; other processes' parts may hold anything.
        shardings: where each one goes.
    """
    if all(sharding.is_fully_addressable for sharding in shardings):
        return jax.device_put(list(values), list(shardings))
    return [
        jax.make_array_from_callback(value.shape, sharding, value.__getitem__)
        for value, sharding in zip(values, shardings, strict=True)
    ]


class Fetcher:
    """Brings arrays that are cut along dimension 0 to every process of the job, by one audited program per shapes."""

    def __init__(self, topology: Topology):
        self.topology = topology
        self._programs: dict[tuple, Step] = {}

    def __call__(self, tree: Any) -> Any:
        """The whole arrays of `tree` as NumPy arrays, in every process; each one must call it with the same shapes.

        Raises:
            PeerTimeout: a process of the job is lost.
        """
        leaves, structure = jax.tree.flatten(tree)
        spread = [i for i, leaf in enumerate(leaves) if not _all_here(leaf)]
        if spread:
            whole = self._program([leaves[i] for i in spread])(*(leaves[i] for i in spread))
            for i, leaf in zip(spread, whole, strict=True):
                leaves[i] = leaf
        if (watchdog := current()) is not None:
            watchdog.wait(leaf for leaf in leaves if isinstance(leaf, jax.Array))
        return jax.tree.unflatten(structure, [_on_host(leaf) for leaf in leaves])

    def _program(self, arrays: Sequence[jax.Array]) -> Step:
        groups = [_group(array) for array in arrays]
        key = tuple((a.shape, a.dtype.name, group) for a, group in zip(arrays, groups, strict=True))
        if key not in self._programs:
            program = self._programs[key] = compile_step(
                lambda *parts: [all_gather(part, group, 0) for part, group in zip(parts, groups, strict=True)],
                self.topology,
                [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays],
                in_specs=[PartitionSpec(group) for group in groups],
                out_specs=PartitionSpec(),
                name="fetch",
            )
            program.counted = False
        return self._programs[key]


def _all_here(array: Any) -> bool:
    return not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated


def _on_host(array: Any) -> np.ndarray:
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        array = array.addressable_data(0)  # a replica: any part is the whole
    return np.asarray(array)


def _group(array: jax.Array) -> tuple[str, ...]:
    """The mesh axes that cut dimension 0."""
    assert isinstance(array.sharding, NamedSharding)
    first, *rest = array.sharding.spec
    if any(rest):
        raise ValueError(f"fetch takes arrays cut along dimension 0 only, not {array.sharding.spec}")
    return (first,) if isinstance(first, str) else tuple(first)
