"""GPUs that are not there: compile-only devices, so that a laptop compiles programs for H100, H200, B200.

Compiling needs jax's CUDA plugin (two wheels, no NVIDIA library); running needs the GPUs. What a link or a
step costs is not here.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import os
import pathlib
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh

GpuTarget = Literal["h100", "h200", "b200"]


class TargetError(ValueError):
    """A target that cannot be compiled for here; the message says why."""


@dataclasses.dataclass(frozen=True)
class GpuFacts:
    """What XLA's cost model and code generation read of a GPU; published by NVIDIA.

    Attributes:
        cores: streaming multiprocessors.
        memory_bandwidth: bytes per second.
        memory_size, l2_size: bytes.
    """

    name: str
    compute_capability: int
    cores: int
    clock_ghz: float
    memory_bandwidth: int
    memory_size: int
    l2_size: int


FACTS: dict[GpuTarget, GpuFacts] = {
    "h100": GpuFacts("NVIDIA H100 80GB HBM3", 9, 132, 1.98, 3_350_000_000_000, 85_520_809_984, 52_428_800),
    "h200": GpuFacts("NVIDIA H200", 9, 132, 1.98, 4_800_000_000_000, 151_397_597_184, 52_428_800),
    "b200": GpuFacts("NVIDIA B200", 10, 148, 1.965, 7_672_320_000_000, 191_514_411_008, 132_644_864),
}

# The same for all three.
_SHARED_LIMITS = """
  fpus_per_core: 128 threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_address_bits: 64 ecc_enabled: true device_vendor: "NVIDIA Corporation"
  collective_memory_granularity: 2097152 device_interconnect_info { active_links: 18 }
  driver_version: "13.0.0" runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
"""


def gpu_mesh(target: GpuTarget, hosts: int, gpus_per_host: int, axes: dict[str, int]) -> Mesh:
    """A mesh of compile-only GPUs: programs are lowered for it and compiled by `compile_only`, and cannot run.

    Args:
        target: "h100", "h200" or "b200".
        hosts: machines; GPUs of different machines are joined by the network, GPUs of one by NVLink.
        gpus_per_host: GPUs of one machine.
        axes: mesh axes, outermost first, with their sizes; devices fill them row-major, host by host.

    Raises:
        TargetError: an unknown target, sizes that do not multiply to hosts * gpus_per_host, no CUDA plugin.
    """
    if math.prod(axes.values()) != hosts * gpus_per_host:
        raise TargetError(
            f"axes {axes} make {math.prod(axes.values())} devices, but {hosts} hosts of {gpus_per_host} GPUs "
            f"are {hosts * gpus_per_host}"
        )
    grid = np.array(gpu_devices(target, hosts, gpus_per_host), dtype=object).reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


@functools.cache
def gpu_devices(target: GpuTarget, hosts: int, gpus_per_host: int) -> tuple[Any, ...]:
    """Compile-only GPUs (`jax.Device`), host by host; the same objects for the same arguments.

    Raises:
        TargetError: an unknown target, a size below 1, or no CUDA plugin.
    """
    if target not in FACTS:
        raise TargetError(f"unknown GPU target {target!r}; targets are {', '.join(get_args(GpuTarget))}")
    if hosts < 1 or gpus_per_host < 1:
        raise TargetError(f"hosts and gpus_per_host must be at least 1, not {hosts} and {gpus_per_host}")
    if not _plugin_is_installed():
        version = jax.__version__
        raise TargetError(
            f"compiling for {target} needs jax's CUDA plugin: install jax-cuda13-plugin and jax-cuda13-pjrt "
            f"{version} (jaxcoll's extra `aot`)"
        )
    try:
        with _plugin_unchecked(), _plugin_unheard():
            found = topologies.get_topology_desc(
                platform="cuda",
                topology_name="",
                topology=f"{hosts}x1x{gpus_per_host}",  # machines x processes of each x GPUs of each process
                target_config=_target_config(FACTS[target]),
            )
    except NotImplementedError as error:
        raise TargetError(
            f"compiling for {target} needs jax's CUDA plugin, which could not start in this process: set "
            "JAX_PLATFORMS=cpu before jax first looks for devices, and give the plugin jax's own version "
            f"({jax.__version__})"
        ) from error
    return tuple(sorted(found.devices, key=lambda d: d.id))


def compile_only(lowered: jax.stages.Lowered, compiler_options: dict[str, Any] | None = None) -> jax.stages.Compiled:
    """Compiles a program lowered for a `gpu_mesh`; use it instead of `lowered.compile()`.

    jax's persistent cache would store the program, but without a GPU it cannot load it, and warns from then on.
    """
    with _cache_off(), _plugin_unheard():
        return lowered.compile(compiler_options)


_compiling = 0  # threads inside `_cache_off`
_cache_was_on = True  # when the first of them came
_cache_lock = threading.Lock()


@contextmanager
def _cache_off() -> Iterator[None]:
    """Switches jax's persistent cache off while any thread is inside, and back as it was."""
    global _compiling, _cache_was_on
    with _cache_lock:
        if _compiling == 0:
            _cache_was_on = jax.config.jax_enable_compilation_cache
            _switch_cache(False)
        _compiling += 1
    try:
        yield
    finally:
        with _cache_lock:
            _compiling -= 1
            if _compiling == 0:
                _switch_cache(_cache_was_on)


def _switch_cache(on: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", on)
    compilation_cache.reset_cache()  # jax asks only once whether the cache is on


def _target_config(gpu: GpuFacts) -> str:
    """XLA's GpuTargetConfigProto in text form."""
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {gpu.compute_capability} feature_extension: ACCELERATED_FEATURES }}
  core_count: {gpu.cores} clock_rate_ghz: {gpu.clock_ghz} memory_bandwidth: {gpu.memory_bandwidth}
  device_memory_size: {gpu.memory_size} l2_cache_size: {gpu.l2_size}
  {_SHARED_LIMITS}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.name}"
"""


def _plugin_is_installed() -> bool:
    try:
        return any(importlib.util.find_spec(f"jax_plugins.xla_cuda{v}") for v in (13, 12))
    except ModuleNotFoundError:  # no jax plugin at all
        return False


@contextmanager
def _plugin_unchecked() -> Iterator[None]:
    """Keeps the plugin from demanding NVIDIA's libraries, with a traceback, where there is no GPU."""
    key = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    if key in os.environ or pathlib.Path("/dev/nvidiactl").exists():
        yield
        return
    os.environ[key] = "1"
    try:
        yield
    finally:
        del os.environ[key]


@contextmanager
def _plugin_unheard() -> Iterator[None]:
    """Keeps the plugin's log off stderr, which it writes past Python; heard after all where the work fails.

    A process that asked for errors alone before the plugin was loaded needs nothing.
    """
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "0") >= "3":
        yield
        return
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        except BaseException:
            said.seek(0)
            os.write(stderr, said.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
