"""What `bench` says of several processes, and its profiler traces, whose scopes follow the hand-overs of a layer."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from golden import WIDE
from one_layer import CONFIG
from programs import shared_programs

from jaxcoll import hlo
from jaxcoll.plan import plan_layer
from jaxcoll.settings import Settings
from jaxcoll.topology import Topology
from models import cli
from models.deepseek_v4 import bench
from models.deepseek_v4.cache import cache_shapes
from models.deepseek_v4.config import Config
from models.deepseek_v4.model import DeepSeekV4
from models.deepseek_v4.program import abstract_parameters, compile_decode

WORDS = ("bench", str(WIDE), "--attn-dp", "2", "--attn-tp", "1", "--batch", "2", "--steps", "3")
AROUND = ("hc_attn.read", "attn", "attn.all_reduce", "hc_attn.write", "hc_ffn.read", "hc_ffn.write")
HAND_OVERS = {  # every scope of a layer, and those in which something is sent
    "gather": ("moe.gather", "moe/route", "moe/experts", "moe/shared", "moe.combine"),
    "all_to_all": ("moe.split", "moe/route", "moe/dispatch", "moe/shared", "moe/experts", "moe/combine",
                   "moe.join"),
}  # fmt: skip
SENDING = {
    "gather": {"attn.all_reduce", "moe.gather", "moe.combine"},
    "all_to_all": {"attn.all_reduce", "moe/dispatch", "moe/combine", "moe.join"},
}


@pytest.fixture(scope="module", autouse=True)
def one_program() -> Iterator[None]:
    with shared_programs():
        yield


@pytest.mark.parametrize("backend", HAND_OVERS)
def test_compiled_instructions_carry_the_hand_overs_names(backend):
    """One layer, cut over both axes of attention; every layer is made by the same code."""
    config, topology = Config.from_dict(CONFIG), Topology(2, 2, 4)
    settings, counts = Settings(moe_backend=backend), (1, 2)
    plan = plan_layer(topology, counts, settings, shared_width=config.moe_intermediate_size)
    model = DeepSeekV4(config, topology, settings)
    step = compile_decode(model, plan, abstract_parameters(model), cache_shapes(config, 4, 8), ("next_token",))
    names = set(re.findall(r'op_name="([^"]*)"', step.compiled.as_text() or ""))
    for scope in (*AROUND, *HAND_OVERS[backend]):
        assert any(f"/layer.0/{scope}/" in name for name in names), scope
    assert all(any(f"/{scope}/" in name for name in names) for scope in ("embed", "head"))
    sources = {c.source for c in hlo.collectives(step.compiled, topology) if c.group_size > 1}
    in_layers = {s.split("/", 1)[1] for s in sources if s.startswith("layer.")}
    sending = {scope for scope in SENDING[backend] if any(f"{s}/".startswith(f"{scope}/") for s in in_layers)}
    assert sending == SENDING[backend]
    outside = ("ids.gather", "head")
    assert all(f"{s}/".startswith(tuple(f"{x}/" for x in SENDING[backend])) for s in in_layers)
    assert all(s.startswith(("layer.", *outside)) for s in sources)


def test_a_trace_holds_the_program_with_its_names(capsys, tmp_path):
    folder = tmp_path / "made" / "for it"
    assert cli.main([*WORDS, "--profile", str(folder), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and json.loads(out)["profile"] == str(folder) and json.loads(out)["steps"] == 3
    assert [path.name for path in folder.iterdir()] == ["process-0"]
    (trace,) = folder.rglob("*.xplane.pb")
    profile = jax.profiler.ProfileData.from_serialized_xspace(trace.read_bytes())
    events = [event.name for plane in profile.planes for line in plane.lines for event in line.events]
    assert sum(name.startswith("decode") for name in events) == bench.PROFILED
    for scope in ("layer.0/attn.all_reduce", "layer.1/moe.gather", "layer.1/moe.combine", "layer.0/moe/experts"):
        assert scope.encode() in trace.read_bytes()


@pytest.fixture
def three_processes(monkeypatch) -> None:
    """This process's times replaced by those of a job of three."""
    job = [[0.002, 0.004, 0.003], [0.009, 0.002, 0.008], [0.001, 0.030, 0.002]]
    monkeypatch.setattr(bench, "gather_times", lambda own, topology: job)


def test_every_process_has_a_row_and_the_slowest_is_named(three_processes, capsys):
    assert cli.main([*WORDS, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["per_process"] == [
        {"process": 0, "min_ms": 2.0, "median_ms": 3.0, "max_ms": 4.0},
        {"process": 1, "min_ms": 2.0, "median_ms": 8.0, "max_ms": 9.0},
        {"process": 2, "min_ms": 1.0, "median_ms": 2.0, "max_ms": 30.0},
    ]
    assert (result["slowest_process"], result["ms_per_step"], result["tokens_per_s"]) == (1, 8.0, 250.0)
    assert cli.main([*WORDS]) == 0
    out = capsys.readouterr().out
    assert "8.0 ms per step (median of 3, the slowest process's), 250.0 tokens/s" in out
    assert "\n1 (slowest)" in out and out.count("slowest)") == 1 and out.split()[-4:] == ["2", "1.0", "2.0", "30.0"]


def test_one_process_reports_its_own_times():
    assert bench.gather_times([0.5, 0.25, 1.0], Topology(3, 2)) == [[0.5, 0.25, 1.0]]


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_profile_that_cannot_be_written_is_refused_first(capsys, tmp_path, monkeypatch, name):
    monkeypatch.setattr(bench, "open_session", None)
    (tmp_path / "file").write_text("kept")
    assert cli.main([*WORDS, "--profile", str(tmp_path / name)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err == f"jaxcoll: --profile must be a folder, but {tmp_path / 'file'} is a file\n"


def test_a_folder_that_refuses_is_named(capsys, monkeypatch):
    """Where permissions do not bind (root), the system does."""
    monkeypatch.setattr(bench, "_times", None)
    assert cli.main([*WORDS, "--profile", "/proc/traces"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("jaxcoll: ") and "/proc" in err and err.count("\n") == 1
    assert not Path("/proc/traces").exists()


def test_profiled_steps_need_room_in_the_cache(capsys, tmp_path):
    assert cli.main([*WORDS, "--max-seq-len", "10", "--profile", str(tmp_path / "x")]) == 2
    told = "a run of 4 + 3 steps and 4 profiled ones needs 11 positions, past the cache of 10; see --max-seq-len"
    assert capsys.readouterr() == ("", f"jaxcoll: {told}\n") and list(tmp_path.iterdir()) == []
