"""`jaxcoll plan`: topologies and paths of jobs, ranked by what the hardware allows, with what bounds each."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from jaxcoll.links import machines
from jaxcoll.targets import FACTS
from models.deepseek_v4.candidates import Candidate, candidates
from models.deepseek_v4.published import named_config, of_dtype
from models.deepseek_v4.report import check_plot_option
from models.deepseek_v4.step_time import Job
from models.errors import UserError
from models.planning_options import PlanOptions
from models.progress import Working


def run(options: PlanOptions) -> int:
    """Runs the command.

    Raises:
        UserError: an unknown model, a job that no topology can run, or a plot that cannot be made.
    """
    if options.plot:
        check_plot_option(options.plot)  # before anything is computed
    name, config = named_config(options.model)
    config = of_dtype(config, "bf16")
    fleet = machines(options.target, options.gpus_per_host, network=options.network)
    job, jobs = Job(options.target, fleet, options.context, options.imbalance), []
    with Working() as working:
        for gpus in options.gpus:
            working.stage(f"planning {gpus} GPUs")
            for tokens in options.tokens_per_gpu:
                found = candidates(config, gpus, tokens, job)
                if not found:
                    raise UserError(f"no topology of {gpus} GPUs divides {name}'s heads, experts and their widths")
                shown = [_record(c, tokens, options.target) for c in found[: options.top]]
                jobs.append({"gpus": gpus, "tokens_per_gpu": tokens, "possible": len(found), "candidates": shown})
    record = {
        "model": name,
        "target": options.target,
        "network": options.network,
        "context": options.context,
        "imbalance": options.imbalance,
        "jobs": jobs,
    }
    if options.plot:
        from models.deepseek_v4.plan_plot import draw  # matplotlib, which is there: it was checked

        draw(record, options.plot)
    print(json.dumps(record)) if options.json else _show(record)
    return 0


def _record(c: Candidate, tokens: int, target: Any) -> dict[str, Any]:
    """One candidate; times in milliseconds, bytes per device, those of collectives for one layer."""
    parts = {f.name: getattr(c.time, f.name) * 1e3 for f in dataclasses.fields(c.time)}
    seconds = parts.pop("seconds") / 1e3
    t = c.topology
    return {
        "topology": {name: getattr(t, name) for name in ("attn_dp", "attn_tp", "moe_ep", "moe_tp")},
        "path": c.path,
        "name": c.name,
        "fits": c.fits(FACTS[target].memory_size),
        "step_ms": round(seconds * 1e3, 4),
        "tokens_per_second_per_gpu": round(tokens / seconds, 1),
        "bound": c.time.bound,
        "parts_ms": {name: round(ms, 4) for name, ms in parts.items()},
        "memory": {"weights": c.held.weights, "caches": c.held.caches, "buffers": c.buffers},
        "layer_bytes": {
            f"{kind} over {group}": {
                "operand_bytes": total.operand_bytes,
                "result_bytes": total.result_bytes,
                "wire_bytes": round(total.wire_bytes, 3),
            }
            for (kind, group), total in sorted(c.totals.items())
        },
    }


def _show(record: dict[str, Any]) -> None:
    console = Console(highlight=False)
    console.print(
        f"{record['model']} on {record['target']} with {record['network']}, {record['context']} positions, imbalance "
        f"{record['imbalance']:g}: step times that HBM, tensor cores and links allow at their peaks; not measured"
    )
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for title in ("GPUs", "tok.\n/GPU", "step\nms", "tok/s\n/GPU", "attn\ndpxtp", "moe\nepxtp"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("path", overflow="fold", min_width=len("reduce_scatter"))
    table.add_column("bound by")
    table.add_column("GB", justify="right")
    for job in record["jobs"]:
        for place, c in enumerate(job["candidates"]):
            first = (str(job["gpus"]), str(job["tokens_per_gpu"])) if place == 0 else ("", "")
            t, held = c["topology"], f"{sum(c['memory'].values()) / 1e9:,.0f}"
            table.add_row(
                *first,
                f"{c['step_ms']:,.2f}",
                f"{c['tokens_per_second_per_gpu']:,.0f}",
                f"{t['attn_dp']}x{t['attn_tp']}",
                f"{t['moe_ep']}x{t['moe_tp']}",
                c["name"],
                c["bound"],
                held if c["fits"] else f"{held}\nno fit",
            )
    console.print(table)
