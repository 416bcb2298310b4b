"""The README's example runs as written, and prints what the README says it prints."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_prints_the_refusal_that_the_readme_quotes():
    code = re.search(r"<!-- example[^>]*-->\n```python\n(.*?)```", README, re.DOTALL)
    quoted = re.search(r"It prints `(.*?)`", README, re.DOTALL)
    assert code and quoted
    done = subprocess.run([sys.executable, "-c", code[1]], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, " ".join(quoted[1].split())), done.stderr


def test_every_command_that_the_readme_names_exists():
    from models.cli import COMMANDS

    named = set(re.findall(r"`jaxcoll ([\w-]+)", README)) - {"COMMAND"}
    assert named == set(COMMANDS)


def test_figures_stand_beside_the_command_that_makes_them():
    measured = README.split("## Measured, and not measured")[1].split("\n## ")[0]
    assert "MEASURED" not in measured and measured.count("`") >= 4
