"""The published config.json, read into a frozen Config with every field checked; no arithmetic and no JAX.

A field that changes what the model computes and that is not understood here is an error, never a default.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

from models.errors import UserError

AttentionKind = Literal["window", "csa", "hca"]
RoutingKind = Literal["hash", "topk"]

CSA_RATIO = 4  # the one compress ratio whose layers have an indexer and overlapping windows
_LEAST, _MOST = 1.2e-38, 3.4e38  # float32's normal numbers: others become 0 or infinity on the devices
_MAX_INT = 2**31 - 1  # sizes and ids are int32 on the devices
_ATTENTION_KINDS: dict[str, AttentionKind] = {
    "sliding_attention": "window",
    "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}
_ROUTING_KINDS: dict[str, RoutingKind] = {"hash_moe": "hash", "moe": "topk"}
_DTYPES = ("float32", "bfloat16")
_SIZES = (
    "hidden_size", "num_attention_heads", "head_dim", "qk_rope_head_dim", "q_lora_rank", "o_groups",
    "o_lora_rank", "sliding_window", "index_n_heads", "index_head_dim", "index_topk", "n_routed_experts",
    "num_experts_per_tok", "moe_intermediate_size", "vocab_size", "num_hidden_layers", "hc_mult",
    "hc_sinkhorn_iters", "max_position_embeddings",
)  # fmt: skip


class ConfigError(UserError):
    """A config.json that is missing, broken, contradictory or of another model; it names the field."""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """YaRN of the layers that compress: lengths in positions, betas in rotations over the original length."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float


@dataclasses.dataclass(frozen=True)
class Config:
    """The published fields under their published names, checked.

    `compress_ratios` holds exactly num_hidden_layers ratios; `rope_scaling` is None only where no layer
    compresses; `ignored` says in sentences what the file describes and this model does not run.
    """

    hidden_size: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    vocab_size: int
    num_hidden_layers: int
    num_hash_layers: int
    n_shared_experts: int
    routed_scaling_factor: float
    swiglu_limit: float
    rms_norm_eps: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rope_theta: float
    compress_rope_theta: float
    max_position_embeddings: int
    rope_scaling: RopeScaling | None
    torch_dtype: Literal["float32", "bfloat16"]
    num_nextn_predict_layers: int
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    ignored: tuple[str, ...] = ()

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> Config:
        """Reads config.json of a checkpoint folder.

        Raises:
            ConfigError: the folder or the file is missing, or the file is not a config of this model.
        """
        return cls.from_file(existing_folder(folder, "a config.json", ConfigError) / "config.json")

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Config:
        """Reads one config.json.

        Raises:
            ConfigError: the file is missing, broken, or not a config of this model.
        """
        return cls.from_dict(read_json_object(path, ConfigError), str(path))

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any], where: str = "config.json") -> Config:
        """Checks the parsed fields; `where` is what error messages call them.

        Raises:
            ConfigError: a field is missing, ill-typed, not supported, or contradicts another one.
        """
        fields = _Fields(mapping, where)
        _check_supported(fields)
        layers = fields.integer("num_hidden_layers")
        nextn = fields.integer("num_nextn_predict_layers", low=0)
        ratios = _compress_ratios(fields, layers, nextn)
        config = cls(
            **{name: fields.integer(name) for name in _SIZES},
            compress_ratios=ratios[:layers],
            num_hash_layers=fields.integer("num_hash_layers", low=0, high=layers, why="num_hidden_layers"),
            n_shared_experts=fields.choice("n_shared_experts", (1,)),
            num_nextn_predict_layers=nextn,
            routed_scaling_factor=fields.number("routed_scaling_factor"),
            swiglu_limit=fields.number("swiglu_limit"),
            rms_norm_eps=fields.number("rms_norm_eps"),
            hc_eps=fields.number("hc_eps"),
            rope_theta=fields.number("rope_theta", above=1),
            compress_rope_theta=fields.number("compress_rope_theta", above=1),
            rope_scaling=_rope_scaling(fields, any(ratios[:layers])),
            torch_dtype=_torch_dtype(fields),
            bos_token_id=fields.token_id("bos_token_id"),
            eos_token_id=fields.token_ids("eos_token_id"),
            ignored=_ignored(layers, nextn, ratios),
        )
        _check_sizes(fields, config)
        _check_layer_kinds(fields, config)
        return config

    def attention_kind(self, layer: int) -> AttentionKind:
        """Which attention a layer has: "window" (ratio 0), "csa" (ratio 4) or "hca" (any other ratio)."""
        ratio = self.compress_ratios[self._layer(layer)]
        return "window" if ratio == 0 else "csa" if ratio == CSA_RATIO else "hca"

    def routing_kind(self, layer: int) -> RoutingKind:
        """How a layer picks experts: "hash" (table by token id) in the first num_hash_layers, or "topk"."""
        return "hash" if self._layer(layer) < self.num_hash_layers else "topk"

    def _layer(self, layer: int) -> int:
        if not 0 <= layer < self.num_hidden_layers:
            raise IndexError(f"layer {layer} of a model with layers 0 to {self.num_hidden_layers - 1}")
        return layer


def existing_folder(path: str | os.PathLike[str], holding: str, error: type[UserError]) -> pathlib.Path:
    """Returns the path if it is a folder.

    Raises:
        error: it is not; `holding` says what must be in it.
    """
    folder = pathlib.Path(path)
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise error(f"{folder} {problem}; it must be a folder with {holding}")
    return folder


def read_json_object(path: str | os.PathLike[str], error: type[UserError]) -> dict[str, Any]:
    """Reads a file that must hold one JSON object without a repeated key.

    Raises:
        error: the file cannot be read, is not JSON (with line and column), or is not an object.
    """

    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = collections.Counter(key for key, _ in pairs)
        for key, count in counts.items():
            if count > 1:
                raise error(f"{path}: {key} is given {count} times; it must be given once")
        return dict(pairs)

    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
        value = json.loads(text, object_pairs_hook=without_repeats)
    except UserError:
        raise
    except FileNotFoundError:
        raise error(f"{path} does not exist") from None
    except OSError as reason:
        raise error(f"{path} cannot be read: {reason.strerror}") from None
    except json.JSONDecodeError as reason:
        raise error(f"{path} is not valid JSON: {reason.msg} at line {reason.lineno} column {reason.colno}") from None
    # Not UTF-8, an integer of thousands of digits, nesting without end.
    except (ValueError, RecursionError) as reason:
        raise error(f"{path} is not valid JSON: {reason}") from None
    if not isinstance(value, dict):
        raise error(f"{path} holds {_shown(value)}; it must hold a JSON object of fields")
    return value


class _Fields:
    """Typed access to a parsed object; every refusal names the field, its value and what is allowed."""

    def __init__(self, mapping: Mapping[str, Any], where: str, inside: str = ""):
        self.mapping, self.where, self.inside = mapping, where, inside

    def refuse(self, name: str, value: Any, allowed: str) -> NoReturn:
        raise ConfigError(f"{self.where}: {self.inside}{name} is {_shown(value)}; it must be {allowed}")

    def get(self, name: str, allowed: str) -> Any:
        if name not in self.mapping:
            raise ConfigError(f"{self.where}: {self.inside}{name} is missing; it must be {allowed}")
        return self.mapping[name]

    def integer(self, name: str, low: int = 1, high: int = _MAX_INT, why: str = "") -> int:
        allowed = f"an integer from {low} to {high}" + (f" ({why})" if why else "")
        value = self.get(name, allowed)
        if type(value) is not int or not low <= value <= high:
            self.refuse(name, value, allowed)
        return value

    def number(self, name: str, above: float = 0) -> float:
        allowed = f"a finite number above {above} that float32 holds, from {_LEAST} to {_MOST}"
        value = self.get(name, allowed)
        if type(value) not in (int, float) or not above < value or not _LEAST <= value <= _MOST:
            self.refuse(name, value, allowed)
        return float(value)

    def choice(self, name: str, allowed: tuple[Any, ...], required: bool = True) -> Any:
        words = " or ".join(_shown(value) for value in allowed)
        if not required and name not in self.mapping:
            return None
        value = self.get(name, words)
        # True == 1 == 1.0 in Python, but not in a config.
        if not any(type(value) is type(option) and value == option for option in allowed):
            self.refuse(name, value, words)
        return value

    def token_id(self, name: str) -> int | None:
        return None if self.mapping.get(name) is None else self.integer(name, low=0)

    def token_ids(self, name: str) -> int | tuple[int, ...] | None:
        value = self.mapping.get(name)
        if not isinstance(value, list):
            return self.token_id(name)
        return self.integers(name)

    def integers(self, name: str) -> tuple[int, ...]:
        allowed = "a list of integers"
        value = self.get(name, allowed)
        if not isinstance(value, list):
            self.refuse(name, value, allowed)
        entries = _Fields({f"{name}[{i}]": entry for i, entry in enumerate(value)}, self.where, self.inside)
        return tuple(entries.integer(entry, low=0) for entry in entries.mapping)


def _shown(value: Any) -> str:
    """The value as the file spells it, cut where it is long."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(type(value).__name__)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_supported(fields: _Fields) -> None:
    """Refuses what would need other arithmetic, or weights of a kind that is not read."""
    fields.choice("model_type", ("deepseek_v4",))
    fields.choice("scoring_func", ("sqrtsoftplus",))
    fields.choice("norm_topk_prob", (True,))
    fields.choice("hidden_act", ("silu",))
    fields.choice("tie_word_embeddings", (False,))
    fields.choice("num_key_value_heads", (1,))
    fields.choice("topk_method", ("noaux_tc",), required=False)
    fields.choice("attention_bias", (False,), required=False)
    fields.choice("expert_dtype", (None, "float32", "bfloat16", "fp32", "bf16"), required=False)
    if fields.mapping.get("quantization_config") is not None:
        allowed = "absent: fp8 and fp4 weights are not read yet, float32 and bfloat16 are"
        fields.refuse("quantization_config", fields.mapping["quantization_config"], allowed)


def _torch_dtype(fields: _Fields) -> Literal["float32", "bfloat16"]:
    """Newer files say `dtype` for what the published ones call `torch_dtype`."""
    if "dtype" not in fields.mapping:
        return fields.choice("torch_dtype", _DTYPES)
    dtype = fields.choice("dtype", _DTYPES)
    if fields.choice("torch_dtype", _DTYPES, required=False) not in (None, dtype):
        fields.refuse("torch_dtype", fields.mapping["torch_dtype"], f"{_shown(dtype)} (dtype) or absent")
    return dtype


def _compress_ratios(fields: _Fields, layers: int, nextn: int) -> tuple[int, ...]:
    """All listed ratios: the published files list those of the next-token-prediction layers too."""
    ratios = fields.integers("compress_ratios")
    _check_length(fields, "compress_ratios", len(ratios), layers, nextn)
    return ratios


def _check_length(fields: _Fields, name: str, length: int, layers: int, nextn: int) -> None:
    if length not in (layers, layers + nextn):
        lengths = f"{layers} (num_hidden_layers)"
        if nextn:
            lengths += f" or {layers + nextn} (num_hidden_layers + num_nextn_predict_layers)"
        raise ConfigError(f"{fields.where}: {name} has {length} entries; it must have {lengths}")


def _rope_scaling(fields: _Fields, compresses: bool) -> RopeScaling | None:
    name = "rope_scaling"
    value = fields.mapping.get(name)
    allowed = "an object with type, factor, original_max_position_embeddings, beta_fast and beta_slow"
    if value is None and not compresses:
        return None
    if value is None:
        fields.get(name, allowed + " where compress_ratios is not all 0")
    if not isinstance(value, dict):
        fields.refuse(name, value, allowed)
    inner = _Fields(value, fields.where, f"{name}.")
    for spelling in ("type", "rope_type"):
        inner.choice(spelling, ("yarn",), required=spelling == "type" and "rope_type" not in value)
    if value.get("attention_factor") is not None and inner.number("attention_factor") != 1:
        inner.refuse("attention_factor", value["attention_factor"], "1 or absent: cos and sin are not scaled")
    inner.choice("truncate", (True,), required=False)
    scaling = RopeScaling(
        factor=inner.number("factor"),
        original_max_position_embeddings=inner.integer("original_max_position_embeddings"),
        beta_fast=inner.number("beta_fast"),
        beta_slow=inner.number("beta_slow"),
    )
    if scaling.beta_fast < scaling.beta_slow:
        inner.refuse("beta_fast", scaling.beta_fast, f"at least beta_slow, which is {scaling.beta_slow}")
    return scaling


def _ignored(layers: int, nextn: int, ratios: tuple[int, ...]) -> tuple[str, ...]:
    if not nextn:
        return ()
    sentences = [f"num_nextn_predict_layers is {nextn}: next-token-prediction layers are not run"]
    if extra := ratios[layers:]:
        sentences.append(f"compress_ratios[{layers}:] = {_shown(list(extra))} belong to next-token-prediction layers")
    return tuple(sentences)


def _check_sizes(fields: _Fields, config: Config) -> None:
    """Refuses sizes that contradict each other."""

    def check(name: str, holds: bool, allowed: str) -> None:
        if not holds:
            fields.refuse(name, getattr(config, name), allowed)

    c = config
    check("num_experts_per_tok", c.num_experts_per_tok <= c.n_routed_experts,
          f"at most n_routed_experts, which is {c.n_routed_experts}")  # fmt: skip
    check("num_attention_heads", c.num_attention_heads % c.o_groups == 0,
          f"a multiple of o_groups, which is {c.o_groups}")  # fmt: skip
    check("qk_rope_head_dim", c.qk_rope_head_dim % 2 == 0, "even")
    check("qk_rope_head_dim", c.qk_rope_head_dim <= c.head_dim, f"at most head_dim, which is {c.head_dim}")
    if CSA_RATIO in c.compress_ratios:
        check("qk_rope_head_dim", c.qk_rope_head_dim <= c.index_head_dim,
              f"at most index_head_dim, which is {c.index_head_dim}")  # fmt: skip
    below = f"below vocab_size, which is {c.vocab_size}"
    check("bos_token_id", c.bos_token_id is None or c.bos_token_id < c.vocab_size, below)
    eos = c.eos_token_id if isinstance(c.eos_token_id, tuple) else (c.eos_token_id,)
    check("eos_token_id", all(token is None or token < c.vocab_size for token in eos), below)


def _check_layer_kinds(fields: _Fields, config: Config) -> None:
    """Compares the optional per-layer kinds of the transformers spelling with the published fields."""
    for name, kinds, kind_of, source in (
        ("layer_types", _ATTENTION_KINDS, config.attention_kind, "compress_ratios"),
        ("mlp_layer_types", _ROUTING_KINDS, config.routing_kind, "num_hash_layers"),
    ):
        listed = fields.mapping.get(name)
        if listed is None:
            continue
        if not isinstance(listed, list):
            fields.refuse(name, listed, "a list of kinds, one per layer")
        _check_length(fields, name, len(listed), config.num_hidden_layers, config.num_nextn_predict_layers)
        for i, kind in enumerate(listed):
            if not isinstance(kind, str) or kind not in kinds:
                fields.refuse(f"{name}[{i}]", kind, " or ".join(_shown(known) for known in kinds))
            if i < config.num_hidden_layers and kinds[kind] != kind_of(i):
                spelled = next(known for known, meaning in kinds.items() if meaning == kind_of(i))
                fields.refuse(f"{name}[{i}]", kind, f"{_shown(spelled)}, as {source} says")
