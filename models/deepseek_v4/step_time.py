"""How long a decode step must take at least, part by part: what HBM, tensor cores and links allow at their peaks.

A floor with the losses that the program is known to have (its blocks, its weight copies); no kernel's efficiency, no
launch, no overlap of communication with computation. Nothing here was measured.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp

from jaxcoll import cost, links
from jaxcoll.plan import LayerPlan
from jaxcoll.ragged import Transport
from jaxcoll.targets import FACTS, GpuTarget
from jaxcoll.topology import Topology
from models.deepseek_v4.config import AttentionKind, Config
from models.deepseek_v4.expert_blocks import block_rows
from models.deepseek_v4.program import layer_transfers
from models.deepseek_v4.sizes import expert_load, model_bytes, weights_of

Bound = Literal["weights", "caches", "compute", "links inside machines", "links between machines", "latency"]

# Dense bfloat16 operations per second: NVIDIA H100 and H200 (SXM) and DGX B200 datasheets, without sparsity.
PEAK_FLOPS: dict[GpuTarget, float] = {"h100": 989.4e12, "h200": 989.4e12, "b200": 2250e12}
# XLA:GPU copies the weights of a block of several rows before it multiplies: read, written, read again.
COPIED = 3


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of one decode step of one device.

    Attributes:
        weights, caches: reading them from HBM.
        compute: matmuls at the tensor cores' peak.
        inside, between, latency: the links' bytes and starts, see links.LinkSeconds.
        seconds: the longer of HBM and compute, plus all collectives.
    """

    weights: float
    caches: float
    compute: float
    inside: float
    between: float
    latency: float
    seconds: float

    @property
    def bound(self) -> Bound:
        """What takes the most of the step: the resource that a faster machine should have more of."""
        parts: dict[Bound, float] = {
            "links inside machines": self.inside,
            "links between machines": self.between,
            "latency": self.latency,
        }
        if self.compute > self.weights + self.caches:
            parts["compute"] = self.compute
        else:
            parts |= {"weights": self.weights, "caches": self.caches}
        return max(parts, key=parts.__getitem__)


@dataclasses.dataclass(frozen=True)
class Job:
    """What is decoded where.

    Attributes:
        target, fleet: the GPUs and how they are joined.
        context: positions that each request has behind it.
        imbalance: how many times the mean the busiest device's experts get.
    """

    target: GpuTarget
    fleet: links.Machines
    context: int
    imbalance: float = 1.0


def step_transfers(
    config: Config, topology: Topology, plan: LayerPlan, transport: Transport = "ragged"
) -> tuple[list[cost.Transfer], list[cost.Transfer]]:
    """What one layer communicates, and what a step does besides: ids and head."""
    layer = layer_transfers(config, topology, plan, transport)
    row = config.hidden_size * jnp.dtype(config.torch_dtype).itemsize
    size = topology.size(topology.group(plan.head))
    vocabulary = -(-config.vocab_size // size) * size * 4  # logits are float32
    besides = cost.gather_transfers(topology, plan, 4, "ids", transport=transport)
    return layer, besides + cost.head_transfers(topology, plan, row, vocabulary)


def step_time(config: Config, topology: Topology, plan: LayerPlan, job: Job) -> StepTime:
    """The floor of one decode step.

    Args:
        plan: counts of real rows and static shapes.
    """
    gpu, layers = FACTS[job.target], config.num_hidden_layers
    held = model_bytes(config, topology, plan, job.context)
    one = weights_of(config, topology)
    load = expert_load(config, topology, sum(plan.rows.counts), plan, job.imbalance)
    per_expert = one.routed // one.experts
    copies = (
        COPIED if block_rows(sum(plan.rows.counts) / config.n_routed_experts * config.num_experts_per_tok) > 1 else 1
    )
    dense = held.weights - layers * one.routed - one.embedding
    read = dense + layers * load.blocks * per_expert * copies
    caches = sum(_cache_read(config, i, job.context) for i in range(layers)) * plan.rows.rows
    rows = max(plan.rows.counts)
    attention = sum(_attention_flops(config, i, job.context) for i in range(layers)) * rows / topology.attn_tp
    flops = 2 * rows * dense / jnp.dtype(config.torch_dtype).itemsize + layers * load.flops + attention
    inner, besides = step_transfers(config, topology, plan)
    each = links.total_seconds(inner, topology, job.fleet, job.imbalance)
    once = links.total_seconds(besides, topology, job.fleet)
    weights_s, caches_s = read / gpu.memory_bandwidth, caches / gpu.memory_bandwidth
    compute_s = flops / PEAK_FLOPS[job.target]
    inside, between, start, total = (
        layers * getattr(each, name) + getattr(once, name) for name in ("inside", "between", "start", "total")
    )
    seconds = max(weights_s + caches_s, compute_s) + total
    return StepTime(weights_s, caches_s, compute_s, inside, between, start, seconds)


def _entries(config: Config, layer: int, context: int) -> tuple[AttentionKind, int, int]:
    """Kind, cached entries of a request, and key/value rows that a token attends to."""
    kind, ratio = config.attention_kind(layer), config.compress_ratios[layer]
    entries = context // ratio if ratio else 0
    attended = min(entries, config.index_topk) if kind == "csa" else entries
    return kind, entries, attended + min(context, config.sliding_window)


def _cache_read(config: Config, layer: int, context: int) -> int:
    """Bytes of caches that one row reads; an indexer looks at all its entries, attention at the chosen ones."""
    kind, entries, attended = _entries(config, layer, context)
    looked_at = entries * config.index_head_dim if kind == "csa" else 0
    return (attended * config.head_dim + looked_at) * jnp.dtype(config.torch_dtype).itemsize


def _attention_flops(config: Config, layer: int, context: int) -> int:
    """Scores and sums of one row over all heads, and the indexer's scores."""
    kind, entries, attended = _entries(config, layer, context)
    index = 2 * config.index_n_heads * config.index_head_dim * entries if kind == "csa" else 0
    return 4 * config.num_attention_heads * config.head_dim * attended + index
