"""What `jaxcoll verify` must notice: one changed number in weights or trace is exit 1, in words and in JSON."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden import ODD, WIDE
from programs import shared_programs
from safetensors.numpy import load_file, save_file

from models import cli
from models.deepseek_v4.checkpoint import TRACE_FILE

WEIGHTS_FILE = "model.safetensors"
MESHES = {WIDE: ("--attn-dp", "2", "--attn-tp", "2", "--moe-ep", "2"), ODD: ("--attn-dp", "3", "--moe-ep", "3")}


@pytest.fixture(scope="module", autouse=True)
def one_program() -> Iterator[None]:
    with shared_programs():
        yield


def changed(source: Path, target: Path, file: str, name: str, change: Callable[[np.ndarray], Any]) -> Path:
    """A copy of a fixture in which one tensor of one file was changed in place."""
    for other in ("config.json", WEIGHTS_FILE, TRACE_FILE):
        shutil.copy(source / other, target / other)
    tensors = load_file(target / file)
    tensors[name] = np.ascontiguousarray(tensors[name])
    change(tensors[name])
    save_file(tensors, target / file)
    return target


def add(index: tuple[int, ...], amount: float) -> Callable[[np.ndarray], None]:
    def change(tensor: np.ndarray) -> None:
        tensor[index] += amount

    return change


def put(index: tuple[int, ...], value: float) -> Callable[[np.ndarray], None]:
    def change(tensor: np.ndarray) -> None:
        tensor[index] = value

    return change


def verify(capsys: pytest.CaptureFixture[str], folder: Path, mesh: tuple[str, ...]) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON; NaN and Infinity are no JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    code = cli.main(["verify", str(folder), *mesh, "--json"])
    out, err = capsys.readouterr()
    assert err == ""
    result = json.loads(out, parse_constant=refuse)
    assert result["ok"] is (code == 0) and result["compiles"] == 1
    return code, result


def worst(result: dict[str, Any]) -> float:
    return max(result["max_abs_err"].values())


# Each kind of tensor once, +0.01 in one element that some row of the trace depends on. (In layer 0 all streams are
# equal, so only the rows of hc_attn that weigh what comes back matter there.)
WIDE_ELEMENTS = {
    "embed.weight": (54, 163),
    "hc_head_base": (2,),
    "hc_head_fn": (1, 315),
    "hc_head_scale": (0,),
    "head.weight": (2, 19),
    "norm.weight": (154,),
    "layers.0.attn.attn_sink": (0,),
    "layers.0.attn.compressor.ape": (1, 104),
    "layers.0.attn.compressor.norm.weight": (83,),
    "layers.0.attn.compressor.wgate.weight": (116, 128),
    "layers.0.attn.compressor.wkv.weight": (77, 248),
    "layers.0.attn.kv_norm.weight": (93,),
    "layers.0.attn.q_norm.weight": (40,),
    "layers.0.attn.wkv.weight": (69, 143),
    "layers.0.attn.wo_a.weight": (59, 71),
    "layers.0.attn.wo_b.weight": (208, 42),
    "layers.0.attn.wq_a.weight": (0, 100),
    "layers.0.attn.wq_b.weight": (438, 35),
    "layers.0.attn_norm.weight": (8,),
    "layers.0.hc_attn_base": (6,),
    "layers.0.hc_attn_fn": (5, 3),
    "layers.0.hc_attn_scale": (1,),
    "layers.0.ffn.experts.6.w1.weight": (46, 216),
    "layers.0.ffn.experts.1.w2.weight": (22, 55),
    "layers.0.ffn.experts.0.w3.weight": (34, 20),
    "layers.0.ffn.gate.weight": (3, 103),
    "layers.0.ffn.shared_experts.w1.weight": (1, 1),
    "layers.0.ffn.shared_experts.w2.weight": (31, 0),
    "layers.0.ffn.shared_experts.w3.weight": (42, 134),
    "layers.0.ffn_norm.weight": (165,),
    "layers.1.attn.compressor.ape": (0, 148),
    "layers.1.attn.compressor.norm.weight": (92,),
    "layers.1.attn.compressor.wgate.weight": (216, 134),
    "layers.1.attn.compressor.wkv.weight": (96, 79),
    "layers.1.ffn.gate.bias": (5,),
    "layers.1.hc_ffn_base": (22,),
    "layers.1.hc_ffn_fn": (14, 358),
    "layers.1.hc_ffn_scale": (2,),
}
# An indexer only chooses entries: what matters is a change that moves a choice, and some take more than 0.01.
ODD_ELEMENTS = {
    "layers.1.attn.indexer.compressor.ape": ((3, 25), 0.03),
    "layers.1.attn.indexer.compressor.norm.weight": ((14,), 0.01),
    "layers.1.attn.indexer.compressor.wgate.weight": ((32, 8), 0.1),
    "layers.1.attn.indexer.compressor.wkv.weight": ((34, 61), 0.03),
    "layers.1.attn.indexer.weights_proj.weight": ((8, 77), 0.01),
    "layers.1.attn.indexer.wq_b.weight": ((226, 25), 0.03),
}


def kind(name: str) -> str:
    return re.sub(r"\d+", "N", name)


def test_the_elements_are_of_every_kind_of_tensor():
    """tid2eid, of integers, has a test of its own."""
    for folder, elements in ((WIDE, WIDE_ELEMENTS), (ODD, ODD_ELEMENTS)):
        assert elements.keys() <= load_file(folder / WEIGHTS_FILE).keys()
    every = {kind(name) for name in load_file(WIDE / WEIGHTS_FILE)}
    tried = {kind(name) for name in (*WIDE_ELEMENTS, *ODD_ELEMENTS)}
    assert every - tried == {"layers.N.ffn.gate.tidNeid"}


@pytest.mark.parametrize(("name", "index"), WIDE_ELEMENTS.items(), ids=WIDE_ELEMENTS)
def test_one_weight_off_by_a_hundredth(name, index, tmp_path, capsys):
    folder = changed(WIDE, tmp_path, WEIGHTS_FILE, name, add(index, 0.01))
    code, result = verify(capsys, folder, MESHES[WIDE])
    assert code == 1 and worst(result) > 4e-4


@pytest.mark.parametrize("name", ODD_ELEMENTS)
def test_one_weight_of_an_indexer_off(name, tmp_path, capsys):
    folder = changed(ODD, tmp_path, WEIGHTS_FILE, name, add(*ODD_ELEMENTS[name]))
    code, result = verify(capsys, folder, MESHES[ODD])
    assert code == 1 and worst(result) > 0.1


def test_one_entry_of_the_routing_table_names_another_expert(tmp_path, capsys):
    table, ids = load_file(WIDE / WEIGHTS_FILE)["layers.0.ffn.gate.tid2eid"], load_file(WIDE / TRACE_FILE)["input_ids"]
    token = int(ids[1, 7])
    other = next(expert for expert in range(8) if expert not in table[token])
    folder = changed(WIDE, tmp_path, WEIGHTS_FILE, "layers.0.ffn.gate.tid2eid", put((token, 1), other))
    code, result = verify(capsys, folder, MESHES[WIDE])
    layer_0 = int(np.sum(ids == token))
    assert code == 1 and result["topk_mismatches"] >= layer_0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_not_finite(value, tmp_path, capsys):
    folder = changed(WIDE, tmp_path, WEIGHTS_FILE, "layers.1.attn.wkv.weight", put((3, 5), value))
    code, result = verify(capsys, folder, MESHES[WIDE])
    errors = result["max_abs_err"]
    assert code == 1 and result["ok"] is False
    assert errors["attn_out.1"] is None and errors["logits"] is None and errors["streams.2"] is None
    assert errors["streams.0"] == 0 and errors["attn_out.0"] < 5e-5  # before that layer nothing changed


def test_the_table_shows_what_is_not_finite(tmp_path, capsys):
    folder = changed(WIDE, tmp_path, WEIGHTS_FILE, "layers.1.attn.wkv.weight", put((3, 5), np.nan))
    assert cli.main(["verify", str(folder), *MESHES[WIDE]]) == 1
    out, err = capsys.readouterr()
    assert err == "" and re.search(r"^logits +not finite *$", out, re.MULTILINE)
    assert "NOT equal to the golden trace: largest difference not finite, allowed 0.0002\n" in out
    assert "greedy ids DIFFER" in out


TRACE_TENSORS = ["logits", "streams.0", "streams.1", "streams.2", "attn_out.0", "attn_out.1", "moe_out.0", "moe_out.1"]


@pytest.mark.parametrize("name", TRACE_TENSORS)
def test_one_number_of_the_trace(name, tmp_path, capsys):
    """Just beyond the tolerance is a mismatch, and only of that tensor."""
    last = tuple(size - 1 for size in load_file(WIDE / TRACE_FILE)[name].shape)
    code, result = verify(capsys, changed(WIDE, tmp_path, TRACE_FILE, name, add(last, 2.5e-4)), MESHES[WIDE])
    off = {tensor for tensor, error in result["max_abs_err"].items() if error > 2e-4}
    assert (code, off, result["greedy_match"], result["topk_mismatches"]) == (1, {name}, True, 0)
    assert result["max_abs_err"][name] == pytest.approx(2.5e-4, abs=2e-5)


def test_within_the_tolerance_is_equal(tmp_path, capsys):
    folder = changed(WIDE, tmp_path, TRACE_FILE, "moe_out.1", add((0, 0, 0), 1.5e-4))
    code, result = verify(capsys, folder, MESHES[WIDE])
    assert code == 0 and result["max_abs_err"]["moe_out.1"] == pytest.approx(1.5e-4, abs=2e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_trace_that_is_not_finite(value, tmp_path, capsys):
    folder = changed(WIDE, tmp_path, TRACE_FILE, "attn_out.0", put((1, 3, 7), value))
    code, result = verify(capsys, folder, MESHES[WIDE])
    assert code == 1
    assert [name for name, error in result["max_abs_err"].items() if error is None] == ["attn_out.0"]


@pytest.mark.parametrize(("request_", "place"), [(0, 0), (1, 4)])
def test_one_greedy_id(request_, place, tmp_path, capsys):
    def another(ids: np.ndarray) -> None:
        ids[request_, place] = (ids[request_, place] + 1) % 64

    code, result = verify(capsys, changed(WIDE, tmp_path, TRACE_FILE, "greedy_ids", another), MESHES[WIDE])
    assert (code, result["greedy_match"], result["topk_mismatches"]) == (1, False, 0)
    assert worst(result) < 5e-5
    assert result["generated"] == load_file(WIDE / TRACE_FILE)["greedy_ids"].tolist()


@pytest.mark.parametrize("layer", [0, 1])
def test_one_expert_choice_counts_once(layer, tmp_path, capsys):
    """The lower id of a row becomes the highest, so that in order no place is as before."""

    def another(ids: np.ndarray) -> None:
        row = next(row for row in ids.reshape(-1, 2) if row.max() < 7)
        row[np.argmin(row)] = 7

    code, result = verify(capsys, changed(WIDE, tmp_path, TRACE_FILE, f"topk_ids.{layer}", another), MESHES[WIDE])
    assert (code, result["greedy_match"], result["topk_mismatches"]) == (1, True, 1)
    assert worst(result) < 5e-5


def test_the_order_of_expert_choices_does_not_count(tmp_path, capsys):
    def turned(ids: np.ndarray) -> None:
        ids[:] = ids[..., ::-1].copy()

    code, result = verify(capsys, changed(WIDE, tmp_path, TRACE_FILE, "topk_ids.1", turned), MESHES[WIDE])
    assert (code, result["topk_mismatches"]) == (0, 0)


def test_another_input_id(tmp_path, capsys):
    def another(ids: np.ndarray) -> None:
        ids[0, 11] = (ids[0, 11] + 1) % 64

    code, result = verify(capsys, changed(WIDE, tmp_path, TRACE_FILE, "input_ids", another), MESHES[WIDE])
    assert code == 1 and result["max_abs_err"]["streams.0"] > 0.1
