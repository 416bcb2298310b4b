"""The picture of `jaxcoll plan`: step time over GPUs, and what each best candidate's step consists of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jaxcoll.plot_file import save_plot

# Okabe and Ito's palette, which people with any colour vision can tell apart.
_PARTS = (
    ("weights", "read weights", "#0072B2"),
    ("caches", "read caches", "#56B4E9"),
    ("compute", "compute", "#F0E442"),
    ("inside", "links inside machines", "#009E73"),
    ("between", "links between machines", "#E69F00"),
    ("latency", "latency of collectives", "#D55E00"),
)
_LINES = (("#0072B2", "o", "-"), ("#D55E00", "s", "--"), ("#009E73", "^", "-."), ("#000000", "D", ":"))


def draw(record: dict[str, Any], path: Path) -> None:
    """Draws a plan's record (the command's JSON): milliseconds of a step over GPUs, and its parts.

    Args:
        record: with at least one job.
        path: .png, .svg or .pdf.
    """
    tokens = sorted({job["tokens_per_gpu"] for job in record["jobs"]})
    figure = Figure(figsize=(9, 3.4 + 2.6 * len(tokens)), layout="constrained")
    axes = figure.subplots(1 + len(tokens), 1)
    _step_times(axes[0], record, tokens)
    for ax, count in zip(axes[1:], tokens, strict=True):
        _parts(ax, [job for job in record["jobs"] if job["tokens_per_gpu"] == count], count)
    handles = [Patch(color=colour) for _, _, colour in _PARTS]
    figure.legend(handles, [label for _, label, _ in _PARTS], fontsize=9, ncols=3, loc="outside lower center")
    save_plot(figure, path)


def _step_times(ax: Axes, record: dict[str, Any], tokens: list[int]) -> None:
    for i, count in enumerate(tokens):
        jobs = sorted((j for j in record["jobs"] if j["tokens_per_gpu"] == count), key=lambda j: j["gpus"])
        x, y = [j["gpus"] for j in jobs], [j["candidates"][0]["step_ms"] for j in jobs]
        fit = [j["candidates"][0]["fits"] for j in jobs]
        colour, marker, style = _LINES[i % len(_LINES)]
        ax.plot(x, y, color=colour, linestyle=style, zorder=1)
        faces = [colour if f else "white" for f in fit]
        name = f"{count} token{'s' if count > 1 else ''} per GPU"
        ax.scatter(x, y, c=faces, edgecolors=colour, marker=marker, s=45, zorder=2)
        ax.plot([], [], color=colour, linestyle=style, marker=marker, label=name)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    gpus = sorted({j["gpus"] for j in record["jobs"]})
    ax.set_xticks(gpus, [str(g) for g in gpus])
    ax.minorticks_off()
    low, high = ax.get_ylim()
    ticks = [t for e in range(-4, 6) for t in (10.0**e, 2 * 10.0**e, 5 * 10.0**e) if low <= t <= high]
    ax.set_yticks(ticks, [f"{t:g}" for t in ticks])
    ax.grid(alpha=0.3)
    ax.set_xlabel("GPUs")
    ax.set_ylabel("step, milliseconds")
    ax.set_title(
        f"{record['model']} on {record['target']}, {record['network']}, {record['context']} positions:\n"
        "best step that the hardware allows (predicted, not measured; hollow: does not fit the memory)",
        fontsize=10,
    )
    ax.legend(fontsize=9)


def _parts(ax: Axes, jobs: list[dict[str, Any]], tokens: int) -> None:
    jobs = sorted(jobs, key=lambda j: j["gpus"])
    bottoms = [0.0] * len(jobs)
    for key, _, colour in _PARTS:
        # Reading and multiplying go on at the same time: only the longer of both takes part.
        heights = [_shown(j["candidates"][0]["parts_ms"], key) for j in jobs]
        ax.bar(range(len(jobs)), heights, bottom=bottoms, color=colour, width=0.7)
        bottoms = [b + h for b, h in zip(bottoms, heights, strict=True)]
    for i, job in enumerate(jobs):
        best = job["candidates"][0]
        t = best["topology"]
        words = f"{t['attn_dp']}x{t['attn_tp']} | {t['moe_ep']}x{t['moe_tp']}\n" + best["name"].replace(" ", "\n", 1)
        ax.text(i, bottoms[i], words, ha="center", va="bottom", fontsize=6.5)
    ax.set_xticks(range(len(jobs)), [str(j["gpus"]) for j in jobs])
    ax.margins(y=0.35)
    ax.set_xlabel("GPUs  (above the bars: attn_dp x attn_tp | moe_ep x moe_tp, path)")
    ax.set_ylabel("milliseconds")
    ax.set_title(f"what the best step consists of, {tokens} token{'s' if tokens > 1 else ''} per GPU", fontsize=10)


def _shown(parts: dict[str, float], key: str) -> float:
    memory = parts["weights"] + parts["caches"]
    if key == "compute":
        return parts["compute"] if parts["compute"] > memory else 0.0
    if key in ("weights", "caches"):
        return parts[key] if parts["compute"] <= memory else 0.0
    return parts[key]
