"""Checkpoints: each shard is its part of the published tensors, read once; what is wrong is named."""

import math
import types
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

from models.deepseek_v4.checkpoint import (
    Checkpoint,
    CheckpointError,
    TensorSpec,
    load_parameters,
    unused_tensors,
)
from models.deepseek_v4.config import Config
from models.errors import UserError

BF16 = np.dtype(jnp.bfloat16)
MESHES = [(4, 2), (2, 3)]


def mesh_of(sizes: tuple[int, int]) -> jax.sharding.Mesh:
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=devices)


def ramp(shape: tuple[int, ...], dtype: Any = np.float32, start: int = 0) -> np.ndarray:
    """Distinct values that bfloat16 holds exactly, below 256."""
    return (start + np.arange(math.prod(shape)) % 251).astype(dtype).reshape(shape)


def published_model() -> dict[str, np.ndarray]:
    tensors = {
        "embed": ramp((22, 4)),
        "norm": ramp((6,), BF16),
        "wq": ramp((24, 6)),
        "wo": ramp((6, 12), start=3),
        "wo_a": ramp((24, 12), BF16, start=5),
        "table": np.arange(44, dtype=np.int64).reshape(22, 2) % 12,
    }
    for e in range(12):
        tensors[f"experts.{e}.w1"] = ramp((6, 4), start=7 * e)
        tensors[f"experts.{e}.w2"] = ramp((4, 6), BF16, start=11 * e)
    return tensors


def specs_for(mesh: jax.sharding.Mesh) -> dict[str, TensorSpec]:
    def spec(shape, dtype, cut, *tensors, **more):
        return TensorSpec(shape, dtype, NamedSharding(mesh, P(*cut)), tensors, **more)

    def experts(name):
        return [f"experts.{e}.{name}" for e in range(12)]

    return {
        "embed": spec((22, 4), "float32", (), "embed"),
        "head_norm": spec((6,), jnp.float32, (), "norm"),
        "wq": spec((24, 6), "bfloat16", (("a", "b"),), "wq"),
        "wo": spec((12, 6), "float32", ("a", None), "wo", transpose=True),
        "wo_a": spec((12, 2, 12), "float32", ("a", None, "b"), "wo_a", tensor_shape=(24, 12)),
        "table": spec((22, 2), "int32", (), "table", int_range=(0, 12)),
        "w1": spec((12, 6, 4), "float32", ("a", "b"), *experts("w1"), stacked=True),
        "w2": spec((12, 6, 4), "float32", ("a", "b"), *experts("w2"), stacked=True, transpose=True),
    }


def assembled(spec: TensorSpec, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """What the parameter must be, from whole tensors."""
    whole = []
    for name in spec.tensors:
        value = tensors[name].astype(spec.dtype)
        if spec.tensor_shape is not None:
            value = value.reshape(spec.shape)
        if spec.transpose:
            value = np.swapaxes(value, -1, -2)
        if spec.pad_dim0 is not None:
            value = np.concatenate([value, np.zeros_like(value, shape=(spec.shape[0] - len(value), *value.shape[1:]))])
        whole.append(value)
    return np.stack(whole) if spec.stacked else whole[0]


def check_parameter(array: jax.Array, spec: TensorSpec, tensors: dict[str, np.ndarray]) -> None:
    want = assembled(spec, tensors)
    assert array.shape == spec.shape == want.shape
    assert array.dtype == spec.dtype
    assert array.sharding == spec.sharding
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), want[shard.index])


@pytest.fixture
def reads(monkeypatch):
    """Every read of a test as (name, index, the part's bytes)."""
    log: list[tuple[str, tuple[slice, ...], int]] = []
    read = Checkpoint.read

    def logged(self, name, index):
        part = read(self, name, index)
        log.append((name, index, part.nbytes))
        return part

    monkeypatch.setattr(Checkpoint, "read", logged)
    return log


def load_one(folder, spec: TensorSpec, tensors: dict[str, np.ndarray]) -> jax.Array:
    save_file(tensors, folder / "model.safetensors")
    parameters, _ = load_parameters(folder, {"x": spec}, lambda name: False)
    check_parameter(parameters["x"], spec, tensors)
    return parameters["x"]


@pytest.mark.parametrize("sizes", MESHES)
def test_whole_model_reads_each_element_once_and_no_more_than_a_shard(tmp_path, reads, sizes):
    tensors, specs = published_model(), specs_for(mesh_of(sizes))
    save_file(tensors, tmp_path / "model.safetensors")
    parameters, report = load_parameters(tmp_path, specs, lambda name: False)
    assert list(parameters) == list(specs)
    for name, spec in specs.items():
        check_parameter(parameters[name], spec, tensors)
    seen = {name: np.zeros(tensor.shape, int) for name, tensor in tensors.items()}
    largest = {
        name: math.prod(spec.sharding.shard_shape(spec.shape)) * tensors[name].itemsize
        for spec in specs.values()
        for name in spec.tensors
    }
    for name, index, nbytes in reads:
        seen[name][index] += 1
        assert nbytes == seen[name][index].size * tensors[name].itemsize <= largest[name]
    for name, times in seen.items():
        assert (times == 1).all(), name
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert report.read_bytes == total == sum(nbytes for *_, nbytes in reads)
    assert (report.tensors, report.ignored) == (len(tensors), ())


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("cut", [(), ("a",), (None, "b"), ("b", "a"), (("b", "a"),), (None, ("a", "b"))])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(("stored", "held"), [(np.float32, BF16), (BF16, np.float32), (np.float32, np.float32)])
def test_matrix_cut_every_way(tmp_path, sizes, cut, transpose, stored, held):
    shape = (24, 48)
    published = shape[::-1] if transpose else shape
    spec = TensorSpec(shape, held, NamedSharding(mesh_of(sizes), P(*cut)), ("w",), transpose=transpose)
    # Thirds are not bfloat16 numbers, so that a cast in the wrong place shows.
    values = (np.arange(24 * 48, dtype=np.float32) / 3).astype(stored).reshape(published)
    load_one(tmp_path, spec, {"w": values})


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("cut", [(("a", "b"),), ("b",), (None, "a"), (None, "b", "a"), ("a", None, "b")])
@pytest.mark.parametrize("transpose", [False, True])
def test_stacked_tensors(tmp_path, sizes, cut, transpose):
    names = tuple(f"e{i}" for i in range(24))
    published = (12, 24) if not transpose else (24, 12)
    tensors = {name: ramp(published, BF16 if i % 2 else np.float32, i) for i, name in enumerate(names)}
    sharding = NamedSharding(mesh_of(sizes), P(*cut))
    load_one(
        tmp_path,
        TensorSpec((24, 12, 24), "float32", sharding, names, stacked=True, transpose=transpose),
        tensors,
    )


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("real", [1, 5, 6, 17, 24])
@pytest.mark.parametrize("cut", [("a",), (("a", "b"),), (None, "b"), ()])
def test_padding_rows_are_zero_and_not_read(tmp_path, reads, sizes, real, cut):
    spec = TensorSpec((24, 6), "float32", NamedSharding(mesh_of(sizes), P(*cut)), ("head",), pad_dim0=real)
    array = load_one(tmp_path, spec, {"head": ramp((real, 6), start=1)})
    assert not np.asarray(array)[real:].any()
    assert np.asarray(array)[:real].all()
    assert sum(nbytes for *_, nbytes in reads) == real * 6 * 4


def test_padding_of_a_transposed_parameter(tmp_path):
    spec = TensorSpec(
        (8, 6), "float32", NamedSharding(mesh_of((4, 2)), P("a", "b")), ("w",), pad_dim0=5, transpose=True
    )
    load_one(tmp_path, spec, {"w": ramp((6, 5))})


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("cut", [("a",), (("b", "a"),), (None, None, "b"), ("a", None, "b"), (None, "b"), ("b", "a")])
def test_split_dimension(tmp_path, reads, sizes, cut):
    """[groups * rank, in] used as [groups, rank, in]: whole groups are one read, else one read per group."""
    sharding = NamedSharding(mesh_of(sizes), P(*cut))
    spec = TensorSpec((24, 12, 6), "bfloat16", sharding, ("wo_a",), tensor_shape=(288, 6))
    load_one(tmp_path, spec, {"wo_a": ramp((288, 6))})
    shards = set(map(str, sharding.devices_indices_map(spec.shape).values()))
    groups, rank, _ = sharding.shard_shape(spec.shape)
    assert len(reads) == len(shards) * (1 if rank == 12 else groups)


def test_split_and_transposed(tmp_path):
    """[heads * dim, rank] used as [heads, rank, dim]."""
    sharding = NamedSharding(mesh_of((2, 3)), P("a", None, "b"))
    spec = TensorSpec((4, 5, 6), "float32", sharding, ("w",), tensor_shape=(24, 5), transpose=True)
    save_file({"w": (w := ramp((24, 5)))}, tmp_path / "model.safetensors")
    array = load_parameters(tmp_path, {"x": spec}, lambda name: False)[0]["x"]
    np.testing.assert_array_equal(np.asarray(array), w.reshape(4, 6, 5).transpose(0, 2, 1))


@pytest.mark.parametrize("stored", [np.int32, np.int64])
def test_integers(tmp_path, stored):
    sharding = NamedSharding(mesh_of((4, 2)), P("a"))
    spec = TensorSpec((8, 3), jnp.int32, sharding, ("t",), int_range=(0, 24))
    load_one(tmp_path, spec, {"t": np.arange(24, dtype=stored).reshape(8, 3)})
    for bad, said in [(24, "from 18 to 24"), (-1, "from -1 to 22")]:
        values = np.arange(24, dtype=stored).reshape(8, 3)
        values[7, 2] = bad
        save_file({"t": values}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"tensor t holds values {said}; they must be from 0 to 23"):
            load_parameters(tmp_path, {"x": spec}, lambda name: False)


def test_integers_that_int32_cannot_hold(tmp_path):
    spec = TensorSpec((2,), "int32", NamedSharding(mesh_of((4, 2)), P()), ("t",))
    save_file({"t": np.array([1, 2**32 + 1])}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="tensor t holds values from 1 to 4294967297"):
        load_parameters(tmp_path, {"x": spec}, lambda name: False)


def test_shards_are_placed_one_after_another(tmp_path, monkeypatch):
    """No shard is read before the one before it is on its devices."""
    events = []
    read, put = Checkpoint.read, jax.device_put
    monkeypatch.setattr(Checkpoint, "read", lambda *a: events.append("read") or read(*a))
    monkeypatch.setattr(jax, "device_put", lambda *a: events.append("put") or put(*a))
    spec = TensorSpec((8, 6), "float32", NamedSharding(mesh_of((4, 2)), P("a")), ("w",))
    load_one(tmp_path, spec, {"w": ramp((8, 6))})
    assert events == ["read", "put", "put"] * 4


def test_progress(tmp_path):
    tensors, specs, seen = published_model(), specs_for(mesh_of((4, 2))), []
    save_file(tensors, tmp_path / "model.safetensors")
    load_parameters(tmp_path, specs, lambda name: False, lambda done, total: seen.append((done, total)))
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert seen[-1] == (total, total)
    assert {of for _, of in seen} == {total}
    done = [d for d, _ in seen]
    assert done == sorted(done) and done[0] == tensors["embed"].nbytes and len(done) == 3 + 8 + 4 + 8 + 8 + 8


def test_ignored_tensors_are_reported(tmp_path):
    ignore = unused_tensors(cast(Config, types.SimpleNamespace(num_hash_layers=2)))
    names = ["mtp.0.e_proj.weight", "layers.0.ffn.gate.bias", "layers.1.ffn.gate.bias"]
    spec = TensorSpec((4,), "float32", NamedSharding(mesh_of((4, 2)), P("a")), ("w",))
    tensors = {"w": ramp((4,))} | {name: np.ones(3, np.float16) for name in names}
    save_file(tensors, tmp_path / "model.safetensors")
    _, report = load_parameters(tmp_path, {"x": spec}, ignore)
    assert report.ignored == tuple(sorted(names))
    assert (report.tensors, report.read_bytes) == (1, 16)
    save_file(tensors | {"layers.2.ffn.gate.bias": ramp((3,))}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 unexpected \(layers\.2\.ffn\.gate\.bias\)"):
        load_parameters(tmp_path, {"x": spec}, ignore)
    assert not ignore("layers.10.ffn.gate.bias") and not ignore("xmtp.0")
    # What a parameter needs is used even where it could be ignored.
    bias = TensorSpec((3,), "float32", NamedSharding(mesh_of((4, 2)), P()), ("layers.2.ffn.gate.bias",))
    parameters, report = load_parameters(tmp_path, {"x": spec, "bias": bias}, lambda name: True)
    np.testing.assert_array_equal(np.asarray(parameters["bias"]), ramp((3,)))
    assert report.ignored == tuple(sorted(names))


def mutations() -> list[tuple[str, str]]:
    return [(name, how) for name in published_model() for how in ("remove", "rename", "reshape", "retype", "extra")]


@pytest.mark.parametrize(("name", "how"), mutations())
def test_every_mutation_of_a_tensor_is_refused_by_name(tmp_path, reads, name, how):
    tensors = published_model()
    value = tensors[name]
    if how in ("remove", "rename"):
        del tensors[name]
    if how in ("rename", "extra"):
        tensors[f"{name}.copy"] = value
    if how == "reshape":
        tensors[name] = value[..., :-1].copy() if value.ndim == 1 else np.ascontiguousarray(value.reshape(2, -1))
    if how == "retype":
        tensors[name] = value.astype(np.float32 if name == "table" else np.float16)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_parameters(tmp_path, specs_for(mesh_of((2, 3))), lambda name: False)
    shape, new = value.shape, tensors.get(name, value)
    opening = f"{tmp_path} does not hold this model's tensors: "
    said = {
        "remove": f"{opening}1 missing ({name})",
        "rename": f"{opening}1 missing ({name}); 1 unexpected ({name}.copy)",
        "reshape": f"1 of a wrong shape ({name} is {new.shape}, not {shape})",
        "retype": f"1 of a wrong dtype ({name} is F16, not F32 or BF16)",
        "extra": f"1 unexpected ({name}.copy)",
    }
    if name == "table":
        said["retype"] = "1 of a wrong dtype (table is F32, not I32 or I64)"
    assert str(caught.value).endswith(said[how])
    assert isinstance(caught.value, UserError)
    assert reads == []


def test_many_faults_are_one_error_with_counts(tmp_path):
    tensors = {f"experts.{e}.w1": ramp((4, 4)) for e in range(3)} | {f"z{i}": ramp((1,)) for i in range(7)}
    save_file(tensors, tmp_path / "model.safetensors")
    names = tuple(f"experts.{e}.w1" for e in range(12))
    spec = TensorSpec((12, 6, 4), "float32", NamedSharding(mesh_of((4, 2)), P("a")), names, stacked=True)
    with pytest.raises(CheckpointError) as caught:
        load_parameters(tmp_path, {"w1": spec}, lambda name: False)
    assert str(caught.value) == (
        f"{tmp_path} does not hold this model's tensors: "
        "3 of a wrong shape (experts.0.w1 is (4, 4), not (6, 4), experts.1.w1 is (4, 4), not (6, 4), "
        "experts.2.w1 is (4, 4), not (6, 4)); 9 missing (experts.3.w1, experts.4.w1, experts.5.w1, "
        "experts.6.w1, experts.7.w1 and 4 more); 7 unexpected (z0, z1, z2, z3, z4 and 2 more)"
    )


def test_a_tensor_cannot_serve_two_parameters(tmp_path):
    spec = TensorSpec((4,), "float32", NamedSharding(mesh_of((4, 2)), P("a")), ("w",))
    save_file({"w": ramp((4,))}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 used twice \(w\)"):
        load_parameters(tmp_path, {"x": spec, "y": spec}, lambda name: False)


@pytest.mark.parametrize(
    ("shape", "more"),
    [
        ((4, 6), {"dtype": "int64"}),
        ((4, 6), {"dtype": "bool"}),
        ((4, 6), {"tensors": ("a", "b")}),
        ((4, 6), {"tensors": ("a", "b", "c"), "stacked": True}),
        ((4, 6), {"pad_dim0": 5}),
        ((4, 6), {"pad_dim0": 0}),
        ((1, 6), {"pad_dim0": 1, "stacked": True}),
        ((4, 6), {"tensor_shape": (4, 6)}),
        ((4,), {"tensor_shape": (4,)}),
        ((4, 6), {"tensor_shape": (25,)}),
    ],
)
def test_a_spec_that_contradicts_itself(shape, more):
    sharding = NamedSharding(mesh_of((4, 2)), P())
    TensorSpec(shape, "float32", sharding, ("a",))
    with pytest.raises(ValueError):
        TensorSpec(**{"shape": shape, "dtype": "float32", "sharding": sharding, "tensors": ("a",)} | more)
