"""What must be decided before a device starts: the platform, the job, and how many CPU devices each process shows.

It imports no jax before `join_job`, and changes nothing that the user has set.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from models.errors import UserError

if TYPE_CHECKING:
    from jaxcoll.distributed import Job

PLATFORMS = "JAX_PLATFORMS"
CPU_DEVICES = "JAX_NUM_CPU_DEVICES"
HOST_DEVICES_FLAG = "--xla_force_host_platform_device_count"
PLUGIN_LOG = "TF_CPP_MIN_LOG_LEVEL"
_set_here: list[str] = []  # variables that prepare_devices chose, so that a job may choose again
MOST_DEVICES = 1024  # of one process; a CPU shows any number asked for, and runs out of memory starting them


def prepare_devices(world: int, *, cpu_only: bool = False, quiet: bool = False) -> None:
    """Sets the environment so that jax, imported afterwards, sees `world` devices on a CPU-only machine.

    A process that has imported jax already keeps what it has: jax reads these settings only once.

    Args:
        world: devices that the command is going to use.
        cpu_only: choose the CPU even where a GPU is present.
        quiet: keep the compilers' log of GPUs that are not here off stderr; what goes wrong is raised all the same.

    Raises:
        UserError: more devices than one process can start.
    """
    if world > MOST_DEVICES:
        raise UserError(f"{world} devices were asked for; one process starts at most {MOST_DEVICES}")
    if "jax" in sys.modules:
        return
    if quiet:
        os.environ.setdefault(PLUGIN_LOG, "3")
    if cpu_only or not gpu_present():
        os.environ.setdefault(PLATFORMS, "cpu")
    if HOST_DEVICES_FLAG not in os.environ.get("XLA_FLAGS", "") and CPU_DEVICES not in os.environ:
        os.environ[CPU_DEVICES] = str(world)
        _set_here.append(CPU_DEVICES)


def join_job(world: int) -> Job:
    """Joins the job that a launcher or a cluster put this process in; alone, it does nothing.

    Standard output is then for process 0's own words: what native code and other processes print there goes nowhere.

    Args:
        world: devices of all processes that the command is going to use.

    Raises:
        UserError: the job is not described well, or the world cannot be cut evenly over its processes.
        PeerTimeout: not every process came.
    """
    from jaxcoll import distributed

    try:
        job = distributed.initialize()
    except distributed.JobError as error:
        raise UserError(str(error)) from error
    if job.processes == 1:
        return job
    _keep_stdout_clean(job.leads)
    if world % job.processes:
        raise UserError(f"{world} devices cannot be shared evenly by {job.processes} processes")
    _check_devices(world, job.processes)
    return job


def _keep_stdout_clean(leads: bool) -> None:
    """File descriptor 1, where gloo reports its connections, leads nowhere; process 0's Python keeps the real one."""
    sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    kept = os.dup(1) if leads else os.dup(nowhere)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    sys.stdout = os.fdopen(kept, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)


def _check_devices(world: int, processes: int) -> None:
    """Gives every process its share of the CPU devices where nobody else has; starts the devices.

    Raises:
        UserError: the job has more or fewer devices than the command is going to use.
    """
    import jax

    if CPU_DEVICES in _set_here:
        jax.config.update("jax_num_cpu_devices", world // processes)
    if jax.device_count() != world:
        raise UserError(
            f"the job's {processes} processes show {jax.device_count()} devices, but the command is for {world}; "
            "--devices is the sum over all processes"
        )


def gpu_present(device_files: Path = Path("/dev")) -> bool:
    """Whether the system shows an NVIDIA or AMD compute device; says nothing about drivers or jax plugins."""
    return any(device_files.glob("nvidia[0-9]*")) or (device_files / "kfd").exists()
