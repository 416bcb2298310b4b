"""The pages in docs/: their examples run, their pictures and commands exist.

`make docs` builds them with every warning an error.
"""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def named(page: Path) -> str:
    return page.relative_to(ROOT / "docs").as_posix()


@pytest.mark.parametrize("page", [p for p in PAGES if EXAMPLE.search(p.read_text())], ids=named)
def test_its_examples_run(page):
    scope: dict = {}
    for number, code in enumerate(EXAMPLE.findall(page.read_text())):
        exec(compile(code, f"{named(page)} example {number}", "exec"), scope)


def test_examples_check_what_they_say():
    assert all("assert" in code for page in PAGES for code in EXAMPLE.findall(page.read_text()))


def test_every_command_exists():
    from models.cli import COMMANDS

    text = "".join(page.read_text() for page in [*PAGES, *(ROOT / "notebooks").glob("[0-9]*.md")])
    commands = set(re.findall(r"`jaxcoll (\w+)", text)) | set(re.findall(r"^jaxcoll (\w+) .*--", text, re.MULTILINE))
    assert commands and commands <= set(COMMANDS)


def test_every_picture_says_what_made_it():
    for page in (p for p in PAGES if p.name != "notebooks.md"):
        text = page.read_text()
        for after in text.split("](pictures/")[1:]:
            assert "notebooks/0" in after.split("\n\n")[1], f"{named(page)}: {after.splitlines()[0]}"


def test_two_names_on_a_line_document_two_parameters():
    spec = importlib.util.spec_from_file_location("split_names", ROOT / "docs" / "split_names.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = "Does.\n\nArgs:\n    a, b: first\n        more\n    c: other, and: not split"
    assert module.split_names(text) == (
        "Does.\n\nArgs:\n    a: first\n        more\n    b: first\n        more\n    c: other, and: not split"
    )
