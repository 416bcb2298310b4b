"""A golden fixture as one .npz: config, parameters as one device holds them, and trace, read with NumPy alone.

`python -m models.deepseek_v4.npz_fixture FIXTURE FILE.npz` makes one from a folder with safetensors.
"""

from __future__ import annotations

import json
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxcoll.topology import Topology
from models.deepseek_v4.config import Config
from models.deepseek_v4.model import DeepSeekV4
from models.deepseek_v4.program import abstract_parameters
from models.deepseek_v4.trace import FILE, Trace
from models.errors import UserError

CONFIG, PARAMETERS, TRACE = "config.json", "parameters/", "trace/"


class Fixture(NamedTuple):
    """What a .npz holds: the parameters are a tree of arrays, in the form of `program.abstract_parameters`."""

    config: Config
    parameters: dict
    trace: Trace


def read(file: Path) -> Fixture:
    """Reads and checks a fixture.

    Raises:
        UserError: no such file, no .npz, or arrays that do not fit the config in it.
    """
    if not file.is_file():
        raise UserError(f"{file} does not exist; python -m models.deepseek_v4.npz_fixture makes one")
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        fields = json.loads(arrays.pop(CONFIG).tobytes())
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{file} is no fixture of npz_fixture: {error}") from error
    config = Config.from_dict(fields, f"{file}: {CONFIG}")
    flat = {name: array for name, array in arrays.items() if name.startswith(PARAMETERS)}
    shapes = abstract_parameters(DeepSeekV4(config, Topology()))
    parameters = _filled(shapes, PARAMETERS, flat, file)
    if flat:
        raise UserError(f"{file} holds {min(flat)}, which is no parameter of its config")
    tensors = {name.removeprefix(TRACE): array for name, array in arrays.items() if name.startswith(TRACE)}
    return Fixture(config, parameters, Trace.from_tensors(tensors, config, file))


def _filled(shapes: dict, prefix: str, flat: dict[str, np.ndarray], file: Path) -> dict:
    """The tree of shapes with arrays in it, which are taken out of `flat`."""
    tree: dict[Any, Any] = {}
    for key, inner in shapes.items():
        name = f"{prefix}{key}"
        if isinstance(inner, dict):
            tree[key] = _filled(inner, f"{name}/", flat, file)
            continue
        array = flat.pop(name, None)
        if array is None or (array.shape, array.dtype) != (inner.shape, inner.dtype):
            found = "nothing" if array is None else f"{array.dtype}{list(array.shape)}"
            raise UserError(f"{file} holds {found} as {name}; it must be {inner.dtype}{list(inner.shape)}")
        tree[key] = array
    return tree


def write(folder: Path, file: Path) -> None:
    """Makes the .npz of a fixture folder; needs safetensors.

    Raises:
        UserError: what `params.load` and `Trace.load` refuse, and weights in a type that NumPy has not.
    """
    from safetensors.numpy import load_file

    from models.deepseek_v4 import params

    config = Config.from_folder(folder)
    if config.torch_dtype != "float32":
        raise UserError(f"{folder} has {config.torch_dtype} weights; an .npz holds float32")
    Trace.load(folder, config)  # refuses a broken one
    parameters, _ = params.load(folder, DeepSeekV4(config, Topology()))
    arrays = {CONFIG: np.frombuffer((folder / CONFIG).read_bytes(), np.uint8)}
    arrays |= _flattened(parameters, PARAMETERS)
    arrays |= {f"{TRACE}{name}": value for name, value in load_file(folder / FILE).items()}
    np.savez_compressed(file, **arrays)  # pyright: ignore[reportArgumentType]


def _flattened(tree: dict, prefix: str) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for key, inner in tree.items():
        name = f"{prefix}{key}"
        found |= _flattened(inner, f"{name}/") if isinstance(inner, dict) else {name: np.asarray(inner)}
    return found


def main(words: list[str]) -> int:
    """Runs the command; its exit code."""
    if len(words) != 2 or not words[1].endswith(".npz"):
        print("usage: python -m models.deepseek_v4.npz_fixture FIXTURE FILE.npz", file=sys.stderr)
        return 2
    try:
        write(Path(words[0]), Path(words[1]))
    except UserError as error:
        print(f"npz_fixture: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
