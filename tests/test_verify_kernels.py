"""`verify --kernels pallas`, interpreted on one device: a process of its own for each, as kernels can take one down."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from golden import WIDE

ROOT = Path(__file__).parent.parent
SECONDS = 600

# The plain versions are taken away first, so that nothing but the kernels can have moved the rows.
VERIFY = """
import sys
from models.startup import prepare_devices
prepare_devices(1, cpu_only=True)
from pallas_kernels.moe_combine import plain as combine
from pallas_kernels.moe_dispatch import plain as dispatch
def taken_away(*arguments):
    raise AssertionError("a plain version ran where the Pallas kernels were asked for")
combine.combine_rows = dispatch.dispatch_rows = taken_away
from models.cli import main
sys.exit(main(["verify", *sys.argv[1:], "--attn-dp", "1", "--kernels", "pallas", "--json"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", [("--moe-backend", "all_to_all", "--dispatch", "normal"), ()], ids=["normal", "auto"])
def test_the_wide_fixture_decodes_to_its_trace_by_interpreted_kernels(words):
    """All its positions; without a named backend the kernels bring theirs, in the form of decoding, low latency."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_PLATFORMS", "JAX_NUM", "JAXCOLL"))}
    environment = kept | {"JAXCOLL_PALLAS_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", VERIFY, str(WIDE), *words]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert result["ok"] and result["greedy_match"] and result["topk_mismatches"] == 0 and result["steps"] == 23
    assert max(result["max_abs_err"].values()) < 5e-5
    plan = result["plan"]
    assert (plan["moe_backend"], plan["dispatch"]) == ("all_to_all", words[-1] if words else "low_latency")
    assert (plan["kernels"], plan["kernels_reason"]) == ("pallas", "it was asked for by name, to be interpreted")
