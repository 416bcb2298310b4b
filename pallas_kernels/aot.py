"""Compiling the kernels for GPUs that are not there, down to machine code, and reading what the assembler reports.

Needs jax's CUDA plugin (two wheels, no NVIDIA library). What a kernel takes of a core is known so; its time is not.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import SingleDeviceSharding

Arch = Literal["sm_90a", "sm_100a"]

# What code generation reads of an H200 and a B200, as published: name, cores, clock in GHz, bytes per second of
# memory, bytes of memory, bytes of L2.
_GPUS: dict[Arch, tuple[str, int, float, int, int, int]] = {
    "sm_90a": ("NVIDIA H200", 132, 1.98, 4_800_000_000_000, 151_397_597_184, 52_428_800),
    "sm_100a": ("NVIDIA B200", 148, 1.965, 7_672_320_000_000, 191_514_411_008, 132_644_864),
}


class NoCompilerError(RuntimeError):
    """This installation cannot compile for GPUs."""


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """What the assembler says of one kernel, and what its PTX holds.

    Attributes:
        registers: per thread, of 128 threads a block.
        spill_bytes, stack_bytes: local memory, which is device memory: none is wanted.
        smem_bytes: shared memory a block.
        bulk_loads, bulk_stores: TMA copies in the code, not in a run.
    """

    name: str
    arch: Arch
    registers: int
    spill_bytes: int
    stack_bytes: int
    smem_bytes: int
    bulk_loads: int
    bulk_stores: int

    @property
    def blocks_per_core(self) -> int:
        """Blocks that one core holds at a time: 228 KiB of SMEM, 1 KiB of it a block's own; 64 Ki registers."""
        by_smem = 228 * 1024 // (self.smem_bytes + 1024)
        return min(by_smem, 65536 // (128 * -(-self.registers // 8) * 8))


def memory_bandwidth(arch: Arch) -> int:
    """Published bytes per second of the GPU that stands for the architecture."""
    return _GPUS[arch][3]


@functools.cache
def device(arch: Arch) -> Any:
    """A compile-only `jax.Device`.

    Raises:
        NoCompilerError: jax's CUDA plugin is missing, or could not start in this process.
    """
    with contextlib.suppress(ModuleNotFoundError):
        if any(importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (13, 12)):
            return _topology(arch).devices[0]
    raise NoCompilerError(
        f"compiling for {arch} needs jax's CUDA plugin: install jax-cuda13-plugin and jax-cuda13-pjrt {jax.__version__}"
    )


def compile_for(arch: Arch, function: Callable[..., Any], *arguments: jax.ShapeDtypeStruct) -> jax.stages.Compiled:
    """Compiles a function for one GPU of that architecture; the result can be read and not run."""
    sharding = SingleDeviceSharding(device(arch))
    placed = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in arguments]
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)  # a cached program cannot be loaded without the GPU
    compilation_cache.reset_cache()
    try:
        return jax.jit(function).lower(*placed).compile()
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def report(arch: Arch, function: Callable[..., Any], *arguments: jax.ShapeDtypeStruct) -> list[KernelReport]:
    """Compiles a function for that architecture; one report for each of its Mosaic kernels, in the order compiled.

    Raises:
        NoCompilerError: jax's CUDA plugin is missing, or could not start in this process.
    """
    with tempfile.TemporaryDirectory() as folder:
        with _mosaic_dumps_to(folder), _quiet_stderr():
            compile_for(arch, function, *arguments)
        return [_read_report(path, arch) for path in sorted(Path(folder).glob("*.ptxas"))]


def _read_report(ptxas: Path, arch: Arch) -> KernelReport:
    text, ptx = ptxas.read_text(), ptxas.with_suffix(".ptx").read_text()
    resources = ptxas.with_suffix(".resources.txt").read_text()

    def number(pattern: str, source: str) -> int:
        found = re.search(pattern, source)
        return int(found[1]) if found else 0

    assert f"'{arch}'" in text, text
    return KernelReport(
        name=re.sub(r"_\d+$", "", ptxas.stem),
        arch=arch,
        registers=number(r"Used (\d+) registers", text),
        spill_bytes=number(r"(\d+) bytes spill stores", text) + number(r"(\d+) bytes spill loads", text),
        stack_bytes=number(r"(\d+) bytes stack frame", text),
        smem_bytes=number(r"smem_scratch_bytes=(\d+)", resources) + number(r"(\d+) bytes smem", text),
        bulk_loads=len(re.findall(r"cp\.async\.bulk\.(?:tensor\.\w+\.)?shared::\w+\.global", ptx)),
        bulk_stores=len(re.findall(r"cp\.async\.bulk\.(?:tensor\.\w+\.)?global\.shared::cta", ptx)),
    )


@contextlib.contextmanager
def _mosaic_dumps_to(folder: str) -> Iterator[None]:
    wanted = {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    before = {key: os.environ.get(key) for key in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Keeps the compiler's native code from complaining, while it dumps, that there is no disassembler."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _topology(arch: Arch) -> topologies.TopologyDescription:
    key = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"  # else the plugin wants NVIDIA's libraries, with a traceback
    added = key not in os.environ and not Path("/dev/nvidiactl").exists()
    if added:
        os.environ[key] = "1"
    try:
        return topologies.get_topology_desc(
            platform="cuda", topology_name="", topology="1x1x1", target_config=_target(arch)
        )
    except NotImplementedError as error:
        raise NoCompilerError(
            f"jax's CUDA plugin could not start: set JAX_PLATFORMS=cpu before jax looks for devices, and give the "
            f"plugin jax's own version ({jax.__version__})"
        ) from error
    finally:
        if added:
            del os.environ[key]


def _target(arch: Arch) -> str:
    """XLA's GpuTargetConfigProto in text form."""
    name, cores, clock, bandwidth, memory, l2 = _GPUS[arch]
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {9 if arch == "sm_90a" else 10} feature_extension: ACCELERATED_FEATURES }}
  core_count: {cores} clock_rate_ghz: {clock} memory_bandwidth: {bandwidth}
  device_memory_size: {memory} l2_cache_size: {l2}
  fpus_per_core: 128 threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_address_bits: 64 ecc_enabled: true device_vendor: "NVIDIA Corporation"
  collective_memory_granularity: 2097152 device_interconnect_info {{ active_links: 18 }}
  driver_version: "13.0.0" runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""
