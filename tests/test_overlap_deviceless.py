"""What a decode step computes while its rows travel, read off the schedule compiled for H200s that are not there.

The compiler options are `plan_exchange.compiler_options`: XLA's latency-hiding scheduler, and over several hosts the
plain ragged exchange. No network and no GPU was measured.
"""

import functools
from typing import Any

import pytest
from tiny_models import published

from jaxcoll.schedule import Scheduled, schedule
from jaxcoll.settings import Settings
from jaxcoll.targets import compile_only, gpu_devices
from jaxcoll.topology import Topology
from models.deepseek_v4.cache import cache_shapes
from models.deepseek_v4.config import Config
from models.deepseek_v4.model import DeepSeekV4
from models.deepseek_v4.program import abstract_parameters, compile_decode, plan_decode

ROWS = 64
SIZES = dict(
    num_hash_layers=0, hidden_size=1024, moe_intermediate_size=512, num_experts_per_tok=6,
    num_attention_heads=16, head_dim=128, q_lora_rank=256, o_groups=4, o_lora_rank=128, vocab_size=512,
    torch_dtype="bfloat16",
)  # fmt: skip


@functools.cache
def exchanges(hosts: int, layers: int = 2, **choices: Any) -> list[Scheduled]:
    """The rows' exchanges of a step, in the order of their start; nothing else may carry rows."""
    topology = Topology(8 * hosts, 1, devices=gpu_devices("h200", hosts, 8))
    config = Config.from_dict(published(**SIZES, compress_ratios=[0] * layers, n_routed_experts=32 * hosts))
    choices = {"moe_backend": "all_to_all", "kernels": "xla", **choices}
    settings = Settings(**choices)
    plan = plan_decode(config, topology, (ROWS,) * topology.attn_dp, settings)
    model = DeepSeekV4(config, topology, settings)
    caches = cache_shapes(config, ROWS * topology.attn_dp, 64)
    step = compile_decode(model, plan, abstract_parameters(model), caches, ("next_token",), compile_only)
    found = schedule(step.compiled, topology)
    rows = [s for s in found if s.collective.kind == "ragged_all_to_all" and "bf16" in s.collective.dtypes]
    others = [s.collective for s in found if s.collective.kind != "ragged_all_to_all"]
    assert {c.kind for c in others} == {"all_gather"} and all(c.dtypes == ("s32",) for c in others)  # the counts
    return rows


def covered_by(exchange: Scheduled, part: str) -> bool:
    assert exchange.collective.is_async
    return any(part in scope for scope in exchange.meanwhile)


@pytest.mark.slow
@pytest.mark.parametrize(("hosts", "mode", "group"), [(1, "normal", "attn_dp"), (2, "low_latency", "attn_dp_outer")])
def test_rows_go_out_under_the_shared_expert(hosts, mode, group):
    """With two levels: over the links between hosts."""
    found = [s for s in exchanges(hosts, layers=1, dispatch=mode) if s.collective.group == group]
    assert len(found) == 2  # there and home
    assert covered_by(found[0], "moe/shared/dot_general")


@pytest.mark.slow
def test_each_half_travels_under_the_other():
    """Of every layer: B goes out under A's experts, A comes home under B's experts, B under A's next attention."""
    found = exchanges(1, overlap="two_batch")
    a_out, b_out, a_home, b_home = found[:4]
    assert len(found) == 8
    assert covered_by(a_out, "layer.0/shared")
    assert covered_by(b_out, "layer.0/experts") and covered_by(a_home, "layer.0/experts")
    assert covered_by(b_home, "layer.1/attn")
    later = sorted(found[4:], key=lambda s: "combine" in s.collective.source)
    assert any(covered_by(s, "layer.1/attn") for s in later)  # A goes out under B's attention
    assert sum(covered_by(s, "layer.1/experts") for s in found) >= 2


@pytest.mark.slow
def test_waves_travel_under_other_waves():
    """Of a layer's four waves the rows of all but the first go out under the experts of the one before; of the results
    XLA brings the third wave's home under the fourth's experts, earlier ones under the work around them."""
    found = exchanges(1, layers=1, moe_backend="fused")
    out = [s for s in found if s.collective.result_bytes > s.collective.operand_bytes]
    home = [s for s in found if s.collective.result_bytes < s.collective.operand_bytes]
    assert len(out) == len(home) == 4
    assert all(covered_by(s, f"wave.{i}/routed_experts") for i, s in enumerate(out[1:]))
    assert covered_by(home[2], "wave.3/routed_experts")
