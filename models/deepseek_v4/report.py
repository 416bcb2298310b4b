"""What ran, as the JSON and the tables of the commands show it; read from the mesh and the compiled program."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jaxcoll import hlo
from jaxcoll.step import Step
from jaxcoll.topology import Topology
from models.deepseek_v4.config import Config
from models.deepseek_v4.decoder import Decoder


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


def plan_json(topology: Topology) -> dict[str, str | None]:
    """The path that every layer takes; None for what this path does not have.

    With one replica there is nothing to gather. The experts' sum is always one all_reduce over the world.
    """
    gathers = topology.attn_dp > 1
    return {
        "gather": "max_len" if gathers else "none",
        "combine": "all_reduce",
        "moe_backend": "gather",
        "dispatch": None,
        "wire": None,
        "kernels": "xla",
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
        notes.append(f"ignored {len(names)} tensors that no parameter needs, the first is {names[0]}")
    return notes


def print_topology(console: Console, decoder: Decoder) -> None:
    """One line about the mesh."""
    sizes = topology_json(decoder.topology)
    console.print(
        f"{sizes['world']} devices: attn_dp {sizes['attn_dp']} x attn_tp {sizes['attn_tp']} = "
        f"moe_ep {sizes['moe_ep']} x moe_tp {sizes['moe_tp']}"
    )


def collectives_table(records: Iterable[dict[str, Any]]) -> Table:
    """The collectives of `collectives_json`, summed over layers."""
    totals: dict[tuple[str, str], list[int]] = {}
    for record in records:
        total = totals.setdefault((record["kind"], record["group"]), [0, 0, 0])
        for i, key in enumerate(("count", "operand_bytes", "result_bytes")):
            total[i] += record[key]
    table = Table(title="collectives of one step, bytes per device", title_justify="left")
    for column in ("kind", "group"):
        table.add_column(column)
    for column in ("count", "operand_bytes", "result_bytes"):
        table.add_column(column, justify="right")
    for (kind, group), numbers in sorted(totals.items()):
        table.add_row(kind, group, *map(str, numbers))
    return table
