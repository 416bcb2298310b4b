"""`jaxcoll demo`: decode the packaged tiny model on a mesh of CPU devices and show what moves between them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib.resources import as_file, files
from pathlib import Path

from rich.console import Console

from jaxcoll.explain import stages
from jaxcoll.topology import GroupName, Topology
from models.deepseek_v4 import report
from models.deepseek_v4.compare import compare
from models.deepseek_v4.config import Config
from models.deepseek_v4.decoder import TRACE, Decoder
from models.deepseek_v4.session import open_session
from models.deepseek_v4.trace import Trace
from models.options import DemoOptions
from models.progress import Working

LAYER = 1  # the first CSA layer of the packaged model: window, compressed entries and an indexer
_GROUPS: tuple[GroupName, ...] = ("attn_dp", "attn_tp", "moe_ep", "moe_tp")
_STATES = """\
REPLICA: every rank of the group holds the same numbers
SHARD:   each rank holds a part of its own (over attn_dp: its own requests)
PARTIAL: each rank holds one addend, and only the sum is the tensor"""


def packaged_model() -> AbstractContextManager[Path]:
    """The folder of the tiny model that ships with this package, for as long as the context lasts."""
    return as_file(files("models.deepseek_v4") / "demo_model")


def run(options: DemoOptions) -> int:
    """Runs the command; 0 if the result equals the golden trace, 1 if not."""
    console = Console(highlight=False)
    with packaged_model() as folder, Working() as working:
        config = Config.from_folder(folder)
        trace = Trace.load(folder, config)
        session = open_session(
            folder,
            config,
            options,
            working,
            requests=len(trace.input_ids),
            positions=trace.steps,
            what="the trace",
            results=TRACE,
        )
        outcome = compare(session.decoder, trace, session.homes, working)
    decoder, homes, topology = session.decoder, session.homes, session.decoder.topology
    console.print(
        f"A tiny DeepSeek-V4 ({config.num_hidden_layers} layers, {config.n_routed_experts} experts) decodes "
        f"{len(homes)} requests together on\n{report.topology_line(report.topology_json(topology))}"
    )
    _show_groups(console, topology)
    _show_layer(console, decoder)
    collectives = report.collectives_json(decoder.steps.values())
    report.print_table(console, report.COLLECTIVES_TITLE, report.collectives_table(collectives))
    report.print_generated(console, outcome["generated"], homes)
    console.print(report.verdict(outcome))
    return 0 if outcome["ok"] else 1


def _show_groups(console: Console, topology: Topology) -> None:
    table = report.new_table("group", "mesh axes", "ranks, group by group")
    for name in _GROUPS:
        members = "  ".join(",".join(map(str, ranks)) for ranks in topology.members(name))
        table.add_row(name, ",".join(topology.group(name)) or "-", members)
    report.print_table(console, "The groups that the devices form", table)


def _show_layer(console: Console, decoder: Decoder) -> None:
    step = next(iter(decoder.steps.values()))
    table = report.new_table("stage", "shape per rank", "attn_dp", "attn_tp", "collective")
    for stage in stages(step.traced, step.topology, f"layer.{LAYER}/"):
        shape = " x ".join(map(str, stage.shape))
        name = stage.scope.split("/", 1)[1]
        table.add_row(name, shape, stage.states["attn_dp"], stage.states["attn_tp"], stage.collective or "-")
    report.print_table(
        console, f"Layer {LAYER}: what each stage leaves on a rank, with its state over two groups", table
    )
    console.print(f"\n{_STATES}")
