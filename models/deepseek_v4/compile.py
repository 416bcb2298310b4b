"""`jaxcoll compile`: one layer of each attention kind, compiled for GPUs that need not be here, and what it costs."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from jaxcoll.placement import Placement
from jaxcoll.plan import LayerPlan
from jaxcoll.schedule import Scheduled, matmul_flops, schedule
from jaxcoll.targets import FACTS, TargetError, compile_only, gpu_devices
from jaxcoll.topology import Topology
from models.deepseek_v4.config import AttentionKind, Config
from models.deepseek_v4.experts import SCOPE
from models.deepseek_v4.layer_program import LayerProgram, compile_layer, one_layer
from models.deepseek_v4.moe import place
from models.deepseek_v4.program import plan_decode
from models.deepseek_v4.published import kinds_of, named_config, of_dtype
from models.deepseek_v4.sizes import cache_bytes, expert_load, layer_weight_bytes, model_bytes
from models.errors import UserError
from models.planning_options import CompileOptions
from models.progress import Working

COMPILING_AT_ONCE = 2  # one compilation does not keep two cores busy; each takes about a gigabyte


def run(options: CompileOptions) -> int:
    """Runs the command.

    Raises:
        UserError: an unknown model, no compiler for the target, or a compiler option that it does not know.
        PlanError, TopologyError: what was asked for is impossible.
    """
    name, config = named_config(options.model)
    config = of_dtype(config, options.dtype)
    topology = Topology(*options.topology.sizes(options.world, config.n_routed_experts), devices=_devices(options))
    rows = (options.tokens_per_gpu * topology.attn_tp,) * topology.attn_dp
    settings = options.paths.settings()
    plan, placement = plan_decode(config, topology, rows, settings), place(config, topology, settings.redundant_experts)
    kinds, began = [kind for kind, _ in kinds_of(config)], time.monotonic()

    def layer(kind: AttentionKind) -> dict[str, Any]:
        one = one_layer(config, kind)
        program = _compiled(one, topology, plan, placement, options)
        return {"kind": kind, **_layer_record(config, one, topology, plan, program, options)}

    with Working() as working, ThreadPoolExecutor(COMPILING_AT_ONCE) as pool:
        working.stage(f"compiling a layer of each kind ({', '.join(kinds)})")
        layers = list(pool.map(layer, kinds))
    record = {
        "model": name,
        "target": options.target,
        "topology": _topology_record(topology, options),
        "layers": layers,
        "compile_seconds": round(time.monotonic() - began, 3),
    }
    print(json.dumps(record)) if options.json else _show(record, plan)
    return 0


def _devices(options: CompileOptions) -> tuple[Any, ...]:
    try:
        return gpu_devices(options.target, options.hosts, options.gpus_per_host)
    except TargetError as error:
        raise UserError(str(error)) from error


def _compiled(
    one: Config, topology: Topology, plan: LayerPlan, placement: Placement, options: CompileOptions
) -> LayerProgram:
    try:
        return compile_layer(one, topology, plan, options.context, compile_only, options.compiler_options, placement)
    except RuntimeError as error:
        if "No such compile option" in str(error):
            raise UserError(str(error).partition(": ")[2]) from error
        raise


def _topology_record(topology: Topology, options: CompileOptions) -> dict[str, Any]:
    sizes = {name: getattr(topology, name) for name in ("attn_dp", "attn_tp", "moe_ep", "moe_tp")}
    return {"hosts": options.hosts, "gpus_per_host": options.gpus_per_host, **sizes, "axes": topology.axes}


def _layer_record(
    config: Config, one: Config, topology: Topology, plan: LayerPlan, program: LayerProgram, options: CompileOptions
) -> dict[str, Any]:
    """What one compiled layer communicates, holds and multiplies, per device.

    Expert work: compiled is every matmul in the program, times the blocks of rows that experts have where the load is
    as even as whole rows allow; needed is tokens * K / moe_ep rows through three matrices of D x F / moe_tp. What
    tensor cores pad beyond that (to 8 rows) is in neither.
    """
    compiled, placement = program.step.compiled, program.layer.ffn.placement
    load = expert_load(one, topology, sum(plan.rows.counts), plan, placement=placement)
    machines = ("hosts", options.hosts), ("gpus", options.gpus_per_host)
    whole = model_bytes(config, topology, plan, options.context, placement)
    return {
        "collectives": [
            _collective_record(s) for s in schedule(compiled, topology, machines) if s.collective.group_size > 1
        ],
        "memory": {
            "weights": layer_weight_bytes(program.layer, topology),
            "caches": cache_bytes(one, plan.rows.rows, options.context),
            "temporaries": compiled.memory_analysis().temp_size_in_bytes,  # pyright: ignore[reportOptionalMemberAccess]
            "model_weights": whole.weights,
            "model_caches": whole.caches,
            "device": FACTS[options.target].memory_size,
        },
        "expert_flops": {
            "compiled": round(matmul_flops(compiled, topology.world, SCOPE, load.blocks)),
            "needed": round(load.flops),
        },
    }


def _collective_record(found: Scheduled) -> dict[str, Any]:
    c = found.collective
    return {
        "kind": c.kind,
        "group": c.group,
        "group_size": c.group_size,
        "operand_bytes": c.operand_bytes,
        "result_bytes": c.result_bytes,
        "wire_bytes": round(c.wire_bytes, 3),
        "dtypes": list(c.dtypes),
        "kernel_strategy": found.kernel_strategy,
        "async": c.is_async,
        "meanwhile": list(found.meanwhile),
        "in_branch": found.in_branch,
        "source": c.source,
    }


def _show(record: dict[str, Any], plan: LayerPlan) -> None:
    console, t = Console(highlight=False), record["topology"]
    console.print(
        f"{record['model']} for {record['target']}, {t['hosts']} x {t['gpus_per_host']} GPUs: "
        f"attn_dp {t['attn_dp']} x attn_tp {t['attn_tp']} = moe_ep {t['moe_ep']} x moe_tp {t['moe_tp']}; "
        f"rows {plan.gather}, {plan.combine}, shared expert {plan.shared_expert}; "
        f"compiled in {record['compile_seconds']:.1f} s"
    )
    for layer in record["layers"]:
        _show_collectives(console, layer)
        memory, flops = layer["memory"], layer["expert_flops"]
        size = {name: decimal(value) for name, value in memory.items()}
        whole = (memory["model_weights"] + memory["model_caches"]) / memory["device"]
        console.print(
            f"  memory per device: weights {size['weights']}, caches {size['caches']}, temporaries "
            f"{size['temporaries']}; all layers' weights {size['model_weights']} and caches {size['model_caches']}: "
            f"{whole:.0%} of {size['device']}"
        )
        compiled, needed = flops["compiled"], flops["needed"]
        console.print(
            f"  expert matmuls per device: {compiled / 1e9:,.3f} GFLOP compiled, {needed / 1e9:,.3f} needed by the "
            f"routed rows at even load ({compiled / needed:.2f} times)"
        )


def _show_collectives(console: Console, layer: dict[str, Any]) -> None:
    title = f"\n{layer['kind']} layer: collectives in schedule order, bytes per device"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("collective over group (members)\nasked for by", overflow="fold")
    table.add_column("operand\nresult", justify="right", no_wrap=True)
    table.add_column("kernel")
    table.add_column("computed meanwhile", overflow="fold")
    for c in layer["collectives"]:
        name = f"{c['kind']} over {c['group']} ({c['group_size']})\n{_short(c['source'])}"
        kernel = f"{c['kernel_strategy'] or '-'}\n{'async' if c['async'] else 'sync'}"
        kernel += "\nmay not run" if c["in_branch"] else ""
        table.add_row(
            name,
            f"{c['operand_bytes']:,}\n{c['result_bytes']:,}",
            kernel,
            "\n".join(map(_short, c["meanwhile"])) or "-",
        )
    console.print(table)


def _short(source: str) -> str:
    """A scope path without the layer, of which there is one."""
    return source.removeprefix("layer.0/")
