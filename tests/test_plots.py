"""Charts and pictures: what is drawn is what was given, with a unit on every axis; nothing is shown on a screen."""

import subprocess
import sys
from pathlib import Path

import jax
import matplotlib
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from matplotlib.colors import to_hex

from jaxcoll import pictures, plots
from jaxcoll.explain import Stage
from jaxcoll.timeline import Bar
from jaxcoll.topology import Topology

ROOT = Path(__file__).parent.parent
matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def closed():
    yield
    pictures.pyplot().close("all")


def texts(ax):
    return [t.get_text() for t in ax.texts]


def widths(container):
    return [bar.get_width() for bar in container]


def test_bytes_by_path_stacks_there_and_back():
    way = {"gather": "max_len", "combine": "all_reduce", "gather_wire_bytes": 2048, "combine_wire_bytes": 4096}
    ax = plots.bytes_by_path([way, way | {"gather": "sum_len", "gather_wire_bytes": 1024}], title="t")
    assert [widths(c) for c in ax.containers] == [[2, 1], [4, 4]]
    assert [bar.get_x() for bar in ax.containers[1]] == [2, 1]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["max_len + all_reduce", "sum_len + all_reduce"]
    assert texts(ax) == ["6", "5"] and "[KiB]" in ax.get_xlabel()


def test_alpha_beta_draws_the_points_and_the_fitted_line():
    ax = plots.alpha_beta({"all_reduce": [(4096, 6e-6), (1024, 3e-6)]}, {"all_reduce": (2e-6, 1.024e9)})
    line, points = ax.lines
    assert points.get_xdata().tolist() == [1, 4] and np.allclose(points.get_ydata(), [3, 6])
    assert np.allclose([line.get_ydata()[0], line.get_ydata()[-1]], [3, 6])
    (label,) = (t.get_text() for t in ax.get_legend().get_texts())
    assert label == "all_reduce: 2 µs + S / 1.02 GB/s"
    assert "[KiB]" in ax.get_xlabel() and "[µs]" in ax.get_ylabel() and ax.get_xscale() == "log"


def test_alpha_beta_needs_a_fit_for_each_name():
    with pytest.raises(ValueError, match="must have the same names"):
        plots.alpha_beta({"a": [(1, 1)]}, {"b": (1, 1)})


def test_a_timeline_has_two_lanes_and_names_what_communicates():
    bars = [
        Bar("computation", 0, 1, "attn"),
        Bar("communication", 1, 3, "attn.all_reduce", "all_reduce(attn_tp)", 8.0),
        Bar("computation", 2, 3, "attn.late"),
        Bar("computation", 3, 4, "moe"),
    ]
    ax = plots.timeline(bars, title="t")
    drawn = [(b.get_x(), b.get_width(), round(b.get_y() + b.get_height() / 2)) for c in ax.containers for b in c][:4]
    assert drawn == [(0, 1, 1), (1, 2, 0), (2, 1, 1), (3, 1, 1)]
    assert texts(ax) == ["1", " 1 all_reduce(attn_tp), 8 bytes"]
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["attn", "moe"]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["communication", "computation"]
    assert "[instructions]" in ax.get_xlabel()


def test_expert_load_colours_by_owner_and_marks_the_mean():
    ax = plots.expert_load([4, 0, 1, 3], 2)
    assert [[bar.get_height() for bar in c] for c in ax.containers] == [[4, 0], [1, 3]]
    colours = [{to_hex(bar.get_facecolor()) for bar in c} for c in ax.containers]
    assert colours == [{plots.COLOURS[0].lower()}, {plots.COLOURS[1].lower()}]
    assert list(ax.lines[0].get_ydata()) == [2, 2]
    assert "[number]" in ax.get_xlabel() and "[rows]" in ax.get_ylabel()
    with pytest.raises(ValueError, match="4 experts do not divide by 3 ranks"):
        plots.expert_load([1, 2, 3, 4], 3)


def test_on_each_rank_is_in_rank_order():
    whole = P(("attn_dp", "attn_tp"))
    x = jax.device_put(np.arange(4), Topology(2, 2).sharding(whole))
    turned = Topology(2, 2, devices=jax.devices()[3::-1])  # rank 0 is the fourth device
    assert [held.tolist() for held in pictures.on_each_rank(x, turned)] == [[3], [2], [1], [0]]


def test_a_move_writes_every_number_in_the_colour_of_its_rank():
    _, ax = pictures.pyplot().subplots()
    values, sources = [np.array([1, 2]), np.array([3, 4])], [np.array([0, 0]), np.array([1, pictures.NOBODY])]
    after = [np.array([5])] * 2, [np.array([pictures.EVERYONE])] * 2
    pictures.draw_move("verb", ("A", values, sources), ("B", *after), ax=ax, addends=True)
    written = texts(ax)
    assert [t for t in written if t.isdigit()] == ["1", "2", "3", "4", "5", "5"]
    assert {"verb", "A", "B", "rank 0", "rank 1"} <= set(written)
    cells = [p for p in ax.patches if type(p).__name__ == "Rectangle"]
    assert [p.get_hatch() for p in cells].count("///") == 4
    filled = [to_hex(p.get_facecolor()) for p in cells if p.get_fill()]
    assert filled[:3] == ["#0072b2", "#0072b2", "#e69f00"] and filled[3] == "#ffffff"


def test_text_is_black_on_light_and_white_on_dark():
    assert [pictures.text_colour(c) for c in ("#F0E442", "#0072B2", "#000000")] == ["#000000", "#FFFFFF", "#FFFFFF"]


def test_stages_show_whose_rows_a_rank_holds():
    topology = Topology(2, 2)
    own = Stage("layer.0/attn", (2, 4), "float32", {"attn_dp": "SHARD", "attn_tp": "PARTIAL"}, "")
    whole = Stage(
        "layer.0/gather", (4, 4), "float32", {"attn_dp": "REPLICA", "attn_tp": "REPLICA"}, "all_gather(world)"
    )
    pictures.draw_stages([own, whole], topology, title="t")
    (ax,) = pictures.pyplot().gcf().axes
    filled = [p for p in ax.patches if p.get_fill()]
    colours = [to_hex(p.get_facecolor()) for p in filled if p.get_linewidth() == 0]
    assert colours == ["#0072b2"] * 2 + ["#e69f00"] * 2 + ["#999999"] * 4
    assert sum(p.get_hatch() is not None for p in ax.patches) == 4
    lines = [t for t in texts(ax) if t.startswith("(")]
    assert lines[0].startswith("(S, P)  2 x 4") and lines[1].endswith("all_gather(world)")


def test_without_matplotlib_one_sentence_says_how_to_get_it():
    code = "import sys; sys.modules['matplotlib'] = None\nfrom jaxcoll import plots\nplots.expert_load([1], 1)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ImportError: pictures need matplotlib: pip install 'jaxcoll[plot]'"
