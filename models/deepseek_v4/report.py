"""What ran, as the JSON and the tables of the commands show it; read from the mesh and the compiled program."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from jaxcoll import hlo
from jaxcoll.plan import LayerPlan
from jaxcoll.plot_file import PlotError, check_plot
from jaxcoll.step import Step
from jaxcoll.topology import Topology
from models.deepseek_v4.config import Config
from models.errors import UserError

COLLECTIVES_TITLE = "Collectives of one compiled step, bytes per device"


def topology_json(topology: Topology) -> dict[str, int]:
    """Sizes of the mesh and of this job."""
    mine = [d for d in topology.mesh.devices.flat if d.process_index == jax.process_index()]
    return {
        "attn_dp": topology.attn_dp,
        "attn_tp": topology.attn_tp,
        "moe_ep": topology.world // topology.moe_tp,
        "moe_tp": topology.moe_tp,
        "world": topology.world,
        "processes": jax.process_count(),
        "local_devices": len(mine),
    }


def plan_json(plan: LayerPlan) -> dict[str, str | None]:
    """The paths that every layer of the compiled step takes; None for what these paths do not have."""
    return {
        "gather": plan.gather,
        "combine": plan.combine,
        "shared_expert": plan.shared_expert,
        "head": plan.head,
        "moe_backend": plan.backend,
        "dispatch": plan.exchange.mode if plan.exchange else None,
        "wire": plan.exchange.wire if plan.exchange else None,
        "overlap": plan.exchange.overlap if plan.exchange else None,
        "levels": ("hosts" if plan.exchange.hosts else "flat") if plan.exchange else None,
        "kernels": plan.kernels.path,
        "kernels_reason": plan.kernels.reason,
    }


def collectives_json(steps: Iterable[Step]) -> list[dict[str, Any]]:
    """Collectives of the compiled steps, aggregated; bytes are totals over the count, per device."""
    found = [c for step in steps for c in hlo.collectives(step.compiled, step.topology)]
    return hlo.summary(found)


def ignored_notes(config: Config, ignored: Iterable[str]) -> list[str]:
    """Sentences about what the checkpoint holds and this model does not run."""
    names = sorted(ignored)
    notes = list(config.ignored)
    if names:
        notes.append(f"ignored {counted(len(names), 'tensor')} that no parameter needs, the first is {names[0]}")
    return notes


def print_notes(notes: Iterable[str]) -> None:
    """Notes on stderr, once per job."""
    if jax.process_index() == 0:
        for note in notes:
            print(f"jaxcoll: {note}", file=sys.stderr)


def check_plot_option(path: Path) -> None:
    """Raises UserError where --plot names a file that no picture could be saved in."""
    try:
        check_plot(path)
    except PlotError as error:
        raise UserError(f"--plot: {error}") from error


def counted(number: int, thing: str) -> str:
    """1 step, 2 steps."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def topology_line(sizes: Mapping[str, int]) -> str:
    """Both factorisations of the mesh, from `topology_json`."""
    return (
        f"{counted(sizes['world'], 'device')}: attn_dp {sizes['attn_dp']} x attn_tp {sizes['attn_tp']} = "
        f"moe_ep {sizes['moe_ep']} x moe_tp {sizes['moe_tp']}"
    )


def verdict(outcome: Mapping[str, Any]) -> str:
    """Two lines: whether `verify`'s JSON says equal and how far off, and what was compared."""
    errors = outcome["max_abs_err"].values()
    worst = "not finite" if None in errors else f"{max(errors):.1e}"
    return (
        f"{'equal' if outcome['ok'] else 'NOT equal'} to the golden trace: largest difference {worst}, "
        f"allowed {outcome['tolerance']:g}\n"
        f"{counted(outcome['steps'], 'step')}, {counted(outcome['compiles'], 'compiled program')}; "
        f"greedy ids {'match' if outcome['greedy_match'] else 'DIFFER'}; "
        f"{counted(outcome['topk_mismatches'], 'expert choice')} "
        f"{'differs' if outcome['topk_mismatches'] == 1 else 'differ'}"
    )


def print_table(console: Console, title: str, table: Table) -> None:
    """A table under its title; rich would fold a title that is wider than its table."""
    console.print(f"\n{title}")
    console.print(table)


def print_generated(console: Console, generated: Sequence[Sequence[int]], homes: Sequence[tuple[int, int]]) -> None:
    """The greedy ids of each request and the replica it lives on; a line each, however narrow the terminal."""
    console.print()
    for request, (ids, (replica, _)) in enumerate(zip(generated, homes, strict=True)):
        line = f"request {request} on replica {replica} continues with {', '.join(map(str, ids))}"
        console.print(line, soft_wrap=True)
    console.print()


def differences_table(errors: Mapping[str, float | None]) -> Table:
    """`verify`'s max_abs_err, a row per layer; its streams are those that enter it."""
    table = new_table("layer", right=("streams", "attn_out", "moe_out"))
    layers = sum(name.startswith("attn_out.") for name in errors)
    for i in range(layers):
        table.add_row(str(i), *(_difference(errors[f"{kind}.{i}"]) for kind in ("streams", "attn_out", "moe_out")))
    table.add_row("head", _difference(errors[f"streams.{layers}"]))
    table.add_row("logits", _difference(errors["logits"]))
    return table


def new_table(*left: str, right: Sequence[str] = ()) -> Table:
    """An empty table with columns aligned left, then right; no frame, so that a narrow terminal has room."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in left:
        table.add_column(column)
    for column in right:
        table.add_column(column, justify="right")
    return table


def _difference(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.1e}"


def collectives_table(records: Iterable[dict[str, Any]]) -> Table:
    """The collectives of `collectives_json`, summed over layers."""
    totals: dict[tuple[str, str], list[int]] = {}
    for record in records:
        total = totals.setdefault((record["kind"], record["group"]), [0, 0, 0])
        for i, key in enumerate(("count", "operand_bytes", "result_bytes")):
            total[i] += record[key]
    table = new_table("kind", "mesh axes", right=("count", "operand_bytes", "result_bytes"))
    for (kind, group), numbers in sorted(totals.items()):
        table.add_row(kind, group, *map(str, numbers))
    return table
