"""A golden trace: what the reference implementation computed on a fixture's input ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from models.deepseek_v4.config import Config
from models.errors import UserError

FILE = "trace.safetensors"
Tensors = Mapping[str, np.ndarray]


class TraceError(UserError):
    """A trace.safetensors that is missing, broken or of another model; the sentence names the tensor."""


@dataclasses.dataclass(frozen=True)
class Trace:
    """B requests of S positions, then G greedy ones; L layers, N streams, K experts per token.

    Attributes:
        input_ids: [B, S] int.
        greedy_ids: [B, G] int, the greedy continuation of `input_ids`.
        values: by the name that `verify` reports: logits [B, S, V]; streams.0 .. streams.L [B, S, N, D];
            attn_out.i and moe_out.i [B, S, D].
        topk_ids: one [B, S, K] int per layer; the order within K does not count.
    """

    input_ids: np.ndarray
    greedy_ids: np.ndarray
    values: dict[str, np.ndarray]
    topk_ids: list[np.ndarray]

    @property
    def steps(self) -> int:
        """Decode steps that feed the input ids and every greedy id but the last."""
        return self.input_ids.shape[1] + self.greedy_ids.shape[1] - 1

    @property
    def arrays(self) -> list[np.ndarray]:
        """All of it, in an order that does not depend on the file."""
        return [self.input_ids, self.greedy_ids, *(self.values[name] for name in sorted(self.values)), *self.topk_ids]

    @classmethod
    def load(cls, folder: Path, config: Config) -> Trace:
        """Reads and checks `folder`/trace.safetensors.

        Raises:
            TraceError: the file or a tensor is missing, or a tensor's shape, type or ids do not fit the config.
        """
        from safetensors import SafetensorError  # not above: the device check reads traces without safetensors
        from safetensors.numpy import load_file

        path = folder / FILE
        if not path.is_file():
            raise TraceError(f"{folder} has no {FILE}: verify compares with one; generate and bench need none")
        try:
            path.open("rb").close()  # safetensors calls every file that it cannot open missing
            tensors = load_file(path)
        except OSError as error:
            raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error
        except (SafetensorError, ValueError, TypeError, KeyError) as error:
            raise TraceError(f"{path} cannot be read as safetensors: {error}") from error
        except AttributeError as error:  # safetensors asks numpy for a type such as float8_e4m3fn
            raise TraceError(f"{path} holds a tensor of type {error.name}, which NumPy does not have") from error
        return cls.from_tensors(tensors, config, path)

    @classmethod
    def from_tensors(cls, tensors: Tensors, config: Config, path: Path) -> Trace:
        """Checks the tensors of a trace; `path` is where errors say they lie.

        Raises:
            TraceError: a tensor is missing, or its shape, type or ids do not fit the config.
        """
        layers = config.num_hidden_layers
        ids = _ids(path, tensors, "input_ids", (None, None), config.vocab_size)
        batch, length = ids.shape
        greedy = _ids(path, tensors, "greedy_ids", (batch, None), config.vocab_size)
        wide = (batch, length, config.hidden_size)
        shapes = {"logits": (batch, length, config.vocab_size)}
        shapes |= {f"streams.{i}": (batch, length, config.hc_mult, config.hidden_size) for i in range(layers + 1)}
        shapes |= {f"{name}.{i}": wide for name in ("attn_out", "moe_out") for i in range(layers)}
        values = {name: _values(path, tensors, name, shape) for name, shape in shapes.items()}
        k = (batch, length, config.num_experts_per_tok)
        topk = [_ids(path, tensors, f"topk_ids.{i}", k, config.n_routed_experts) for i in range(layers)]
        return cls(ids, greedy, values, topk)


def _tensor(path: Path, tensors: Tensors, name: str, shape: tuple[int | None, ...]) -> np.ndarray:
    if name not in tensors:
        raise TraceError(f"{path} has no tensor {name}")
    value = tensors[name]
    fits = value.ndim == len(shape) and all(n in (None, m) for n, m in zip(shape, value.shape, strict=True))
    if not fits or 0 in value.shape:
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise TraceError(f"{name} in {path} has shape {list(value.shape)}; this config needs [{wanted}], none empty")
    return value


def _values(path: Path, tensors: Tensors, name: str, shape: tuple[int | None, ...]) -> np.ndarray:
    value = _tensor(path, tensors, name, shape)
    if value.dtype.kind not in "fV" and value.dtype.name != "bfloat16":
        raise TraceError(f"{name} in {path} is {value.dtype}; it must be a floating-point type")
    return value.astype(np.float32)


def _ids(path: Path, tensors: Tensors, name: str, shape: tuple[int | None, ...], limit: int) -> np.ndarray:
    value = _tensor(path, tensors, name, shape)
    if value.dtype.kind not in "iu":
        raise TraceError(f"{name} in {path} is {value.dtype}; it must be an integer type")
    low, high = int(value.min()), int(value.max())
    if low < 0 or high >= limit:
        outside = low if low < 0 else high
        raise TraceError(f"{name} in {path} holds id {outside}, out of range: it must be from 0 to {limit - 1}")
    return value.astype(np.int64)
