"""Keeps the notebooks: `python notebooks/render.py pair` or `pictures`.

`pair` makes every .ipynb from its .md, without outputs. `pictures` runs them and saves the picture of each cell that is
tagged picture-NAME as docs/pictures/NAME.png.
"""

from __future__ import annotations

import argparse
import base64
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
PICTURES = HERE.parent / "docs" / "pictures"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def pair(text: Path) -> None:
    """Writes the .ipynb of one .md: the same cells, numbered, with no outputs."""
    notebook = jupytext.read(text)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    notebook.metadata = {"kernelspec": KERNEL, "jupytext": {"formats": "ipynb,md"}}
    nbformat.write(notebook, text.with_suffix(".ipynb"))


def executed(path: Path, timeout: int = 300) -> Any:
    """A notebook (.md or .ipynb) with the outputs of a fresh kernel; a cell that raises raises here."""
    notebook = jupytext.read(path)
    folder = {"metadata": {"path": str(path.parent)}}
    return NotebookClient(notebook, timeout=timeout, kernel_name=KERNEL["name"], resources=folder).execute()


def picture_names(notebook: Any) -> dict[str, int]:
    """NAME -> position of the cell tagged picture-NAME."""
    tags = {tag: i for i, cell in enumerate(notebook.cells) for tag in cell.metadata.get("tags", ())}
    return {tag.removeprefix("picture-"): i for tag, i in tags.items() if tag.startswith("picture-")}


def save_pictures(text: Path) -> list[Path]:
    """Runs one notebook and saves its tagged pictures."""
    notebook, saved = executed(text), []
    for name, cell in picture_names(notebook).items():
        shown = [o["data"]["image/png"] for o in notebook.cells[cell].outputs if "image/png" in o.get("data", {})]
        path = PICTURES / f"{name}.png"
        path.write_bytes(base64.b64decode(shown[-1]))
        saved.append(path)
    return saved


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("pair", "pictures"))
    parser.add_argument("only", nargs="*", type=Path, help="some .md files; default all")
    given = parser.parse_args()
    for text in given.only or sorted(HERE.glob("[0-9]*.md")):
        if given.command == "pair":
            pair(text)
        else:
            print(*(p.name for p in save_pictures(text)), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
