"""Times on this machine's GPU: the device's own clock where CUPTI gives it, else the wall clock, and says which."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

from pallas_kernels.case import Case
from pallas_kernels.choice import Device

RUNS = 20
COPIED_BYTES = 2**29  # well above any L2

Clock = Literal["device", "wall"]


@dataclasses.dataclass(frozen=True)
class Measured:
    """One case's times in microseconds (medians), against the floor: its bytes at the measured copy bandwidth.

    Attributes:
        agree: both implementations gave the same result, written over memory that held NaN.
        fraction_of_floor: floor over Pallas's time, 1 at best, and above it where the L2 holds the rows.
        speedup: XLA's time over Pallas's.
    """

    operation: str
    model: str
    tokens: int
    floor_bytes: int
    floor_us: float
    pallas_us: float
    xla_us: float
    fraction_of_floor: float
    speedup: float
    agree: bool
    clock: Clock


def measure(case: Case, device: Device, bytes_per_second: float) -> Measured:
    """Runs a case with both implementations on the default device."""
    rows = jax.random.normal(jax.random.key(0), case.types[0].shape, case.types[0].dtype)
    arguments = (rows, *map(jnp.asarray, case.tables()))
    pallas, xla = (jax.jit(case.function(kernels, device)) for kernels in ("pallas", "xla"))
    poison(jax.eval_shape(pallas, *arguments))
    agree = agreement(pallas(*arguments), xla(*arguments), case.largest_error)
    (pallas_us, clock), (xla_us, _) = (microseconds(f, *arguments) for f in (pallas, xla))
    floor_us = case.floor_bytes / bytes_per_second * 1e6
    return Measured(
        operation=case.operation,
        model=case.model,
        tokens=case.tokens,
        floor_bytes=case.floor_bytes,
        floor_us=floor_us,
        pallas_us=pallas_us,
        xla_us=xla_us,
        fraction_of_floor=floor_us / pallas_us,
        speedup=xla_us / pallas_us,
        agree=agree,
        clock=clock,
    )


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a large elementwise pass on the default device."""
    data = jnp.zeros(COPIED_BYTES // 4, jnp.uint32)
    us, _ = microseconds(jax.jit(lambda x: x + jnp.uint32(1)), data)
    return 2 * data.nbytes / (us * 1e-6)


def microseconds(function: Callable[..., Any], *arguments: Any) -> tuple[float, Clock]:
    """Median time of a jitted function after a first run, over RUNS runs, and the clock that told it."""
    jax.block_until_ready(function(*arguments))
    try:
        _, milliseconds = profiler.measure(function, iterations=RUNS)(*arguments)
    except (RuntimeError, AttributeError):  # no CUPTI here
        milliseconds = None
    if milliseconds:
        return statistics.median(milliseconds) * 1e3, "device"
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e6, "wall"


def poison(results: Any) -> None:
    """Fills memory of the results' sizes with NaN and frees it, for the allocator to hand to the next program."""
    filled = jax.tree.map(lambda result: jnp.full(result.shape, jnp.nan, result.dtype), results)
    jax.block_until_ready(filled)
    jax.tree.map(lambda array: array.delete(), filled)


def agreement(found: Any, expected: Any, largest_error: float) -> bool:
    """Whether two results are equal, or differ by no more than a share of the value; NaN never agrees."""

    def agree(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        # Sums that cancel are as exact as their terms, not as themselves.
        return jnp.all(jnp.abs(a - b) <= largest_error * jnp.abs(b) + (2.0**-20 if largest_error else 0.0))

    return all(map(bool, jax.tree.leaves(jax.tree.map(jax.jit(agree), found, expected))))
