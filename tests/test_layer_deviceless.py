"""A whole decode layer with the Pallas kernels, compiled for 8 H200s that are not there."""

import dataclasses
from collections import Counter

import pytest
from golden import WIDE

from jaxcoll import hlo
from jaxcoll.settings import Settings
from jaxcoll.targets import compile_only, gpu_devices
from jaxcoll.topology import Topology
from models.deepseek_v4.cache import cache_shapes
from models.deepseek_v4.config import Config
from models.deepseek_v4.model import DeepSeekV4
from models.deepseek_v4.program import abstract_parameters, compile_decode, plan_decode

CSA_LAYER = {"num_hidden_layers": 1, "compress_ratios": (4,), "num_hash_layers": 0, "torch_dtype": "bfloat16"}
EXCHANGES = {"normal": 3, "low_latency": 2}  # rows there and home, in normal mode ids and weights beside them


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "kernels", "moe_ep", "wire", "packed_by", "added_up_by"),
    [
        ("low_latency", "pallas", 8, "auto", "moe_dispatch_rows", "moe_combine_rows"),
        ("normal", "auto", 4, "fp8", "moe_dispatch_rows_fp8_float32", "moe_combine_rows_unweighted"),
    ],
)
def test_the_step_for_eight_gpus_holds_the_kernels(mode, kernels, moe_ep, wire, packed_by, added_up_by):
    """Named, and chosen by the rule; the audit passes both, ranks that share an expert's width (moe_tp 2) included."""
    config = dataclasses.replace(Config.from_folder(WIDE), **CSA_LAYER)
    topology = Topology(4, 2, moe_ep, devices=gpu_devices("h200", 1, 8))
    settings = Settings(moe_backend="all_to_all", dispatch=mode, kernels=kernels, wire=wire)
    plan = plan_decode(config, topology, (2, 0, 2, 1), settings)
    assert plan.kernels.path == "pallas"
    model = DeepSeekV4(config, topology, settings)
    caches = cache_shapes(config, 8, 32)
    step = compile_decode(model, plan, abstract_parameters(model), caches, ("next_token", "logits"), compile_only)
    assert sorted(hlo.mosaic_kernels(step.compiled)) == [
        f"layer.0/moe/combine/{added_up_by}",
        f"layer.0/moe/dispatch/{packed_by}",
    ]
    found = Counter(c.kind for c in hlo.collectives(step.compiled, topology))
    assert found["ragged_all_to_all"] == EXCHANGES[mode] and found["all_to_all"] == 0
