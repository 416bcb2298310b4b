"""`jaxcoll bench-collectives`: alpha and bandwidth of every verb over every group of the topology. No model runs."""

from __future__ import annotations

import json
from typing import Any

import jax
from rich.console import Console

from jaxcoll.bench_collectives import Measurement, Report, measure
from jaxcoll.collectives_plot import save_collectives_plot
from jaxcoll.topology import Topology
from models.deepseek_v4 import report
from models.errors import UserError
from models.options import BenchCollectivesOptions
from models.progress import Working


def run(options: BenchCollectivesOptions) -> int:
    """Runs the command. In a job of several processes all measure, and process 0 reports its own times.

    Raises:
        UserError: one device, or a plot that cannot be made; before anything is measured.
    """
    topology = Topology(*options.topology.sizes)
    if topology.world == 1:
        raise UserError("one device sends nothing to another; bench-collectives needs at least --devices 2")
    leads = jax.process_index() == 0
    if options.plot and leads:
        report.check_plot_option(options.plot)
    with Working() as working:
        working.stage("measuring")
        found = measure(topology, options.sizes, options.rounds, working.advance)
    if not leads:
        return 0
    sizes = report.topology_json(topology)
    if options.plot:
        save_collectives_plot(found, options.plot, f"{report.topology_line(sizes)}, {jax.default_backend()}")
    if options.json:
        print(json.dumps(_record(found, sizes, options.rounds)))
    else:
        _show(found, report.topology_line(sizes), options)
    return 0


def _record(found: Report, sizes: dict[str, int], rounds: int) -> dict[str, Any]:
    return {
        "launch_us": round(found.launch_seconds * 1e6, 2),
        "rounds": rounds,
        "skipped": list(found.skipped),
        "measurements": [_measurement(m) for m in found.measurements],
        "topology": sizes,
    }


def _measurement(m: Measurement) -> dict[str, Any]:
    return {
        "verb": m.verb,
        "groups": list(m.names),
        "group_size": m.group_size,
        "alpha_us": round(m.line.alpha_seconds * 1e6, 2),
        "bandwidth_gb_s": round(m.line.bandwidth / 1e9, 4) if m.line.bandwidth else None,
        "residual": round(m.line.residual, 4),
        "points": [
            {"buffer_bytes": p.buffer_bytes, "wire_bytes": p.wire_bytes, "us": round(p.seconds * 1e6, 2)}
            for p in m.points
        ],
    }


def _show(found: Report, topology: str, options: BenchCollectivesOptions) -> None:
    console = Console(highlight=False)
    table = report.new_table("verb", "group", right=("ranks", "alpha us", "GB/s", "residual"))
    for m in found.measurements:
        speed = f"{m.line.bandwidth / 1e9:.2f}" if m.line.bandwidth else "-"
        group = ", ".join(m.names)
        fitted = f"{m.line.alpha_seconds * 1e6:.0f}", speed, f"{m.line.residual:.1%}"
        table.add_row(m.verb, group, str(m.group_size), *fitted)
    report.print_table(console, f"T = alpha + wire bytes per device / bandwidth, on {topology}", table)
    console.print(
        f"\nMedians of {report.counted(options.rounds, 'round')}, completed; alpha includes starting a program, "
        f"{found.launch_seconds * 1e6:.0f} us for one that sends nothing.",
        soft_wrap=True,
    )
    if any(m.line.bandwidth is None for m in found.measurements):
        console.print("-: the time did not grow with the bytes.")
    if found.skipped:
        console.print(f"Not measured, having one member: {', '.join(found.skipped)}.")
    if options.plot:
        console.print(f"Plot saved to {options.plot}", soft_wrap=True)
