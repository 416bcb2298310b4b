"""The files of a checkpoint: one or many, with and without an index, broken, on several hosts."""

import json
import os
import socket
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from models.deepseek_v4.checkpoint import INDEX_FILE, Checkpoint, CheckpointError

W = np.arange(12, dtype=np.float32).reshape(3, 4)


def refusal(folder) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def save_parts(folder, parts: list[dict[str, np.ndarray]], weight_map: dict[str, Any] | None = None) -> None:
    """Saves parts under the published names, with an index unless told which."""
    named = {f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts)}
    for file, part in named.items():
        save_file(part, folder / file)
    if weight_map is None:
        weight_map = {name: file for file, part in named.items() for name in part}
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def test_tensors_and_slices(tmp_path):
    halves = (W / 4).astype(jnp.bfloat16)
    count = np.array(2**40, np.int64)
    save_file(
        {"w": W, "h": halves, "n": count, "none": W[:0], "f16": W.astype(np.float16)},
        tmp_path / "any.safetensors",
    )
    with Checkpoint(str(tmp_path)) as checkpoint:
        assert checkpoint.tensors == {
            "w": ((3, 4), "F32"), "h": ((3, 4), "BF16"), "n": ((), "I64"), "none": ((0, 4), "F32"),
            "f16": ((3, 4), "F16"),
        }  # fmt: skip
        part = checkpoint.read("h", (slice(1, 3), slice(0, 2)))
        row = checkpoint.read("w", (slice(2, 3),))
        assert checkpoint.read("n", ()) == 2**40
        assert checkpoint.read("none", (slice(None),)).shape == (0, 4)
        assert checkpoint.read_bytes == part.nbytes + row.nbytes + 8
    # The arrays outlive the files.
    assert part.dtype == jnp.bfloat16 and part.flags.c_contiguous
    np.testing.assert_array_equal(part, halves[1:3, 0:2])
    np.testing.assert_array_equal(row, W[2:3])


def test_published_parts_with_an_index(tmp_path):
    save_parts(tmp_path, [{"a": W, "b": W + 1}, {"c": W + 2}])
    save_file({"a": W}, tmp_path / "trace.safetensors")  # never part of a checkpoint
    with Checkpoint(tmp_path) as checkpoint:
        assert sorted(checkpoint.tensors) == ["a", "b", "c"]
        np.testing.assert_array_equal(checkpoint.read("c", (slice(0, 2), slice(1, 4))), (W + 2)[0:2, 1:4])
        np.testing.assert_array_equal(checkpoint.read("b", ()), W + 1)


def test_parts_without_an_index(tmp_path):
    save_parts(tmp_path, [{"a": W}, {"c": W + 2}])
    (tmp_path / INDEX_FILE).unlink()
    with Checkpoint(tmp_path) as checkpoint:
        assert sorted(checkpoint.tensors) == ["a", "c"]


def test_no_folder_or_no_weights(tmp_path):
    assert refusal(tmp_path / "x") == f"{tmp_path / 'x'} does not exist; it must be a folder with *.safetensors files"
    (tmp_path / "y").write_text("")
    assert "y is not a folder" in refusal(tmp_path / "y")
    save_file({"a": W}, tmp_path / "trace.safetensors")
    assert refusal(tmp_path) == f"{tmp_path} has no weights; it must have *.safetensors files"


def test_a_tensor_in_two_files(tmp_path):
    for file in ("p.safetensors", "q.safetensors"):
        save_file({"w": W}, tmp_path / file)
    assert refusal(tmp_path) == f"{tmp_path}: tensor w is in both p.safetensors and q.safetensors; it must be in one"


@pytest.mark.parametrize("keep", [0, 3, 8, 40, -1, -47])
def test_truncated_file(tmp_path, keep):
    file = tmp_path / "model.safetensors"
    save_file({"w": W}, file)
    file.write_bytes(file.read_bytes()[:keep])
    assert refusal(tmp_path).startswith(f"{file} is truncated or not a safetensors file: ")


@pytest.mark.parametrize(
    "header",
    [
        b"{,}",
        b"[]",
        b'{"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 48]}}',
        b'{"w": {"dtype": "F32", "shape": [12], "data_offsets": [0, 44]}}',
        b'{"w": {"dtype": "Q7", "shape": [12], "data_offsets": [0, 48]}}',
        b'{"w": {"dtype": "F32", "shape": [6], "data_offsets": [24, 48]}}',
        b'{"w": {"dtype": "F32", "shape": [12], "data_offsets": [0, 48]}, "w": {}}',
    ],
)
def test_broken_header(tmp_path, header):
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + W.tobytes())
    assert refusal(tmp_path).startswith(f"{file} is truncated or not a safetensors file: ")


def test_not_a_file(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    assert "model.safetensors is not a file" in refusal(tmp_path)
    (tmp_path / "model.safetensors").rmdir()
    os.mkfifo(tmp_path / "model.safetensors")  # reading it would wait for a writer for ever
    assert "model.safetensors is not a file" in refusal(tmp_path)


def test_an_index_that_is_a_link_to_nothing(tmp_path):
    save_file({"a": W}, tmp_path / "model.safetensors")
    (tmp_path / INDEX_FILE).symlink_to("nowhere")
    assert refusal(tmp_path) == f"{tmp_path / INDEX_FILE} does not exist"


@pytest.mark.parametrize(
    ("weight_map", "said"),
    [
        ({"a": "{1}", "c": "m.safetensors"}, "{index} names m.safetensors, which the folder does not have"),
        ({"a": "{1}", "c": "../{2}"}, "{index} names ../{2}, which the folder does not have"),
        ({"a": "{1}"}, "{folder} has {2}, which model.safetensors.index.json does not name"),
        (
            {"a": "{1}", "c": "{1}", "d": "{2}"},
            "{index} lists c in {1} (it is in {2}), d in {2} (it is in no file); ",
        ),
        (
            {"a": "{2}", "c": "{1}"},
            "{index} lists a in {2} (it is in {1}), c in {1} (it is in {2}); it must agree",
        ),
        (
            {"a": "{1}", "d": "{2}"},
            "{index} lists c in no file (it is in {2}), d in {2} (it is in no file); it must",
        ),
        ({"a": 1}, "{index}: weight_map must be an object from tensor names to file names"),
    ],
)
def test_an_index_that_disagrees(tmp_path, weight_map, said):
    def filled(text):
        if not isinstance(text, str):
            return text
        for i in (1, 2):
            text = text.replace(f"{{{i}}}", f"model-0000{i}-of-00002.safetensors")
        return text.replace("{folder}", str(tmp_path)).replace("{index}", str(tmp_path / INDEX_FILE))

    parts = [{"a": W}, {"c": W}]
    save_parts(tmp_path, parts, {name: filled(file) for name, file in weight_map.items()})
    assert refusal(tmp_path).startswith(filled(said))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"weight_map": {"a": }}', "is not valid JSON: Expecting value at line 1 column 22"),
        (
            '{"weight_map": {"a": "model.safetensors", "a": "x"}}',
            ": a is given 2 times; it must be given once",
        ),
        ("{}", ": weight_map must be an object"),
        ("3", "holds 3; it must hold a JSON object"),
    ],
)
def test_a_broken_index(tmp_path, text, said):
    save_file({"a": W}, tmp_path / "model.safetensors")
    (tmp_path / INDEX_FILE).write_text(text)
    assert said in refusal(tmp_path)


HOST = """
import sys
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
port, process, folder = sys.argv[1:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process))
from models.deepseek_v4.checkpoint import TensorSpec, load_parameters
assert jax.device_count() == 6 and jax.local_device_count() == 3
mesh = jax.make_mesh((2, 3), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
first_host = jax.sharding.Mesh(mesh.devices[:1], ("a", "b"))
spec = lambda cut, *names, **more: TensorSpec((6, 6), "float32", NamedSharding(mesh, P(*cut)), names, **more)
specs = {"rows": spec(("a",), "w0"), "columns": spec((None, "b"), "w1"), "both": spec(("a", "b"), "w2"),
         "remote": TensorSpec((3, 6), "float32", NamedSharding(first_host, P("b")), ("w3",))}
parameters, report = load_parameters(folder, specs, lambda name: False)
for i, (name, array) in enumerate(parameters.items()):
    want = np.arange(np.prod(array.shape), dtype=np.float32).reshape(array.shape) + i
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), want[shard.index])
print("read", report.read_bytes, len(parameters["remote"].addressable_shards))
"""


def test_each_host_reads_only_what_its_devices_hold(tmp_path):
    tensors = {f"w{i}": np.arange(36, dtype=np.float32).reshape(6, 6) + i for i in range(3)}
    tensors["w3"] = np.arange(18, dtype=np.float32).reshape(3, 6) + 3
    save_file(tensors, tmp_path / "model.safetensors")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "3"}
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", HOST, port, str(process), str(tmp_path)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for process in range(2)
    ]  # fmt: skip
    try:
        said = [host.communicate(timeout=90)[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0, 0], said
    # Host a holds row a of the mesh: half of w0 and w2, all of w1 (cut over b); w3 lives on host 0 alone.
    assert [text.strip().splitlines()[-1] for text in said] == ["read 360 3", "read 288 0"]
