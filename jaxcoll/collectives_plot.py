"""The picture of `jaxcoll bench-collectives`, a panel per verb; matplotlib (extra `plot`) is imported late."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxcoll.bench_collectives import VERBS, Measurement, Report
from jaxcoll.plot_file import check_plot, save_plot

# Okabe and Ito's palette, told apart with every common colour blindness; marker and dash repeat what the colour says.
# One for each name that a group can have.
_STYLES = (
    ("#0072B2", "o", "-"),
    ("#D55E00", "s", "--"),
    ("#009E73", "^", "-."),
    ("#CC79A7", "D", ":"),
    ("#000000", "v", (0, (6, 1, 1, 1, 1, 1))),
)


def save_collectives_plot(report: Report, path: Path, title: str) -> None:
    """Draws completed time over wire bytes, a panel per verb, a colour per group, with the fitted lines.

    Raises:
        PlotError: see `check_plot`.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7.5), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    groups = list(dict.fromkeys(m.names for m in report.measurements))
    for verb, axes in zip(VERBS, panels.flat, strict=True):
        mine = [m for m in report.measurements if m.verb == verb]
        _draw_panel(axes, mine, groups, report.launch_seconds)
        axes.set_title(verb)
    for axes in panels[-1]:
        axes.set_xlabel("wire bytes per device")
    for axes in panels[:, 0]:
        axes.set_ylabel("completed time, median (µs)")
    figure.suptitle(title)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    save_plot(figure, path)


def _draw_panel(axes: Any, measurements: Sequence[Measurement], groups: list, launch_seconds: float) -> None:
    for m in measurements:
        colour, marker, dash = _STYLES[groups.index(m.names)]
        sent = [p.wire_bytes for p in m.points]
        axes.plot(sent, [p.seconds * 1e6 for p in m.points], marker, color=colour, markersize=5)
        along = [sent[0] * (sent[-1] / sent[0]) ** (i / 60) for i in range(61)]
        label = f"{' = '.join(m.names)} ({m.group_size} ranks)"
        fitted = [m.line.seconds(x) * 1e6 for x in along]
        axes.plot(along, fitted, linestyle=dash, color=colour, marker=marker, markersize=5, markevery=[], label=label)
    nothing = {"color": "0.45", "linewidth": 1, "linestyle": (0, (1, 3))}
    axes.axhline(launch_seconds * 1e6, **nothing, label="a program that sends nothing")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda x, _: _binary(x))
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:,.10g}")
    axes.yaxis.set_minor_formatter(lambda y, _: f"{y:,.10g}" if f"{y:e}"[0] in "25" else "")
    axes.grid(True, which="major", color="0.88")


def _binary(size: float) -> str:
    """2048 -> 2 KiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:g} {unit}"
        size /= 1024
    return f"{size:g} GiB"
