"""What people are shown: the stages of a traced step, and the tables and sentences about a run."""

import io
from typing import Any

import jax
import pytest
from golden import WIDE
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table
from stepping import shape

from jaxcoll.collectives import all_gather, all_reduce, all_to_all, declare_partial, reduce_scatter, take_shard
from jaxcoll.explain import Stage, stages
from jaxcoll.step import compile_step
from jaxcoll.topology import Topology
from models.deepseek_v4 import report
from models.deepseek_v4.config import Config

scope = jax.named_scope


@pytest.fixture(scope="module")
def layer() -> list[Stage]:
    """Hand-overs of a layer on 2 x 3 devices, between layers that are not asked for."""
    topology = Topology(2, 3)
    dp, tp, world = topology.group("attn_dp"), topology.group("attn_tp"), topology.group("world")

    def step(h, w):
        with scope("layer.0"), scope("attn"):
            h = h * 2
        with scope("layer.1"):
            with scope("attn"):
                y = declare_partial(h @ w, tp)  # [6, 9]
            with scope("attn.all_reduce"):
                y = all_reduce(y, tp)
            with scope("moe.gather"), scope("inside"):
                y = all_gather(y, dp, 0)  # [12, 9]
            with scope("moe.own"):
                y = take_shard(y, world, 0)  # [2, 9]
            with scope("moe.exchange"):
                y = all_to_all(y, tp, 1, 0)  # [6, 3]
            with scope("moe"):
                y = declare_partial(y.astype("bfloat16"), world)
            with scope("moe.combine"):
                y = all_gather(reduce_scatter(y, world, 0), tp, 0)  # [1, 3], [3, 3]
        with scope("layer.10"), scope("attn"):
            return y + 1

    shapes = shape(12, 6), shape(6, 9)
    compiled = compile_step(step, topology, shapes, in_specs=(P(dp, tp), P(tp, None)), out_specs=P(dp, None))
    return stages(compiled.traced, topology, "layer.1/")


def test_the_stages_of_one_layer_with_shapes_states_and_collectives(layer):
    found = [(s.scope, s.shape, s.states["attn_dp"], s.states["attn_tp"], s.collective) for s in layer]
    assert found == [
        ("layer.1/attn", (6, 9), "SHARD", "PARTIAL", ""),
        ("layer.1/attn.all_reduce", (6, 9), "SHARD", "REPLICA", "all_reduce(attn_tp)"),
        ("layer.1/moe.gather", (12, 9), "REPLICA", "REPLICA", "all_gather(attn_dp)"),
        ("layer.1/moe.own", (2, 9), "SHARD", "SHARD", ""),
        ("layer.1/moe.exchange", (6, 3), "SHARD", "SHARD", "all_to_all(attn_tp)"),
        ("layer.1/moe", (6, 3), "PARTIAL", "PARTIAL", ""),
        ("layer.1/moe.combine", (3, 3), "SHARD", "REPLICA", "reduce_scatter(world); all_gather(attn_tp)"),
    ]


def test_the_element_types(layer):
    assert {s.scope.split("/")[1]: s.dtype for s in layer if s.scope.endswith(("moe", "own"))} == {
        "moe.own": "float32",
        "moe": "bfloat16",
    }


def test_groups_are_named_where_they_have_a_name():
    """On a mesh of three axes: moe_ep is one of them, another half of attn_dp is in no group."""
    topology = Topology(4, 2, 2)
    assert topology.group("moe_ep") == ("attn_dp_outer",) and topology.group("attn_dp")[1] == "attn_dp_inner"

    def step(x):
        with scope("s"):
            with scope("half"):
                y = take_shard(x, "attn_dp_inner", 0)
            with scope("half.all_gather"):
                y = all_gather(y, "attn_dp_inner", 0)
            with scope("experts"):
                y = all_reduce(declare_partial(take_shard(y, "attn_dp_outer", 0), "attn_dp_outer"), "attn_dp_outer")
            with scope("all"):
                y = take_shard(y, ("attn_dp_outer", "attn_tp"), 0)
                y = all_gather(y, ("attn_dp_outer", "attn_tp"), 0)
        return y

    compiled = compile_step(step, topology, (shape(8, 3),), in_specs=(P(None, None),), out_specs=P(None, None))
    assert [(s.scope, s.states["attn_dp"], s.collective) for s in stages(compiled.traced, topology, "s/")] == [
        ("s/half", "mixed", ""),
        ("s/half.all_gather", "REPLICA", "all_gather(attn_dp_inner)"),
        ("s/experts", "REPLICA", "all_reduce(moe_ep)"),
        ("s/all", "REPLICA", "all_gather(attn_dp_outer,attn_tp)"),
    ]


def printed(*parts: Table | str, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    for part in parts:
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_the_table_of_differences_has_a_row_per_layer():
    names = ["logits", "streams.0", "streams.1", "streams.2", "attn_out.0", "attn_out.1", "moe_out.0", "moe_out.1"]
    errors: dict[str, float | None] = {name: 10.0**-i for i, name in enumerate(names)}
    lines = printed(report.differences_table(errors | {"moe_out.1": None}))
    assert lines[0] == "layer streams attn_out moe_out"
    assert lines[2:] == [
        "0 1.0e-01 1.0e-04 1.0e-06",
        "1 1.0e-02 1.0e-05 not finite",
        "head 1.0e-03",
        "logits 1.0e+00",
    ]


def test_the_table_of_collectives_adds_up_per_kind_and_group():
    def record(kind: str, group: str, count: int, size: int) -> dict[str, Any]:
        return {
            "kind": kind, "group": group, "source": f"s{size}", "count": count, "operand_bytes": size,
            "result_bytes": 2 * size,
        }  # fmt: skip

    records = [record("all_reduce", "a,b", 1, 8), record("all_gather", "a", 2, 4), record("all_reduce", "a,b", 3, 16)]
    lines = printed(report.collectives_table([*records, record("all_reduce", "a", 1, 1)]))
    assert lines[0] == "kind mesh axes count operand_bytes result_bytes"
    assert lines[2:] == ["all_gather a 2 4 8", "all_reduce a 1 1 2", "all_reduce a,b 4 24 48"]


OUTCOME = {
    "ok": True, "tolerance": 2e-4, "max_abs_err": {"logits": 3e-6, "streams.0": 0.0}, "topk_mismatches": 0,
    "greedy_match": True, "steps": 36, "compiles": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (
            {},
            "equal to the golden trace: largest difference 3.0e-06, allowed 0.0002\n"
            "36 steps, 1 compiled program; greedy ids match; 0 expert choices differ",
        ),
        (
            {"ok": False, "greedy_match": False, "topk_mismatches": 1, "compiles": 2, "steps": 1},
            "NOT equal to the golden trace: largest difference 3.0e-06, allowed 0.0002\n"
            "1 step, 2 compiled programs; greedy ids DIFFER; 1 expert choice differs",
        ),
        (
            {"ok": False, "max_abs_err": {"logits": None, "streams.0": 0.5}, "tolerance": 0.25},
            "NOT equal to the golden trace: largest difference not finite, allowed 0.25\n"
            "36 steps, 1 compiled program; greedy ids match; 0 expert choices differ",
        ),
    ],
)
def test_the_verdict(changes, lines):
    assert report.verdict(OUTCOME | changes) == lines
    assert max(map(len, lines.splitlines())) <= 80


def test_ids_stay_on_one_line_however_narrow_the_terminal(capsys):
    report.print_generated(Console(width=30), [[1] * 30, [2]], [(0, 0), (3, 1)])
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "",
        f"request 0 on replica 0 continues with {', '.join(['1'] * 30)}",
        "request 1 on replica 3 continues with 2",
        "",
    ]


def test_a_title_is_wider_than_its_table(capsys):
    table = report.new_table("a", right=("b",))
    table.add_row("x", "1")
    report.print_table(Console(width=40), "A title that a table would fold", table)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "", "A title that a table would fold", "a   b", "─────", "x   1",
    ]  # fmt: skip


def test_the_topology_in_words_and_as_json():
    sizes = report.topology_json(Topology(2, 3, 2))
    assert sizes == {
        "attn_dp": 2, "attn_tp": 3, "moe_ep": 2, "moe_tp": 3, "world": 6, "processes": 1, "local_devices": 6,
    }  # fmt: skip
    assert report.topology_line(sizes) == "6 devices: attn_dp 2 x attn_tp 3 = moe_ep 2 x moe_tp 3"
    assert report.topology_line(report.topology_json(Topology())).startswith("1 device: attn_dp 1 x ")


def test_what_was_ignored_is_said():
    config = Config.from_folder(WIDE)
    assert report.ignored_notes(config, ()) == []
    assert report.ignored_notes(config, ["mtp.1.w", "mtp.0.w"]) == [
        "ignored 2 tensors that no parameter needs, the first is mtp.0.w"
    ]
    assert report.ignored_notes(config, ["mtp.0.w"])[0].startswith("ignored 1 tensor that")
