"""Which kernels a plan takes for an all-to-all, and why; what is impossible is refused before anything is compiled."""

import functools

import pytest
from golden import ODD, WIDE

from jaxcoll.kernels import RowShape
from jaxcoll.plan import LayerPlan, PlanError, plan_layer
from jaxcoll.settings import Settings
from jaxcoll.targets import gpu_devices
from jaxcoll.topology import Topology
from models import cli

PRO = RowShape(7168, "bfloat16", 6)
A_CPU = "the device is cpu (cpu), and the kernels are for Hopper and Blackwell GPUs"
NO_KERNELS = "the gather backend packs no rows and adds none up: only an all_to_all has kernels"
GATHER_NAMED = "gather was asked for, which exchanges no rows; name moe_backend all_to_all or fused"


@functools.cache
def gpus(target="h200", attn_dp=4, attn_tp=2, moe_ep=8) -> Topology:
    world = attn_dp * attn_tp
    devices = gpu_devices(target, -(-world // 8), min(world, 8))
    return Topology(attn_dp, attn_tp, moe_ep, devices=devices)


def plan(topology: Topology, row: RowShape | None = PRO, rows: int = 4, **choices) -> LayerPlan:
    settings = Settings(**{"moe_backend": "all_to_all", **choices})
    return plan_layer(topology, (rows,) * topology.attn_dp, settings, shared_width=8, row=row)


@pytest.mark.parametrize(("target", "kind"), [("h200", "NVIDIA H200"), ("b200", "NVIDIA B200")])
def test_hopper_and_blackwell_take_pallas(target, kind):
    kernels = plan(gpus(target)).kernels
    assert kernels.path == "pallas" and not kernels.interpret
    assert kernels.reason == f"{kind} runs it, and 7168 channels of bfloat16 fit"
    assert kernels.record()["not_chosen"] == {"xla": kernels.reason} and not kernels.record()["impossible"]


def test_elsewhere_and_for_other_shapes_it_is_xla():
    kernels = plan(Topology(4, 2)).kernels
    assert (kernels.path, kernels.reason, kernels.obstacle) == ("xla", f"Pallas is impossible: {A_CPU}", A_CPU)
    assert kernels.record() == {
        "name": "kernels",
        "path": "xla",
        "interpret": False,
        "reason": f"Pallas is impossible: {A_CPU}",
        "not_chosen": {},
        "impossible": {"pallas": A_CPU},
    }
    narrow = plan(gpus(), RowShape(96, "bfloat16", 6)).kernels
    assert (narrow.path, narrow.obstacle) == (
        "xla",
        "rows have 96 channels, and the kernels take multiples of 256 up to 8192",
    )


def test_a_plan_that_is_not_told_what_a_row_is_leaves_it_to_tracing():
    assert plan(gpus(), None).kernels.path is None
    assert plan(gpus(), None, kernels="pallas").kernels.path == "pallas"
    assert plan(Topology(4, 2), None).kernels.path == "xla"


def test_a_name_wins_over_the_rule():
    kernels = plan(gpus(), kernels="xla").kernels
    assert (kernels.path, kernels.reason, kernels.obstacle) == ("xla", "it was asked for by name", None)
    assert kernels.record()["not_chosen"] == {"pallas": "it was asked for by name"}
    assert plan(gpus(), kernels="pallas").kernels.path == "pallas"
    interpreted = plan(Topology(), kernels="pallas", pallas_interpret=True).kernels
    assert (interpreted.path, interpreted.interpret) == ("pallas", True)
    assert interpreted.reason == "it was asked for by name, to be interpreted"


def test_interpretation_alone_changes_nothing():
    kernels = plan(Topology(), pallas_interpret=True).kernels
    assert (kernels.path, kernels.interpret) == ("xla", False)
    assert not plan(gpus(), pallas_interpret=True).kernels.interpret


@pytest.mark.parametrize(
    ("topology", "row", "choices", "obstacle"),
    [
        (Topology(4, 2), PRO, {}, A_CPU),
        (Topology(4, 2), PRO, {"pallas_interpret": True}, "run on one device only, and this mesh has 8"),
        (Topology(), RowShape(96, "float32", 2), {"pallas_interpret": True}, "rows have 96 channels, and"),
        (Topology(4, 2), None, {}, A_CPU),
        (Topology(4, 2), PRO, {"moe_backend": "gather"}, GATHER_NAMED),
    ],
)
def test_a_name_that_is_impossible_is_refused_with_the_reason(topology, row, choices, obstacle):
    with pytest.raises(PlanError, match="^kernels pallas is impossible here because") as error:
        plan(topology, row, kernels="pallas", **choices)
    assert obstacle in str(error.value)


@pytest.mark.parametrize(
    ("moe_ep", "mode", "rows", "copies"),
    [
        (8, "low_latency", 2**17, 2**16 * 6),  # a rank's half of its replica's rows, once per expert
        (4, "low_latency", 2**16, 2**15 * 2 * 6),  # with those of the rank that shares its experts
        (4, "normal", 2**16, 2**15 * 2 * 4),  # once per destination rank, of which there are four
        (8, "normal", 2**17, 2**16 * 6),
        (8, "waves", 2**15, 2**14 * 6 * 4),  # once per expert, and room for them all in each of four waves
    ],
)
def test_offsets_of_the_largest_array_must_be_int32(moe_ep, mode, rows, copies):
    row = RowShape(8192, "bfloat16", 6)
    asked = {"moe_backend": "fused"} if mode == "waves" else {"dispatch": mode}
    assert plan(gpus(moe_ep=moe_ep), row, rows // 2, **asked).kernels.path == "pallas"
    kernels = plan(gpus(moe_ep=moe_ep), row, rows, **asked).kernels
    assert kernels.path == "xla"
    assert kernels.obstacle == f"an array of {copies * 8192} elements passes the kernels' int32 offsets"


def test_named_kernels_bring_their_backend_and_say_so():
    named = plan(gpus(), kernels="pallas", moe_backend="auto")
    assert (named.backend, named.shared_expert) == ("all_to_all", "replicated_local")
    assert named.rows.reason == "kernels pallas needs it"
    with pytest.raises(
        PlanError, match="gather max_len is impossible here because an all_to_all is what kernels pallas needs"
    ):
        plan(gpus(), kernels="pallas", moe_backend="auto", gather="max_len")
    assert plan(gpus(), moe_backend="auto").kernels.reason == NO_KERNELS
    assert plan(gpus(), moe_backend="gather", kernels="xla").kernels.path == "xla"


def test_other_kernels_are_another_program():
    plans = [plan(gpus(), kernels="xla"), plan(gpus(), kernels="pallas"), plan(gpus())]
    assert [p.program == plans[1].program for p in plans] == [False, True, True]
    interpreted = plan(Topology(), kernels="pallas", pallas_interpret=True)
    assert interpreted.program != plan(Topology()).program


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([str(WIDE), "--attn-dp", "1"], A_CPU),
        ([str(WIDE), "--moe-backend", "gather"], GATHER_NAMED),
        ([str(ODD), "--attn-dp", "1", "interpreted"], "rows have 96 channels, and the kernels take multiples of 256"),
        (
            [str(WIDE), "--attn-dp", "2", "interpreted"],
            "interpreted kernels run on one device only, and this mesh has 2",
        ),
    ],
)
@pytest.mark.parametrize("command", ["verify", "bench", "generate"])
def test_the_command_refuses_in_one_sentence(command, words, reason, capsys, monkeypatch):
    if words[-1] == "interpreted":
        monkeypatch.setenv("JAXCOLL_PALLAS_INTERPRET", "1")
        words = words[:-1]
    prompt = ["--prompt-ids", "1,2"] if command == "generate" else []
    assert cli.main([command, *words, *prompt, "--kernels", "pallas"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"jaxcoll: kernels pallas is impossible here because {reason}")
