"""Published safetensors, read straight into sharded parameters by one rule from tensors to parameters.

It knows neither the layers nor their names: a TensorSpec per parameter says which tensors it is made of. Only
the bytes of the shards that this process holds are read, one shard at a time.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import mmap
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from safetensors import SafetensorError, safe_open

from models.deepseek_v4.config import Config, existing_folder, read_json_object
from models.errors import UserError

INDEX_FILE = "model.safetensors.index.json"
TRACE_FILE = "trace.safetensors"  # a recorded run that may lie beside the weights
READABLE_DTYPES = {name: jnp.dtype(dtype) for name, dtype in
                 (("F32", "float32"), ("BF16", "bfloat16"), ("I32", "int32"), ("I64", "int64"))}  # fmt: skip
_FLOAT_DTYPES, _INT_DTYPES = ("F32", "BF16"), ("I32", "I64")
_NAMES_PER_KIND = 5  # how many names an error lists of each kind of fault

Bounds = tuple[tuple[int, int], ...]  # (start, stop) per dimension


class CheckpointError(UserError):
    """Safetensors that are missing, broken, or not this model's; the message names files and tensors."""


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """How one parameter is made of published tensors, and where it lives.

    Args:
        shape: the parameter's global shape.
        dtype: in memory: a float (read from F32 or BF16 tensors) or int32 (from I32 or I64).
        sharding: which device holds which part of it.
        tensors: published names: exactly one, or where `stacked`, one per entry of the leading dimension.
        stacked: the tensors lie along a new leading dimension.
        pad_dim0: how many leading rows are the tensor's where the parameter has rows of zeros after them.
        tensor_shape: the published shape where the parameter splits its dimension 0 in two, in order.
        transpose: the parameter has the last two dimensions swapped.
        int_range: [low, high) that the values of an int32 parameter must lie in.

    Raises:
        ValueError: the parts contradict each other (a fault of the program, not of the files).
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding
    tensors: tuple[str, ...]
    stacked: bool = False
    pad_dim0: int | None = None
    tensor_shape: tuple[int, ...] | None = None
    transpose: bool = False
    int_range: tuple[int, int] | None = None

    def __post_init__(self):
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        if not self.is_int and not jnp.issubdtype(self.dtype, jnp.floating):
            raise ValueError(f"a parameter is a float or int32, not {self.dtype}")
        if len(self.tensors) != (self.shape[0] if self.stacked else 1):
            raise ValueError(f"{len(self.tensors)} tensors for {self.shape=} with {self.stacked=}")
        if self.pad_dim0 is not None and (self.stacked or not 0 < self.pad_dim0 <= self.shape[0]):
            raise ValueError(f"{self.pad_dim0=} does not fit {self.shape=} with {self.stacked=}")
        if self.tensor_shape is not None:
            split = self._unsplit_shape()
            if len(split) < 2 or self.tensor_shape != (split[0] * split[1], *split[2:]):
                raise ValueError(f"{self.tensor_shape=} is not {split} with its first two dimensions joined")

    @property
    def is_int(self) -> bool:
        return self.dtype == jnp.int32

    @property
    def published_shape(self) -> tuple[int, ...]:
        """The shape that each of the tensors must have in the file."""
        return self.tensor_shape or self._unsplit_shape()

    def _unsplit_shape(self) -> tuple[int, ...]:
        shape = self.shape[1:] if self.stacked else self.shape
        if self.pad_dim0 is not None:
            shape = (self.pad_dim0, *shape[1:])
        return _swapped(shape) if self.transpose else shape


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """How many tensors the parameters are made of, which were ignored, and the bytes this process read."""

    tensors: int
    ignored: tuple[str, ...]
    read_bytes: int


class _Entry(NamedTuple):
    file: pathlib.Path
    shape: tuple[int, ...]
    dtype: str
    offset: int  # bytes from the start of the file


class _Piece(NamedTuple):
    """One read: part `bounds` of a tensor fills `place` of a shard (dimensions in the tensor's order)."""

    tensor: str
    bounds: Bounds
    place: tuple[int | slice, ...]

    @property
    def size(self) -> int:
        return math.prod(stop - start for start, stop in self.bounds)


class Checkpoint(contextlib.AbstractContextManager["Checkpoint"]):
    """The tensors of a folder: headers are checked when it is opened, data is read slice by slice.

    The files are those of model.safetensors.index.json, or without one every *.safetensors of the folder;
    trace.safetensors is never one of them.

    Raises:
        CheckpointError: no folder or no file, a truncated or broken file, or files and index that disagree.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = existing_folder(folder, "*.safetensors files", CheckpointError)
        self.read_bytes = 0
        self._maps: dict[pathlib.Path, mmap.mmap] = {}
        self._entries: dict[str, _Entry] = {}
        files, listed = _checkpoint_files(self.folder)
        for file in files:
            for name, entry in _read_header(file).items():
                if name in self._entries:
                    both = f"both {self._entries[name].file.name} and {file.name}"
                    raise CheckpointError(f"{folder}: tensor {name} is in {both}; it must be in one")
                self._entries[name] = entry
        if listed is not None:
            self._check_index(listed)
        self.tensors = {name: (entry.shape, entry.dtype) for name, entry in self._entries.items()}

    def _check_index(self, listed: Mapping[str, str]) -> None:
        found = {name: entry.file.name for name, entry in self._entries.items()}
        wrong = [
            f"{name} in {listed.get(name, 'no file')} (it is in {found.get(name, 'no file')})"
            for name in sorted(listed.keys() | found.keys())
            if listed.get(name) != found.get(name)
        ]
        if wrong:
            index = self.folder / INDEX_FILE
            raise CheckpointError(f"{index} lists {_some(wrong)}; it must agree with the files")

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Reads one part of a tensor, and nothing else, into a fresh array of the file's dtype.

        Args:
            name: one of `tensors`, of dtype F32, BF16, I32 or I64.
            index: one slice of step 1 per dimension; dimensions left out are read whole.
        """
        entry = self._entries[name]
        if entry.file not in self._maps:
            with entry.file.open("rb") as file:
                self._maps[entry.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        mapped, dtype = self._maps[entry.file], READABLE_DTYPES[entry.dtype]
        count = math.prod(entry.shape)
        whole = np.frombuffer(mapped, dtype, count, entry.offset).reshape(entry.shape)
        part = np.array(whole[index], order="C")
        if part.size and hasattr(mmap, "MADV_DONTNEED"):
            # The process must not go on holding pages that it has only copied from.
            start = entry.offset // mmap.PAGESIZE * mmap.PAGESIZE
            mapped.madvise(mmap.MADV_DONTNEED, start, entry.offset - start + whole.nbytes)
        self.read_bytes += part.nbytes
        return part

    def close(self) -> None:
        """Unmaps the files; what was read stays valid."""
        while self._maps:
            self._maps.popitem()[1].close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _checkpoint_files(folder: pathlib.Path) -> tuple[list[pathlib.Path], dict[str, str] | None]:
    """The files to read, and the index's name -> file where there is an index."""
    visible = sorted(folder.glob("[!.]*.safetensors"))
    present = {file.name: file for file in visible if file.name != TRACE_FILE}
    index = folder / INDEX_FILE
    if not os.path.lexists(index):  # a link that leads nowhere is an index that is missing, not none at all
        if not present:
            raise CheckpointError(f"{folder} has no weights; it must have *.safetensors files")
        return list(present.values()), None
    listed = read_json_object(index, CheckpointError).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise CheckpointError(f"{index}: weight_map must be an object from tensor names to file names")
    named = set(listed.values())
    if missing := sorted(named - present.keys()):
        raise CheckpointError(f"{index} names {_some(missing)}, which the folder does not have")
    if extra := sorted(present.keys() - named):
        raise CheckpointError(f"{folder} has {_some(extra)}, which {INDEX_FILE} does not name")
    return [present[name] for name in sorted(named)], listed


def _read_header(file: pathlib.Path) -> dict[str, _Entry]:
    if file.exists() and not file.is_file():
        raise CheckpointError(f"{file} is not a file: it must be one in the safetensors format")
    try:
        with safe_open(file, framework="numpy"):  # checks the header against itself and the file's length
            pass
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
    except (SafetensorError, ValueError) as reason:
        detail = str(reason).removeprefix("Error while deserializing header: ")
        raise CheckpointError(f"{file} is truncated or not a safetensors file: {detail}") from None
    except OSError as reason:
        raise CheckpointError(f"{file} cannot be read: {reason.strerror or reason}") from None
    return {
        name: _Entry(file, tuple(entry["shape"]), entry["dtype"], 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def unused_tensors(config: Config) -> Callable[[str], bool]:
    """Says of a published name whether it may be there without being used.

    These are the next-token-prediction layers (`mtp.*`) and the selection bias of layers that route by hash.
    """
    biases = {f"layers.{layer}.ffn.gate.bias" for layer in range(config.num_hash_layers)}
    return lambda name: name.startswith("mtp.") or name in biases


def load_parameters(
    folder: str | os.PathLike[str],
    specs: Mapping[str, TensorSpec],
    ignore: Callable[[str], bool],
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, jax.Array], LoadReport]:
    """Reads every parameter, each shard straight to the devices of this process that hold it.

    Before any data is read, every tensor must be used exactly once and have the right shape and dtype. A part
    that several devices hold is read once. The host holds about one shard beside what the devices hold.

    Args:
        folder: the checkpoint.
        specs: parameter name -> how it is made.
        ignore: says which tensor names no parameter needs.
        progress: called with (bytes read so far, bytes that this process will read) after each shard.

    Returns:
        the parameters under the names of `specs`, and what was done.

    Raises:
        CheckpointError: files or tensors are missing, left over, broken, of a wrong shape, dtype or value.
    """
    advance = progress or (lambda done, total: None)
    with Checkpoint(folder) as checkpoint:
        ignored = _check_tensors(checkpoint, specs, ignore)
        shards = {name: _shards(spec) for name, spec in specs.items()}
        total = sum(_bytes(checkpoint, specs[name], bounds) for name in specs for bounds in shards[name])
        parameters = {}
        for name, spec in specs.items():
            arrays = []
            for bounds, places in shards[name].items():
                arrays += _place(_read_shard(checkpoint, spec, bounds), places)
                advance(checkpoint.read_bytes, total)
            parameters[name] = jax.make_array_from_single_device_arrays(
                spec.shape, spec.sharding, arrays, dtype=spec.dtype
            )
    used = len(checkpoint.tensors) - len(ignored)
    return parameters, LoadReport(used, ignored, checkpoint.read_bytes)


def _place(value: np.ndarray, places: list[SingleDeviceSharding]) -> list[jax.Array]:
    """Waits for the copies, so that the host's own goes before the next shard is read."""
    return jax.block_until_ready([jax.device_put(value, place) for place in places])


def _check_tensors(
    checkpoint: Checkpoint, specs: Mapping[str, TensorSpec], ignore: Callable[[str], bool]
) -> tuple[str, ...]:
    """Compares names, shapes and dtypes, all at once; returns the ignored names."""
    faults: collections.defaultdict[str, list[str]] = collections.defaultdict(list)
    used: set[str] = set()
    for spec in specs.values():
        for name in dict.fromkeys(spec.tensors):  # one parameter may hold copies of a tensor
            if name in used:
                faults["used twice"].append(name)
            used.add(name)
            if name not in checkpoint.tensors:
                faults["missing"].append(name)
                continue
            shape, dtype = checkpoint.tensors[name]
            if shape != spec.published_shape:
                faults["of a wrong shape"].append(f"{name} is {shape}, not {spec.published_shape}")
            if dtype not in (allowed := _INT_DTYPES if spec.is_int else _FLOAT_DTYPES):
                faults["of a wrong dtype"].append(f"{name} is {dtype}, not {' or '.join(allowed)}")
    unused = sorted(checkpoint.tensors.keys() - used)
    faults["unexpected"] = [name for name in unused if not ignore(name)]
    said = [f"{len(names)} {kind} ({_some(names)})" for kind, names in faults.items() if names]
    if said:
        raise CheckpointError(f"{checkpoint.folder} does not hold this model's tensors: {'; '.join(said)}")
    return tuple(name for name in unused if ignore(name))


def _shards(spec: TensorSpec) -> dict[Bounds, list[SingleDeviceSharding]]:
    """The distinct parts of a parameter that this process holds, and the devices that hold each."""
    shards: dict[Bounds, list[SingleDeviceSharding]] = {}
    kind = spec.sharding.memory_kind
    for device, index in spec.sharding.addressable_devices_indices_map(spec.shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index or (), spec.shape, strict=True))
        shards.setdefault(bounds, []).append(SingleDeviceSharding(device, memory_kind=kind))
    return shards


def _pieces(spec: TensorSpec, bounds: Bounds) -> Iterator[_Piece]:
    """The reads that fill one shard; rows of padding are filled by none."""
    members: Iterable[tuple[str, tuple[int, ...]]] = [(spec.tensors[0], ())]
    if spec.stacked:
        (first, last), *rest = bounds
        bounds = tuple(rest)
        members = [(spec.tensors[i], (i - first,)) for i in range(first, last)]
    if spec.pad_dim0 is not None:
        (start, stop), *rest = bounds
        bounds = ((start, min(stop, spec.pad_dim0)), *rest)
        members = members if start < spec.pad_dim0 else ()
    for tensor, prefix in members:
        yield from _member_pieces(spec, tensor, _swapped(bounds) if spec.transpose else bounds, prefix)


def _member_pieces(spec: TensorSpec, tensor: str, bounds: Bounds, at: tuple[int, ...]) -> Iterator[_Piece]:
    """The reads of one tensor: one, unless the second half of a split dimension 0 is cut."""
    whole = tuple(slice(0, stop - start) for start, stop in bounds)
    if spec.tensor_shape is None:
        yield _Piece(tensor, bounds, at + whole)
        return
    (outer, outer_stop), (inner, inner_stop), *rest = bounds
    size = spec._unsplit_shape()[1]
    if inner_stop - inner == size:
        yield _Piece(tensor, ((outer * size, outer_stop * size), *rest), at + whole)
        return
    for i in range(outer, outer_stop):
        rows = (i * size + inner, i * size + inner_stop)
        yield _Piece(tensor, (rows, *rest), (*at, i - outer, *whole[1:]))


def _read_shard(checkpoint: Checkpoint, spec: TensorSpec, bounds: Bounds) -> np.ndarray:
    shape = tuple(stop - start for start, stop in bounds)
    published = _swapped(shape) if spec.transpose else shape
    pieces = list(_pieces(spec, bounds))
    if len(pieces) == 1 and pieces[0].size == math.prod(shape):  # what was read is the shard: no second copy
        filled = _read_piece(checkpoint, spec, pieces[0]).reshape(published)
    else:
        filled = np.zeros(published, spec.dtype)
        for piece in pieces:
            target = filled[piece.place]
            target[...] = _read_piece(checkpoint, spec, piece).reshape(target.shape)
    return np.swapaxes(filled, -1, -2) if spec.transpose else filled


def _read_piece(checkpoint: Checkpoint, spec: TensorSpec, piece: _Piece) -> np.ndarray:
    value = checkpoint.read(piece.tensor, tuple(slice(*bound) for bound in piece.bounds))
    if spec.is_int and value.size:
        low, high = spec.int_range or (-(2**31), 2**31)
        least, most = value.min(), value.max()
        if least < low or most >= high:
            what = f"{checkpoint.folder}: tensor {piece.tensor} holds values from {least} to {most}"
            raise CheckpointError(f"{what}; they must be from {low} to {high - 1}")
    return value.astype(spec.dtype, copy=False)


def _bytes(checkpoint: Checkpoint, spec: TensorSpec, bounds: Bounds) -> int:
    """How much of the files one shard needs."""
    sizes = {name: READABLE_DTYPES[checkpoint.tensors[name][1]].itemsize for name in spec.tensors}
    return sum(piece.size * sizes[piece.tensor] for piece in _pieces(spec, bounds))


def _swapped[T](dims: tuple[T, ...]) -> tuple[T, ...]:
    return (*dims[:-2], dims[-1], dims[-2])


def _some(names: list[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - _NAMES_PER_KIND
    return ", ".join(names[:_NAMES_PER_KIND]) + (f" and {more} more" if more > 0 else "")
