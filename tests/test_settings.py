"""Choices of paths: environment variables, arguments over them, bad values named, nothing read or started early."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxcoll.plan import plan_layer
from jaxcoll.settings import VARIABLES, Settings, SettingsError
from jaxcoll.topology import Topology

NAMES = {
    "use_gatherv": "JAXCOLL_DP_USE_GATHERV",
    "use_reduce_scatter": "JAXCOLL_DP_USE_REDUCE_SCATTER",
    "shared_expert_tp1": "JAXCOLL_SHARED_EXPERT_TP1",
    "shared_expert_local": "JAXCOLL_SHARED_EXPERT_LOCAL",
    "mask_dp_pad": "JAXCOLL_MASK_DP_PAD",
    "pallas_interpret": "JAXCOLL_PALLAS_INTERPRET",
}


def fields(**values: Any) -> Settings:
    return Settings(**values)


each_variable = pytest.mark.parametrize(("field", "name"), NAMES.items())


def test_the_variables_are_these():
    assert VARIABLES == NAMES


def test_defaults():
    assert Settings.from_environment({}) == Settings()
    assert Settings() == Settings(
        gather="auto",
        combine="auto",
        head="attn_tp",
        use_gatherv=False,
        use_reduce_scatter=None,
        shared_expert_tp1=False,
        shared_expert_local=False,
        mask_dp_pad=True,
        kernels="auto",
        pallas_interpret=False,
    )


@each_variable
@pytest.mark.parametrize("text", ["1", "true", "yes", "on", "True", "ON", " on "])
def test_a_variable_switches_its_field_on(field, name, text):
    assert Settings.from_environment({name: text}) == fields(**{field: True})


@each_variable
@pytest.mark.parametrize("text", ["0", "false", "no", "off", "False", "NO"])
def test_a_variable_switches_its_field_off(field, name, text):
    assert Settings.from_environment({name: text}) == fields(**{field: False})


@each_variable
@pytest.mark.parametrize("text", ["", "2", "maybe", "truee", "-1"])
def test_a_bad_value_is_an_error_that_names_variable_value_and_the_allowed_ones(field, name, text):
    with pytest.raises(SettingsError) as error:
        Settings.from_environment({name: text})
    assert str(error.value) == (
        f"{name}={text!r} is neither on nor off; it must be one of 1, true, yes, on, 0, false, no, off"
    )


@each_variable
@pytest.mark.parametrize("given", [True, False])
def test_an_argument_wins_over_its_variable_and_over_no_other(field, name, given):
    opposite = {variable: "off" if given else "on" for variable in NAMES.values()}
    others = {other: not given for other in NAMES if other != field}
    assert Settings.from_environment(opposite, **{field: given}) == fields(**{field: given}, **others)


def test_none_asks_for_the_variable_and_then_for_the_default():
    nothing: dict = dict.fromkeys(("gather", "combine", "head", *NAMES))
    assert Settings.from_environment({}, **nothing) == Settings()
    assert Settings.from_environment({NAMES["use_gatherv"]: "1"}, **nothing) == Settings(use_gatherv=True)
    assert Settings.from_environment({}, gather="sum_len", **{"head": None}).gather == "sum_len"


@pytest.mark.parametrize(("text", "kernels"), [("auto", "auto"), (" XLA ", "xla"), ("pallas", "pallas")])
def test_kernels_have_a_variable_too_and_an_argument_wins(text, kernels):
    variable = {"JAXCOLL_KERNELS": text}
    assert Settings.from_environment(variable) == Settings(kernels=kernels)
    assert Settings.from_environment(variable, kernels=None).kernels == kernels
    assert Settings.from_environment(variable, kernels="xla").kernels == "xla"
    assert Settings.from_environment(variable, kernels="auto").kernels == "auto"


@pytest.mark.parametrize("text", ["", "triton", "1"])
def test_kernels_that_do_not_exist_are_an_error_that_names_the_variable(text):
    with pytest.raises(SettingsError) as error:
        Settings.from_environment({"JAXCOLL_KERNELS": text}, kernels="xla")
    assert str(error.value) == f"JAXCOLL_KERNELS={text!r} must be one of auto, xla, pallas"


def test_named_pallas_kernels_bring_the_backend_that_has_them():
    backends = {k: Settings(kernels=k).backend for k in ("auto", "xla", "pallas")}
    assert backends == {"auto": "gather", "xla": "gather", "pallas": "all_to_all"}
    assert Settings(kernels="pallas", moe_backend="gather").backend == "gather"
    assert Settings(moe_backend="all_to_all").backend == "all_to_all"


def test_other_variables_mean_nothing():
    assert Settings.from_environment({"SGLANG_DP_USE_GATHERV": "1", "JAXCOLL_DP_USE_GATHER": "x"}) == Settings()


def test_the_processs_environment_is_read_when_settings_are_made(monkeypatch):
    monkeypatch.delenv("JAXCOLL_DP_USE_GATHERV", raising=False)
    assert not Settings.from_environment().use_gatherv
    monkeypatch.setenv("JAXCOLL_DP_USE_GATHERV", "yes")
    assert Settings.from_environment().use_gatherv
    assert not Settings().use_gatherv, "settings made directly are what they say"
    monkeypatch.setenv("JAXCOLL_DP_USE_GATHERV", "no")
    assert not Settings.from_environment().use_gatherv


def test_a_bad_variable_is_no_error_before_settings_are_made():
    code = (
        "import jaxcoll.settings as s, sys\n"
        "from jax._src import xla_bridge\n"
        "s.Settings()\n"
        "assert not xla_bridge._backends, 'devices were started'\n"
        "try: s.Settings.from_environment()\n"
        "except s.SettingsError as error: print(error)\n"
    )
    env = dict(os.environ, JAXCOLL_MASK_DP_PAD="perhaps")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("JAXCOLL_MASK_DP_PAD='perhaps' is neither on nor off")


def test_the_module_adds_nothing_foreign_to_the_package_and_starts_no_device():
    code = (
        "import sys, jaxcoll\n"
        "from jax._src import xla_bridge\n"
        "before = set(sys.modules)\n"
        "from jaxcoll.settings import Settings\n"
        "Settings.from_environment({'JAXCOLL_DP_USE_GATHERV': '1'})\n"
        "print(sorted({name.split('.')[0] for name in set(sys.modules) - before} - {'jaxcoll', 'pallas_kernels'}))\n"
        "assert not xla_bridge._backends, 'devices were started'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


@pytest.mark.parametrize(
    ("field", "allowed"),
    [
        ("gather", "auto, gather_v, sum_len, max_len"),
        ("combine", "auto, all_reduce, reduce_scatter_v, reduce_scatter"),
        ("head", "attn_tp, world"),
        ("moe_backend", "auto, gather, all_to_all, fused"),
        ("dispatch", "auto, normal, low_latency"),
        ("kernels", "auto, xla, pallas"),
        ("overlap", "auto, none, shared_expert, two_batch"),
        ("levels", "auto, flat, hosts"),
    ],
)
@pytest.mark.parametrize("wrong", ["nothing", "MAX_LEN", "", None, 1])
def test_a_choice_that_does_not_exist_is_refused_with_the_allowed_ones(field, allowed, wrong):
    with pytest.raises(SettingsError) as error:
        Settings(**{field: wrong})
    assert str(error.value) == f"{field} must be one of {allowed}, not {wrong!r}"
    if wrong is not None:
        with pytest.raises(SettingsError):
            Settings.from_environment({}, **{field: wrong})


def test_a_field_that_does_not_exist_is_refused():
    with pytest.raises(TypeError):
        Settings.from_environment({}, gatherv=True)


# What reduce_scatter is by default: on for ROCm, found out when it is asked for.


def device(version):
    return SimpleNamespace(client=SimpleNamespace(platform_version=version))


@pytest.mark.parametrize(
    ("version", "expected"),
    [("PJRT C API\nrocm 60300", True), ("ROCM 7.0", True), ("PJRT C API\ncuda 13000", False), ("cpu", False)],
)
def test_reduce_scatter_is_on_for_rocm_and_off_otherwise(monkeypatch, version, expected):
    monkeypatch.setattr(jax, "devices", lambda: [device(version)])
    assert Settings().reduce_scatter_allowed() is expected
    assert Settings(use_reduce_scatter=not expected).reduce_scatter_allowed() is not expected


def test_a_plan_asks_for_devices_only_where_that_rule_decides(monkeypatch):
    def fail():
        raise AssertionError("devices were started")

    monkeypatch.setattr(jax, "devices", fail)
    equal = (1, 1, 1, 1)
    plan_layer(Topology(4, 2), equal, shared_width=8)  # attn_tp = 2: the rule cannot apply
    plan_layer(Topology(4, 1), equal, shared_width=8)  # decided by the expert-parallel rule
    plan_layer(Topology(4, 1, 2), (5, 0, 1, 0), shared_width=8)  # unequal slots
    plan_layer(Topology(4, 1, 2), equal, Settings(use_reduce_scatter=True), shared_width=8)
    with pytest.raises(AssertionError, match="devices were started"):
        plan_layer(Topology(4, 1, 2), equal, shared_width=8)


@pytest.mark.parametrize(("version", "expected"), [("rocm 7", "reduce_scatter"), ("cuda", "all_reduce")])
def test_the_default_reaches_the_plan(monkeypatch, version, expected):
    monkeypatch.setattr(jax, "devices", lambda: [device(version)])
    assert plan_layer(Topology(4, 1, 2), (1, 1, 1, 1), shared_width=8).combine == expected


@pytest.mark.parametrize("field", NAMES)
@pytest.mark.parametrize("value", ["false", "0", 0, 1, 2.0, None])
def test_a_switch_is_true_or_false(field, value):
    """A word would be taken for on, whatever it says."""
    if field == "use_reduce_scatter" and value is None:
        assert fields(**{field: None}).use_reduce_scatter is None
        return
    with pytest.raises(SettingsError) as error:
        fields(**{field: value})
    assert str(error.value) == f"{field} must be True or False, not {value!r}"


@pytest.mark.parametrize("copies", [-1, True, 1.5, "2", None])
def test_copies_of_experts_are_a_whole_number(copies):
    with pytest.raises(SettingsError) as error:
        fields(redundant_experts=copies)
    assert str(error.value) == f"redundant_experts must be a whole number of at least 0, not {copies!r}"


@pytest.mark.parametrize("width", [0, -8, True, 1.5, "8", None])
def test_a_width_is_a_positive_whole_number(width):
    with pytest.raises(ValueError) as error:
        plan_layer(Topology(2, 2), (1, 1), shared_width=width)
    assert str(error.value) == f"shared_width must be a whole number of at least 1, not {width!r}"
