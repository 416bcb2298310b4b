"""`jaxcoll bench-collectives`: programs, bytes, fit and picture are judged; real times are not."""

import importlib.util
import json

import numpy as np
import pytest

from jaxcoll import bench_collectives, plot_file
from jaxcoll.bench_collectives import VERBS, WARM_UP, fit, groups, measure
from jaxcoll.step import Step
from jaxcoll.topology import Topology
from models.cli import main

MIB = 2**20
FACTORS = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}  # times S(n-1)/n


@pytest.mark.parametrize(
    ("line", "sent"), [((25e-6, 40e9), (1e3, 1e5, 1e7)), ((1e-3, 1e6), (100.0, 9e9)), ((0.0, 5e8), (1e4, 1e6, 1e8))]
)
def test_points_on_a_line_give_the_line(line, sent):
    found = fit(sent, [line[0] + x / line[1] for x in sent])
    assert found.alpha_seconds == pytest.approx(line[0], abs=1e-12) and found.bandwidth == pytest.approx(line[1])
    assert found.residual == pytest.approx(0, abs=1e-9)
    assert found.seconds(sent[-1]) == pytest.approx(line[0] + sent[-1] / line[1])


def test_a_slow_large_transfer_does_not_decide_alpha():
    """Unweighted, the 20 % on 10 ms would be twenty times alpha; relative errors weigh it like any other point."""
    sent = [1e3, 1e4, 1e5, 1e6, 1e7]
    seconds = [1e-4 + x / 1e9 for x in sent]
    seconds[-1] *= 1.2
    assert fit(sent, seconds).alpha_seconds == pytest.approx(1e-4, rel=0.05)


def test_what_a_line_cannot_be_is_not_fitted():
    flat = fit([1e3, 1e6], [3e-4, 1e-4])  # time falls: no bandwidth can be told, and T is a weighted mean
    assert flat.bandwidth is None and flat.seconds(1e9) == flat.alpha_seconds == pytest.approx(1.2e-4)
    assert flat.residual == pytest.approx(((0.6**2 + 0.2**2) / 2) ** 0.5)
    steep = fit([1e3, 1e6], [1e-7, 9e-3])  # the line through both would start below 0
    assert steep.alpha_seconds == 0 and steep.bandwidth and steep.residual > 0


def test_groups_with_the_same_ranks_are_measured_once():
    assert list(groups(Topology(4, 2, 4)).values()) == [("attn_dp", "moe_ep"), ("attn_tp", "moe_tp"), ("world",)]
    names = ("attn_dp", "attn_tp", "moe_ep", "moe_tp", "world")
    assert list(groups(Topology(2, 4, 4)).values()) == [(name,) for name in names]
    assert groups(Topology(6, 1)) == {("attn_dp",): ("attn_dp", "moe_ep", "world"), (): ("attn_tp", "moe_tp")}


class Network:
    """Stands in for time and transport: a step takes `alpha + wire bytes / bandwidth` when it is waited for."""

    def __init__(self, alpha: float, bandwidth: float):
        self.now, self.due, self.alpha, self.bandwidth, self.runs = 0.0, 0.0, alpha, bandwidth, {}

    def perf_counter(self) -> float:
        return self.now

    def call(self, step: Step, *_: object) -> Step:
        self.runs[step] = self.runs.get(step, 0) + 1
        found = bench_collectives.hlo.collectives(step.compiled, step.topology)
        self.due = self.alpha + sum(c.wire_bytes for c in found) / self.bandwidth
        self.due += 5.0 if self.runs[step] <= WARM_UP or self.runs[step] == WARM_UP + 2 else 0.0
        return step

    def wait(self, _: object) -> None:
        self.now, self.due = self.now + self.due, 0.0


def test_every_verb_over_every_group(monkeypatch):
    """Bytes are those of the formulas; warm-up, one slow round and the time of submission do not reach the line."""
    network, stages = Network(3e-5, 2e9), []
    monkeypatch.setattr(bench_collectives, "time", network)
    monkeypatch.setattr(Step, "__call__", lambda step, *args: network.call(step, *args))
    monkeypatch.setattr(bench_collectives.jax, "block_until_ready", network.wait)
    topology = Topology(3, 2, 6)
    report = measure(topology, (MIB, 4096), rounds=5, progress=lambda *at: stages.append(at))
    sizes = {("attn_dp",): 3, ("attn_tp",): 2, ("moe_ep", "world"): 6}
    assert [(m.verb, m.names) for m in report.measurements] == [(verb, names) for names in sizes for verb in VERBS]
    for m in report.measurements:
        n = m.group_size
        assert n == sizes[m.names]
        for point, size in zip(m.points, (4096, MIB), strict=True):
            assert size <= point.buffer_bytes < size + 4 * n
            assert point.wire_bytes == pytest.approx(FACTORS[m.verb] * point.buffer_bytes * (n - 1) / n)
        assert m.line.alpha_seconds == pytest.approx(3e-5) and m.line.bandwidth == pytest.approx(2e9)
    assert report.skipped == ("moe_tp",) and report.launch_seconds == pytest.approx(3e-5)
    assert stages[-1] == (len(stages), len(stages)) == (33, 33)  # 25 programs and 8 rounds


def test_one_size_is_no_line():
    with pytest.raises(ValueError, match="at least two different sizes, not 4096, 4096"):
        measure(Topology(2, 1), (4096, 4096))


WORDS = ("bench-collectives", "--attn-dp", "2", "--attn-tp", "1", "--sizes", "4096,65536", "--rounds", "3")


def test_json_holds_every_point(capsys):
    assert main([*WORDS, "--json"]) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert err == "" and record["skipped"] == ["attn_tp", "moe_tp"] and record["launch_us"] > 0
    assert record["rounds"] == 3 and record["topology"]["world"] == 2
    assert [m["verb"] for m in record["measurements"]] == list(VERBS)
    for m in record["measurements"]:
        assert m["groups"] == ["attn_dp", "moe_ep", "world"] and m["group_size"] == 2 and m["alpha_us"] >= 0
        sent = [p["wire_bytes"] for p in m["points"]]
        assert sent == [size * FACTORS[m["verb"]] / 2 for size in (4096, 65536)]
        assert all(p["us"] > 0 for p in m["points"])


def test_the_picture_shows_points_lines_and_units(capsys, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: drawn.append(self) or save(self, *a, **k))
    path = tmp_path / "verbs.png"
    assert main([*WORDS, "--plot", str(path)]) == 0
    out, err = capsys.readouterr()
    assert err == "" and f"Plot saved to {path}\n" in out and "Not measured, having one member: attn_tp, moe_tp." in out
    assert all(f"{verb} attn_dp, moe_ep, world 2 " in " ".join(out.split()) for verb in VERBS)
    assert path.read_bytes().startswith(b"\x89PNG")
    panels = drawn[0].axes
    assert [axes.get_title() for axes in panels] == list(VERBS)
    assert all(axes.get_xscale() == axes.get_yscale() == "log" for axes in panels)
    assert "bytes" in panels[2].get_xlabel() and "µs" in panels[0].get_ylabel()
    for axes, verb in zip(panels, VERBS, strict=True):
        points, line, _ = axes.lines
        assert np.asarray(points.get_xdata()).tolist() == [size * FACTORS[verb] / 2 for size in (4096, 65536)]
        assert line.get_label() == "attn_dp = moe_ep = world (2 ranks)" and points.get_color() == line.get_color()


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("verbs.gif", "--plot: a plot's file must end in .png, .svg, .pdf, which "),
        ("", "is a folder; a plot needs a file's name"),
        ("nowhere/verbs.png", "nowhere is not a folder, so no plot can be saved there"),
    ],
)
def test_a_plot_that_cannot_be_saved_is_refused_before_anything_runs(capsys, tmp_path, monkeypatch, name, needed):
    monkeypatch.setattr("models.deepseek_v4.bench_collectives.measure", None)
    assert main([*WORDS, "--plot", str(tmp_path / name)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and needed in err and err.count("\n") == 1 and list(tmp_path.iterdir()) == []


def test_without_matplotlib_a_sentence_says_how_to_get_it(capsys, tmp_path, monkeypatch):
    find, finder = importlib.util.find_spec, plot_file.importlib.util
    monkeypatch.setattr(finder, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    assert main([*WORDS, "--plot", str(tmp_path / "verbs.png")]) == 2
    told = "jaxcoll: --plot: a plot needs matplotlib, which is not installed: pip install 'jaxcoll[plot]'\n"
    assert capsys.readouterr() == ("", told)


def test_one_device_is_refused(capsys):
    assert main(["bench-collectives", "--devices", "1"]) == 2
    assert "one device sends nothing to another" in capsys.readouterr().err
