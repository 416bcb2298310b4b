"""The house rules that can be read off the source: who imports whom, how long things are, what starts."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
STREET = ["models", "jaxcoll", "pallas_kernels"]  # each may import only what stands to its right, and itself

FILE_LINES, KERNEL_FILE_LINES = 400, 600
FUNCTION_LINES, LAYER_FORWARD_LINES = 40, 80


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Top-level names of absolute imports with their lines, those inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").split(".")[0], node.lineno


def imports_against_the_street(package: str, source: str) -> list[tuple[str, int]]:
    forbidden = {*STREET[: STREET.index(package)], "tests", "golden", "conftest"}
    return [(name, line) for name, line in imported(ast.parse(source)) if name in forbidden]


def long_functions(source: str, *, layer: bool) -> list[tuple[str, int]]:
    """Functions over the limit, from `def` to their last line, docstring included."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            forward = layer and node.name in ("__call__", "forward")
            if lines > (LAYER_FORWARD_LINES if forward else FUNCTION_LINES):
                found.append((node.name, lines))
    return found


def test_the_packages_are_where_the_project_says():
    found = {path.parent.relative_to(ROOT).as_posix().replace("/", ".") for path in sources(*STREET)}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found
    assert {package.split(".")[0] for package in found} == set(STREET)


@pytest.mark.parametrize("package", STREET)
def test_imports_run_one_way(package):
    paths = sources(package)
    assert paths
    against = {name_of(path): imports_against_the_street(package, path.read_text()) for path in paths}
    assert {name: lines for name, lines in against.items() if lines} == {}


def test_an_import_against_the_street_is_seen():
    source = "def f():\n    from models.errors import UserError\nimport pallas_kernels.x\nimport jaxcoll"
    assert imports_against_the_street("jaxcoll", source) == [("models", 2)]
    assert sorted(imports_against_the_street("pallas_kernels", source)) == [("jaxcoll", 4), ("models", 2)]
    assert imports_against_the_street("models", source) == []


def test_packages_import_only_declared_dependencies():
    needs = PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["plot"]  # imported late
    declared = {re.split(r"[<>=\[]", need)[0] for need in needs}
    known = declared | set(STREET) | set(sys.stdlib_module_names)
    found = {(name, name_of(path)) for path in sources(*STREET) for name, _ in imported(ast.parse(path.read_text()))}
    assert {(name, path) for name, path in found if name not in known} == set()


def test_files_are_short():
    def limit(path: Path) -> int:
        kernel = path.is_relative_to(ROOT / "pallas_kernels") and "kernel" in path.stem
        return KERNEL_FILE_LINES if kernel else FILE_LINES

    lengths = {path: len(path.read_text().splitlines()) for path in sources(*STREET, "tests")}
    assert {name_of(path): lines for path, lines in lengths.items() if lines > limit(path)} == {}


def test_functions_are_short():
    found = {p: long_functions(p.read_text(), layer=p.name == "layer.py") for p in sources(*STREET)}
    assert {name_of(path): functions for path, functions in found.items() if functions} == {}


def test_a_long_function_is_seen():
    source = "def __call__():\n" + "    pass\n" * 40
    assert long_functions(source, layer=False) == [("__call__", 41)]
    assert long_functions(source, layer=True) == []


def test_every_module_says_what_it_is():
    for path in sources(*STREET, "tests"):
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        assert docstring, f"{name_of(path)} has no docstring"


QUIET_IMPORT = """
import sys
import jaxcoll
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "importing jaxcoll started a device"
print(sorted({name.split(".")[0] for name in sys.modules} & {"matplotlib", "models", "tyro", "pytest"}))
"""


def test_importing_jaxcoll_starts_nothing():
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")} | {"JAX_PLATFORMS": "cpu"}
    words = [sys.executable, "-c", QUIET_IMPORT]
    shown = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, "[]\n", "")


def test_partial_sums_are_declared_only_where_they_are_made():
    allowed = {
        f"jaxcoll/{name}.py"
        for name in ("collectives", "ragged", "dispatch", "fused", "bench_paths", "bench_collectives")
    }
    allowed.add("models/deepseek_v4/moe.py")
    found = {name_of(path) for path in sources(*STREET) if "declare_partial(" in path.read_text()}
    assert found <= allowed
