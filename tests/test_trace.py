"""Reading a golden trace: what it holds, and one sentence for everything that does not fit the config."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from golden import ODD, TINY, WIDE
from safetensors.numpy import load_file, save_file

from models.deepseek_v4.config import Config
from models.deepseek_v4.trace import FILE, Trace, TraceError

CONFIG = Config.from_folder(WIDE)
GOLDEN = load_file(WIDE / FILE)
Tensors = dict[str, np.ndarray]


def written(folder: Path, **changes: Any) -> Path:
    """The wide fixture's trace with some tensors replaced; None leaves one out."""
    tensors = {name: value for name, value in (GOLDEN | changes).items() if value is not None}
    save_file(tensors, folder / FILE)
    return folder


def refusal(folder: Path, config: Config = CONFIG) -> str:
    with pytest.raises(TraceError) as caught:
        Trace.load(folder, config)
    text = str(caught.value)
    assert "\n" not in text and str(folder) in text
    return text


@pytest.mark.parametrize("folder", [TINY, ODD, WIDE], ids=lambda f: f.name)
def test_the_fixtures(folder):
    config, tensors = Config.from_folder(folder), load_file(folder / FILE)
    trace = Trace.load(folder, config)
    batch, length = tensors["input_ids"].shape
    new = tensors["greedy_ids"].shape[1]
    assert trace.steps == length + new - 1  # the last greedy id is not fed again
    layers = range(config.num_hidden_layers)
    names = ["logits", *(f"streams.{i}" for i in (*layers, len(layers)))]
    names += [f"{name}.{i}" for name in ("attn_out", "moe_out") for i in layers]
    assert sorted(trace.values) == sorted(names)
    for name, value in trace.values.items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, tensors[name])
    np.testing.assert_array_equal(trace.input_ids, tensors["input_ids"])
    np.testing.assert_array_equal(trace.greedy_ids, tensors["greedy_ids"])
    for i, ids in enumerate(trace.topk_ids):
        assert ids.shape == (batch, length, config.num_experts_per_tok) and ids.dtype == np.int64
        np.testing.assert_array_equal(ids, tensors[f"topk_ids.{i}"])


def test_other_number_types_are_read(tmp_path):
    halves, long = GOLDEN["logits"].astype(jnp.bfloat16), GOLDEN["input_ids"].astype(np.int64)
    doubles = GOLDEN["streams.1"].astype(np.float64)
    trace = Trace.load(written(tmp_path, logits=halves, input_ids=long, **{"streams.1": doubles}), CONFIG)
    np.testing.assert_array_equal(trace.values["logits"], halves.astype(np.float32))
    np.testing.assert_array_equal(trace.values["streams.1"], GOLDEN["streams.1"])
    np.testing.assert_array_equal(trace.input_ids, long)
    assert {value.dtype.name for value in trace.values.values()} == {"float32"}


def test_tensors_that_nobody_compares_may_be_there(tmp_path):
    assert Trace.load(written(tmp_path, notes=np.zeros(3, np.uint8)), CONFIG).values.keys() == (
        Trace.load(WIDE, CONFIG).values.keys()
    )


def test_no_trace(tmp_path):
    assert refusal(tmp_path) == f"{tmp_path} has no {FILE}: verify compares with one; generate and bench need none"
    (tmp_path / FILE).mkdir()
    assert "has no trace.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize("length", [0, 4, 8, 500, 20000, -1])
def test_a_truncated_file(length, tmp_path):
    content = (WIDE / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(content[:length])
    assert f"{tmp_path / FILE} cannot be read as safetensors: " in refusal(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x00" * 64, b"not a tensor file at all", b"\xff" * 4096])
def test_garbage(content, tmp_path):
    (tmp_path / FILE).write_bytes(content)
    assert "cannot be read as safetensors: " in refusal(tmp_path)


KINDS = ["input_ids", "greedy_ids", "logits", "streams.0", "streams.2", "attn_out.1", "moe_out.0", "topk_ids.1"]


@pytest.mark.parametrize("name", KINDS)
def test_a_missing_tensor(name, tmp_path):
    assert refusal(written(tmp_path, **{name: None})) == f"{tmp_path / FILE} has no tensor {name}"


RESHAPED: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
    "input_ids": (lambda v: v[0], "[any, any]"),
    "greedy_ids": (lambda v: v[:1], "[2, any]"),
    "logits": (lambda v: v[..., :-1], "[2, 19, 64]"),
    "streams.0": (lambda v: v[:, :, :3], "[2, 19, 4, 256]"),
    "streams.2": (lambda v: v[:, :-1], "[2, 19, 4, 256]"),
    "attn_out.1": (lambda v: v.reshape(-1, 256), "[2, 19, 256]"),
    "moe_out.0": (lambda v: np.repeat(v, 2, axis=0), "[2, 19, 256]"),
    "topk_ids.1": (lambda v: v[..., :1], "[2, 19, 2]"),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_wrong_shape(name, tmp_path):
    change, needed = RESHAPED[name]
    value = np.ascontiguousarray(change(GOLDEN[name]))
    said = refusal(written(tmp_path, **{name: value}))
    expected = f"{name} in {tmp_path / FILE} has shape {list(value.shape)}; this config needs {needed}, none empty"
    assert said == expected


@pytest.mark.parametrize("shape", [(0, 19), (2, 0)])
def test_nothing_to_feed(shape, tmp_path):
    assert f"has shape {list(shape)}" in refusal(written(tmp_path, input_ids=np.zeros(shape, np.int32)))


def test_no_greedy_ids(tmp_path):
    assert "greedy_ids in" in refusal(written(tmp_path, greedy_ids=np.zeros((2, 0), np.int32)))


@pytest.mark.parametrize("name", KINDS)
def test_a_wrong_type(name, tmp_path):
    other, allowed = (np.float32, "an integer type") if "ids" in name else (np.int32, "a floating-point type")
    said = refusal(written(tmp_path, **{name: GOLDEN[name].astype(other)}))
    assert said == f"{name} in {tmp_path / FILE} is {np.dtype(other)}; it must be {allowed}"


def test_booleans_are_no_ids(tmp_path):
    assert "is bool; it must be an integer type" in refusal(written(tmp_path, greedy_ids=GOLDEN["greedy_ids"] > 3))


@pytest.mark.parametrize("value", [-1, 64])
@pytest.mark.parametrize("name", ["input_ids", "greedy_ids"])
def test_a_token_out_of_range(name, value, tmp_path):
    ids = GOLDEN[name].copy()
    ids[1, 3] = value
    assert refusal(written(tmp_path, **{name: ids})) == (
        f"{name} in {tmp_path / FILE} holds id {value}, out of range: it must be from 0 to 63"
    )


@pytest.mark.parametrize("value", [-1, 8])
def test_an_expert_out_of_range(value, tmp_path):
    ids = GOLDEN["topk_ids.0"].copy()
    ids[0, 0, 1] = value
    assert f"topk_ids.0 in {tmp_path / FILE} holds id {value}, out of range" in refusal(
        written(tmp_path, **{"topk_ids.0": ids})
    )


def test_a_trace_of_another_model():
    smaller = dataclasses.replace(CONFIG, hidden_size=128)
    assert "streams.0 in" in refusal(WIDE, smaller) and "needs [2, 19, 4, 128]" in refusal(WIDE, smaller)


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    """As the system says it: who runs the tests may be allowed to read everything."""

    def forbidden(path: Path, *_: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    written(tmp_path)
    monkeypatch.setattr(Path, "open", forbidden)
    assert refusal(tmp_path) == f"{tmp_path / FILE} cannot be read: Permission denied"
