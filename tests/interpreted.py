"""Checks of interpreted kernels in a process of their own: a kernel that fails can take its process down, or hang.

A test file lists its checks, runs itself as a script with `run_here`, and asks for their outcomes with `run_apart`.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECONDS = 600


def run_apart(file: str, *only: str) -> dict[str, str]:
    """What each check of a test file raised, "" if nothing; all of them, or only those named."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, file, *only]
    done = subprocess.run(
        words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, f"the process died with {done.returncode}:\n{done.stderr[-3000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def run_here(checks: dict[str, Callable[[], None]]) -> None:
    """Runs the checks named on the command line, or all, and prints their outcomes as one line of JSON."""
    outcomes: dict[str, str] = {}
    for name in sys.argv[1:] or checks:
        failed = next((earlier for earlier, outcome in outcomes.items() if outcome), None)
        if failed is not None:
            outcomes[name] = f"not run: the interpreter is not to be used again after {failed} failed"
            continue
        try:
            checks[name]()
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
    print(json.dumps(outcomes))
