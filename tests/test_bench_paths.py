"""The benchmark of the ways runs every possible cell and reports the bytes that formulas give; no time is judged."""

import pytest

from jaxcoll.bench_paths import markdown, measure


@pytest.mark.parametrize(
    ("mesh", "cells"), [((4, 1), {("gather_v", "all_reduce"), ("max_len", "reduce_scatter")}), ((2, 2), set())]
)
def test_every_possible_cell_is_measured(mesh, cells):
    records = measure(*mesh, rows=4, width=8, rounds=2)
    found = {(r["gather"], r["combine"]): r for r in records}
    assert cells <= set(found) and len(found) == (7 if mesh[1] == 1 else 3)
    n, everyone = mesh[0] * mesh[1], mesh[0] * 4 * 8 * 4  # all rows, float32
    equal = found["max_len", "all_reduce"]
    assert equal["gather_wire_bytes"] == everyone * (n - 1) // n
    assert equal["combine_wire_bytes"] == 2 * everyone * (n - 1) // n
    assert equal["ratio"] == 1.0
    assert all(r["ms"] > 0 for r in records)
    assert markdown(records).count("\n") == len(records) + 1
