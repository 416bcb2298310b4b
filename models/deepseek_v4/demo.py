"""`jaxcoll demo`: decode the packaged tiny model on a mesh of CPU devices and show what moves between them."""

from __future__ import annotations

from importlib.resources import as_file, files

from rich.console import Console
from rich.table import Table

from jaxcoll.explain import stages
from jaxcoll.topology import GroupName, Topology
from models.deepseek_v4 import report
from models.deepseek_v4.config import Config
from models.deepseek_v4.decoder import TRACE, Decoder
from models.deepseek_v4.requests import cache_length, slots_for, spread
from models.deepseek_v4.trace import Trace
from models.deepseek_v4.verify import TOLERANCE, compare
from models.options import DemoOptions
from models.progress import Working

LAYER = 1  # the first CSA layer of the packaged model: window, compressed entries and an indexer
_GROUPS: tuple[GroupName, ...] = ("attn_dp", "attn_tp", "moe_ep", "moe_tp")


def run(options: DemoOptions) -> int:
    """Runs the command; 0 if the result equals the golden trace, 1 if not."""
    console = Console()
    topology = Topology(*options.topology.sizes)
    with as_file(files("models.deepseek_v4") / "demo_model") as folder, Working() as working:
        config = Config.from_folder(folder)
        trace = Trace.load(folder, config)
        homes = spread(len(trace.input_ids), topology.attn_dp)
        positions = trace.input_ids.shape[1] + trace.greedy_ids.shape[1] - 1
        length = cache_length(config, options.max_seq_len, positions, "the trace")
        working.stage("loading weights")
        decoder, _ = Decoder.load(
            folder,
            topology,
            slots=slots_for(homes),
            max_seq_len=length,
            results=TRACE,
            config=config,
            progress=working.advance,
        )
        working.stage("compiling the step and decoding")
        outcome = compare(decoder, trace, homes, working)
    console.print(
        f"A tiny DeepSeek-V4: {config.num_hidden_layers} layers, {config.n_routed_experts} experts, "
        f"{len(homes)} requests decoded together, one token each per step.\n"
    )
    _show_groups(console, topology)
    _show_layer(console, decoder)
    step = next(iter(decoder.steps.values()))
    console.print(report.collectives_table(report.collectives_json([step])))
    for request, ids in enumerate(outcome["generated"]):
        console.print(f"request {request} on replica {homes[request][0]} continues with {ids}")
    worst = max(outcome["max_abs_err"].values())
    tolerance = TOLERANCE[config.torch_dtype]
    equal = worst <= tolerance and outcome["greedy_match"] and not outcome["topk_mismatches"]
    console.print(
        f"\nlargest difference from the golden trace: {worst:.1e} "
        f"({'equal' if equal else 'NOT equal'} at {tolerance:g}), {outcome['topk_mismatches']} expert choices differ, "
        f"greedy ids {'match' if outcome['greedy_match'] else 'do not match'}; "
        f"{outcome['steps']} steps, {decoder.compiles} program compiled"
    )
    return 0 if equal else 1


def _show_groups(console: Console, topology: Topology) -> None:
    table = Table(title=f"{topology.world} devices and their groups (ranks)", title_justify="left")
    for column in ("group", "mesh axes", "members"):
        table.add_column(column)
    for name in _GROUPS:
        members = "  ".join(",".join(map(str, ranks)) for ranks in topology.members(name))
        table.add_row(name, ", ".join(topology.group(name)) or "-", members)
    console.print(table)


def _show_layer(console: Console, decoder: Decoder) -> None:
    step = next(iter(decoder.steps.values()))
    table = Table(title=f"layer {LAYER}: what each stage leaves on a rank", title_justify="left")
    for column in ("stage", "shape per rank", "attn_dp", "attn_tp", "collective"):
        table.add_column(column, no_wrap=column == "stage")
    for stage in stages(step.traced, step.topology, f"layer.{LAYER}/"):
        shape = " x ".join(map(str, stage.shape))
        name = stage.scope.split("/", 1)[1]
        table.add_row(name, shape, stage.states["attn_dp"], stage.states["attn_tp"], stage.collective or "-")
    console.print(table)
