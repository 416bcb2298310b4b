"""`bench` and `bench-collectives` in jobs of two processes: real times, one output, a trace of each, a slow cable."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hosts import Hosts
from one_layer import write_one_layer

ROOT = Path(__file__).parent.parent
JAXCOLL = [sys.executable, "-m", "models.cli"]
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
ENVIRONMENT |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_backend_optimization_level=0"}
ENVIRONMENT |= {"JAXCOLL_START_TIMEOUT": "90"}  # a loaded machine imports slowly


def in_a_job(*words: str) -> dict[str, Any]:
    """Runs a command in two processes of two devices each; the JSON that the job prints."""
    job = [*JAXCOLL, "launch", "--processes", "2", "--devices-per-process", "2", "--", *JAXCOLL, *words, "--json"]
    done = subprocess.run(job, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
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
def test_alpha_is_the_cables():
    """Two hosts whose frames take 10 ms each way: no collective completes sooner, a program that sends nothing does."""
    words = ["bench-collectives", "--devices", "2", "--sizes", "64,4096", "--rounds", "3", "--json"]
    with Hosts(2, relayed=(1,)) as hosts:
        hosts.delay(1, 0.010)
        job = [hosts.start(rank, [*JAXCOLL, *words], ENVIRONMENT | hosts.job(rank)) for rank in range(2)]
        said = [process.communicate(timeout=200) for process in job]
        assert [process.returncode for process in job] == [0, 0], said
    result = json.loads(said[0][0])
    assert said[1][0] == "" and result["topology"]["processes"] == 2
    assert [m["verb"] for m in result["measurements"]] == ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]
    for m in result["measurements"]:
        assert all(p["us"] > 10_000 for p in m["points"]) and m["alpha_us"] > 9_000
    assert result["launch_us"] < 10_000
