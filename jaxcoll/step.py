"""A compiled step: one jit of one shard_map, audited once when it is traced.

Everything that jaxcoll compiles goes through `compile_step`, so that no program skips the audit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxcoll import watchdog
from jaxcoll.agreement import agree, agree_on_program, agree_on_step, steps_are_checked
from jaxcoll.audit import audit
from jaxcoll.hlo import collectives
from jaxcoll.topology import Topology

COMPILE_SECONDS = 3600.0  # hosts may compile at different speeds; a lost one is told at once


class Step:
    """One compiled SPMD program for one set of shapes; calling it with other shapes is an error, never a recompile.

    Attributes:
        traced: what was audited.
        compiled: the executable.
        name: in messages.
        fingerprint: what the processes of a job agreed on.
        plan: describes the step to a reader; None lists its collectives.
        counted: has a number of its own in messages; off, it belongs to the step before.
    """

    def __init__(
        self,
        topology: Topology,
        traced: Any,
        compiled: jax.stages.Compiled,
        name: str = "step",
        fingerprint: str = "",
        plan: Callable[[], str] | None = None,
    ):
        self.topology, self.traced, self.compiled = topology, traced, compiled
        self.name, self.fingerprint, self.plan = name, fingerprint, plan or self._collectives
        self.counted = True

    def __call__(self, *args: Any) -> Any:
        """Submits the step; the result is ready when JAX says so.

        Raises:
            PeerTimeout: a process of the job is lost.
            DisagreementError: another process has run other programs or in another order, which is seen after a beat;
                in the debug mode, another process is about to run something else.
        """
        watching = watchdog.current()
        if watching is None:
            return self.compiled(*args)
        if steps_are_checked():
            agree_on_step(watching.step + self.counted, self.name, self.fingerprint)
        with watching.dispatching(self.name, self.fingerprint, self.plan, counted=self.counted) as note:
            return note(self.compiled(*args))

    def _collectives(self) -> str:
        return (
            "\n".join(f"{c.kind} over {c.group}" for c in collectives(self.compiled, self.topology)) or "no collectives"
        )


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
    name: str = "step",
    plan: Callable[[], str] | None = None,
) -> Step:
    """Traces `fn` under shard_map over the topology's mesh, audits it and compiles it.

    Args:
        fn: the per-rank program; its arguments have per-rank shapes, its values states.
        topology: the mesh.
        args: arrays or `jax.ShapeDtypeStruct`s of global shapes, one tree per argument of `fn`.
        in_specs, out_specs: trees of PartitionSpec as for `jax.shard_map`; prefixes allowed, one alone is for all.
        donate_argnums: arguments whose buffers the step may reuse.
        compiler: compiles the lowered program; None is its own `compile`. `targets.compile_only` for absent GPUs.
        compiler_options: what the compiler is given after the program, if anything.
        name, plan: see `Step`.

    Raises:
        DisagreementError: another process of the job is about to compile something else; all must compile alike.
        PeerTimeout: another process does not come.
        StateError: the audit refuses the program, or a verb refused a state while it was traced.
        TypeError, ValueError: an argument is no array, or has no spec.
    """
    specs = _spec_per_argument(in_specs, len(args), name)
    placed = [_placed(arg, spec, topology) for arg, spec in zip(args, specs, strict=True)]
    mapped = jax.shard_map(fn, mesh=topology.mesh, in_specs=specs, out_specs=out_specs)
    audit(traced := jax.jit(mapped, donate_argnums=donate_argnums).trace(*placed))
    lowered, options = traced.lower(), [compiler_options] if compiler_options else []
    fingerprint = agree_on_program(name, topology, traced, lowered, placed)
    compiled = compiler(lowered, *options) if compiler else lowered.compile(*options)
    agree(f"the first run of {name}", {}, timeout=COMPILE_SECONDS)
    return Step(topology, traced, compiled, name, fingerprint, plan)


def _spec_per_argument(specs: Any, arguments: int, name: str) -> tuple[Any, ...]:
    specs = (specs,) * arguments if isinstance(specs, PartitionSpec) else tuple(specs)
    if len(specs) != arguments:
        raise ValueError(f"{name} has {arguments} arguments and {len(specs)} in_specs; each needs one of its own")
    return specs


def _placed(arg: Any, spec: Any, topology: Topology) -> Any:
    """Abstract values on their place of the mesh, so that the program is compiled for exactly that."""

    def place(part: PartitionSpec, tree: Any) -> Any:
        sharding = topology.sharding(part)
        return jax.tree.map(lambda x: abstract(x, sharding), tree)

    def abstract(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise TypeError(f"a step takes arrays or jax.ShapeDtypeStructs, not {x!r}")
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(place, spec, arg, is_leaf=lambda node: isinstance(node, PartitionSpec))
