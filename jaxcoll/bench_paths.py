"""Time and bytes of every possible way to the experts and back, measured in turns: `python -m jaxcoll.bench_paths`.

One program per cell moves rows out and home and adds them up, with no expert in between: by a gather and a combine, or
by an all-to-all, which sends only what its routing asks for. Times are medians of runs
taken in turns, so that a noisy machine slows all cells alike; read the ratios.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxcoll import hlo, plots
from jaxcoll.collectives import declare_partial
from jaxcoll.combine import Way, combine, combine_impossible
from jaxcoll.dispatch import DispatchSpec, Received, dispatch
from jaxcoll.dispatch import combine as combine_home
from jaxcoll.gather import gather, gather_impossible
from jaxcoll.level import Mode
from jaxcoll.plot_file import PlotError, check_plot, save_plot
from jaxcoll.rows import GatherMode
from jaxcoll.split import join_rows, split_rows
from jaxcoll.step import Step, compile_step
from jaxcoll.topology import Topology

ROUNDS = 200
EXPERTS, TOPK = 64, 6


def measure(
    attn_dp: int, attn_tp: int, rows: int, width: int, rounds: int = ROUNDS, *, experts: int = EXPERTS, topk: int = TOPK
) -> list[dict[str, Any]]:
    """Runs every possible cell with equal counts.

    Args:
        attn_dp, attn_tp: the mesh.
        rows: of each replica.
        width: float32 channels of a row.
        rounds: timed runs of each cell.
        experts, topk: of the all-to-all's random routing; moe_ep, which is the world, divides the experts.

    Returns:
        One record per cell: gather, combine, wire bytes per device of both, median ms, and the median over rounds of
        the ratio to max_len + all_reduce in the same round.
    """
    topology = Topology(attn_dp, attn_tp)
    cells = {}
    for mode, way in itertools.product(get_args(GatherMode), get_args(Way)):
        if not gather_impossible(mode, topology) and not combine_impossible(way, mode, topology):
            cells[mode, way] = _cell(topology, mode, way, rows, width)
    for form in get_args(Mode):
        cells[form, "all_to_all"] = _exchange(topology, form, (rows, width, experts, topk))
    times: dict[tuple, list[float]] = {cell: [] for cell in cells}
    for cell, (step, args) in itertools.chain(cells.items(), *(cells.items() for _ in range(rounds))):
        start = time.perf_counter()
        jax.block_until_ready(step(*args))
        times[cell].append((time.perf_counter() - start) * 1e3)
    base = times["max_len", "all_reduce"]
    return [_record(topology, cell, cells[cell][0], mine[1:], base[1:]) for cell, mine in times.items()]


def _record(topology: Topology, cell: tuple, step: Step, mine: list[float], base: list[float]) -> dict[str, Any]:
    found = hlo.collectives(step.compiled, topology)
    sent = {part: sum(c.wire_bytes for c in found if c.source.startswith(part)) for part in ("gather", "combine")}
    return {
        "gather": cell[0],
        "combine": cell[1],
        "gather_wire_bytes": round(sent["gather"]),
        "combine_wire_bytes": round(sent["combine"]),
        "ms": round(statistics.median(mine), 3),
        "ratio": round(statistics.median(m / b for m, b in zip(mine, base, strict=True)), 2),
    }


def _cell(topology: Topology, mode: GatherMode, way: Way, rows: int, width: int) -> tuple[Step, tuple]:
    """The compiled cell and its arguments, in place."""
    world = topology.group("world")

    def there_and_back(x: jax.Array, counts: jax.Array) -> jax.Array:
        with jax.named_scope("gather"):
            everyone = gather(x, counts, topology, mode=mode, total=topology.attn_dp * rows)
        addend = declare_partial(everyone * (lax.axis_index(world) + 1), world)  # stands for this rank's experts
        with jax.named_scope("combine"):
            return combine(addend, counts, topology, way=way, mode=mode, rows=rows)

    by_replica = P(topology.group("attn_dp"))
    x, counts = jnp.ones((topology.attn_dp * rows, width)), jnp.full(topology.attn_dp, rows, jnp.int32)
    step = compile_step(there_and_back, topology, (x, counts), in_specs=(by_replica, P()), out_specs=by_replica)
    placed = jax.device_put((x, counts), (topology.sharding(by_replica), topology.sharding(P())))
    return step, placed


def _exchange(topology: Topology, form: Mode, sizes: tuple[int, int, int, int]) -> tuple[Step, tuple]:
    """The same by an all-to-all of random routing: each replica's rows are cut over its ranks, and joined again."""
    rows, width, experts, topk = sizes
    spec, tp = DispatchSpec.of(topology, experts, mode=form), topology.group("attn_tp")

    def there_and_back(x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        own = [split_rows(a, tp, fill=-1) for a in (x, ids, weights)]
        with jax.named_scope("gather"):
            received, handle = dispatch(own[0], own[1], own[2], spec)
        y = received.x * (lax.axis_index(spec.moe_ep) + 1)  # stands for this rank's experts
        if isinstance(received, Received):
            y = y * jnp.sum(received.topk_weights, axis=1)[:, None]
        with jax.named_scope("combine"):
            return join_rows(combine_home(y, handle), tp, rows=rows)

    by_replica, total = P(topology.group("attn_dp")), topology.attn_dp * rows
    draw = np.random.default_rng(0)
    ids = np.argsort(draw.random((total, experts)))[:, :topk].astype(np.int32)
    args = jnp.ones((total, width)), jnp.asarray(ids), jnp.full((total, topk), 1 / topk)
    step = compile_step(there_and_back, topology, args, in_specs=(by_replica,) * 3, out_specs=by_replica)
    return step, jax.device_put(args, (topology.sharding(by_replica),) * 3)


def markdown(records: list[dict[str, Any]]) -> str:
    """The records as a table."""
    lines = ["| gather | combine | wire bytes, gather | combine | ms | ratio |", "|---|---|---:|---:|---:|---:|"]
    for r in records:
        sent = f"{r['gather_wire_bytes']:,} | {r['combine_wire_bytes']:,}"
        lines.append(f"| {r['gather']} | {r['combine']} | {sent} | {r['ms']:.2f} | {r['ratio']:.2f} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """The command line; devices are CPU devices unless JAX_PLATFORMS says otherwise."""
    parser = argparse.ArgumentParser(prog="python -m jaxcoll.bench_paths", description=__doc__)
    shape = (("attn-dp", 8), ("attn-tp", 1), ("rows", 8), ("width", 4096))
    for name, default in (*shape, ("rounds", ROUNDS), ("experts", EXPERTS), ("topk", TOPK)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="saves a chart of the bytes, such as bytes.png")
    given = parser.parse_args(argv)
    if given.plot:
        try:
            check_plot(given.plot)
        except PlotError as error:
            parser.error(str(error))
    if "JAX_PLATFORMS" not in os.environ:  # this package has imported jax already, which reads variables only then
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", given.attn_dp * given.attn_tp)
    routing = {"experts": given.experts, "topk": given.topk}
    records = measure(given.attn_dp, given.attn_tp, given.rows, given.width, given.rounds, **routing)
    print(json.dumps(records) if given.json else markdown(records))
    if given.plot:
        title = f"{given.attn_dp} x {given.attn_tp} ranks, {given.rows} rows of {4 * given.width:,} bytes per replica"
        save_plot(plots.bytes_by_path(records, title=title).figure, given.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
