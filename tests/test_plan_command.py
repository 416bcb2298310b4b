"""`jaxcoll plan`: its bytes are the compiled program's, its times what hand arithmetic says, its picture is drawn."""

import dataclasses
import json
import sys

import pytest

from jaxcoll import hlo
from jaxcoll.links import machines
from jaxcoll.plan import plan_layer
from jaxcoll.targets import compile_only, gpu_devices
from jaxcoll.topology import Topology
from models.cli import main
from models.deepseek_v4.candidates import candidates, topologies
from models.deepseek_v4.layer_program import compile_layer, one_layer
from models.deepseek_v4.published import named_config, of_dtype, published_config
from models.deepseek_v4.step_time import Job, step_time

H200 = machines("h200")


def planned(capsys, *words):
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "sizes", "name"),
    [
        (1, (4, 2, 8), "max_len reduce_scatter"),
        (2, (2, 4, 8), "normal fp8"),  # machines first, then the ranks of one
    ],
)
def test_bytes_are_the_compiled_programs_totals(hosts, sizes, name):
    """The packaged model in bfloat16, whose channels fp8 needs to be a multiple of 128."""
    config = dataclasses.replace(of_dtype(named_config("tiny")[1], "bf16"), hidden_size=256)
    job = Job("h200", machines("h200", 8 // hosts), context=64)
    found = {(c.topology, c.name): c for c in candidates(config, 8, 2, job)}
    chosen = found[Topology(*sizes, hosts=hosts), name]
    topology = Topology(*sizes, devices=gpu_devices("h200", hosts, 8 // hosts))
    program = compile_layer(one_layer(config, "window"), topology, chosen.plan, 64, compile_only)
    compiled = hlo.totals(c for c in hlo.collectives(program.step.compiled, topology) if c.group_size > 1)
    assert {k: dataclasses.replace(t, count=0) for k, t in chosen.totals.items()} == {
        k: dataclasses.replace(t, count=0) for k, t in compiled.items()
    }


def test_a_step_adds_up():
    """Flash on one GPU sends nothing: weights, experts read row by row, and caches over the bandwidth of HBM."""
    config, topology = published_config("flash"), Topology(1, 1, devices=range(1))
    plan = plan_layer(topology, (1,), shared_width=2048)
    t = step_time(config, topology, plan, Job("h200", H200, context=8192))
    assert t.inside == t.between == t.latency == 0 and t.bound == "weights"
    window = 128 * 512 * 2
    csa, hca = (512 * 512 + 2048 * 128) * 2 + window, 64 * 512 * 2 + window
    assert t.caches * 4.8e12 == pytest.approx(2 * window + 21 * csa + 20 * hca)
    expert = 3 * 4096 * 2048 * 2
    assert t.weights * 4.8e12 > 43 * 7 * expert + 129280 * 4096 * 2  # 6 routed experts, a shared one, the head
    assert t.seconds == t.weights + t.caches > t.compute
    busy = step_time(config, topology, plan, Job("h200", H200, context=8192, imbalance=2))
    assert (busy.weights - t.weights) * 4.8e12 == pytest.approx(43 * 6 * expert)


def test_blocks_of_several_rows_cost_a_copy_of_their_weights():
    """256 rows x 6 experts of 256: 6 rows each, in blocks of 8, each read, copied and read again."""
    config, topology = published_config("flash"), Topology(1, 1, devices=range(1))
    job = Job("h200", H200, context=8192)
    one, many = (step_time(config, topology, plan_layer(topology, (n,), shared_width=2048), job) for n in (1, 256))
    expert = 3 * 4096 * 2048 * 2
    assert (many.weights - one.weights) * 4.8e12 == pytest.approx(43 * (3 * 256 - 6) * expert)


def test_topologies_divide_the_model_and_stay_on_machines():
    config = published_config("pro")
    found = [(t.attn_dp, t.attn_tp, t.moe_ep, t.moe_tp) for t in topologies(config, 2048, 8)]
    assert {ep for _, _, ep, _ in found} == {128} and {tp for _, tp, _, _ in found} == {1, 2, 4, 8}
    small = [(t.attn_tp, t.moe_ep) for t in topologies(config, 6, 8)]
    assert small == [(1, 6), (1, 3), (1, 2), (1, 1), (2, 6), (2, 3), (2, 1)]  # 3 divides no heads; 2 x 3 no mesh
    sixes = {(t.attn_tp, t.moe_tp) for t in topologies(config, 12, 6)}
    assert sixes and not any(4 in cut for cut in sixes)  # ranks 4 to 7 would lie on two machines


def test_ranks_say_what_bounds_them(capsys):
    record = planned(capsys, "flash", "--gpus", "8,64", "--tokens-per-gpu", "1,64", "--top", "4")
    assert [(j["gpus"], j["tokens_per_gpu"]) for j in record["jobs"]] == [(8, 1), (8, 64), (64, 1), (64, 64)]
    for job in record["jobs"]:
        found = job["candidates"]
        assert len(found) == 4 <= job["possible"] and all(c["fits"] for c in found)
        assert [c["step_ms"] for c in found] == sorted(c["step_ms"] for c in found)
        for c in found:
            assert c["step_ms"] >= sum(c["parts_ms"][k] for k in ("weights", "caches", "latency")) - 1e-3
            assert c["bound"] in ("weights", "latency", "compute", "links between machines", "links inside machines")
            assert c["topology"]["attn_dp"] * c["topology"]["attn_tp"] == job["gpus"] and c["layer_bytes"]
    faster = planned(capsys, "flash", "--gpus", "64", "--tokens-per-gpu", "64", "--network", "connectx8")
    assert faster["jobs"][0]["candidates"][0]["step_ms"] < record["jobs"][3]["candidates"][0]["step_ms"]


def test_a_person_reads_a_table_and_what_does_not_fit(capsys):
    assert main(["plan", "pro", "--gpus", "8", "--tokens-per-gpu", "1", "--top", "1"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "not measured" in told and "no fit" in told and "weights" in told


def test_a_picture_is_drawn(capsys, tmp_path):
    file = tmp_path / "plan.png"
    planned(capsys, "flash", "--gpus", "8,16", "--tokens-per-gpu", "1,8", "--plot", str(file))
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 20_000


def test_without_matplotlib_one_sentence_says_how_to_install_it(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "models.deepseek_v4.plan_plot", raising=False)
    words = ("--gpus", "8", "--tokens-per-gpu", "1", "--plot", str(tmp_path / "plan.png"))
    assert main(["plan", "tiny", *words]) == 2
    out, err = capsys.readouterr()
    told = "jaxcoll: --plot: a plot needs matplotlib, which is not installed: pip install 'jaxcoll[plot]'\n"
    assert (out, err) == ("", told)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("flash", "--gpus", "0"), "--gpus: must be whole numbers from 1 to"),
        (("flash", "--imbalance", "0.5"), "--imbalance must be a number from 1 on, not 0.5"),
        (("flash", "--plot", "plan.txt"), "--plot: a plot's file must end in .png, .svg, .pdf"),
        (("flash", "--gpus", "8,x"), "--gpus: must be whole numbers from 1 to"),
        (("flash", "--tokens-per-gpu", "8,0"), "--tokens-per-gpu: must be whole numbers from 1 to"),
        (("flash", "--gpus", "8,100000000"), "--gpus must be at most 131072 GPUs, not 100000000"),
        (("none",), "unknown model 'none'"),
        (("flash", "--gpus", "7"), "no topology of 7 GPUs"),
    ],
)
def test_a_request_that_cannot_be_served_is_one_sentence(capsys, words, said):
    assert main(["plan", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and said in err
