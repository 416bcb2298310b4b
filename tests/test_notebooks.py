"""Every notebook runs from top to bottom in a fresh kernel, warns of nothing, and is stored without outputs.

The numbers that a notebook is about are asserted in its own cells.
"""

import importlib.util
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import pytest

ROOT = Path(__file__).parent.parent
TEXTS = sorted((ROOT / "notebooks").glob("[0-9]*.md"))
MOST_CELLS = 60


def loaded_render() -> Any:
    spec = importlib.util.spec_from_file_location("render", ROOT / "notebooks" / "render.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


render = loaded_render()


def cells_of(notebook: Any) -> list[tuple[str, str, list[str]]]:
    return [(c.cell_type, c.source, c.metadata.get("tags", [])) for c in notebook.cells]


@pytest.fixture(scope="module")
def fonts() -> None:
    """matplotlib lists the fonts of a new machine once, and says so on stderr."""
    import matplotlib.font_manager

    assert matplotlib.font_manager.fontManager.ttflist


def test_the_promised_notebooks_are_there():
    assert [text.name[:2] for text in TEXTS] == ["01", "02", "03", "04", "05", "06"]
    assert {text.stem for text in TEXTS} == {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.stem)
def test_it_runs(text, fonts):
    notebook = render.executed(text.with_suffix(".ipynb"))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    # XLA may log to stderr on a busy machine; a warning of Python's says so.
    assert [o.text for o in outputs if o.output_type == "stream" and "Warning: " in o.text] == []
    for name, cell in render.picture_names(notebook).items():
        assert any("image/png" in o.get("data", {}) for o in notebook.cells[cell].outputs), f"{name} shows no picture"


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.stem)
def test_the_notebook_equals_its_text_and_holds_no_output(text):
    notebook = nbformat.read(text.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(notebook)
    assert cells_of(notebook) == cells_of(jupytext.read(text))
    assert len(notebook.cells) < MOST_CELLS
    assert all(not c.outputs and c.execution_count is None for c in notebook.cells if c.cell_type == "code")


def test_each_picture_is_made_by_a_notebook_and_shown_in_the_docs():
    made = {name for text in TEXTS for name in render.picture_names(jupytext.read(text))}
    assert made == {path.stem for path in render.PICTURES.glob("*.png")}
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    assert {name for name in made if f"pictures/{name}.png" not in pages} == set()
