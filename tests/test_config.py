"""config.json: what is read, and one sentence for each way to get it wrong."""

import copy
import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest

from models.deepseek_v4.config import Config, ConfigError, RopeScaling
from models.errors import UserError

PUBLISHED: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "torch_dtype": "bfloat16",
    "hidden_size": 96, "vocab_size": 99, "num_hidden_layers": 4, "max_position_embeddings": 256,
    "num_attention_heads": 12, "head_dim": 24, "qk_rope_head_dim": 12, "q_lora_rank": 40, "o_groups": 6,
    "o_lora_rank": 8, "sliding_window": 5, "num_key_value_heads": 1, "attention_bias": False,
    "index_n_heads": 10, "index_head_dim": 20, "index_topk": 3,
    "n_routed_experts": 24, "num_experts_per_tok": 7, "moe_intermediate_size": 48, "n_shared_experts": 1,
    "compress_ratios": [0, 4, 16, 4, 0, 8], "num_hash_layers": 2, "num_nextn_predict_layers": 2,
    "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "swiglu_limit": 10, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "hc_mult": 3, "hc_sinkhorn_iters": 19, "hc_eps": 2e-6, "rope_theta": 10000, "compress_rope_theta": 160000,
    "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64, "beta_fast": 32,
                     "beta_slow": 1},
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
OPTIONAL = {"architectures", "topk_method", "attention_bias", "bos_token_id", "eos_token_id"}
LAYER_TYPES = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
LAYER_TYPES += ["compressed_sparse_attention"]
MLP_LAYER_TYPES = ["hash_moe", "hash_moe", "moe", "moe"]


def with_changes(**changes: Any) -> dict[str, Any]:
    return copy.deepcopy(PUBLISHED) | changes


def scaled(**changes: Any) -> dict[str, Any]:
    return with_changes(rope_scaling=PUBLISHED["rope_scaling"] | changes)


def refusal(mapping: Any) -> str:
    """The one sentence with which a mapping is refused."""
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(mapping, "my/config.json")
    message = str(caught.value)
    assert message.startswith("my/config.json: ")
    assert "\n" not in message
    return message.removeprefix("my/config.json: ")


def test_every_field_is_read():
    config = Config.from_dict(PUBLISHED)
    for field in dataclasses.fields(Config):
        if field.name not in ("compress_ratios", "rope_scaling", "ignored"):
            assert getattr(config, field.name) == PUBLISHED[field.name], field.name
    assert config.compress_ratios == (0, 4, 16, 4)
    assert config.rope_scaling == RopeScaling(4.0, 64, 32.0, 1.0)
    assert isinstance(config.swiglu_limit, float)
    assert hash(config) == hash(Config.from_dict(PUBLISHED))


def test_kinds_by_layer():
    config = Config.from_dict(PUBLISHED)
    assert [config.attention_kind(i) for i in range(4)] == ["window", "csa", "hca", "csa"]
    assert [config.routing_kind(i) for i in range(4)] == ["hash", "hash", "topk", "topk"]
    for layer in (-1, 4):
        with pytest.raises(IndexError):
            config.attention_kind(layer)
        with pytest.raises(IndexError):
            config.routing_kind(layer)


def test_next_token_prediction_layers_are_reported_as_ignored():
    assert Config.from_dict(PUBLISHED).ignored == (
        "num_nextn_predict_layers is 2: next-token-prediction layers are not run",
        "compress_ratios[4:] = [0, 8] belong to next-token-prediction layers",
    )
    exact = Config.from_dict(with_changes(compress_ratios=[0, 4, 16, 4]))
    assert exact.compress_ratios == (0, 4, 16, 4)
    assert len(exact.ignored) == 1
    assert Config.from_dict(with_changes(compress_ratios=[0, 4, 16, 4], num_nextn_predict_layers=0)).ignored == ()


def test_from_folder_and_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    assert Config.from_folder(tmp_path) == Config.from_dict(PUBLISHED)
    assert Config.from_file(str(tmp_path / "config.json")) == Config.from_dict(PUBLISHED)
    (tmp_path / "config.json").write_text(json.dumps(with_changes(head_dim="64")))
    with pytest.raises(UserError, match=r'config\.json: head_dim is "64"; it must be an integer from 1'):
        Config.from_folder(tmp_path)


def test_missing_folder_and_file(tmp_path):
    with pytest.raises(ConfigError, match="nowhere does not exist; it must be a folder with a config.json"):
        Config.from_folder(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        Config.from_folder(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        Config.from_folder(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file is not a folder"):
        Config.from_folder(tmp_path / "file")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"hidden_size": 1,\n "head_dim": }', "is not valid JSON: Expecting value at line 2 column 14"),
        ("", "is not valid JSON: Expecting value at line 1 column 1"),
        ("[1, 2]", r"holds \[1, 2\]; it must hold a JSON object"),
        ('{"head_dim": 1, "head_dim": 2}', "head_dim is given 2 times"),
        ('{"head_dim": ' + "1" * 5000 + "}", "is not valid JSON: "),
        ("[" * 100_000, "is not valid JSON: "),
    ],
)
def test_broken_json(tmp_path, text, said):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        Config.from_folder(tmp_path)


def test_not_utf8(tmp_path):
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match="is not valid JSON: .*utf-8"):
        Config.from_folder(tmp_path)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_json_text_can_smuggle_in(tmp_path, value):
    text = json.dumps(with_changes(hc_eps=12345)).replace("12345", value)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"hc_eps is -?(NaN|Infinity); it must be a finite number above 0 "):
        Config.from_folder(tmp_path)


@pytest.mark.parametrize("name", sorted(PUBLISHED.keys() - OPTIONAL))
def test_each_missing_field_is_named(name):
    mapping = with_changes()
    del mapping[name]
    said = refusal(mapping)
    assert said.startswith((f"{name} is missing; it must be ", f"{name} is null; it must be "))


def test_optional_fields_may_be_missing():
    config = Config.from_dict({name: PUBLISHED[name] for name in PUBLISHED.keys() - OPTIONAL})
    assert config == dataclasses.replace(Config.from_dict(PUBLISHED), bos_token_id=None, eos_token_id=None)


def test_unknown_fields_are_tolerated():
    assert Config.from_dict(with_changes(initializer_range=0.02, x=[float("nan")])) == Config.from_dict(PUBLISHED)


INTEGERS = [name for name, value in PUBLISHED.items() if type(value) is int]
INTEGERS = [name for name in INTEGERS if name not in ("rope_theta", "compress_rope_theta", "swiglu_limit")]
NUMBERS = [
    "routed_scaling_factor",
    "swiglu_limit",
    "rms_norm_eps",
    "hc_eps",
    "rope_theta",
    "compress_rope_theta",
]


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [True, "64", 64.0, float("nan"), None, [], -1, 2**31, 10**400])
def test_integers_are_strict(name, value):
    if value is None and name in OPTIONAL:
        assert getattr(Config.from_dict(with_changes(**{name: None})), name) is None
    elif value == [] and name == "eos_token_id":
        assert Config.from_dict(with_changes(eos_token_id=[])).eos_token_id == ()
    else:
        assert refusal(with_changes(**{name: value})).startswith(f"{name} is ")


@pytest.mark.parametrize("name", sorted(set(INTEGERS) - {"num_hash_layers", "num_nextn_predict_layers"} - OPTIONAL))
def test_zero_sizes_are_refused(name):
    assert refusal(with_changes(**{name: 0})).startswith(f"{name} is 0; it must be ")


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [True, "1", None, float("nan"), float("inf"), 0, -1.0, 10**400])
def test_numbers_are_strict(name, value):
    assert refusal(with_changes(**{name: value})).startswith(f"{name} is ")


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("model_type", "deepseek_v3", '"deepseek_v4"'),
        ("scoring_func", "sigmoid", '"sqrtsoftplus"'),
        ("topk_method", "greedy", '"noaux_tc"'),
        ("hidden_act", "gelu", '"silu"'),
        ("norm_topk_prob", False, "true"),
        ("norm_topk_prob", 1, "true"),
        ("tie_word_embeddings", True, "false"),
        ("attention_bias", True, "false"),
        ("num_key_value_heads", 2, "1"),
        ("num_key_value_heads", True, "1"),
        ("n_shared_experts", 2, "1"),
        ("expert_dtype", "fp4", 'null or "float32" or "bfloat16" or "fp32" or "bf16"'),
        ("torch_dtype", "float16", '"float32" or "bfloat16"'),
        ("dtype", "float32", None),
        ("rope_theta", 1, "a finite number above 1 that float32 holds, from 1.2e-38 to 3.4e+38"),
    ],
)
def test_unsupported_values(name, value, allowed):
    said = refusal(with_changes(**{name: value}))
    if allowed is None:  # dtype float32 beside torch_dtype bfloat16
        assert said == 'torch_dtype is "bfloat16"; it must be "float32" (dtype) or absent'
    else:
        assert said == f"{name} is {json.dumps(value)}; it must be {allowed}"


def test_dtype_is_another_name_of_torch_dtype():
    mapping = with_changes(dtype="bfloat16")
    assert Config.from_dict(mapping).torch_dtype == "bfloat16"
    del mapping["torch_dtype"]
    assert Config.from_dict(mapping | {"dtype": "float32"}).torch_dtype == "float32"
    assert refusal(mapping | {"dtype": "fp8"}).startswith('dtype is "fp8"')


def test_quantised_weights_are_refused():
    said = refusal(with_changes(quantization_config={"quant_method": "fp8"}))
    assert said.startswith('quantization_config is {"quant_method": "fp8"}; it must be absent')
    assert "float32 and bfloat16" in said
    assert Config.from_dict(with_changes(quantization_config=None)) == Config.from_dict(PUBLISHED)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"compress_ratios": [0, -1, 16, 4]}, "compress_ratios[1] is -1; it must be an integer from 0"),
        ({"compress_ratios": [0, 4, "16", 4]}, 'compress_ratios[2] is "16"; it must be an integer'),
        ({"compress_ratios": [0, 4, 16, 4, 0, 4.0]}, "compress_ratios[5] is 4.0; it must be an integer"),
        ({"compress_ratios": [False, 4, 16, 4]}, "compress_ratios[0] is false; it must be an integer"),
        ({"compress_ratios": 4}, "compress_ratios is 4; it must be a list of integers"),
        (
            {"compress_ratios": [0, 4, 16]},
            "compress_ratios has 3 entries; it must have 4 (num_hidden_layers) or 6",
        ),
        ({"compress_ratios": [0, 4, 16, 4, 0]}, "compress_ratios has 5 entries"),
        (
            {"num_experts_per_tok": 25},
            "num_experts_per_tok is 25; it must be at most n_routed_experts, which is 24",
        ),
        (
            {"num_hash_layers": 5},
            "num_hash_layers is 5; it must be an integer from 0 to 4 (num_hidden_layers)",
        ),
        ({"qk_rope_head_dim": 11}, "qk_rope_head_dim is 11; it must be even"),
        ({"qk_rope_head_dim": 26}, "qk_rope_head_dim is 26; it must be at most head_dim, which is 24"),
        ({"qk_rope_head_dim": 22}, "qk_rope_head_dim is 22; it must be at most index_head_dim, which is 20"),
        ({"o_groups": 5}, "num_attention_heads is 12; it must be a multiple of o_groups, which is 5"),
        ({"bos_token_id": 99}, "bos_token_id is 99; it must be below vocab_size, which is 99"),
        ({"eos_token_id": 100}, "eos_token_id is 100; it must be below vocab_size"),
        ({"eos_token_id": [1, 99]}, "eos_token_id is [1, 99]; it must be below vocab_size"),
        ({"eos_token_id": [1, -2]}, "eos_token_id[1] is -2; it must be an integer from 0"),
    ],
)
def test_contradictions(changes, said):
    assert refusal(with_changes(**changes)).startswith(said)


def test_indexer_sizes_bind_only_where_a_layer_has_an_indexer():
    config = Config.from_dict(with_changes(qk_rope_head_dim=22, compress_ratios=[0, 16, 16, 0]))
    assert config.qk_rope_head_dim == 22


def test_values_at_the_limits_are_allowed():
    changes = {
        "num_experts_per_tok": 24,
        "num_hash_layers": 4,
        "qk_rope_head_dim": 20,
        "eos_token_id": [98, 0],
    }
    config = Config.from_dict(with_changes(**changes))
    assert config.num_experts_per_tok == 24 and config.num_hash_layers == 4 and config.qk_rope_head_dim == 20
    assert config.eos_token_id == (98, 0)


@pytest.mark.parametrize(
    ("mapping", "said"),
    [
        (scaled(type="linear"), 'rope_scaling.type is "linear"; it must be "yarn"'),
        (scaled(rope_type="linear"), 'rope_scaling.rope_type is "linear"; it must be "yarn"'),
        (with_changes(rope_scaling={"factor": 4}), 'rope_scaling.type is missing; it must be "yarn"'),
        (scaled(factor="4"), 'rope_scaling.factor is "4"; it must be a finite number above 0'),
        (scaled(beta_fast=9e307), "rope_scaling.beta_fast is 9e+307; it must be a finite number above 0 that float32"),
        (scaled(beta_slow=1e-320), "rope_scaling.beta_slow is 1e-320; it must be a finite number above 0 that float32"),
        (scaled(truncate=False), "rope_scaling.truncate is false; it must be true"),
        (
            scaled(original_max_position_embeddings=6.5),
            "rope_scaling.original_max_position_embeddings is 6.5",
        ),
        (scaled(beta_fast=0.5), "rope_scaling.beta_fast is 0.5; it must be at least beta_slow, which is 1.0"),
        (scaled(attention_factor=1.2), "rope_scaling.attention_factor is 1.2; it must be 1 or absent"),
        (with_changes(rope_scaling=[]), "rope_scaling is []; it must be an object with type, factor"),
        (with_changes(rope_scaling=None), "rope_scaling is null; it must be an object with type, factor"),
    ],
)
def test_rope_scaling_refusals(mapping, said):
    assert refusal(mapping).startswith(said)


@pytest.mark.parametrize("name", ["type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow"])
def test_each_missing_rope_scaling_field_is_named(name):
    mapping = scaled()
    del mapping["rope_scaling"][name]
    assert refusal(mapping).startswith(f"rope_scaling.{name} is missing; it must be ")


def test_rope_scaling_spellings():
    mapping = scaled(rope_type="yarn", attention_factor=1.0)
    assert Config.from_dict(mapping) == Config.from_dict(PUBLISHED)
    del mapping["rope_scaling"]["type"]
    assert Config.from_dict(mapping) == Config.from_dict(PUBLISHED)


def test_rope_scaling_is_needed_only_where_a_layer_compresses():
    # The ratios of next-token-prediction layers do not count: those layers are not run.
    mapping = with_changes(compress_ratios=[0, 0, 0, 0, 4, 4], rope_scaling=None)
    assert Config.from_dict(mapping).rope_scaling is None
    del mapping["rope_scaling"]
    assert Config.from_dict(mapping).rope_scaling is None
    assert refusal(mapping | {"compress_ratios": [0, 0, 0, 8]}).startswith("rope_scaling is missing")


def test_layer_kinds_that_agree_are_accepted():
    mapping = with_changes(layer_types=LAYER_TYPES, mlp_layer_types=MLP_LAYER_TYPES)
    assert Config.from_dict(mapping) == Config.from_dict(PUBLISHED)
    longer = with_changes(layer_types=[*LAYER_TYPES, "sliding_attention", "heavily_compressed_attention"])
    assert Config.from_dict(longer) == Config.from_dict(PUBLISHED)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"layer_types": [*LAYER_TYPES[:3], "full_attention"]},
            'layer_types[3] is "full_attention"; it must be "sliding_attention" or '
            '"compressed_sparse_attention" or "heavily_compressed_attention"',
        ),
        (
            {"layer_types": [*LAYER_TYPES[:2], "sliding_attention", LAYER_TYPES[3]]},
            'layer_types[2] is "sliding_attention"; it must be "heavily_compressed_attention", as compress_ratios says',
        ),
        ({"layer_types": LAYER_TYPES[:3]}, "layer_types has 3 entries; it must have 4"),
        ({"layer_types": "sliding_attention"}, 'layer_types is "sliding_attention"; it must be a list'),
        ({"layer_types": [None, *LAYER_TYPES[1:]]}, "layer_types[0] is null; it must be"),
        ({"layer_types": [["moe"], *LAYER_TYPES[1:]]}, 'layer_types[0] is ["moe"]; it must be'),
        (
            {"mlp_layer_types": ["hash_moe", "dense", "moe", "moe"]},
            'mlp_layer_types[1] is "dense"; it must be "hash_moe" or "moe"',
        ),
        (
            {"mlp_layer_types": ["hash_moe", "moe", "moe", "moe"]},
            'mlp_layer_types[1] is "moe"; it must be "hash_moe", as num_hash_layers says',
        ),
    ],
)
def test_layer_kinds_that_are_unknown_or_contradict(changes, said):
    assert refusal(with_changes(**changes)).startswith(said)


def test_long_values_are_cut_in_messages():
    said = refusal(with_changes(model_type="x" * 1000))
    assert len(said) < 200 and 'it must be "deepseek_v4"' in said


def test_reading_a_config_does_not_import_jax():
    code = "import sys, models.deepseek_v4.config; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
