"""Completed times of the verbs over every group of a topology, and the line T = alpha + bytes / bandwidth through them.

Each program holds one verb, so alpha includes starting a program; `launch_seconds` is what that alone takes.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxcoll import hlo
from jaxcoll.collectives import all_gather, all_reduce, all_to_all, declare_partial, reduce_scatter
from jaxcoll.step import Step, compile_step
from jaxcoll.topology import Group, GroupName, Topology

Verb = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]
VERBS: tuple[Verb, ...] = get_args(Verb)
SIZES = tuple(4096 * 4**i for i in range(6))  # 4 KiB to 4 MiB
ROUNDS, WARM_UP = 20, 3


@dataclasses.dataclass(frozen=True)
class Point:
    """One verb at one size.

    Attributes:
        buffer_bytes: the full buffer on one device: the gathered result of an all_gather, the operand of the others.
        wire_bytes: per device by `hlo.wire_bytes`, read from the compiled program.
        seconds: median completed time.
    """

    buffer_bytes: int
    wire_bytes: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Line:
    """T = alpha + wire_bytes / bandwidth.

    Attributes:
        alpha_seconds: at least 0.
        bandwidth: wire bytes per second; None where time does not grow with the bytes.
        residual: root mean square of (fitted - measured) / measured.
    """

    alpha_seconds: float
    bandwidth: float | None
    residual: float

    def seconds(self, wire_bytes: float) -> float:
        """The fitted time."""
        return self.alpha_seconds + (wire_bytes / self.bandwidth if self.bandwidth else 0.0)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One verb over one group.

    Attributes:
        verb: what ran.
        names: every name of the topology for this group, such as moe_ep and world.
        group_size: its members.
        points: by rising size.
        line: fitted to the points.
    """

    verb: Verb
    names: tuple[GroupName, ...]
    group_size: int
    points: tuple[Point, ...]
    line: Line


@dataclasses.dataclass(frozen=True)
class Report:
    """All measurements of one topology.

    Attributes:
        measurements: per group, then per verb.
        skipped: groups of one member: nothing is sent over them.
        launch_seconds: median completed time of a program that sends nothing.
    """

    measurements: tuple[Measurement, ...]
    skipped: tuple[GroupName, ...]
    launch_seconds: float


def groups(topology: Topology) -> dict[Group, tuple[GroupName, ...]]:
    """The topology's groups with their names; names that mean the same ranks share an entry."""
    found: dict[Group, tuple[GroupName, ...]] = {}
    for name in get_args(GroupName):
        axes = tuple(axis for axis in topology.group(name) if topology.axes[axis] > 1)
        found[axes] = (*found.get(axes, ()), name)
    return found


def fit(wire_bytes: Sequence[float], seconds: Sequence[float]) -> Line:
    """The line with the least squared relative errors, with alpha and 1 / bandwidth not below 0.

    Relative, because sizes span orders of magnitude and the largest would decide alone.

    Args:
        wire_bytes, seconds: one entry per point, at least two; times above 0.
    """
    sent, taken = np.asarray(wire_bytes, np.float64), np.asarray(seconds, np.float64)
    columns, ones = np.stack([1 / taken, sent / taken], axis=1), np.ones(len(taken))
    alpha, per_byte = np.linalg.lstsq(columns, ones, rcond=None)[0]
    if per_byte <= 0:
        alpha, per_byte = np.linalg.lstsq(columns[:, :1], ones, rcond=None)[0][0], 0.0
    elif alpha < 0:
        alpha, per_byte = 0.0, np.linalg.lstsq(columns[:, 1:], ones, rcond=None)[0][0]
    residual = math.sqrt(np.mean((columns @ np.array([alpha, per_byte]) - 1) ** 2))
    return Line(float(alpha), float(1 / per_byte) if per_byte > 0 else None, residual)


def measure(
    topology: Topology,
    sizes: Sequence[int] = SIZES,
    rounds: int = ROUNDS,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Times every verb over every group that has more than one member.

    All programs run in turns, round by round, so that a noisy machine slows them alike. In a job of several processes
    every process calls this with the same arguments, and each has its own times.

    Args:
        sizes: bytes of the full buffer on one device, at least two different ones; rounded up to whole chunks.
        rounds: timed runs of each program, after WARM_UP others.
        progress: called with (done, total) after every compiled program and every round.

    Raises:
        ValueError: fewer than two different sizes, which no line can be fitted to.
    """
    if len(set(sizes)) < 2:
        raise ValueError(f"a line needs at least two different sizes, not {', '.join(map(str, sizes)) or 'none'}")
    found = groups(topology)
    cells: list[tuple[Verb, Group, int]]
    cells = [(verb, axes, size) for axes in found if axes for verb in VERBS for size in sorted(set(sizes))]
    total, programs = len(cells) + 1 + WARM_UP + rounds, []
    for done, cell in enumerate([*cells, None]):
        programs.append(_program(topology, *cell) if cell else _nothing(topology))
        if progress:
            progress(done + 1, total)
    seconds = _median_seconds(programs, rounds, lambda done: progress and progress(len(programs) + done, total))
    points: dict[tuple[Group, Verb], list[Point]] = {}
    for (verb, axes, _), (step, x), taken in zip(cells, programs[:-1], seconds[:-1], strict=True):
        points.setdefault((axes, verb), []).append(_point(topology, axes, verb, step, x, taken))
    measurements = tuple(
        Measurement(verb, found[axes], topology.size(axes), tuple(at), fit_points(at))
        for (axes, verb), at in points.items()
    )
    return Report(measurements, found.get((), ()), seconds[-1])


def _median_seconds(
    programs: Sequence[tuple[Step, jax.Array]], rounds: int, after_round: Callable[[int], object]
) -> list[float]:
    """Median completed time of each program; every round runs all of them once, in an order of its own."""
    times: list[list[float]] = [[] for _ in programs]
    for done in range(WARM_UP + rounds):
        # The same order in every process. A fixed one would time each small buffer with caches that a large one left.
        for i in random.Random(done).sample(range(len(programs)), len(programs)):
            step, x = programs[i]
            start = time.perf_counter()
            jax.block_until_ready(step(x))
            times[i].append(time.perf_counter() - start)
        after_round(done + 1)
    return [statistics.median(mine[WARM_UP:]) for mine in times]


def fit_points(points: Sequence[Point]) -> Line:
    """`fit` of measured points."""
    return fit([p.wire_bytes for p in points], [p.seconds for p in points])


def _point(topology: Topology, axes: Group, verb: Verb, step: Step, x: jax.Array, seconds: float) -> Point:
    sent = sum(c.wire_bytes for c in hlo.collectives(step.compiled, topology))
    per_rank = x.nbytes // topology.world
    return Point(per_rank * (topology.size(axes) if verb == "all_gather" else 1), sent, seconds)


def _program(topology: Topology, verb: Verb, group: Group, size: int) -> tuple[Step, jax.Array]:
    """One verb on a full buffer of `size` bytes, compiled, and its operand in place."""
    members, everyone = topology.size(group), topology.group("world")
    chunk = max(1, -(-size // (members * 4)))  # float32 elements
    rows = chunk if verb == "all_gather" else chunk * members
    others = tuple(axis for axis in everyone if axis not in group)

    def run(x: jax.Array) -> jax.Array:  # [rows], SHARD over the world
        if verb == "all_gather":
            return all_gather(x, group, 0)
        if verb == "all_to_all":
            return all_to_all(x, group, 0, 0)
        addend = declare_partial(x, group)  # stands for a rank's product
        return all_reduce(addend, group) if verb == "all_reduce" else reduce_scatter(addend, group, 0)

    return _compiled(topology, run, rows, P(others if verb in ("all_reduce", "all_gather") else everyone))


def _nothing(topology: Topology) -> tuple[Step, jax.Array]:
    """A program that sends nothing, on a few bytes."""
    return _compiled(topology, jnp.negative, 1, P(topology.group("world")))


def _compiled(topology: Topology, run: Callable, rows: int, out_spec: P) -> tuple[Step, jax.Array]:
    spec = P(topology.group("world"))
    own_part = np.ones(rows, np.float32)
    x = jax.make_array_from_callback((topology.world * rows,), topology.sharding(spec), lambda _: own_part)
    return compile_step(run, topology, (x,), in_specs=(spec,), out_specs=out_spec), x
