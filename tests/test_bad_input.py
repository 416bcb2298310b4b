"""Bad input to the commands: exit 2, one sentence that names the thing, nothing on stdout, nothing written."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden import ODD, TINY, WIDE
from safetensors.numpy import load_file, save_file

from models import cli
from models.startup import MOST_DEVICES

ROOT = Path(__file__).parent.parent
WEIGHTS_FILE, TRACE_FILE = "model.safetensors", "trace.safetensors"
MESH = ["--attn-dp", "2", "--attn-tp", "2"]


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch) -> None:
    """What can be refused is refused before a program is made."""

    def compiles(*_: Any) -> None:
        raise AssertionError("a program was compiled for a request that must be refused")

    monkeypatch.setattr("models.deepseek_v4.decoder.compile_decode", compiles)


@pytest.fixture
def fixture(tmp_path: Path) -> Path:
    """A copy of the wide fixture."""
    return Path(shutil.copytree(WIDE, tmp_path / "fixture"))


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def refusal(capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: object) -> str:
    """The one sentence of a refused command."""
    before, here = contents(tmp_path), sorted(os.listdir())
    assert cli.main([str(word) for word in words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("jaxcoll: ") and err.endswith("\n") and err.count("\n") == 1
    assert "Traceback" not in err and contents(tmp_path) == before and sorted(os.listdir()) == here
    return err.removeprefix("jaxcoll: ").rstrip("\n")


def commands(folder: Path) -> list[list[object]]:
    """Every command that reads a checkpoint."""
    return [
        ["verify", folder, *MESH],
        ["generate", folder, *MESH, "--prompt-ids", "1,2"],
        ["bench", folder, *MESH],
    ]


def test_a_missing_folder(capsys, tmp_path):
    for words in commands(tmp_path / "nowhere"):
        said = refusal(capsys, tmp_path, *words)
        assert said == f"{tmp_path / 'nowhere'} does not exist; it must be a folder with a config.json"


def test_a_file_instead_of_a_folder(capsys, tmp_path, fixture):
    for words in commands(fixture / WEIGHTS_FILE):
        assert f"{fixture / WEIGHTS_FILE} is not a folder" in refusal(capsys, tmp_path, *words)


def test_a_missing_config(capsys, tmp_path, fixture):
    (fixture / "config.json").unlink()
    for words in commands(fixture):
        assert refusal(capsys, tmp_path, *words) == f"{fixture / 'config.json'} does not exist"


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        ("", "is not valid JSON"),
        ('{"model_type": "deepseek_v4",', "is not valid JSON"),
        ("[1, 2]", "must hold a JSON object"),
        ("\x00\x01", "is not valid JSON"),
    ],
)
def test_a_broken_config(text, needed, capsys, tmp_path, fixture):
    (fixture / "config.json").write_text(text)
    for words in commands(fixture):
        said = refusal(capsys, tmp_path, *words)
        assert str(fixture / "config.json") in said and needed in said


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("compress_ratios", [-1, 4]),
        ("compress_ratios", [8]),
        ("hidden_size", "256"),
        ("num_hash_layers", None),
        ("scoring_func", "softmax"),
        ("num_experts_per_tok", 9),
        ("vocab_size", 0),
    ],
)
def test_a_config_of_something_else(field, value, capsys, tmp_path, fixture):
    config = json.loads((fixture / "config.json").read_text())
    (fixture / "config.json").write_text(json.dumps(config | {field: value}))
    for words in commands(fixture):
        assert field in refusal(capsys, tmp_path, *words)


def test_no_weights(capsys, tmp_path, fixture):
    (fixture / WEIGHTS_FILE).unlink()
    for words in commands(fixture):
        said = refusal(capsys, tmp_path, *words)
        assert said == f"{fixture} has no weights; it must have *.safetensors files"


@pytest.mark.parametrize("length", [0, 7, 8, 9, 4000, 100_000, -1])
def test_truncated_weights(length, capsys, tmp_path, fixture):
    content = (WIDE / WEIGHTS_FILE).read_bytes()
    (fixture / WEIGHTS_FILE).write_bytes(content[:length])
    said = refusal(capsys, tmp_path, *commands(fixture)[0])
    assert f"{fixture / WEIGHTS_FILE} is truncated or not a safetensors file" in said


@pytest.mark.parametrize("content", [b"no tensors in here", b"\xff" * 1000, bytes(1000)])
def test_garbage_for_weights(content, capsys, tmp_path, fixture):
    (fixture / WEIGHTS_FILE).write_bytes(content)
    said = refusal(capsys, tmp_path, *commands(fixture)[1])
    assert f"{fixture / WEIGHTS_FILE} is truncated or not a safetensors file" in said


Change = Callable[[dict[str, np.ndarray]], object]
TENSOR_FAULTS: dict[str, tuple[Change, list[str]]] = {
    "missing": (lambda t: t.pop("layers.1.attn.wkv.weight"), ["1 missing (layers.1.attn.wkv.weight)"]),
    "extra": (lambda t: t.update(surplus=np.ones(3, np.float32)), ["1 unexpected (surplus)"]),
    "shape": (
        lambda t: t.update({"norm.weight": t["norm.weight"][:-1]}),
        ["1 of a wrong shape (norm.weight is (255,), not (256,))"],
    ),
    "dtype": (
        lambda t: t.update({"norm.weight": t["norm.weight"].astype(np.float16)}),
        ["1 of a wrong dtype (norm.weight is F16, not F32 or BF16)"],
    ),
    "integers": (
        lambda t: t.update({"layers.0.ffn.gate.tid2eid": t["layers.0.ffn.gate.tid2eid"].astype(np.float32)}),
        ["layers.0.ffn.gate.tid2eid is F32, not I32 or I64"],
    ),
    "several": (
        lambda t: (t.pop("head.weight"), t.update(surplus=np.ones(3, np.float32))),
        ["head.weight", "surplus"],
    ),
    "expert out of range": (lambda t: t["layers.0.ffn.gate.tid2eid"].fill(8), ["tid2eid", "from 0 to 7"]),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_a_wrong_tensor(fault, capsys, tmp_path, fixture):
    change, needed = TENSOR_FAULTS[fault]
    tensors = load_file(fixture / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, fixture / WEIGHTS_FILE)
    said = refusal(capsys, tmp_path, *commands(fixture)[1])
    assert str(fixture) in said and all(part in said for part in needed), said


def test_no_trace(capsys, tmp_path, fixture):
    (fixture / TRACE_FILE).unlink()
    said = refusal(capsys, tmp_path, "verify", fixture, *MESH)
    assert said == f"{fixture} has no trace.safetensors: verify compares with one; generate and bench need none"


def test_a_truncated_trace(capsys, tmp_path, fixture):
    (fixture / TRACE_FILE).write_bytes((WIDE / TRACE_FILE).read_bytes()[:-1])
    said = refusal(capsys, tmp_path, "verify", fixture, *MESH)
    assert f"{fixture / TRACE_FILE} cannot be read as safetensors" in said


TRACE_FAULTS: dict[str, tuple[Change, str]] = {
    "missing": (lambda t: t.pop("moe_out.1"), "has no tensor moe_out.1"),
    "shape": (lambda t: t.update({"logits": t["logits"][:, 1:].copy()}), "logits in"),
    "dtype": (lambda t: t.update({"streams.1": t["streams.1"].astype(np.int32)}), "streams.1 in"),
    "token": (lambda t: t["input_ids"].fill(64), "holds id 64, out of range: it must be from 0 to 63"),
    "negative token": (lambda t: t["greedy_ids"].fill(-1), "holds id -1, out of range: it must be from 0 to 63"),
}


def test_a_trace_of_a_type_that_numpy_lacks(capsys, tmp_path, fixture):
    header = json.dumps({"logits": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (fixture / TRACE_FILE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    said = refusal(capsys, tmp_path, "verify", fixture, *MESH)
    assert said == f"{fixture / TRACE_FILE} holds a tensor of type float8_e4m3fn, which NumPy does not have"


@pytest.mark.parametrize("fault", TRACE_FAULTS)
def test_a_wrong_trace(fault, capsys, tmp_path, fixture):
    change, needed = TRACE_FAULTS[fault]
    tensors = load_file(fixture / TRACE_FILE)
    change(tensors)
    save_file(tensors, fixture / TRACE_FILE)
    said = refusal(capsys, tmp_path, "verify", fixture, *MESH)
    assert needed in said and str(fixture / TRACE_FILE) in said


REQUESTS = {
    "generate {wide} --prompt-ids 1,64": "token id 64 of prompt 1 is out of range: it must be from 0 to 63",
    "generate {wide} --prompt-ids 1 --prompt-ids 2,2147483647": "token id 2147483647 of prompt 2 is out of range",
    "generate {wide} --prompt-ids=": "--prompt-ids: must be whole numbers from 0",
    "generate {wide} --prompt-ids -1": "--prompt-ids: must be whole numbers from 0",
    "generate {wide}": "generate needs at least one prompt, such as --prompt-ids 5,17,9",
    "generate {wide} --prompt-ids 1,2,3 --max-new-tokens 3 --max-seq-len 4": "needs 5 positions, past the cache of 4",
    "generate {wide} --prompt-ids 1 --max-new-tokens 257": "needs 257 positions, past the cache of 256",
    "verify {wide} --max-seq-len 4": "the trace needs 23 positions, past the cache of 4; see --max-seq-len",
    "verify {wide} --max-seq-len 22": "the trace needs 23 positions, past the cache of 22; see --max-seq-len",
    "verify {wide} --max-seq-len 257": "--max-seq-len 257 is past the model's last position",
    "bench {wide} --max-seq-len 257": "from 1 to max_position_embeddings=256",
    "bench {wide} --steps 253": "a run of 4 + 253 steps needs 257 positions, past the cache of 256",
    "verify {wide} --attn-dp 2 --requests-per-replica 2,1": "2,1 makes 3 requests, but there are 2",
    "verify {wide} --attn-dp 2 --requests-per-replica 0,0": "0,0 makes 0 requests, but there are 2",
    "verify {wide} --attn-dp 2 --requests-per-replica 2": "2 must hold one count for each of 2 attn_dp replicas",
    "verify {wide} --attn-dp 2 --attn-tp 2 --devices 8": "--attn-tp 2 makes 4 devices, not --devices 8",
    "verify {wide} --attn-tp 2 --devices 3": "--devices 3 is not a multiple of --attn-tp 2",
    "verify {odd} --attn-dp 3 --attn-tp 2 --moe-ep 2": "neither attn_tp=2 nor moe_tp=3 divides the other",
    "verify {tiny} --attn-tp 8": "attn_tp=8 does not divide o_groups=4",
    "verify {odd} --attn-dp 5": "moe_ep=5 does not divide n_routed_experts=24",
    "verify {wide} --attn-dp 0": "--attn-dp: must be a whole number from 1",
    "bench {wide} --devices -2": "--devices: must be a whole number from 1",
    "verify {wide} --sizes 3": "verify has no option --sizes",
    "verify {tiny} --attn-dp 16": "a world of 16 needs 16 devices; this process sees 8",
    "verify {wide} --attn-dp 2048": f"2048 devices were asked for; one process starts at most {MOST_DEVICES}",
    "verify {wide} --attn-dp 2 --redundant-experts 1000000": "more than one of each of 8 experts for each of moe_ep=2",
    "bench {wide} --batch 2147483647": "2147483647 requests were asked for; one batch holds at most 1048576",
    "explain {wide} --attn-dp 2 --requests-per-replica 2147483647,0": "which passes 2^31 - 1",
    "verify {tiny} --attn-dp 2 --wire fp8": "wire fp8 is impossible here because",
    "verify {wide} --attn-dp 2 --attn-tp 2 --gather gather_v": "gather_v is impossible here because",
}


@pytest.mark.parametrize("words", REQUESTS)
def test_a_request_that_cannot_be_served(words, capsys, tmp_path):
    folders = {"wide": WIDE, "odd": ODD, "tiny": TINY}
    said = refusal(capsys, tmp_path, *(word.format(**folders) for word in words.split()))
    assert REQUESTS[words] in said


@pytest.mark.parametrize("file", ["config.json", TRACE_FILE, WEIGHTS_FILE])
def test_a_file_that_may_not_be_read(file, capsys, tmp_path, fixture, monkeypatch):
    """As the system says it: who runs the tests may be allowed to read everything."""
    opened = Path.open

    def guarded(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == file:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    before = contents(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", guarded)
        code = cli.main(["verify", str(fixture), *MESH])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "") and contents(tmp_path) == before
    assert err == f"jaxcoll: {fixture / file} cannot be read: Permission denied\n"


@pytest.mark.parametrize(
    ("words", "environment", "needed"),
    [
        (["verify", "nowhere"], {}, "nowhere does not exist; it must be a folder with a config.json"),
        (["verify", str(ODD), *"--attn-dp 3 --attn-tp 2 --moe-ep 2".split()], {}, "have no common refinement"),
        (["verify", str(WIDE), "--attn-dp", "2"], {"JAX_NUM_CPU_DEVICES": "1"}, "this process sees 1"),
        (["verify", str(WIDE), "--attn-dp", "2"], {"JAX_NUM_CPU_DEVICES": "two"}, "jax cannot start: "),
        (["generate", str(WIDE), *MESH, "--prompt-ids", "99"], {"FORCE_COLOR": "1"}, "token id 99 of prompt 1"),
    ],
    ids=["folder", "refinement", "devices", "setting", "colour"],
)
def test_in_a_process_of_its_own(words, environment, needed, tmp_path):
    """stderr is one line, also where it is a pipe that pretends to be a terminal; no file appears."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(
        [sys.executable, "-m", "models.cli", *words],
        cwd=tmp_path,
        env=kept | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("jaxcoll: ") and done.stderr.count("\n") == 1 and needed in done.stderr
    assert list(tmp_path.iterdir()) == []
