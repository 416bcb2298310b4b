"""The kernels compiled for GPUs that are not there: what the assembler reports, and that programs contain them."""

import dataclasses
import re
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxcoll.audit import audit
from jaxcoll.targets import compile_only, gpu_mesh
from pallas_kernels.aot import Arch, KernelReport, NoCompilerError
from pallas_kernels.compile_report import main, reports_of
from pallas_kernels.moe_combine import combine_rows
from pallas_kernels.moe_dispatch import dispatch_rows, dispatch_rows_fp8

OPERATIONS = {  # and how many TMA copies of each kind their code holds at least, at 6 slots or experts a token
    "moe_dispatch": (1, 6),
    "moe_dispatch fp8 float32": (1, 12),
    "moe_dispatch fp8 power_of_two": (1, 12),
    "moe_combine": (6, 1),
    "moe_combine unweighted": (6, 1),
}
CASES = [f"{operation} {model} T={t}" for operation in OPERATIONS for model in ("flash", "pro") for t in (1, 128, 4096)]


@pytest.fixture(scope="module")
def both_reports() -> dict[Arch, dict[str, KernelReport]]:
    architectures = get_args(Arch)
    with ThreadPoolExecutor() as pool:
        return dict(zip(architectures, pool.map(reports_of, architectures), strict=True))


@pytest.fixture(params=get_args(Arch))
def reports(both_reports, request) -> dict[str, KernelReport]:
    return both_reports[request.param]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_kernel_fits_a_core_twice_and_spills_nothing(reports, case):
    report = reports[case]
    print(f"{report.arch} {case}: {report.registers} registers, {report.smem_bytes} bytes of SMEM")
    assert (report.spill_bytes, report.stack_bytes) == (0, 0)
    loads, stores = OPERATIONS[case.partition(" flash")[0].partition(" pro")[0]]
    assert report.bulk_loads >= loads
    assert report.bulk_stores >= stores
    assert 0 < report.registers <= 128
    assert report.smem_bytes > 2 * 4096 * 2  # two rows at least
    assert report.blocks_per_core >= 2


@pytest.mark.slow
def test_every_published_shape_is_compiled(reports):
    assert set(reports) == set(CASES)


@pytest.mark.slow
def test_each_architecture_is_compiled_for_itself(both_reports):
    for arch, reports in both_reports.items():
        assert {report.arch for report in reports.values()} == {arch}


def test_blocks_of_a_core_are_counted_from_smem_and_registers():
    report = KernelReport("k", "sm_90a", 0, 0, 0, 0, 0, 0)
    changed = [(24, 100_000, 2), (24, 115_712, 2), (24, 115_713, 1), (128, 1024, 4), (129, 1024, 3), (255, 1024, 2)]
    for registers, smem, blocks in changed:
        assert dataclasses.replace(report, registers=registers, smem_bytes=smem).blocks_per_core == blocks


def test_a_wrong_architecture_is_refused(capsys):
    assert main(["sm_80"]) == 2
    assert capsys.readouterr().err == "usage: python -m pallas_kernels.compile_report sm_90a|sm_100a\n"


def test_a_failing_compiler_is_reported(monkeypatch):
    monkeypatch.setenv("PYTHONSTARTUP", "")
    with pytest.raises(NoCompilerError, match=r"usage: python -m pallas_kernels.compile_report sm_90a\|sm_100a"):
        reports_of("sm_80")  # pyright: ignore[reportArgumentType]


def test_a_program_for_eight_gpus_holds_the_kernels():
    """Chosen by default from the mesh, typed as varying, passed by the audit, and with their gradients."""
    mesh = gpu_mesh("h200", 1, 8, {"ep": 8})
    spec = PartitionSpec("ep")

    def exchange(x, slots, weights):
        def loss(x, weights):
            sent = dispatch_rows(x, slots, 64)
            assert jax.typeof(sent).mat.varying == {"ep"}
            received = jax.lax.all_to_all(sent, "ep", split_axis=0, concat_axis=0, tiled=True)
            return combine_rows(received, slots, weights).astype(jnp.float32).sum()

        total, gradients = jax.value_and_grad(loss, argnums=(0, 1))(x, weights)
        return total[None], gradients, dispatch_rows_fp8(x, slots, 64, "power_of_two")

    def argument(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    types = [argument((64, 7168), jnp.bfloat16), argument((64, 6), jnp.int32), argument((64, 6), jnp.float32)]
    mapped = jax.shard_map(exchange, mesh=mesh, in_specs=spec, out_specs=spec)
    traced = jax.jit(mapped).trace(*types)
    audit(traced)
    program = compile_only(traced.lower()).as_text()
    assert program is not None
    names = re.findall(r'custom_call_target="mosaic_gpu.*?(moe_\w+)', program)
    assert sorted(names) == [
        "moe_combine_rows",
        "moe_combine_rows_unweighted",
        "moe_dispatch_rows",
        "moe_dispatch_rows",
        "moe_dispatch_rows_fp8_power_of_two",
    ]
