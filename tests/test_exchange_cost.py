"""Predicted bytes of an all-to-all against compiled programs: both modes and transports, all wires, as totals."""

import dataclasses

import pytest
from tiny_models import published

from jaxcoll import cost, hlo
from jaxcoll.exchange_cost import copies_per_row, exchange_transfers
from jaxcoll.kernels import RowShape
from jaxcoll.level import Level
from jaxcoll.plan import plan_layer
from jaxcoll.settings import Settings
from jaxcoll.targets import compile_only, gpu_devices
from jaxcoll.topology import Topology
from models.deepseek_v4.config import Config
from models.deepseek_v4.layer_program import compile_layer
from models.deepseek_v4.program import layer_transfers

WIDTH, EXPERTS, K = 256, 24, 3
ROW = RowShape(WIDTH, "bfloat16", K)
CONFIG = Config.from_dict(
    published(
        compress_ratios=[0], num_hash_layers=0, hidden_size=WIDTH, n_routed_experts=EXPERTS, num_attention_heads=12,
        o_groups=12, num_experts_per_tok=K, moe_intermediate_size=24,
    )
)  # fmt: skip


def totals_of(sizes, counts, mode, wire, dtype, compiler=None, devices=None):
    """Predicted and compiled totals of one layer's program."""
    config = dataclasses.replace(CONFIG, torch_dtype=dtype)
    topology = Topology(*sizes, devices=devices)
    settings = Settings(moe_backend="all_to_all", dispatch=mode, wire=wire)
    plan = plan_layer(topology, counts, settings, shared_width=config.moe_intermediate_size)
    program = compile_layer(config, topology, plan, 16, compiler)
    found = [c for c in hlo.collectives(program.step.compiled, topology) if c.group_size > 1]
    return cost.totals(layer_transfers(config, topology, plan)), hlo.totals(found)


def bytes_of(totals):
    """Counts are left out: XLA merges instructions."""
    return {key: (t.operand_bytes, t.result_bytes, t.wire_bytes) for key, t in totals.items()}


@pytest.mark.parametrize(
    ("sizes", "counts", "mode", "wire"),
    [
        ((4, 2, 8), (3, 0, 1, 2), "normal", "f32"),
        ((4, 2, 4), (40, 0, 1, 2), "low_latency", "f32"),  # moe_tp 2; two sizes of blocks
        ((2, 2, 2), (3, 5), "normal", "f32"),
        ((2, 3, 6), (4, 4), "low_latency", "f32"),
        ((3, 1, 1), (1, 2, 0), "normal", "f32"),  # one owner of all experts
    ],
)
def test_padded_blocks_on_cpu_are_what_is_predicted(sizes, counts, mode, wire):
    # In float32: XLA:CPU widens bfloat16, in which fp8's results come home.
    predicted, compiled = totals_of(sizes, counts, mode, wire, "float32")
    assert bytes_of(predicted) == bytes_of(compiled)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "mode", "wire"),
    [((4, 2, 4), "normal", "fp8"), ((8, 1, 8), "low_latency", "bf16")],
)
def test_ragged_exchanges_on_gpus_are_what_is_predicted(sizes, mode, wire):
    devices = gpu_devices("h200", 1, 8)
    predicted, compiled = totals_of(sizes, (2,) * sizes[0], mode, wire, "bfloat16", compile_only, devices)
    assert bytes_of(predicted) == bytes_of(compiled)
    assert any(kind == "ragged_all_to_all" for kind, _ in compiled)


def sent(mode, wire, counts=(8,) * 4):
    """Bytes that a rank sends on average, out and home, in ragged exchanges and in all others."""
    topology = Topology(4, 1, devices=range(4))
    plan = plan_layer(topology, counts, Settings(moe_backend="all_to_all", dispatch=mode, wire=wire), shared_width=24)
    found = exchange_transfers(topology, plan, ROW, EXPERTS, transport="ragged")
    return {t.purpose: t.wire_bytes_from_counts for t in found}


def test_what_travels_is_copies_for_other_ranks():
    # 8 rows x 3 experts, 3 of 4 ranks are others: low latency sends 18 copies of a row each way.
    low = sent("low_latency", "bf16")
    assert low == {"counts": 4 * EXPERTS * 3, "dispatch": 18 * WIDTH * 2, "combine": 18 * WIDTH * 2}
    # A rank's 6 of 24 experts are all missed with chance C(18,3)/C(24,3) = 816/2024.
    copies = 8 * 4 * (1 - 816 / 2024)
    normal = sent("normal", "bf16")
    assert normal["dispatch"] == pytest.approx(copies * 3 / 4 * (WIDTH * 2 + 8 * K), abs=1)
    assert normal["combine"] == pytest.approx(copies * 3 / 4 * WIDTH * 2, abs=1)


def test_fp8_halves_the_way_out_and_not_the_way_home():
    wide, narrow = sent("low_latency", "bf16"), sent("low_latency", "fp8")
    assert narrow["dispatch"] == wide["dispatch"] * (WIDTH + 4 * WIDTH / 128) / (2 * WIDTH)
    assert narrow["combine"] == wide["combine"]


def test_padding_travels_not_at_all():
    assert sent("low_latency", "bf16", (8, 0, 8, 0))["dispatch"] == sent("low_latency", "bf16")["dispatch"] / 2


def test_hosts_first_sends_one_copy_per_host():
    topology = Topology(2, 4, devices=range(8), hosts=2)
    plan = plan_layer(topology, (8, 8), Settings(moe_backend="all_to_all", dispatch="normal"), shared_width=24)
    found = exchange_transfers(topology, plan, ROW, EXPERTS, transport="ragged")
    rows = [(t.purpose, t.group, t.operand_bytes) for t in found if t.kind == "ragged_all_to_all"]
    out, home = WIDTH * 2 + 8 * K, WIDTH * 2
    assert rows == [
        ("dispatch", "attn_dp", 2 * 2 * out),  # 2 rows, at most 2 hosts
        ("dispatch", "attn_tp", 2 * 2 * 3 * out),  # 2 rows of 2 hosts, at most 3 ranks
        ("combine", "attn_tp", 2 * 2 * 4 * home),
        ("combine", "attn_dp", 2 * 2 * home),
    ]


def test_machines_pass_on_what_came_and_no_more():
    """Of 2 rows per rank with 3 of 24 experts each, one copy goes to each of 2 machines with a chosen one, and on from
    there one to each of 8 ranks with a chosen one, whatever machine it is on."""
    topology = Topology(2, 4, devices=range(8), hosts=2)
    plan = plan_layer(topology, (8, 8), Settings(moe_backend="all_to_all", dispatch="normal"), shared_width=24)
    found = exchange_transfers(topology, plan, ROW, EXPERTS, transport="ragged")
    outer, inner = (t.wire_bytes_from_counts for t in found if t.purpose == "combine" and t.kind != "reduce_scatter")
    outer, inner = sorted((outer, inner), key=lambda b: b)
    machines = 2 * (1 - 220 / 2024)  # C(12,3) / C(24,3): all experts on the other machine
    ranks = 8 * (1 - 1330 / 2024)  # C(21,3) / C(24,3)
    assert outer == pytest.approx(2 * machines * WIDTH * 2 / 2, abs=1)
    assert inner == pytest.approx(2 * ranks * WIDTH * 2 * 3 / 4, abs=1)


def test_every_rank_may_be_chosen():
    assert copies_per_row(Level((), 6, 1, "normal", "ragged"), 6) == 6
    assert copies_per_row(Level((), 1, 8, "normal", "ragged"), 6) == 1
    assert copies_per_row(Level((), 2, 8, "low_latency", "ragged"), 6) == 6


def test_a_plan_that_gathers_is_priced_elsewhere():
    topology = Topology(2, 1, devices=range(2))
    with pytest.raises(ValueError, match="this plan gathers rows"):
        exchange_transfers(topology, plan_layer(topology, (1, 1), shared_width=24), RowShape(8, "float32", 2), 4)
