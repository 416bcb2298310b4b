"""The topologies and paths that a job of GPUs could run, each with its predicted step time, bytes and memory."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

from jaxcoll import cost
from jaxcoll.plan import LayerPlan, PlanError, plan_layer
from jaxcoll.settings import Settings
from jaxcoll.targets import FACTS
from jaxcoll.topology import Topology, TopologyError
from models.deepseek_v4.config import Config
from models.deepseek_v4.model import check_sizes
from models.deepseek_v4.sizes import Held, model_bytes
from models.deepseek_v4.step_time import Job, StepTime, step_time, step_transfers

# Equal counts need no slots by count, so sum_len and gather_v could not win; `explain` prices them.
PATHS: tuple[dict[str, str], ...] = (
    {"moe_backend": "gather", "gather": "max_len", "combine": "all_reduce"},
    {"moe_backend": "gather", "gather": "max_len", "combine": "reduce_scatter"},
    {"moe_backend": "all_to_all", "dispatch": "normal", "wire": "bf16"},
    {"moe_backend": "all_to_all", "dispatch": "normal", "wire": "fp8"},
    {"moe_backend": "all_to_all", "dispatch": "low_latency", "wire": "bf16"},
    {"moe_backend": "all_to_all", "dispatch": "low_latency", "wire": "fp8"},
)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to run a job.

    Attributes:
        topology, path: of it; the path is `Settings` fields.
        time: its predicted floor.
        held: bytes on one device, without buffers.
        buffers: the largest two buffers that a collective of one layer needs at a time.
        totals: what one layer communicates, per (kind, group).
    """

    topology: Topology
    path: dict[str, str]
    plan: LayerPlan
    time: StepTime
    held: Held
    buffers: int
    totals: dict[tuple[Any, str], Any]

    def fits(self, memory: int) -> bool:
        """Whether weights, caches and buffers leave something of the memory."""
        return self.held.weights + self.held.caches + self.buffers < memory

    @property
    def name(self) -> str:
        """The path in words."""
        return " ".join(v for k, v in self.path.items() if k != "moe_backend")


def topologies(config: Config, gpus: int, gpus_per_host: int) -> Iterator[Topology]:
    """Topologies of `gpus` GPUs that divide the model, whose attn_tp and moe_tp stay on one machine.

    The largest moe_ep is among them whatever moe_tp it leaves: more GPUs may be asked for than experts can use.
    """
    common = math.gcd(gpus, config.n_routed_experts)
    # Neighbours by n lie on one machine each, and not across two, where n divides a machine's GPUs.
    cuts = [n for n in range(1, min(gpus, gpus_per_host) + 1) if gpus % n == 0]
    cuts = [n for n in cuts if gpus <= gpus_per_host or gpus_per_host % n == 0]
    owners = [n for n in range(common, 0, -1) if common % n == 0 and (n == common or gpus // n in cuts)]
    hosts = gpus // gpus_per_host if gpus % gpus_per_host == 0 else 1
    for attn_tp, moe_ep in itertools.product(cuts, owners):
        try:
            topology = Topology(gpus // attn_tp, attn_tp, moe_ep, devices=range(gpus), hosts=hosts)
            check_sizes(config, topology)
        except TopologyError:
            continue
        yield topology


def candidates(config: Config, gpus: int, tokens_per_gpu: int, job: Job) -> list[Candidate]:
    """All of them, those that fit the GPUs' memory first, then by step time."""
    found = []
    for topology in topologies(config, gpus, job.fleet.gpus_per_host):
        counts = (tokens_per_gpu * topology.attn_tp,) * topology.attn_dp
        for path in PATHS:
            try:
                plan = plan_layer(topology, counts, Settings(**path), shared_width=config.moe_intermediate_size)  # pyright: ignore[reportArgumentType]
                found.append(_candidate(config, topology, path, plan, job))
            except (PlanError, ValueError):  # impossible here, or row numbers pass 2^31 - 1
                continue
    memory = FACTS[job.target].memory_size
    return sorted(found, key=lambda c: (not c.fits(memory), c.time.seconds))


def _candidate(config: Config, topology: Topology, path: dict[str, str], plan: LayerPlan, job: Job) -> Candidate:
    layer, _ = step_transfers(config, topology, plan)
    buffers = max((t.operand_bytes + t.result_bytes for t in layer), default=0)
    held = model_bytes(config, topology, plan, job.context)
    return Candidate(topology, path, plan, step_time(config, topology, plan, job), held, buffers, cost.totals(layer))
