"""Which implementation runs, Pallas or XLA, and why: from the device, the shapes and what the caller asked for.

Nothing is compiled or started here, so a plan can ask before there is an array.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal

import jax
import jax.numpy as jnp

Kernels = Literal["xla", "pallas"]

TILE = 256  # channels: the most that a TMA box takes in one dimension, so rows are viewed as [D / TILE, TILE]
MAX_WIDTH = 8192  # channels: a thread of 128 keeps a row's float32 sum in registers, 64 of them at this width
MAX_FANOUT = 32  # slots or experts a token: the kernels' inner loops are unrolled, and a block has 32 barriers
MAX_ELEMENTS = 2**31 - 1  # of one array: offsets are int32

_HOPPER = re.compile(r"\b(H100|H200|H800|H20|GH200)\b")
_BLACKWELL = re.compile(r"\b(B100|B200|B300|GB200|GB300)\b")


@dataclasses.dataclass(frozen=True)
class Device:
    """The kind of device a program is for.

    Attributes:
        platform: "gpu", "cpu" or "tpu".
        kind: the name jax gives it, such as "NVIDIA H200".
        cores: streaming multiprocessors, which set the size of the kernels' grids; elsewhere any number.
    """

    platform: str
    kind: str
    cores: int

    @classmethod
    def of(cls, device: Any) -> Device:
        """From a `jax.Device`, also a compile-only one."""
        return cls(device.platform, device.device_kind, getattr(device, "core_count", None) or 1)

    @classmethod
    def of_program(cls, x: jax.Array) -> Device:
        """That of the program being traced: of the mesh in use, else of the mesh x is on, else jax's default."""
        meshes = (jax.sharding.get_abstract_mesh(), getattr(jax.typeof(x).sharding, "mesh", None))
        for mesh in meshes:
            if (abstract := getattr(mesh, "abstract_device", None)) is not None:
                return cls(abstract.platform or "cpu", abstract.device_kind, abstract.num_cores or 1)
        default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
        return cls.of(default if isinstance(default, jax.Device) else jax.devices(default)[0])

    @property
    def runs_pallas(self) -> bool:
        """Whether the kernels were written for it: Hopper and Blackwell datacenter GPUs (sm_90a, sm_100a)."""
        return self.platform in ("gpu", "cuda") and bool(_HOPPER.search(self.kind) or _BLACKWELL.search(self.kind))


@dataclasses.dataclass(frozen=True)
class Choice:
    """What runs, and the reason in one sentence.

    Attributes:
        kernels, reason: the implementation and why it was chosen.
        cores, interpret: what the Pallas kernels are started with.
    """

    kernels: Kernels
    reason: str
    cores: int
    interpret: bool


def choose(
    kernels: Kernels | None,
    device: Device,
    *,
    width: int,
    dtype: Any,
    fanout: int,
    elements: int = 0,
    interpret: bool = False,
) -> Choice:
    """Chooses the implementation of dispatch packing and of combine; both have the same limits.

    Args:
        kernels: "xla", "pallas", or None: Pallas wherever it runs and the shapes fit, XLA elsewhere.
        device: where the program will run.
        width: channels of a row, D.
        dtype: of the rows.
        fanout: slots or experts a token, the tables' second dimension.
        elements: of the largest array of rows, where known.
        interpret: the kernels are interpreted, which any device can.

    Raises:
        ValueError: an unknown name, or "pallas" on a device or for shapes that it does not support.
    """
    if kernels not in (None, "xla", "pallas"):
        raise ValueError(f"kernels must be 'xla', 'pallas' or None, not {kernels!r}")
    if kernels == "xla":
        return Choice("xla", "XLA was asked for.", device.cores, interpret)
    obstacle = unsupported_device(device, interpret=interpret) or unsupported_shape(width, dtype, fanout, elements)
    if obstacle is None:
        where = "interpreted" if interpret else f"on {device.kind}"
        asked = "Pallas was asked for" if kernels else "Pallas is the default"
        reason = f"{asked}, and {width} channels of {jnp.dtype(dtype).name} fit ({where})."
        return Choice("pallas", reason, device.cores, interpret)
    if kernels == "pallas":
        raise ValueError(f"kernels='pallas' cannot run here: {obstacle}")
    return Choice("xla", f"Pallas cannot run here: {obstacle}.", device.cores, interpret)


def choose_for(
    rows: jax.Array,
    fanout: int,
    most_rows: int,
    *,
    kernels: Kernels | None,
    interpret: bool,
    device: Device | None,
) -> Choice:
    """`choose` for an array of rows in the program being traced; `most_rows` are those of its largest array."""
    width = rows.shape[1]
    return choose(
        kernels,
        device or Device.of_program(rows),
        width=width,
        dtype=rows.dtype,
        fanout=fanout,
        elements=most_rows * width,
        interpret=interpret,
    )


def unsupported_shape(width: int, dtype: Any, fanout: int, elements: int = 0) -> str | None:
    """Why the kernels cannot take such rows, None if they can."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        return f"rows are {jnp.dtype(dtype).name}, and the kernels move bfloat16 and float32"
    if width % TILE or not TILE <= width <= MAX_WIDTH:
        return f"rows have {width} channels, and the kernels take multiples of {TILE} up to {MAX_WIDTH}"
    if fanout > MAX_FANOUT:
        return f"a token names {fanout} rows, and the kernels take at most {MAX_FANOUT}"
    if elements > MAX_ELEMENTS:
        return f"an array of {elements} elements passes the kernels' int32 offsets"
    return None


def unsupported_device(device: Device, *, interpret: bool = False) -> str | None:
    """Why the kernels cannot run on a device, None if they can; interpreted they run on any."""
    if interpret or device.runs_pallas:
        return None
    return f"the device is {device.kind} ({device.platform}), and the kernels are for Hopper and Blackwell GPUs"
