"""A compiled step: one jit of one shard_map, audited once when it is traced.

Everything that jaxcoll compiles goes through `compile_step`, so that no program skips the audit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxcoll.audit import audit
from jaxcoll.topology import Topology


class Step:
    """One compiled SPMD program for one set of shapes; calling it with other shapes is an error, never a recompile.

    Attributes:
        traced: what was audited.
        compiled: the executable.
    """

    def __init__(self, topology: Topology, traced: Any, compiled: jax.stages.Compiled):
        self.topology, self.traced, self.compiled = topology, traced, compiled

    def __call__(self, *args: Any) -> Any:
        """Submits the step; the result is ready when JAX says so."""
        return self.compiled(*args)


def compile_step(
    fn: Callable,
    topology: Topology,
    args: Sequence[Any],
    *,
    in_specs: Any,
    out_specs: Any,
    donate_argnums: tuple[int, ...] = (),
    compiler: Callable[..., jax.stages.Compiled] | None = None,
    compiler_options: dict[str, Any] | None = None,
) -> Step:
    """Traces `fn` under shard_map over the topology's mesh, audits it and compiles it.

    Args:
        fn: the per-rank program; its arguments have per-rank shapes, its values states.
        topology: the mesh.
        args: arrays or `jax.ShapeDtypeStruct`s of global shapes, one tree per argument of `fn`.
        in_specs, out_specs: trees of PartitionSpec (prefixes allowed), as for `jax.shard_map`.
        donate_argnums: arguments whose buffers the step may reuse.
        compiler: compiles the lowered program; None is its own `compile`. `targets.compile_only` for absent GPUs.
        compiler_options: what the compiler is given after the program, if anything.

    Raises:
        StateError: the audit refuses the program, or a verb refused a state while it was traced.
    """
    mapped = jax.shard_map(fn, mesh=topology.mesh, in_specs=tuple(in_specs), out_specs=out_specs)
    placed = [_placed(arg, spec, topology) for arg, spec in zip(args, in_specs, strict=True)]
    traced = jax.jit(mapped, donate_argnums=donate_argnums).trace(*placed)
    audit(traced)
    lowered, options = traced.lower(), (compiler_options,) if compiler_options else ()
    return Step(topology, traced, compiler(lowered, *options) if compiler else lowered.compile(*options))


def _placed(arg: Any, spec: Any, topology: Topology) -> Any:
    """Abstract values on their place of the mesh, so that the program is compiled for exactly that."""

    def place(part: PartitionSpec, tree: Any) -> Any:
        sharding = topology.sharding(part)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    return jax.tree.map(place, spec, arg, is_leaf=lambda node: isinstance(node, PartitionSpec))
