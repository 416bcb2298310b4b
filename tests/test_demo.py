"""`jaxcoll demo`: what a newcomer sees, that the right trace is compared, and the exit code."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from golden import TINY
from programs import shared_programs
from safetensors.numpy import load_file, save_file

from models import cli
from models.deepseek_v4 import demo

ROOT = Path(__file__).parent.parent
GREEDY = load_file(TINY / "trace.safetensors")["greedy_ids"].tolist()


@pytest.fixture(scope="module", autouse=True)
def one_program() -> Iterator[None]:
    with shared_programs():
        yield


def words_of(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


@pytest.mark.slow
def test_a_bare_demo_in_a_process_of_its_own(tmp_path):
    """As `make demo` runs it: 8 CPU devices, optimised code, no settings, a narrow terminal; nothing is written."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(
        [sys.executable, "-m", "models.cli", "demo"],
        cwd=tmp_path,
        env=kept | {"PYTHONPATH": str(ROOT), "COLUMNS": "80", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == [] and "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    lines = words_of(done.stdout)
    assert lines[1] == "8 devices: attn_dp 4 x attn_tp 2 = moe_ep 8 x moe_tp 1"
    for line in GROUPS_4X2 + STAGES_4X2:
        assert line in lines, line
    assert_generated_and_equal(lines, [0, 1, 2, 3])


GROUPS_4X2 = [
    "attn_dp attn_dp 0,2,4,6 1,3,5,7",
    "attn_tp attn_tp 0,1 2,3 4,5 6,7",
    "moe_ep attn_dp,attn_tp 0,1,2,3,4,5,6,7",
    "moe_tp - 0 1 2 3 4 5 6 7",
]
STAGES_4X2 = [
    "attn 2 x 64 SHARD PARTIAL -",
    "attn.all_reduce 2 x 64 SHARD REPLICA all_reduce(attn_tp)",
    "moe.gather 8 x 64 REPLICA REPLICA all_gather(world)",
    "moe 8 x 64 PARTIAL PARTIAL -",
    "moe.combine 2 x 64 SHARD REPLICA all_reduce(world)",
    "hc_ffn.write 2 x 4 x 64 SHARD REPLICA -",
]


def assert_generated_and_equal(lines: list[str], replicas: list[int]) -> None:
    for request, (ids, replica) in enumerate(zip(GREEDY, replicas, strict=True)):
        assert f"request {request} on replica {replica} continues with {', '.join(map(str, ids))}" in lines
    assert lines[-2].startswith("equal to the golden trace: largest difference ")
    assert float(lines[-2].split()[7].rstrip(",")) < 5e-5
    assert lines[-1] == "36 steps, 1 compiled program; greedy ids match; 0 expert choices differ"


MESH = ["--attn-dp", "2", "--attn-tp", "2", "--moe-ep", "2"]


def test_another_mesh(capsys):
    """Experts cut in width: moe_tp has members, and two requests share a replica."""
    assert cli.main(["demo", *MESH]) == 0
    out, err = capsys.readouterr()
    lines = words_of(out)
    assert err == "" and lines[1] == "4 devices: attn_dp 2 x attn_tp 2 = moe_ep 2 x moe_tp 2"
    for line in (
        "attn_dp attn_dp 0,2 1,3",
        "moe_ep attn_dp 0,2 1,3",
        "moe_tp attn_tp 0,1 2,3",
        "attn.all_reduce 2 x 64 SHARD REPLICA all_reduce(attn_tp)",
        "moe 4 x 64 PARTIAL PARTIAL -",
    ):
        assert line in lines, line
    assert_generated_and_equal(lines, [0, 0, 1, 1])


def test_a_trace_that_differs_is_exit_1(capsys, tmp_path, monkeypatch):
    for file in ("config.json", "model.safetensors"):
        shutil.copy(TINY / file, tmp_path / file)
    trace = load_file(TINY / "trace.safetensors")
    trace["greedy_ids"][3, 7] = (trace["greedy_ids"][3, 7] + 1) % 128
    save_file(trace, tmp_path / "trace.safetensors")
    monkeypatch.setattr(demo, "packaged_model", lambda: contextlib.nullcontext(tmp_path))
    assert cli.main(["demo", *MESH]) == 1
    lines = words_of(capsys.readouterr().out)
    assert lines[-2].startswith("NOT equal to the golden trace: ")
    assert lines[-1] == "36 steps, 1 compiled program; greedy ids DIFFER; 0 expert choices differ"


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (["--attn-dp", "1", "--attn-tp", "8"], "attn_tp=8 does not divide o_groups=4"),
        (["--max-seq-len", "35"], "the trace needs 36 positions, past the cache of 35; see --max-seq-len"),
        (["--devices", "9", "--attn-tp", "2"], "--devices 9 is not a multiple of --attn-tp 2"),
    ],
)
def test_what_cannot_be_shown(words, needed, capsys):
    assert cli.main(["demo", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"jaxcoll: {needed}\n")
