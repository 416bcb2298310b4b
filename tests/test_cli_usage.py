"""The command line alone: what each command is asked to do; every misuse is one sentence and exit 2."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from jaxcoll.states import StateError
from jaxcoll.topology import TopologyError
from models import cli
from models.errors import UserError
from models.options import (
    BenchOptions,
    DemoOptions,
    GenerateOptions,
    RunOptions,
    TopologyOptions,
    TopologySizes,
    VerifyOptions,
)
from models.startup import gpu_present

ROOT = Path(__file__).parent.parent


@pytest.fixture
def asked(monkeypatch) -> list[RunOptions]:
    """The options that commands were run with; each stands in for the real work and returns 1."""
    seen: list[RunOptions] = []
    for command in cli.COMMANDS:
        module = types.ModuleType(f"models.deepseek_v4.{command.replace('-', '_')}")
        module.run = lambda options: seen.append(options) or 1  # pyright: ignore[reportAttributeAccessIssue]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return seen


def test_defaults(asked):
    assert [cli.main(words) for words in (["demo"], ["verify", "a"], ["bench", "b"])] == [1, 1, 1]
    assert asked == [DemoOptions(), VerifyOptions(Path("a")), BenchOptions(Path("b"), batch=8, steps=24)]
    assert all(options.max_seq_len is None and options.topology.sizes == (4, 2, 8) for options in asked)


def test_every_option_arrives(asked):
    sizes = "--attn-dp 3 --attn-tp=2 --moe_ep 6 --devices 6 --max-seq-len 32".split()
    topology = TopologyOptions(attn_dp=3, attn_tp=2, moe_ep=6, devices=6)
    assert cli.main(["verify", "a b", *sizes, "--requests-per-replica", "2,0,1", "--json"]) == 1
    assert cli.main(["generate", *sizes, "--prompt-ids", "5, 17,9", "d", "--prompt-ids", "0"]) == 1
    assert cli.main(["generate", "d", "--prompt-ids=1", "--max-new-tokens", "3", "--json"]) == 1
    assert cli.main(["bench", "d", "--batch", "2", "--steps", "5", "--json"]) == 1
    assert cli.main(["verify", "--", "--odd-name"]) == 1
    assert asked == [
        VerifyOptions(Path("a b"), requests_per_replica=(2, 0, 1), json=True, topology=topology, max_seq_len=32),
        GenerateOptions(Path("d"), prompt_ids=((5, 17, 9), (0,)), topology=topology, max_seq_len=32),
        GenerateOptions(Path("d"), prompt_ids=((1,),), max_new_tokens=3, json=True),
        BenchOptions(Path("d"), batch=2, steps=5, json=True),
        VerifyOptions(Path("--odd-name")),
    ]


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        (TopologyOptions(), (4, 2, 8)),
        (TopologyOptions(moe_ep=4), (4, 2, 4)),
        (TopologyOptions(devices=6), (6, 1, 6)),
        (TopologyOptions(attn_dp=3), (3, 1, 3)),
        (TopologyOptions(attn_tp=2), (1, 2, 2)),
        (TopologyOptions(attn_tp=2, devices=6), (3, 2, 6)),
        (TopologyOptions(attn_dp=2, devices=6, moe_ep=2), (2, 3, 2)),
        (TopologyOptions(attn_dp=2, attn_tp=3), (2, 3, 6)),
    ],
)
def test_sizes_that_were_not_given_follow_from_those_that_were(options, sizes):
    assert options.sizes == TopologySizes(*sizes)
    assert options.sizes.world == sizes[0] * sizes[1]


COMMANDS = "one of the commands demo, verify, generate, bench, bench-collectives, explain, compile, plan, launch"
MISUSES = {
    "": f"{COMMANDS}, and none was given",
    "frobnicate": f"{COMMANDS}, not 'frobnicate'",
    "--json": f"{COMMANDS}, not '--json'",
    "verify": "verify needs FIXTURE: folder",
    "generate --prompt-ids 1": "generate needs CHECKPOINT_DIR: folder",
    "bench": "bench needs CHECKPOINT_DIR: folder",
    "verify a b": "Unrecognized options: b",
    "verify --bogus 3 a": "verify has no option --bogus; its options are --attn-dp, --attn-tp, --moe-ep",
    "verify a --bogus=3": "verify has no option --bogus",
    "demo --json": "demo has no option --json",
    "verify a --no-json": "verify has no option --no-json",
    "verify a -j": "Unrecognized options: -j",
    "verify a --json=yes": "Unrecognized options: yes",
    "verify a --devices": "--devices needs a value",
    "verify a --devices --json": "--devices needs a value",
    "verify a --devices 0": "--devices: must be a whole number from 1 to 2147483647, not '0'",
    "verify a --attn-dp -4": "--attn-dp: must be a whole number from 1 to 2147483647, not '-4'",
    "verify a --attn-tp two": "--attn-tp: must be a whole number from 1 to 2147483647, not 'two'",
    "verify a --moe-ep 2.5": "--moe-ep: must be a whole number from 1 to 2147483647, not '2.5'",
    "verify a --max-seq-len 1_000": "--max-seq-len: must be a whole number from 1 to 2147483647, not '1_000'",
    "verify a --devices 99999999999": "--devices: must be a whole number from 1 to 2147483647",
    "verify a --devices 5000": "5000 devices were asked for; one process starts at most 1024",
    "verify a --attn-dp 3 --attn-tp 2 --devices 8": "--attn-tp 2 makes 6 devices, not --devices 8",
    "verify a --attn-tp 3 --devices 8": "--devices 8 is not a multiple of --attn-tp 3",
    "verify a --attn-dp 5 --devices 8": "--devices 8 is not a multiple of --attn-dp 5",
    "verify a --requests-per-replica 1,2": "1,2 must hold one count for each of 4 attn_dp replicas",
    "verify a --requests-per-replica 1,2,-1,0": "--requests-per-replica: must be whole numbers from 0",
    "generate d": "generate needs at least one prompt, such as --prompt-ids 5,17,9",
    "generate d --prompt-ids 5,x": "--prompt-ids: must be whole numbers from 0 to 2147483647 separated",
    "generate d --prompt-ids 5,,9": "--prompt-ids: must be whole numbers from 0",
    "generate d --prompt-ids -1,2": "--prompt-ids: must be whole numbers from 0",
    "generate d --prompt-ids=": "--prompt-ids: must be whole numbers from 0",
    "generate d --prompt-ids 1 --max-new-tokens 0": "--max-new-tokens: must be a whole number from 1",
    "bench d --batch 0": "--batch: must be a whole number from 1",
    "bench d --steps -1": "--steps: must be a whole number from 1",
    "bench-collectives d": "Unrecognized options: d",
    "bench-collectives --sizes 4096": "--sizes must be at least two different numbers of bytes from 4 up, not 4096",
    "bench-collectives --sizes 8,8": "--sizes must be at least two different numbers of bytes from 4 up, not 8,8",
    "bench-collectives --sizes 3,8": "--sizes must be at least two different numbers of bytes from 4 up, not 3,8",
    "bench-collectives --rounds 0": "--rounds: must be a whole number from 1",
    "bench-collectives --plot=": "--plot: must be a file, not an empty name",
    "bench-collectives --max-seq-len 8": "bench-collectives has no option --max-seq-len; its options are --attn-dp",
}


def assert_one_sentence(output: tuple[str, str], needed: str):
    out, err = output
    assert out == ""
    assert err.startswith("jaxcoll: ") and err.count("\n") == 1 and err.endswith("\n")
    assert needed in err
    assert not any(mark in err for mark in ("Traceback", "│", "╭", "─", "\x1b"))


@pytest.mark.parametrize(("words", "needed"), MISUSES.items(), ids=MISUSES)
def test_misuse_is_one_sentence(words, needed, asked, capsys):
    assert cli.main(words.split()) == 2
    assert_one_sentence(capsys.readouterr(), needed)
    assert asked == []


def test_an_empty_folder_name_is_not_this_folder(asked, capsys):
    assert cli.main(["verify", ""]) == 2
    assert_one_sentence(capsys.readouterr(), "FIXTURE: must be a folder, not an empty name")
    assert asked == []


def test_a_narrow_terminal_does_not_cut_the_sentence(asked, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    assert cli.main(["verify", "a", "--attn-dp", "minus four"]) == 2
    assert_one_sentence(capsys.readouterr(), "must be a whole number from 1 to 2147483647, not 'minus four'")


@pytest.mark.parametrize(
    ("error", "needed"),
    [
        (UserError("the folder\nis missing"), "the folder is missing"),
        (TopologyError("moe_ep=3 does not divide 8"), "moe_ep=3 does not divide 8"),
        (StateError("x is SHARD over attn_tp"), "x is SHARD over attn_tp"),
        (FileNotFoundError(2, "No such file or directory", "a/config.json"), "a/config.json: No such file"),
        (OSError("disk is gone"), "disk is gone"),
        (RuntimeError("Unable to initialize backend 'cuda': no driver"), "backend 'cuda': no driver"),
    ],
)
def test_what_a_command_refuses_is_one_sentence(error, needed, asked, capsys, monkeypatch):
    def refuse(_options):
        raise error

    monkeypatch.setattr(sys.modules["models.deepseek_v4.verify"], "run", refuse)
    assert cli.main(["verify", "a"]) == 2
    assert_one_sentence(capsys.readouterr(), needed)


def test_a_defect_keeps_its_traceback(asked, monkeypatch):
    monkeypatch.setattr(sys.modules["models.deepseek_v4.verify"], "run", lambda _options: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["verify", "a"])


def test_an_interrupt_is_quiet(asked, capsys, monkeypatch):
    def interrupted(_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["models.deepseek_v4.demo"], "run", interrupted)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("name", "present"), [("nvidia0", True), ("kfd", True), ("nvidiactl", False)])
def test_a_gpu_is_known_by_its_device_file(name, present, tmp_path):
    (tmp_path / name).touch()
    assert gpu_present(tmp_path) is present


def run_python(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter in the project's root, without the settings that these tests run under."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_help_is_for_people_and_needs_no_jax():
    asked_help = run_python("-X", "importtime", "-m", "models.cli", "verify", "--help", COLUMNS="100")
    assert asked_help.returncode == 0
    for option in ("FIXTURE", "--attn-dp N", "--requests-per-replica N,N,...", "--max-seq-len N", "--json"):
        assert option in asked_help.stdout
    imported = {line.rpartition("|")[2].strip() for line in asked_help.stderr.splitlines()}
    assert "models.cli" in imported or "models.options" in imported
    assert not imported & {"jax", "numpy", "matplotlib", "flax"}


def test_misuse_in_a_real_process():
    refused = run_python("-m", "models.cli", "bench", "d", "--batch", "none")
    assert refused.returncode == 2
    assert_one_sentence((refused.stdout, refused.stderr), "--batch: must be a whole number from 1")


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
@pytest.mark.parametrize("colour", ["FORCE_COLOR", "NO_COLOR"])
def test_the_sentence_is_the_same_on_every_terminal(encoding, colour):
    terminal = {"PYTHONIOENCODING": encoding, "COLUMNS": "30", colour: "1"}
    refused = run_python("-m", "models.cli", "verify", **terminal)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == (
        "jaxcoll: verify needs FIXTURE: folder with config.json, model.safetensors and trace.safetensors\n"
    )


PRINTING = """
import sys, types
sys.modules["models.deepseek_v4.demo"] = demo = types.ModuleType("demo")
demo.run = lambda options: print("row " * 10) or 0
from models.cli import main
sys.exit(main(["demo"]))
"""


def test_output_that_nobody_reads_is_no_error():
    read_end, write_end = os.pipe()
    os.close(read_end)
    words = [sys.executable, "-c", PRINTING]
    with (
        open(write_end, "w") as unread,
        subprocess.Popen(words, cwd=ROOT, stdout=unread, stderr=subprocess.PIPE) as process,
    ):
        assert process.communicate(timeout=120)[1] == b""
    assert process.returncode == 141


SETTINGS = """
import json, os, sys
from models.startup import prepare_devices
prepare_devices(int(sys.argv[1]), cpu_only=True)
assert "jax" not in sys.modules
import jax
print(json.dumps([jax.device_count(), jax.devices()[0].platform, os.environ.get("JAX_NUM_CPU_DEVICES")]))
"""


@pytest.mark.parametrize(
    ("environment", "devices"),
    [
        ({}, [6, "cpu", "6"]),
        ({"JAX_NUM_CPU_DEVICES": "3"}, [3, "cpu", "3"]),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=5"}, [5, "cpu", None]),
    ],
)
def test_devices_are_prepared_before_jax_unless_the_user_did(environment, devices):
    shown = run_python("-c", SETTINGS, "6", **environment)
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout) == devices


def test_a_platform_that_the_user_chose_stays():
    shows = "import os, models.startup as s; s.prepare_devices(2, cpu_only=1); print(os.environ[s.PLATFORMS])"
    assert run_python("-c", shows).stdout == "cpu\n"
    assert run_python("-c", shows, JAX_PLATFORMS="cuda").stdout == "cuda\n"
