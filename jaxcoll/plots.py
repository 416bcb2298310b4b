"""Charts of sizes, times and loads: bytes by path, alpha-beta fits, a layer's timeline, expert load.

Each takes plain numbers or records and draws; it measures and fits nothing. Needs matplotlib (extra `plot`), imported
when something is drawn. Small arrays cell by cell are in pictures.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.filesize import decimal

from jaxcoll.pictures import COLOURS, INK, pyplot
from jaxcoll.timeline import Bar

NOTEBOOK_WIDTH = 7.5  # inches
_KIB = 1024
_MARKERS = "osD^vP*X"
_LANES = ("communication", "computation")


def bytes_by_path(records: Sequence[Mapping[str, Any]], *, title: str = "", ax: Any = None) -> Any:
    """Draws what one device sends on every way to the experts and back.

    Args:
        records: one per way, with `gather`, `combine`, `gather_wire_bytes` and `combine_wire_bytes` (per device), as
            `bench_paths.measure` returns them.
        title: above the chart.
        ax: a matplotlib Axes; None makes a figure.

    Returns:
        The Axes.
    """
    ax = ax if ax is not None else _axes(1.0 + 0.36 * len(records))
    names = [f"{r['gather']} + {r['combine']}" for r in records]
    there = np.array([r["gather_wire_bytes"] for r in records]) / _KIB
    home = np.array([r["combine_wire_bytes"] for r in records]) / _KIB
    ax.barh(names, there, color=COLOURS[0], label="to the experts")
    bars = ax.barh(names, home, left=there, color=COLOURS[1], label="and back")
    ax.bar_label(bars, [f"{total:,.0f}" for total in there + home], padding=3, fontsize=9)
    ax.invert_yaxis()
    ax.set(xlabel="wire bytes per device [KiB]", xlim=(0, 1.12 * max((there + home).max(), 1e-9)))
    ax.set_title(title, fontsize=11)
    ax.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16 - 0.9 / len(records)), ncols=2)
    return ax


def alpha_beta(
    measured: Mapping[str, Sequence[tuple[float, float]]],
    fits: Mapping[str, tuple[float, float]],
    *,
    title: str = "",
    ax: Any = None,
) -> Any:
    """Draws times of collectives over their size, and the lines alpha + S/B that were fitted to them.

    Args:
        measured: name -> (wire bytes per device, seconds) of each size.
        fits: the same names -> (alpha in seconds, B in bytes per second).
        title: above the chart.
        ax: a matplotlib Axes; None makes a figure.

    Returns:
        The Axes; both its axes are logarithmic.

    Raises:
        ValueError: a name is measured but not fitted, or fitted but not measured.
    """
    if set(measured) != set(fits):
        raise ValueError(f"measured {sorted(measured)} and fitted {sorted(fits)} must have the same names")
    ax = ax if ax is not None else _axes(4.2)
    for i, (name, points) in enumerate(measured.items()):
        sizes, seconds = np.array(sorted(points), float).T
        alpha, bandwidth = fits[name]
        line = np.geomspace(sizes[0], sizes[-1], 100)
        label = f"{name}: {alpha * 1e6:.3g} µs + S / {bandwidth / 1e9:.3g} GB/s"
        colour = COLOURS[i % len(COLOURS)]
        ax.plot(line / _KIB, (alpha + line / bandwidth) * 1e6, color=colour, label=label)
        ax.plot(sizes / _KIB, seconds * 1e6, _MARKERS[i % len(_MARKERS)], color=colour, markersize=6)
    ax.set(xscale="log", yscale="log", xlabel="wire bytes per device, S [KiB]", ylabel="time [µs]")
    ax.set_title(title, fontsize=11)
    ax.grid(alpha=0.3)
    ax.legend(frameon=False, fontsize=9)
    return ax


def timeline(bars: Sequence[Bar], *, title: str = "", ax: Any = None) -> Any:
    """Draws the schedule of a compiled program in two lanes, communication above computation.

    A collective that is asynchronous spans everything between its start and its end; where the other lane is busy under
    it, it is hidden. Positions are those in the schedule: they say what runs beside what, not how long it takes.

    Args:
        bars: from `timeline.bars`.
        title: above the chart.
        ax: a matplotlib Axes; None makes a figure.

    Returns:
        The Axes; collectives are numbered, and listed beside it with their wire bytes per device.
    """
    ax = ax if ax is not None else _axes(2.9, width=10)
    scopes = list(dict.fromkeys(_part(b) for b in bars if b.lane == "computation"))
    colours = {scope: COLOURS[i % len(COLOURS)] for i, scope in enumerate(scopes)}
    for bar in bars:
        lane, length = _LANES.index(bar.lane), bar.end - bar.start
        colour = colours[_part(bar)] if bar.lane == "computation" else "#404040"
        ax.barh(lane, length, left=bar.start, height=0.55, color=colour, edgecolor="white", linewidth=0.4)
    end = max(bar.end for bar in bars)
    _label_collectives(ax, [b for b in bars if b.lane == "communication"])
    for part, colour in colours.items():
        ax.barh(1, 0, color=colour, label=part)
    ax.set(xlim=(-0.01 * end, 1.01 * end), xlabel="position in the schedule [instructions]")
    ax.set(yticks=(0, 1), yticklabels=_LANES, ylim=(1.5, -0.9))
    ax.set_title(title, fontsize=11)
    ax.legend(frameon=False, fontsize=9, ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    return ax


def expert_load(rows: Sequence[int], ranks: int, *, title: str = "", ax: Any = None) -> Any:
    """Draws how many rows every expert gets, in the colour of the rank that owns it.

    Args:
        rows: per expert; rank r owns the r-th of `ranks` equal parts.
        ranks: owners.
        title: above the chart.
        ax: a matplotlib Axes; None makes a figure.

    Returns:
        The Axes; its dashed line is the mean.

    Raises:
        ValueError: the ranks do not divide the experts.
    """
    if len(rows) % ranks:
        raise ValueError(f"{len(rows)} experts do not divide by {ranks} ranks")
    ax = ax if ax is not None else _axes(3.0)
    local, mean = len(rows) // ranks, float(np.mean(rows))
    for rank in range(ranks):
        experts = range(rank * local, (rank + 1) * local)
        ax.bar(experts, [rows[e] for e in experts], color=COLOURS[rank % len(COLOURS)], label=f"rank {rank}")
    ax.axhline(mean, color=INK, linestyle="--", linewidth=1, label=f"mean {mean:.3g}")
    ax.set(xlabel="expert [number]", ylabel="load [rows]")
    ax.locator_params(integer=True)
    ax.set_title(title, fontsize=11)
    ax.legend(frameon=False, fontsize=9, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    return ax


def _part(bar: Bar) -> str:
    """What a bar's colour stands for: attn of attn.all_reduce."""
    return bar.scope.split(".")[0]


def _label_collectives(ax: Any, bars: Sequence[Bar]) -> None:
    """Numbers the collectives above their lane, and lists them beside the chart."""
    for number, bar in enumerate(bars, 1):
        at = (bar.start + bar.end) / 2, -0.42 - 0.2 * (number % 2)
        ax.text(*at, str(number), ha="center", va="center", fontsize=9, color=INK)
    lines = [f"{i:>2} {b.label}, {decimal(int(b.wire_bytes))}".replace("\n", "\n   ") for i, b in enumerate(bars, 1)]
    ax.text(1.02, 0.98, "\n".join(lines), va="top", fontsize=9, color=INK, transform=ax.transAxes)


def _axes(height: float, width: float = NOTEBOOK_WIDTH) -> Any:
    _, ax = pyplot().subplots(figsize=(width, height), layout="constrained")
    return ax
