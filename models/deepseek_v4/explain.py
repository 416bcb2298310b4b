"""`jaxcoll explain`: the plan, its predicted bytes and the compiled program, side by side."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from jaxcoll import cost, hlo
from jaxcoll.explain import mermaid, stages
from jaxcoll.plan import LayerPlan, plan_layer, plan_records
from jaxcoll.targets import compile_only, gpu_devices
from jaxcoll.topology import Topology
from models.deepseek_v4.cache import cache_shapes
from models.deepseek_v4.config import Config
from models.deepseek_v4.demo import packaged_model
from models.deepseek_v4.model import DeepSeekV4
from models.deepseek_v4.program import abstract_parameters, compile_decode, predicted_transfers
from models.deepseek_v4.requests import cache_length
from models.options import ExplainOptions
from models.progress import Working

GPUS_PER_HOST = 8


def run(options: ExplainOptions) -> int:
    """Runs the command. Raises UserError for an impossible plan or an unknown target."""
    with contextlib.nullcontext(options.checkpoint) if options.checkpoint else packaged_model() as folder:
        config = Config.from_folder(folder)
    sizes = options.topology.sizes
    devices = None
    if options.target != "cpu":
        per_host = min(sizes.world, GPUS_PER_HOST)
        devices = gpu_devices(options.target, -(-sizes.world // per_host), per_host)[: sizes.world]
    topology = Topology(*sizes, devices=devices)
    counts = options.requests_per_replica or (1,) * topology.attn_dp
    settings = options.paths.settings()
    plan = plan_layer(topology, counts, settings, shared_width=config.moe_intermediate_size)
    length = cache_length(config, options.max_seq_len, 1, "one step")
    model = DeepSeekV4(config, topology, settings)
    with Working() as working:
        working.stage("compiling the step")
        caches = cache_shapes(config, max(counts) * topology.attn_dp, length)
        compiler = None if options.target == "cpu" else compile_only
        step = compile_decode(model, plan, abstract_parameters(model), caches, ("next_token", "logits"), compiler)
    found = [c for c in hlo.collectives(step.compiled, topology) if c.group_size > 1]
    record = _record(plan, found, predicted_transfers(model, plan))
    if options.format == "json":
        print(json.dumps(record))
    elif options.format == "mermaid":
        print(mermaid(stages(step.traced, topology, "layer.0/")))
    else:
        _show(plan, record)
    return 0


def _record(plan: LayerPlan, found: list[hlo.Collective], predicted: list[cost.Transfer]) -> dict[str, Any]:
    return {
        "plan": plan_records(plan),
        "collectives": hlo.summary(found),
        "totals": {"predicted": _totals(cost.totals(predicted)), "compiled": _totals(hlo.totals(found))},
    }


def _totals(totals: dict[tuple[hlo.Kind, str], hlo.Totals]) -> dict[str, dict[str, float]]:
    """Per "kind over group": bytes per device. Counts are left out: XLA merges instructions."""
    return {
        f"{kind} over {group}": {
            "operand_bytes": t.operand_bytes,
            "result_bytes": t.result_bytes,
            "wire_bytes": round(t.wire_bytes, 3),
        }
        for (kind, group), t in sorted(totals.items())
    }


def _show(plan: LayerPlan, record: dict[str, Any]) -> None:
    console = Console(highlight=False)
    console.print("The plan of every layer; states over (attn_dp, attn_tp): S shard, R replica, P partial sum")
    for h in plan.hand_overs:
        verbs = ", ".join(f"{verb}({group})" for verb, group in h.collectives) or "nothing is sent"
        console.print(f"\n[bold]{h.name}[/bold]: {h.path}  {h.before} -> {h.after}  {verbs}")
        for line in (f"because {h.reason}", *map(str, h.others)):
            console.print(Padding(line, (0, 0, 0, 4)))
    totals = Table(title="\nBytes of one step per device", title_justify="left", box=box.SIMPLE)
    for column in ("collective", "predicted wire_bytes", "compiled wire_bytes", "compiled operand_bytes"):
        totals.add_column(column, justify="left" if column == "collective" else "right")
    predicted, compiled = record["totals"]["predicted"], record["totals"]["compiled"]
    for name in sorted(predicted | compiled):
        told, real = predicted.get(name, {}), compiled.get(name, {})
        totals.add_row(name, _number(told, "wire_bytes"), _number(real, "wire_bytes"), _number(real, "operand_bytes"))
    console.print(totals)


def _number(totals: dict[str, float], key: str) -> str:
    return f"{totals[key]:,.0f}" if key in totals else "-"
