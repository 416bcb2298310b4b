"""Jobs of several processes that go well: the numbers of one process, nothing per step, and only the weights needed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import one_layer
import pytest
from golden import TINY, WIDE
from jobs import ROOT, environment, run_job
from safetensors.numpy import load_file

from models import cli

CLOSE = 5e-5  # another order of sums; what was measured is 1e-5
SAME = ("ok", "topk_mismatches", "greedy_match", "generated", "steps", "compiles", "plan")
STEPS = 200


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return one_layer.write_one_layer(tmp_path_factory.mktemp("layer"))


def launched(processes: int, devices: int, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """A jaxcoll command in a job; its stdout is what a script would read."""
    sizes = ["--processes", processes, "--devices-per-process", devices // processes]
    line = ["-m", "models.cli", "launch", *sizes, "--", sys.executable, "-m", "models.cli", *words]
    command = [sys.executable, *map(str, line)]
    return subprocess.run(command, env=environment(), cwd=ROOT, text=True, timeout=240, capture_output=True)


def unnamed(collective: dict) -> dict:
    """Without the names of its axes: over several hosts an axis is cut in two, and the groups are the same."""
    return {name: value for name, value in collective.items() if name != "group"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fixture", "processes", "sizes"),
    [
        (TINY, 2, "--attn-dp 4 --attn-tp 2"),
        (WIDE, 4, "--attn-dp 4 --attn-tp 2 --moe-ep 4"),
    ],
)
def test_verify_gives_the_numbers_of_one_process(fixture, processes, sizes, capsys):
    words = ["verify", str(fixture), *sizes.split(), "--devices", "8", "--json"]
    assert cli.main(words) == 0
    alone = json.loads(capsys.readouterr().out)
    job = launched(processes, 8, *words)
    assert job.returncode == 0, job.stderr
    together = json.loads(job.stdout)
    assert {name: together[name] for name in SAME} == {name: alone[name] for name in SAME}
    assert [unnamed(c) for c in together["collectives"]] == [unnamed(c) for c in alone["collectives"]]
    assert max(together["max_abs_err"].values()) < CLOSE
    assert together["topology"] == alone["topology"] | {"processes": processes, "local_devices": 8 // processes}
    assert re.search(
        rf"^\[0\] jaxcoll: {processes} processes agree on program decode: [\d.]+ ms of work", job.stderr, re.M
    )
    assert "[1]" not in job.stderr  # only process 0 speaks


@pytest.mark.slow
def test_rows_go_by_host_first_where_there_are_several():
    """8 x 1 over two hosts: attn_dp is two axes, of which the outer one tells the hosts apart."""
    words = ["verify", str(WIDE), "--attn-dp", "8", "--moe-backend", "all_to_all", "--dispatch", "normal", "--json"]
    job = launched(2, 8, *words)
    assert job.returncode == 0, job.stderr
    found = json.loads(job.stdout)
    assert found["ok"] and max(found["max_abs_err"].values()) < CLOSE and found["plan"]["levels"] == "hosts"
    groups = {c["group"] for c in found["collectives"] if c["kind"] == "all_to_all"}
    assert groups == {"attn_dp_outer", "attn_dp_inner"}


@pytest.mark.slow
def test_generate_and_bench_run_unchanged(layer, capsys):
    words = ["generate", str(layer), "--prompt-ids", "5,17,9", "--prompt-ids", "2"]
    words += ["--attn-dp", "1", "--attn-tp", "2"]  # one replica that lives in both processes
    assert cli.main(words) == 0
    alone = capsys.readouterr().out
    job = launched(2, 2, *words)
    assert (job.returncode, job.stdout) == (0, alone), job.stderr
    job = launched(2, 2, "bench", layer, "--devices", "2", "--steps", "4", "--batch", "3", "--json")
    assert job.returncode == 0, job.stderr
    timed = json.loads(job.stdout)
    assert (timed["compiles"], timed["topology"]["processes"], timed["topology"]["local_devices"]) == (1, 2, 1)
    assert timed["ms_per_step"] > 0


@pytest.fixture(scope="module")
def idle(layer: Path) -> dict[int, dict[str, dict]]:
    """What the processes found of STEPS steps with idle replicas, in jobs of 1 and 2 processes."""
    found = {}
    for processes in (1, 2):
        job = run_job(
            [ROOT / "tests" / "idle_worker.py", str(layer), str(STEPS)], processes, devices_per_process=4 // processes
        )
        assert [p.code for p in job.values()] == [0] * processes, job[0].err
        found[processes] = json.loads(job[0].out.splitlines()[-1])
    return found


def test_replicas_idle_at_random_give_the_tokens_of_one_process(idle):
    [alone] = idle[1].values()
    together = {replica: tokens for mine in idle[2].values() for replica, tokens in mine["heard"].items()}
    assert together == alone["heard"]
    assert {rank: sorted(mine["heard"]) for rank, mine in idle[2].items()} == {"0": ["0", "1"], "1": ["2", "3"]}
    assert all(len(tokens) > STEPS / 10 for tokens in together.values())
    assert 0 < alone["idle"] == idle[2]["0"]["idle"] == idle[2]["1"]["idle"] < STEPS


def test_steps_compile_and_agree_on_nothing_new(idle):
    for mine in idle[2].values():
        assert mine["warm"] == mine["end"] and mine["end"][0] == 1 and mine["end"][1] > 0
    assert idle[1]["0"]["end"] == [1, 0]


def test_each_process_reads_the_weights_of_its_own_devices_only(idle, layer):
    tensors = load_file(layer / "model.safetensors")
    whole = sum(tensor.nbytes for tensor in tensors.values())
    cut = sum(tensor.nbytes for name, tensor in tensors.items() if "experts." in name)  # the shared expert as well
    assert 0 < cut < whole
    assert idle[1]["0"]["read"] == whole
    assert [mine["read"] for mine in idle[2].values()] == [whole - cut / 2] * 2


def test_integer_sums_of_big_chunks_are_exact():
    job = run_job([ROOT / "tests" / "canary_worker.py"], 2, devices_per_process=2)
    for process in job.values():
        assert process.code == 0, process.err
        assert process.out.splitlines()[-1] == "exact 20"


def test_devices_are_those_of_the_whole_job(layer):
    refused = launched(2, 8, "verify", layer, "--devices", "4")
    assert (refused.returncode, refused.stdout) == (2, "")
    said = "the job's 2 processes show 8 devices, but the command is for 4; --devices is the sum over all processes"
    assert f"[0] jaxcoll: {said}\n" in refused.stderr and f"[1] jaxcoll: {said}\n" in refused.stderr
