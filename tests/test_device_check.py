"""The check of a whole step on one device, by XLA here: what it says, its exit codes, and what it can do without."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from golden import DATA, TINY, WIDE

from jaxcoll.topology import Topology
from models.deepseek_v4 import device_check, npz_fixture, params
from models.deepseek_v4.config import Config
from models.deepseek_v4.device_check import Case, check
from models.deepseek_v4.model import DeepSeekV4
from models.deepseek_v4.trace import Trace
from pallas_kernels.choice import Device

ROOT = Path(__file__).parent.parent
FILE = DATA / "wide-21.npz"
NO_GPU = "the device is cpu (cpu), and the kernels are for Hopper and Blackwell GPUs"

# Imports by this project of anything but itself, the standard library and four others raise; flax has its own needs.
WITHOUT = """
import builtins, sys
OURS = {"models", "jaxcoll", "pallas_kernels"}
ALLOWED = OURS | {"jax", "jaxlib", "flax", "numpy", "chex"} | set(sys.stdlib_module_names)
find = builtins.__import__
def few_only(name, globals=None, *more, **named):
    if ((globals or {}).get("__name__") or "").split(".")[0] in OURS and name.split(".")[0] not in ALLOWED:
        raise ModuleNotFoundError(f"{globals['__name__']} imports {name}")
    return find(name, globals, *more, **named)
builtins.__import__ = few_only
from models.deepseek_v4.device_check import main
sys.exit(main(["--json"]))
"""


@pytest.mark.slow
def test_without_a_gpu_it_says_so_and_checks_xla_with_few_libraries():
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")}
    environment |= {"PYTHONPATH": str(ROOT), "JAXCOLL_KERNELS": "pallas"}  # settings are its own
    words = [sys.executable, "-c", WITHOUT]
    done = subprocess.run(words, env=environment, cwd=DATA, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (3, "")
    shown = json.loads(done.stdout)
    assert (shown["device"], shown["jax"]) == ("cpu", jax.__version__)
    assert shown["not_checked"] == f"no GPU was checked: {NO_GPU}"
    assert [(c["mode"], c["kernels"], c["interpret"]) for c in shown["checks"]] == [
        ("normal", "xla", False),
        ("low_latency", "xla", False),
    ]
    for outcome in shown["checks"]:
        assert outcome["ok"] and outcome["greedy_match"] and outcome["topk_mismatches"] == 0
        assert outcome["steps"] == 23 and outcome["pallas_calls"] == 0
        assert 0 < max(outcome["max_abs_err"].values()) < 5e-5


def test_the_npz_holds_what_the_folder_holds():
    fixture, config = npz_fixture.read(FILE), Config.from_folder(WIDE)
    assert fixture.config == config
    loaded, _ = params.load(WIDE, DeepSeekV4(config, Topology()))
    assert jax.tree.structure(fixture.parameters) == jax.tree.structure(loaded)
    jax.tree.map(np.testing.assert_array_equal, fixture.parameters, loaded)
    golden = Trace.load(WIDE, config)
    jax.tree.map(np.testing.assert_array_equal, dataclasses.asdict(fixture.trace), dataclasses.asdict(golden))


def short(fixture: npz_fixture.Fixture, **changes: Any) -> npz_fixture.Fixture:
    """Two positions of the fixture's trace, with some values changed."""
    trace = fixture.trace
    following = trace.values["logits"][:, 1].argmax(-1)[:, None]
    values = trace.values | changes
    return fixture._replace(
        trace=dataclasses.replace(trace, input_ids=trace.input_ids[:, :2], greedy_ids=following, values=values)
    )


@pytest.mark.slow
def test_a_difference_is_no_success():
    fixture = npz_fixture.read(FILE)
    wrong = fixture.trace.values["moe_out.1"] + np.float32(1e-3)
    outcome = check(Case("normal", "xla", False), short(fixture, **{"moe_out.1": wrong}))
    assert not outcome["ok"] and outcome["max_abs_err"]["moe_out.1"] == pytest.approx(1e-3, rel=0.05)
    assert outcome["max_abs_err"]["moe_out.0"] < 5e-5


@pytest.mark.parametrize(
    ("program", "kernels", "ok"),
    [("a b", "pallas", True), ("", "pallas", False), ("", "xla", True), ("a", "xla", False)],
)
def test_a_program_with_other_kernels_than_asked_for_is_no_success(program, kernels, ok, monkeypatch):
    told = dict.fromkeys(("max_abs_err", "tolerance", "topk_mismatches", "greedy_match", "steps"))

    def decoded(decoder, *_):
        decoder.steps[()] = SimpleNamespace(compiled=program)
        return {"ok": True, **told}

    monkeypatch.setattr(device_check, "mosaic_kernels", lambda text: text.split())
    monkeypatch.setattr(device_check, "compare", decoded)
    outcome = check(Case("normal", kernels, False), npz_fixture.read(FILE))
    assert (outcome["ok"], outcome["pallas_calls"]) == (ok, len(program.split()))


def outcome_of(case: Case, ok: bool = True) -> dict[str, Any]:
    told = {"ok": ok, "max_abs_err": {"logits": 1e-6}, "tolerance": 2e-4, "topk_mismatches": 0, "greedy_match": True}
    return {**case._asdict(), **told, "pallas_calls": 4 * (case.kernels == "pallas")}


@pytest.mark.parametrize(
    ("device", "words", "ran", "code"),
    [
        ("NVIDIA H200", [], ["xla", "xla", "pallas", "pallas"], 0),
        ("NVIDIA H200", ["--interpret"], ["xla", "xla", "pallas", "pallas"], 0),
        ("NVIDIA A100", [], ["xla", "xla"], 3),
        ("cpu", ["--interpret"], ["xla", "xla", "pallas interpreted", "pallas interpreted"], 3),
    ],
)
def test_what_runs_where_and_the_exit_codes(device, words, ran, code, monkeypatch, capsys):
    on = Device("cpu" if device == "cpu" else "gpu", device, 132)
    monkeypatch.setattr(device_check.Device, "of", lambda _: on)
    monkeypatch.setattr(device_check, "check", lambda case, fixture: outcome_of(case))
    assert device_check.main(words) == code
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{device}, jax {jax.__version__}") and ("no GPU was checked" in first) == (code == 3)
    assert [line.split(",")[0] for line in lines] == [f"equal  {how}" for how in ran]
    monkeypatch.setattr(device_check, "check", lambda case, fixture: outcome_of(case, ok=case.kernels == "xla"))
    assert device_check.main(words) == (1 if "pallas" in ran[-1] else code)


def refusal(capsys, *words: str) -> str:
    assert device_check.main(list(words)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("device_check: ") and err.count("\n") == 1
    return err


def test_a_fixture_that_is_none_is_refused(tmp_path, capsys):
    assert "nowhere.npz does not exist" in refusal(capsys, "--fixture", str(tmp_path / "nowhere.npz"))
    file = tmp_path / "a.npz"
    for content in (b"", b"text", FILE.read_bytes()[:100_000]):
        file.write_bytes(content)
        assert f"{file} is no fixture of npz_fixture" in refusal(capsys, "--fixture", str(file))
    with np.load(FILE) as stored:
        arrays = dict(stored)
    name = "parameters/layers/1/ffn/experts/w1"
    for change, needed in [
        ({name: arrays[name][:, :2]}, f"holds float32[8, 2, 256] as {name}; it must be float32[8, 64, 256]"),
        ({name: arrays[name].astype(np.float64)}, f"holds float64[8, 64, 256] as {name}"),
        ({"parameters/more": arrays[name]}, "holds parameters/more, which is no parameter of its config"),
        ({"trace/logits": arrays[name]}, "logits in"),
        ({"config.json": np.frombuffer(b"{}", np.uint8)}, "config.json: model_type is missing"),
    ]:
        np.savez(file, **(arrays | change))
        assert needed in refusal(capsys, "--fixture", str(file))
    del arrays[name]
    np.savez(file, **arrays)
    assert f"holds nothing as {name}" in refusal(capsys, "--fixture", str(file))


def test_the_command_that_makes_an_npz(tmp_path, capsys):
    file = tmp_path / "tiny.npz"
    assert npz_fixture.main([str(TINY), str(file)]) == 0
    assert npz_fixture.read(file).config == Config.from_folder(TINY)
    assert npz_fixture.main([str(TINY)]) == npz_fixture.main([str(TINY), "tiny.zip"]) == 2
    assert capsys.readouterr().err == 2 * "usage: python -m models.deepseek_v4.npz_fixture FIXTURE FILE.npz\n"
    assert npz_fixture.main([str(tmp_path / "none"), str(file)]) == 2
    assert "does not exist" in capsys.readouterr().err
