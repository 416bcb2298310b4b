"""`bench` and `bench-collectives` in a job of two processes: real times of both, one output, a trace of each."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from one_layer import write_one_layer

ROOT = Path(__file__).parent.parent
JAXCOLL = [sys.executable, "-m", "models.cli"]


def in_a_job(*words: str) -> dict[str, Any]:
    """Runs a command in two processes of two devices each; the JSON that the job prints."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))} | {"JAX_PLATFORMS": "cpu"}
    job = [*JAXCOLL, "launch", "--processes", "2", "--devices-per-process", "2", "--", *JAXCOLL, *words, "--json"]
    done = subprocess.run(job, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["topology"]["processes"], result["topology"]["local_devices"]) == (2, 2)
    return result


@pytest.mark.slow
def test_bench_reports_both_processes(tmp_path):
    model, traces = write_one_layer(tmp_path), tmp_path / "traces"
    result = in_a_job(
        "bench",
        str(model),
        "--attn-dp",
        "2",
        "--attn-tp",
        "2",
        "--batch",
        "4",
        "--steps",
        "5",
        "--profile",
        str(traces),
    )
    rows = result["per_process"]
    assert [row["process"] for row in rows] == [0, 1]
    assert all(0 < row["min_ms"] <= row["median_ms"] <= row["max_ms"] for row in rows)
    assert rows[0] | {"process": 1} != rows[1]  # each process's own clock
    slowest = rows[result["slowest_process"]]
    assert slowest["median_ms"] == result["ms_per_step"] == max(row["median_ms"] for row in rows)
    assert sorted(path.name for path in traces.iterdir()) == ["process-0", "process-1"]
    for folder in traces.iterdir():
        (trace,) = folder.rglob("*.xplane.pb")
        assert b"layer.0/moe.combine" in trace.read_bytes()


@pytest.mark.slow
def test_collectives_are_measured_across_processes():
    result = in_a_job("bench-collectives", "--attn-dp", "2", "--attn-tp", "2", "--sizes", "64,65536", "--rounds", "2")
    assert [(m["verb"], m["group_size"]) for m in result["measurements"][::4]] == [("all_reduce", n) for n in (2, 2, 4)]
    assert all(p["us"] > 0 for m in result["measurements"] for p in m["points"])
