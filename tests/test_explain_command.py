"""`jaxcoll explain`: plan, prediction and compiled program side by side, for CPU devices here and GPUs elsewhere."""

import json

import pytest

from models.cli import main


def explained(capsys, *words: str) -> dict:
    assert main(["explain", *words, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("--attn-dp", "4", "--attn-tp", "2"),
        ("--attn-dp", "4", "--attn-tp", "1", "--combine", "reduce_scatter", "--target", "h200"),
        ("--attn-dp", "2", "--attn-tp", "2", "--gather", "sum_len", "--head", "world"),
        ("--attn-dp", "4", "--attn-tp", "2", "--moe-backend", "all_to_all"),
        ("--attn-dp", "4", "--attn-tp", "2", "--moe-ep", "4", "--moe-backend", "fused"),
        ("--attn-dp", "2", "--attn-tp", "2", "--overlap", "two_batch", "--requests-per-replica", "4,3"),
    ],
)
def test_the_program_sends_what_the_plan_predicts(capsys, words):
    record = explained(capsys, *words)
    predicted, compiled = record["totals"]["predicted"], record["totals"]["compiled"]
    assert predicted == compiled and sum(t["wire_bytes"] for t in compiled.values()) > 0
    exchanges = {"all_to_all", "fused", "two_batch"} & set(words)
    way = "dispatch" if exchanges else "gather"
    assert [h["name"] for h in record["plan"]] == ["attention", way, "combine", "shared_expert", "head"]
    assert sum(h["reduces"] for h in record["plan"] if h["name"] != "attention") == 1
    assert all(h["reason"] for h in record["plan"])
    why = "the gather backend packs no rows and adds none up: only an all_to_all has kernels"
    if exchanges:
        why = "the device is cpu (cpu), and the kernels are for Hopper and Blackwell GPUs"
    assert (record["kernels"]["path"], record["kernels"]["impossible"]) == ("xla", {"pallas": why})
    assert sum(c["operand_bytes"] for c in record["collectives"]) == sum(t["operand_bytes"] for t in compiled.values())


@pytest.mark.slow
def test_a_person_reads_reasons_and_a_picture(capsys):
    assert main(["explain", "--attn-dp", "2"]) == 0
    told = capsys.readouterr().out
    assert "all_reduce: not chosen because" in told and "gather_v: not chosen because" in told and "predicted" in told
    assert "kernels: xla\n    because the gather backend packs no rows" in told
    assert main(["explain", "--attn-dp", "2", "--format", "mermaid"]) == 0
    picture = capsys.readouterr().out
    assert picture.startswith("flowchart TB") and '-- "(S, P)' in picture


def test_an_impossible_way_is_one_sentence(capsys):
    assert main(["explain", "--attn-dp", "4", "--attn-tp", "2", "--gather", "gather_v"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "gather_v is impossible here because" in err
    assert main(["explain", "--moe-backend", "gather", "--kernels", "pallas"]) == 2
    assert "kernels pallas is impossible here because gather was asked for" in capsys.readouterr().err
