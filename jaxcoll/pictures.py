"""Small arrays drawn cell by cell as each rank holds them; colours tell whose data a cell is. For notebooks and docs.

Needs matplotlib (extra `plot`), which is imported when something is drawn. Charts of sizes and times are in plots.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxcoll.explain import Stage
from jaxcoll.topology import Topology

# Okabe and Ito's palette, which colour-blind readers tell apart; the first eight name ranks, experts or paths.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
EVERYONE, NOBODY = -1, -2  # sources of a cell: the sum over all ranks; padding
INK = "#202020"
CELL, INCH = 1.2, 0.36  # a cell is CELL units wide and 1 high; a unit is INCH inches at notebook width
_SUM_COLOUR, _EMPTY_COLOUR = "#404040", "#FFFFFF"
_GAP, _LABEL, _ARROW, _TITLE, _MARGIN = 0.3, 2.2, 4.6, 1.3, 1.0  # units

Blocks = Sequence[np.ndarray]


def pyplot() -> Any:
    """matplotlib's pyplot.

    Raises:
        ImportError: matplotlib is not installed; the message is one sentence that says how to get it.
    """
    try:
        import matplotlib.pyplot
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'jaxcoll[plot]'") from error
    return matplotlib.pyplot


def on_each_rank(x: jax.Array, topology: Topology) -> list[np.ndarray]:
    """What each device holds of a global array, in rank order."""
    held = {shard.device: np.asarray(shard.data) for shard in x.addressable_shards}
    return [held[device] for device in topology.mesh.devices.flat]


def source_colour(source: int) -> str:
    """The colour of a cell that comes from rank `source`, from EVERYONE, or from NOBODY."""
    if source in (EVERYONE, NOBODY):
        return _SUM_COLOUR if source == EVERYONE else _EMPTY_COLOUR
    return COLOURS[source % len(COLOURS)]


def text_colour(background: str) -> str:
    """Black or white, whichever reads better on a #rrggbb background."""
    red, green, blue = (int(background[i : i + 2], 16) for i in (1, 3, 5))
    return "#FFFFFF" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else "#000000"


def draw_blocks(
    ax: Any,
    blocks: Blocks,
    sources: Blocks,
    *,
    title: str,
    labels: Sequence[str],
    left: float = 0.0,
    addends: bool = False,
    write: Callable[[Any], str] = "{:g}".format,
) -> tuple[float, float]:
    """Draws one block per rank, below each other, in data units of one cell's height.

    Args:
        ax: a matplotlib Axes whose y axis points down.
        blocks: values of each rank, [rows, columns] or [columns].
        sources: as `blocks`, the rank that each cell comes from, EVERYONE or NOBODY.
        title: above the blocks.
        labels: left of each block.
        left: where the cells begin; labels stand left of it.
        addends: hatch the cells, which are addends of one tensor.
        write: a value as text.

    Returns:
        Where the cells end: right, bottom.
    """
    right, top = left, 0.0
    for block, source, label in zip(map(np.atleast_2d, blocks), map(np.atleast_2d, sources), labels, strict=True):
        for (row, column), value in np.ndenumerate(block):
            colour = source_colour(int(source[row, column]))
            _draw_cell(ax, left + column * CELL, top + row, write(value), colour, addends)
        ax.text(left - 0.3, top + len(block) / 2, label, ha="right", va="center", fontsize=10, color=INK)
        right, top = max(right, left + CELL * block.shape[1]), top + len(block) + _GAP
    ax.text((left + right) / 2, -0.35, title, ha="center", va="bottom", fontsize=10.5, color=INK)
    return right, top - _GAP


def draw_move(
    verb: str,
    before: tuple[str, Blocks, Blocks],
    after: tuple[str, Blocks, Blocks],
    *,
    ax: Any = None,
    addends: bool = False,
    write: Callable[[Any], str] = "{:g}".format,
) -> None:
    """Draws what every rank holds before and after a verb, with an arrow in between.

    Args:
        verb: written over the arrow.
        before, after: (state, values per rank, sources per rank), see `draw_blocks`.
        ax: a matplotlib Axes; None makes a figure of the right size.
        addends: hatch the left side, whose cells are addends of one tensor.
        write: a value as text.
    """
    columns = [max(np.atleast_2d(b).shape[1] for b in side[1]) * CELL for side in (before, after)]
    rows = max(sum(len(np.atleast_2d(b)) + _GAP for b in side[1]) for side in (before, after))
    width, height = sum(columns) + 2 * _LABEL + _ARROW + _MARGIN, rows + _TITLE
    ax = ax if ax is not None else pyplot().figure(figsize=(width * INCH, height * INCH)).add_axes((0, 0, 1, 1))
    right, _ = draw_blocks(
        ax, *before[1:], title=before[0], labels=_ranks(before), left=_LABEL, addends=addends, write=write
    )
    start = right + _ARROW + _LABEL
    draw_blocks(ax, *after[1:], title=after[0], labels=_ranks(after), left=start, write=write)
    middle, style = rows / 2 - _GAP / 2, {"arrowstyle": "-|>", "lw": 2, "color": INK}
    ax.annotate("", xy=(right + _ARROW - 0.3, middle), xytext=(right + 0.4, middle), arrowprops=style)
    verb_style = {"ha": "center", "va": "bottom", "fontsize": 10.5, "family": "monospace", "color": INK}
    ax.text(right + _ARROW / 2, middle - 0.2, verb, **verb_style)
    ax.set(xlim=(0, width), ylim=(rows, -_TITLE), aspect="equal")
    ax.axis("off")


def draw_stages(stages: Sequence[Stage], topology: Topology, *, title: str = "") -> None:
    """Draws what every rank holds after each stage of a step: whose rows, whole or an addend.

    A box in a replica's colour holds that replica's rows, a grey one the rows of all; half a box is a piece of them;
    a hatched one holds addends.

    Args:
        stages: from `explain.stages`.
        topology: the step's mesh.
        title: above the picture.
    """
    below, left = len(stages) + 0.2, 4.2
    width, height = 0.55 * topology.world + 6.3, 0.42 * (below + _TITLE + 0.3)
    ax = pyplot().figure(figsize=(width, height)).add_axes((0, 0, 1, 1))
    for rank in range(topology.world):
        ax.text(rank + 0.5, -0.25, str(rank), ha="center", va="bottom", fontsize=9, color=INK)
    ax.text(-0.3, -0.25, "rank", ha="right", va="bottom", fontsize=9, color=INK)
    header = "state over (attn_dp, attn_tp), shape, collective"
    ax.text(topology.world + 0.3, -0.25, header, ha="left", va="bottom", fontsize=9, color=INK)
    for row, stage in enumerate(stages):
        for rank in range(topology.world):
            _draw_held(ax, rank, row, stage.states, *topology.attention_ranks(rank))
        ax.text(-0.3, row + 0.5, stage.scope.split("/")[-1], ha="right", va="center", fontsize=10, color=INK)
        states = ", ".join(stage.states[g][0] for g in ("attn_dp", "attn_tp"))
        text = f"({states})  {' x '.join(map(str, stage.shape)):<11} {stage.collective}"
        style = {"family": "monospace", "fontsize": 9.5, "color": INK}
        ax.text(topology.world + 0.3, row + 0.5, text, ha="left", va="center", **style)
    ax.text(topology.world / 2, -0.85, title, ha="center", va="bottom", fontsize=11, color=INK)
    ax.set(xlim=(-left, width / 0.55 - left), ylim=(below, -_TITLE - 0.3))
    ax.axis("off")


def _draw_held(ax: Any, x: float, y: float, states: Mapping[str, str], replica: int, part: int) -> None:
    """One rank after one stage: `states` over attn_dp and attn_tp."""
    from matplotlib.patches import Rectangle

    colour = COLOURS[replica % len(COLOURS)] if states["attn_dp"] == "SHARD" else "#999999"
    left, wide = x + 0.06, 0.88
    ax.add_patch(Rectangle((left, y + 0.1), wide, 0.8, facecolor="#FFFFFF", edgecolor="#C0C0C0"))
    if states["attn_tp"] == "SHARD":
        left, wide = left + part * wide / 2 % wide, wide / 2
    ax.add_patch(Rectangle((left, y + 0.1), wide, 0.8, facecolor=colour, edgecolor="#FFFFFF", linewidth=0))
    if "PARTIAL" in states.values():
        ax.add_patch(Rectangle((left, y + 0.1), wide, 0.8, fill=False, hatch="////", edgecolor="#FFFFFF", linewidth=0))


def _draw_cell(ax: Any, x: float, y: float, text: str, colour: str, addend: bool) -> None:
    from matplotlib.patches import Rectangle

    edge = "#B0B0B0" if colour == _EMPTY_COLOUR else "#FFFFFF"
    ax.add_patch(Rectangle((x, y), CELL, 1, facecolor=colour, edgecolor=edge, linewidth=1.5))
    back = None
    if addend:
        ax.add_patch(Rectangle((x, y), CELL, 1, fill=False, hatch="///", edgecolor="#FFFFFF90", linewidth=0))
        back = {"boxstyle": "round,pad=0.1", "facecolor": colour, "edgecolor": "none"}
    ink = text_colour(colour)
    ax.text(x + CELL / 2, y + 0.5, text, bbox=back, color=ink, fontsize=10, ha="center", va="center")


def _ranks(side: tuple[str, Blocks, Blocks]) -> list[str]:
    return [f"rank {r}" for r in range(len(side[1]))]
