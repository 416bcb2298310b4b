"""`jaxcoll bench`: times of completed decode steps in every process, after a warm-up, and a profiler trace of some."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from jaxcoll.host_arrays import Fetcher
from jaxcoll.topology import Topology
from models.deepseek_v4 import report
from models.deepseek_v4.config import Config
from models.deepseek_v4.decoder import Row
from models.deepseek_v4.session import Session, open_session
from models.errors import UserError
from models.options import BenchOptions
from models.progress import Working

WARM_UP = 4
PROFILED = 4  # steps after the timed ones: a profiler makes steps slower


def run(options: BenchOptions) -> int:
    """Runs the command.

    Raises:
        UserError: the steps do not fit the cache, or --profile names no folder that can be made.
    """
    config = Config.from_folder(options.checkpoint_dir)
    traces = _traces_folder(options.profile)
    timed, profiled = WARM_UP + options.steps, PROFILED if traces else 0
    extra = f" and {profiled} profiled ones" if profiled else ""
    with Working() as working:
        session = open_session(
            options.checkpoint_dir,
            config,
            options,
            working,
            requests=options.batch,
            positions=timed + profiled,
            what=f"a run of {WARM_UP} + {options.steps} steps{extra}",
            settings=options.paths.settings(),
        )
        if traces:
            traces.mkdir(parents=True, exist_ok=True)
        step = _stepper(session, [i % config.vocab_size for i in range(options.batch)])
        times = _times(step, timed, working)[WARM_UP:]
        if traces:
            _trace(step, timed, traces)
    result = _result(gather_times(times, session.decoder.topology), options, session)
    if jax.process_index() == 0:
        _print(result, options)
    return 0


def _stepper(session: Session, tokens: list[int]) -> Callable[[int], None]:
    """A function that decodes one position of every request and waits for it."""

    def step(position: int) -> None:
        rows = [Row(token, position, *home) for token, home in zip(tokens, session.homes, strict=True)]
        tokens[:] = session.decoder.next_tokens(rows)  # waits for the step: the ids are on the host afterwards

    return step


def _times(step: Callable[[int], None], steps: int, working: Working) -> list[float]:
    times = []
    for position in range(steps):
        start = time.perf_counter()
        step(position)
        times.append(time.perf_counter() - start)
        working.decoded(position + 1, steps)
    return times


def _trace(step: Callable[[int], None], first: int, folder: Path) -> None:
    """Decodes PROFILED steps under the profiler."""
    with jax.profiler.trace(folder):
        for position in range(first, first + PROFILED):
            with jax.profiler.StepTraceAnnotation("decode", step_num=position):
                step(position)


def gather_times(own: Sequence[float], topology: Topology) -> list[list[float]]:
    """The times of every process of the mesh, in process order; every process must call it."""
    by_device = topology.sharding(P(topology.group("world")))
    mine = np.asarray([own], np.float32)
    times = jax.make_array_from_callback((topology.world, len(own)), by_device, lambda _: mine)
    first = {d.process_index: i for i, d in reversed(list(enumerate(topology.mesh.devices.flat)))}
    return Fetcher(topology)(times)[[first[process] for process in sorted(first)]].tolist()


def per_process(times: Sequence[Sequence[float]]) -> list[dict[str, float]]:
    """Least, median and most of each process's step times, in ms."""
    kinds = {"min_ms": min, "median_ms": statistics.median, "max_ms": max}
    return [
        {"process": i, **{name: round(kind(mine) * 1e3, 4) for name, kind in kinds.items()}}
        for i, mine in enumerate(times)
    ]


def _traces_folder(folder: Path | None) -> Path | None:
    """This process's folder in --profile's: hosts may share names and disks. Nothing is made yet.

    Raises:
        UserError: it cannot be made or written to.
    """
    if folder is None:
        return None
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"--profile must be a folder, but {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"--profile {folder} cannot be written: {there} is not writable")
    return folder / f"process-{jax.process_index()}"


def _result(times: list[list[float]], options: BenchOptions, session: Session) -> dict[str, Any]:
    processes = per_process(times)
    medians = [statistics.median(mine) for mine in times]
    slowest = medians.index(max(medians))
    return {
        "ms_per_step": processes[slowest]["median_ms"],
        "tokens_per_s": round(options.batch / medians[slowest], 1),
        "batch": options.batch,
        "steps": options.steps,
        "compiles": session.decoder.compiles,
        "per_process": processes,
        "slowest_process": slowest,
        "profile": str(options.profile) if options.profile else None,
        "topology": report.topology_json(session.decoder.topology),
    }


def _print(result: dict[str, Any], options: BenchOptions) -> None:
    if options.json:
        print(json.dumps(result))
        return
    processes = result["per_process"]
    of = f"median of {options.steps}" if len(processes) == 1 else f"median of {options.steps}, the slowest process's"
    devices = report.counted(result["topology"]["world"], "device")
    print(
        f"{result['ms_per_step']} ms per step ({of}), {result['tokens_per_s']} tokens/s, "
        f"batch {options.batch} on {devices}"
    )
    report.print_table(Console(highlight=False), "Completed steps", _table(processes, result["slowest_process"]))
    if options.profile:
        print(f"\nProfiler traces of {PROFILED} more steps: {options.profile}/process-*, one for each process")


def _table(processes: list[dict[str, float]], slowest: int) -> Table:
    table = report.new_table("process", right=("min ms", "median ms", "max ms"))
    for mine in processes:
        mark = " (slowest)" if len(processes) > 1 and mine["process"] == slowest else ""
        table.add_row(f"{mine['process']}{mark}", *(str(mine[k]) for k in ("min_ms", "median_ms", "max_ms")))
    return table
