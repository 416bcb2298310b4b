"""What must be decided before jax is first imported: the platform and how many CPU devices it shows.

It imports no jax itself, and changes nothing that the user has set.
"""

import os
import sys
from pathlib import Path

from models.errors import UserError

PLATFORMS = "JAX_PLATFORMS"
CPU_DEVICES = "JAX_NUM_CPU_DEVICES"
HOST_DEVICES_FLAG = "--xla_force_host_platform_device_count"
PLUGIN_LOG = "TF_CPP_MIN_LOG_LEVEL"
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
    if HOST_DEVICES_FLAG not in os.environ.get("XLA_FLAGS", ""):
        os.environ.setdefault(CPU_DEVICES, str(world))


def gpu_present(device_files: Path = Path("/dev")) -> bool:
    """Whether the system shows an NVIDIA or AMD compute device; says nothing about drivers or jax plugins."""
    return any(device_files.glob("nvidia[0-9]*")) or (device_files / "kfd").exists()
