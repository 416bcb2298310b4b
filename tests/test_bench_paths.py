"""The benchmark of the ways runs every possible cell and reports the bytes that formulas give; no time is judged."""

import sys

import pytest

from jaxcoll.bench_paths import main, markdown, measure


@pytest.mark.parametrize(
    ("mesh", "cells"), [((4, 1), {("gather_v", "all_reduce"), ("max_len", "reduce_scatter")}), ((2, 2), set())]
)
def test_every_possible_cell_is_measured(mesh, cells):
    records = measure(*mesh, rows=4, width=8, rounds=2)
    found = {(r["gather"], r["combine"]): r for r in records}
    assert cells <= set(found) and len(found) == (9 if mesh[1] == 1 else 5)
    n, everyone = mesh[0] * mesh[1], mesh[0] * 4 * 8 * 4  # all rows, float32
    equal = found["max_len", "all_reduce"]
    assert equal["gather_wire_bytes"] == everyone * (n - 1) // n
    assert equal["combine_wire_bytes"] == 2 * everyone * (n - 1) // n
    assert equal["ratio"] == 1.0
    assert all(r["ms"] > 0 for r in records)
    exchange = found[
        "normal", "all_to_all"
    ]  # one block of each rank's rows for every rank, ids and weights beside them
    block = 4 // mesh[1] * (n - 1)
    assert exchange["combine_wire_bytes"] == (block + 4 // mesh[1] * (mesh[1] - 1)) * 8 * 4  # joined over attn_tp
    assert exchange["gather_wire_bytes"] == block * (8 * 4 + 8 * 6) + 4 * n * (n - 1)
    assert markdown(records).count("\n") == len(records) + 1


def test_the_command_prints_the_table_and_saves_the_chart(tmp_path, capsys):
    words = ["--attn-dp", "2", "--rows", "2", "--width", "8", "--rounds", "1", "--plot", str(tmp_path / "bytes.png")]
    assert main(words) == 0
    assert capsys.readouterr().out.count("\n") == 11
    assert (tmp_path / "bytes.png").read_bytes().startswith(b"\x89PNG")


def test_a_chart_without_matplotlib_is_refused_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as left:
        main(["--plot", str(tmp_path / "bytes.png")])
    shown = capsys.readouterr()
    assert (left.value.code, shown.out) == (2, "")
    assert "a plot needs matplotlib, which is not installed: pip install 'jaxcoll[plot]'" in shown.err
    assert list(tmp_path.iterdir()) == []
