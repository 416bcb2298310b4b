"""The kernels' benchmark: floors, the report without a GPU, and the arithmetic of what is measured with one."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import bench, measure
from pallas_kernels.aot import KernelReport, NoCompilerError
from pallas_kernels.choice import Device
from pallas_kernels.moe_combine.bench import cases as combine_cases
from pallas_kernels.moe_dispatch.bench import cases as dispatch_cases

CPU = Device("cpu", "cpu", 1)
REPORT = KernelReport("moe", "sm_90a", 31, 0, 0, 71_681, 4, 12)


def test_floors_count_every_byte_once():
    dispatch, float32, power_of_two = dispatch_cases("pro", 10)
    tables = 10 * 6 * 4
    assert dispatch.floor_bytes == 10 * 7168 * 2 + 60 * 7168 * 2 + tables + 60 * 4
    assert float32.floor_bytes == power_of_two.floor_bytes == 10 * 7168 * 2 + 60 * (7168 + 56 * 4) + tables + 60 * 4
    weighted, unweighted = combine_cases("flash", 10)
    assert weighted.floor_bytes == 60 * 4096 * 2 + 10 * 4096 * 2 + 2 * tables
    assert unweighted.floor_bytes == weighted.floor_bytes - tables


def test_without_a_gpu_it_says_so_and_prints_floors_and_the_compilers_report(monkeypatch, capsys):
    monkeypatch.setattr(bench, "reports_of", lambda arch: {"moe_dispatch pro T=8": REPORT})
    assert bench.main(["--json", "--tokens", "8"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["device"], shown["jax"]) == ("cpu", jax.__version__)
    assert shown["not_measured"] == "the device is cpu (cpu), not a Hopper or Blackwell GPU"
    assert len(shown["floors"]) == 10
    assert shown["floors"][0] == {
        "operation": "moe_dispatch",
        "model": "flash",
        "tokens": 8,
        "floor_bytes": 459_136,
        "sm_90a_us": pytest.approx(459_136 / 4.8e12 * 1e6),
        "sm_100a_us": pytest.approx(459_136 / 7.67232e12 * 1e6),
    }
    row = {"case": "moe_dispatch pro T=8", **dataclasses.asdict(REPORT), "blocks_per_core": 3}
    assert shown["compiled_sm_90a"] == shown["compiled_sm_100a"] == [row]
    assert "measured" not in shown


def test_tables_are_aligned_and_a_missing_compiler_is_reported(monkeypatch, capsys):
    def no_compiler(arch):
        raise NoCompilerError(f"compiling for {arch} needs jax's CUDA plugin")

    monkeypatch.setattr(bench, "reports_of", no_compiler)
    assert bench.main(["--tokens", "128"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "not measured: the device is cpu (cpu), not a Hopper or Blackwell GPU"
    assert lines[3].split() == ["operation", "model", "T", "floor", "bytes", "us", "on", "H200", "us", "on", "B200"]
    assert lines[4].split() == ["moe_dispatch", "flash", "128", "7346176", "1.53", "0.96"]
    assert lines[-1] == "not compiled: compiling for sm_90a needs jax's CUDA plugin"


def test_tokens_below_one_are_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--tokens", "0"])
    assert stopped.value.code == 2
    assert "--tokens must be at least 1, not 0" in capsys.readouterr().err


def test_a_measurement_compares_both_implementations_with_the_floor(monkeypatch):
    """On the CPU, with XLA in Pallas's place and made-up times."""
    monkeypatch.setattr(measure, "microseconds", lambda function, *_: (next(times), "wall"))
    for case in (*dispatch_cases("flash", 2), *combine_cases("flash", 2)):
        times = iter([10.0, 25.0])
        on_cpu = dataclasses.replace(case, function=lambda kernels, device, case=case: case.function("xla", device))
        found = measure.measure(on_cpu, CPU, bytes_per_second=case.floor_bytes / 8e-6)
        assert (found.operation, found.tokens, found.agree, found.clock) == (case.operation, 2, True, "wall")
        assert (found.pallas_us, found.xla_us, found.speedup) == (10.0, 25.0, 2.5)
        assert math.isclose(found.floor_us, 8.0) and math.isclose(found.fraction_of_floor, 0.8)


def test_times_are_taken_on_the_wall_clock_where_the_device_has_none(monkeypatch):
    monkeypatch.setattr(measure, "RUNS", 3)
    us, clock = measure.microseconds(jax.jit(lambda x: x + 1), jnp.zeros(1000))
    assert clock == "wall" and us > 0
    monkeypatch.setattr(measure, "COPIED_BYTES", 2**20)
    assert measure.copy_bandwidth() > 0


def test_results_that_differ_do_not_agree():
    ones = jnp.ones((2, 256), jnp.bfloat16)
    assert measure.agreement(ones, ones, 0.0)
    assert measure.agreement((ones, ones), (ones, ones), 0.0)
    assert not measure.agreement((ones, ones), (ones, ones.at[1, 7].set(1 + 2**-7)), 0.0)
    assert measure.agreement(ones.at[0, 0].set(1 + 2**-7), ones, 2.0**-7)
    assert not measure.agreement(ones.at[0, 0].set(1 + 2**-6), ones, 2.0**-7)
    assert not measure.agreement(ones.at[0, 0].set(np.nan), ones, 2.0**-7)


def test_a_disagreement_is_an_error(monkeypatch, capsys):
    row = {"operation": "moe_combine", "agree": False}
    monkeypatch.setattr(bench, "not_measured", lambda cases, device: iter([("measured", [row])]))
    assert bench.main(["--tokens", "1"]) == 1
    assert capsys.readouterr().out.splitlines()[1:] == ["operation    agree", "moe_combine  False"]
