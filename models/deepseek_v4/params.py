"""Which published tensors each parameter of the model is made of, and loading them onto the mesh."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from models.deepseek_v4.checkpoint import LoadReport, TensorSpec, load_parameters, unused_tensors
from models.deepseek_v4.model import DeepSeekV4

Path = tuple[Any, ...]


def published_name(path: Path) -> str:
    """The checkpoint's name for the parameter at a module path (routed experts: see `tensor_spec`)."""
    *owner, leaf = (str(part) for part in path)
    if owner[-1].startswith("hc_"):  # published without a dot: hc_attn_fn
        return ".".join([*owner[:-1], f"{owner[-1]}_{leaf}"])
    if owner[-1] == "shared_experts" or leaf == "wo_a":
        leaf = f"{leaf}.weight"
    return ".".join([*owner, leaf])


def tensor_spec(path: Path, variable: nnx.Variable, model: DeepSeekV4) -> TensorSpec:
    """How the parameter at `path` is made of published tensors, and where on the mesh it lives."""
    config, topology = model.config, model.topology
    value = variable.get_value()
    common: dict[str, Any] = {
        "shape": value.shape,
        "dtype": value.dtype,
        "sharding": topology.sharding(variable.get_metadata()["spec"]),
    }
    if path[-2] == "experts":
        owner = ".".join(map(str, path[:-1]))
        names = tuple(f"{owner}.{e}.{path[-1]}.weight" for e in model.placement.physical_to_logical)
        return TensorSpec(tensors=names, stacked=True, **common)
    names = (published_name(path),)
    if path[-1] == "wo_a":
        groups, rank, width = value.shape
        return TensorSpec(tensors=names, tensor_shape=(groups * rank, width), **common)
    if path == ("head", "weight"):
        return TensorSpec(tensors=names, pad_dim0=config.vocab_size, **common)
    if path[-1] == "tid2eid":
        return TensorSpec(tensors=names, int_range=(0, config.n_routed_experts), **common)
    return TensorSpec(tensors=names, **common)


def load(
    folder: str | os.PathLike[str],
    model: DeepSeekV4,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict, LoadReport]:
    """Reads a published checkpoint into the tree of the model's split state.

    Args:
        folder: config.json's folder.
        model: with abstract parameters.
        progress: called with (bytes done, bytes in all).

    Returns:
        The parameters as a nested dict for `nnx.replace_by_pure_dict`, and what was read and ignored.

    Raises:
        CheckpointError: a tensor is missing, left over, broken, or of another shape, dtype or range.
    """
    variables = dict(nnx.to_flat_state(nnx.split(model)[1]))
    specs = {".".join(map(str, path)): tensor_spec(path, variable, model) for path, variable in variables.items()}
    loaded, report = load_parameters(folder, specs, unused_tensors(model.config), progress)
    return _nested({path: loaded[".".join(map(str, path))] for path in variables}), report


def _nested(flat: dict[Path, jax.Array]) -> dict:
    tree: dict = {}
    for path, value in flat.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value
    return tree
