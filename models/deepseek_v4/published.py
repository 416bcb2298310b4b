"""The two published models' config.json, as far as a decode step depends on it; no checkpoint is read.

Numbers are facts of the published files (deepseek-ai/DeepSeek-V4-Flash and DeepSeek-V4-Pro, technical report section
4.2, arXiv 2606.19348), except that weights are bfloat16: the published fp8 and fp4 are not read here.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal, cast, get_args

from models.deepseek_v4.config import AttentionKind, Config
from models.errors import UserError

Published = Literal["flash", "pro"]

_BOTH: dict[str, Any] = dict(
    model_type="deepseek_v4", head_dim=512, qk_rope_head_dim=64, o_lora_rank=1024, sliding_window=128,
    index_n_heads=64, index_head_dim=128, num_experts_per_tok=6, n_shared_experts=1, vocab_size=129280,
    num_hash_layers=3, num_key_value_heads=1, scoring_func="sqrtsoftplus", norm_topk_prob=True, swiglu_limit=10.0,
    rms_norm_eps=1e-6, hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, rope_theta=10000, compress_rope_theta=160000,
    max_position_embeddings=1048576, num_nextn_predict_layers=0, tie_word_embeddings=False, hidden_act="silu",
    torch_dtype="bfloat16",
    rope_scaling=dict(type="yarn", factor=16, original_max_position_embeddings=65536, beta_fast=32, beta_slow=1),
)  # fmt: skip
_OWN: dict[Published, dict[str, Any]] = {
    "flash": dict(
        hidden_size=4096, num_attention_heads=64, q_lora_rank=1024, o_groups=8, n_routed_experts=256,
        moe_intermediate_size=2048, num_hidden_layers=43, index_topk=512, routed_scaling_factor=1.5,
        compress_ratios=[0, 0, *[4, 128] * 20, 4],
    ),
    "pro": dict(
        hidden_size=7168, num_attention_heads=128, q_lora_rank=1536, o_groups=16, n_routed_experts=384,
        moe_intermediate_size=3072, num_hidden_layers=61, index_topk=1024, routed_scaling_factor=2.5,
        compress_ratios=[128, 128, *[4, 128] * 29, 4],
    ),
}  # fmt: skip


def published_config(name: Published) -> Config:
    """The Config of a published model."""
    return Config.from_dict({**_BOTH, **_OWN[name]}, name)


def named_config(model: str) -> tuple[str, Config]:
    """A short name and the Config of a model: flash, pro, tiny (packaged), a config.json or a folder with one.

    Raises:
        UserError: neither a name nor a file, or a file that is no config of this model.
    """
    if model in get_args(Published):
        return model, published_config(cast(Published, model))
    if model == "tiny":
        return model, Config.from_folder(Path(__file__).with_name("demo_model"))
    path = Path(model)
    if path.is_dir():
        return path.resolve().name, Config.from_folder(path)
    if not path.is_file():
        raise UserError(f"unknown model {model!r}: it must be flash, pro, tiny, a config.json or a folder with one")
    return path.resolve().parent.name, Config.from_file(path)


def of_dtype(config: Config, dtype: Literal["bf16", "f32"]) -> Config:
    """The same model with weights, activations and caches of another type."""
    return dataclasses.replace(config, torch_dtype="bfloat16" if dtype == "bf16" else "float32")


def kinds_of(config: Config) -> list[tuple[AttentionKind, int]]:
    """Each attention kind that a model has with its first layer, in layer order."""
    first: dict[AttentionKind, int] = {}
    for layer in range(config.num_hidden_layers):
        first.setdefault(config.attention_kind(layer), layer)
    return list(first.items())
