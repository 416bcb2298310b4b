"""`explain --trace`: one token from its request's ranks to its experts' and home, with states, bytes and owners."""

import json
from typing import Any

import pytest

from jaxcoll.cost import Transfer
from jaxcoll.explain import Stage, Stages
from jaxcoll.follow import Stop, TokenPath, _counted, _sent
from jaxcoll.plan import plan_layer
from jaxcoll.topology import Topology
from models.cli import main

HOME, EXPERTS = "request ranks", "expert ranks"


def path_of(capsys, *words):
    assert main(["explain", "--attn-dp", "4", "--attn-tp", "2", "--trace", "--format", "json", *words]) == 0
    return {stop["stage"]: stop for stop in json.loads(capsys.readouterr().out)}


def letters(stop):
    return "".join(state[0] for state in stop["states"].values())


@pytest.mark.slow
def test_a_token_goes_to_its_experts_and_home(capsys):
    path = path_of(capsys, "--moe-backend", "all_to_all", "--moe-ep", "4")  # moe_tp 2, low latency
    owners = [stop["owner"] for stop in path.values()]
    assert owners == [HOME] * 7 + [EXPERTS] * 2 + [HOME] * 3
    assert list(path)[5:11] == ["moe.split", "moe/route", "moe/dispatch", "moe/experts", "moe/combine", "moe.join"]
    assert {name: letters(stop) for name, stop in path.items() if name.startswith("moe")} == {
        "moe.split": "SSSS",
        "moe/route": "SSSS",
        "moe/dispatch": "SRSR",  # over moe_tp all hold the same rows
        "moe/experts": "SSSS",  # and compute an addend each, of the experts' width
        "moe/combine": "SSSS",
        "moe.join": "SRSR",
    }
    assert path["moe/dispatch"]["shape"] == [4, 8, 64]  # 16 experts of 4 owners; 4 owners' rows, gathered over moe_tp
    # Chunks of 1 row of 64 floats. Out: 3 gathers over moe_tp, 16 counts, blocks of 8 rows for each of 4 owners.
    gathered, counts, rows = 64 * 4 + 2 * 4 * 4, 16 * 4 * 3, 8 * 64 * 4 * 3
    assert path["moe/dispatch"]["wire_bytes"] == pytest.approx(gathered + counts + rows)
    assert path["moe/combine"]["wire_bytes"] == rows + 64 * 4
    assert path["moe.join"]["wire_bytes"] == 64 * 4 and path["moe.join"]["collective"] == "3 x all_gather(attn_tp)"


@pytest.mark.slow
def test_gathered_rows_are_everybodys_and_pictured(capsys):
    assert main(["explain", "--attn-dp", "4", "--attn-tp", "2", "--trace", "--format", "mermaid"]) == 0
    picture = capsys.readouterr().out
    boxes = [line.strip() for line in picture.splitlines() if "subgraph" in line]
    assert [box.split('"')[1] for box in boxes] == [HOME, "every rank", EXPERTS, HOME]
    assert picture.count("subgraph") == sum(line.strip() == "end" for line in picture.splitlines())
    # 7 of 8 chunks of a row of 64 floats arrive; the sum of 8 rows is twice 7/8 of them.
    assert "moe.gather<br/>all_gather(world)<br/>1,792 B sent" in picture
    assert "moe.combine<br/>all_reduce(world)<br/>3,584 B sent" in picture
    assert "own experts' addend of every row<br/>(P, P, P, R) 8 x 64" in picture


def test_a_stage_names_once_what_it_does_often():
    assert _counted("") == "" and _counted("a(x); b(x); a(x)") == "2 x a(x); b(x)"


def test_of_two_block_sizes_one_is_sent():
    kind: Any = "all_to_all"
    blocks = [Transfer(kind, "x", 2, 8, 8, f"dispatch ({name} blocks)") for name in ("small", "full")]
    assert _sent([*blocks, Transfer(kind, "x", 2, 6, 6, "combine")], ("dispatch", "counts")) == 4


def test_jupyter_shows_escaped_tables():
    states: dict[str, str] = dict.fromkeys(("attn_dp", "attn_tp", "moe_ep", "moe_tp"), "SHARD")
    path = TokenPath([Stop("moe", "<b>rows</b> & more", (2, 8), "float32", states, "", 0.0, "expert ranks")])
    shown = path._repr_html_()
    assert "&lt;b&gt;rows&lt;/b&gt; &amp; more" in shown and "<b>" not in shown and "float32 2 x 8" in shown
    found = Stages([Stage("s", (3,), "int32", {"attn_dp": "SHARD", "attn_tp": "REPLICA"}, "all_reduce(attn_tp)")])
    assert "<td" in found._repr_html_() and "all_reduce(attn_tp)" in found._repr_html_()
    plan = plan_layer(Topology(4, 2, devices=range(8)), (1, 1, 1, 1), shared_width=8)
    assert plan._repr_html_().count("<tr>") == 1 + len(plan.hand_overs)
    assert "max_len" in plan._repr_html_() and "&gt;=" in plan._repr_html_()  # a reason with a comparison
