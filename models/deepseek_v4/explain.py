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
from jaxcoll.follow import TokenPath
from jaxcoll.plan import LayerPlan, plan_records
from jaxcoll.targets import TargetError, compile_only, gpu_devices
from jaxcoll.topology import Topology
from models.deepseek_v4.cache import cache_shapes
from models.deepseek_v4.config import Config
from models.deepseek_v4.demo import packaged_model
from models.deepseek_v4.model import DeepSeekV4
from models.deepseek_v4.program import abstract_parameters, compile_decode, plan_decode, predicted_transfers
from models.deepseek_v4.requests import cache_length
from models.deepseek_v4.token_path import token_path
from models.errors import UserError
from models.options import ExplainOptions
from models.progress import Working

GPUS_PER_HOST = 8


def run(options: ExplainOptions) -> int:
    """Runs the command.

    Raises:
        UserError: no compiler for the target, or a step that nobody would run.
        PlanError: a named path is impossible for these counts.
    """
    with contextlib.nullcontext(options.checkpoint) if options.checkpoint else packaged_model() as folder:
        config = Config.from_folder(folder)
    sizes = options.topology.sizes
    topology = Topology(*sizes, devices=_devices(options))
    counts = options.requests_per_replica or (1,) * topology.attn_dp
    settings = options.paths.settings()
    plan = plan_decode(config, topology, counts, settings)
    length = cache_length(config, options.max_seq_len, 1, "one step")
    model = DeepSeekV4(config, topology, settings)
    with Working() as working:
        working.stage("compiling the step")
        caches = cache_shapes(config, max(counts) * topology.attn_dp, length)
        compiler = None if options.target == "cpu" else compile_only
        step = compile_decode(model, plan, abstract_parameters(model), caches, ("next_token", "logits"), compiler)
    if options.trace:
        _show_path(token_path(model, plan, step), options.format)
        return 0
    found = [c for c in hlo.collectives(step.compiled, topology) if c.group_size > 1]
    record = _record(plan, found, predicted_transfers(model, plan))
    if options.format == "json":
        print(json.dumps(record))
    elif options.format == "mermaid":
        print(mermaid(stages(step.traced, topology, "layer.0/")))
    else:
        _show(plan, record)
    return 0


def _show_path(path: TokenPath, format: str) -> None:
    if format == "json":
        return print(json.dumps(path.records()))
    if format == "mermaid":
        return print(path.mermaid())
    console = Console(highlight=False)
    console.print("One token through a layer; R replica, S shard, P partial sum, m mixed over the group's axes")
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in ("stage\nowner", "tensor\nper rank", "attn  moe\ndp tp ep tp", "sent per device"):
        table.add_column(name, overflow="fold", no_wrap=name.startswith("attn"))
    for stop in path:
        stage, tensor, shape, *states, collective, sent, owner = stop.cells()
        letters = "".join(f"{state[0]:3}" for state in states).strip()
        moved = "-" if collective == "-" else "\n".join([*collective.split("; "), f"{sent} bytes"])
        table.add_row(f"{stage}\n{owner}", f"{tensor}\n{shape}", letters, moved)
    console.print(table)


def _devices(options: ExplainOptions) -> tuple[Any, ...] | None:
    """Compile-only GPUs for a GPU target; None is the CPU's own devices."""
    if options.target == "cpu":
        return None
    world = options.topology.sizes.world
    per_host = min(world, GPUS_PER_HOST)
    try:
        return gpu_devices(options.target, -(-world // per_host), per_host)[:world]
    except TargetError as error:
        raise UserError(str(error)) from error


def _record(plan: LayerPlan, found: list[hlo.Collective], predicted: list[cost.Transfer]) -> dict[str, Any]:
    return {
        "plan": plan_records(plan),
        "kernels": plan.kernels.record(),
        "collectives": hlo.summary(found),
        "totals": {
            "predicted": _totals(cost.totals(predicted)),
            "compiled": _totals(hlo.totals(found)),
            "wire_bytes_from_counts": {
                _name(key): round(count, 3) for key, count in sorted(cost.totals_from_counts(predicted).items())
            },
        },
    }


def _name(key: tuple[hlo.Kind, str]) -> str:
    return f"{key[0]} over {key[1]}"


def _totals(totals: dict[tuple[hlo.Kind, str], hlo.Totals]) -> dict[str, dict[str, float]]:
    """Per "kind over group": bytes per device. Counts are left out: XLA merges instructions."""
    return {
        _name(key): {
            "operand_bytes": t.operand_bytes,
            "result_bytes": t.result_bytes,
            "wire_bytes": round(t.wire_bytes, 3),
        }
        for key, t in sorted(totals.items())
    }


def _show(plan: LayerPlan, record: dict[str, Any]) -> None:
    console = Console(highlight=False)
    console.print("The plan of every layer; states over (attn_dp, attn_tp): S shard, R replica, P partial sum")
    for h in plan.hand_overs:
        verbs = ", ".join(f"{verb}({group})" for verb, group in h.collectives) or "nothing is sent"
        console.print(f"\n[bold]{h.name}[/bold]: {h.path}  {h.before} -> {h.after}  {verbs}")
        for line in (f"because {h.reason}", *map(str, h.others)):
            console.print(Padding(line, (0, 0, 0, 4)))
    console.print(f"\n[bold]kernels[/bold]: {plan.kernels.path}")
    console.print(Padding(f"because {plan.kernels.reason}", (0, 0, 0, 4)))
    totals = Table(title="\nBytes of one step per device", title_justify="left", box=box.SIMPLE)
    totals.add_column("collective", overflow="fold")
    for kind in ("predicted wire_bytes", "compiled wire_bytes", "compiled operand_bytes", "wire_bytes from counts"):
        totals.add_column(kind, justify="right")
    predicted, compiled, counted = (record["totals"][k] for k in ("predicted", "compiled", "wire_bytes_from_counts"))
    for name in sorted(predicted | compiled):
        told, real = predicted.get(name, {}), compiled.get(name, {})
        numbers = (_number(told, "wire_bytes"), _number(real, "wire_bytes"), _number(real, "operand_bytes"))
        totals.add_row(name.replace(",", ", "), *numbers, _number(counted, name))
    console.print(totals)


def _number(totals: dict[str, float], key: str) -> str:
    return f"{totals[key]:,.0f}" if key in totals else "-"
