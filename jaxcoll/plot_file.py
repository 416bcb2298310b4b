"""The file that a picture goes to: whether it can be drawn and saved, asked before anything is measured; and saving.

matplotlib (the extra `plot`) is looked for, not imported.
"""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import Any

_SUFFIXES = (".png", ".svg", ".pdf")


class PlotError(ValueError):
    """A picture that cannot be drawn or saved; the message says why and what to do."""


def check_plot(path: Path) -> None:
    """Raises PlotError where no picture could be drawn or saved; for before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotError("a plot needs matplotlib, which is not installed: pip install 'jaxcoll[plot]'")
    if path.is_dir():
        raise PlotError(f"{path} is a folder; a plot needs a file's name")
    if path.suffix not in _SUFFIXES:
        raise PlotError(f"a plot's file must end in {', '.join(_SUFFIXES)}, which {str(path)!r} does not")
    if not path.parent.is_dir():
        raise PlotError(f"{path.parent} is not a folder, so no plot can be saved there")


def save_plot(figure: Any, path: Path) -> None:
    """Saves a matplotlib Figure; drawn in memory first, so that a failure leaves no half of a file."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:], dpi=150)
    path.write_bytes(drawn.getvalue())
