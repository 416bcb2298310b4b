"""How much of a model one device holds and multiplies: bytes and expert work, from shapes alone."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxcoll.linear import partition_specs
from jaxcoll.placement import Placement
from jaxcoll.plan import LayerPlan, SharedExpert
from jaxcoll.topology import Topology
from models.deepseek_v4.cache import cache_shapes
from models.deepseek_v4.config import Config
from models.deepseek_v4.expert_blocks import block_rows, blocks_at_even_load
from models.deepseek_v4.layer import Layer


@dataclasses.dataclass(frozen=True)
class ExpertLoad:
    """The routed experts' work of one device when the load is even.

    Attributes:
        rows: (row, expert) pairs that this device's experts get: tokens * K / moe_ep.
        flops: what these need: rows * 3 matrices * 2 * D * F / moe_tp.
        blocks: blocks that they make, spread as evenly as whole rows allow.
        experts_hit: experts of this device that get a row at all.
    """

    rows: float
    flops: float
    blocks: int
    experts_hit: int


def expert_load(
    config: Config,
    topology: Topology,
    tokens: int,
    plan: LayerPlan,
    imbalance: float = 1.0,
    placement: Placement | None = None,
) -> ExpertLoad:
    """What `tokens` real rows of the whole world mean for one device.

    Args:
        plan: whose static shapes choose the block's rows.
        imbalance: how many times the mean this device gets.
        placement: where the experts live; None is in order, each once.
    """
    ep = topology.world // topology.moe_tp
    local = (placement.num_physical if placement else config.n_routed_experts) // ep
    rows = imbalance * tokens * config.num_experts_per_tok / ep
    flops = rows * 6 * config.hidden_size * config.moe_intermediate_size / topology.moe_tp
    shaped = plan.one_batch().rows.rows * topology.attn_dp
    size = block_rows(shaped * config.num_experts_per_tok / config.n_routed_experts)
    blocks = plan.batches * blocks_at_even_load(rows / plan.batches, local, size)
    return ExpertLoad(rows, flops, blocks, min(local, math.ceil(rows)))


@dataclasses.dataclass(frozen=True)
class Held:
    """Bytes that one device holds."""

    weights: int
    caches: int


def layer_weight_bytes(layer: nnx.Module, topology: Topology) -> int:
    """Bytes of a module's weights on one device; the module may be abstract."""
    specs = jax.tree.leaves(partition_specs(layer), is_leaf=lambda s: isinstance(s, jax.sharding.PartitionSpec))
    leaves = jax.tree.leaves(nnx.to_pure_dict(nnx.split(layer)[1]))
    return sum(_shard_bytes(x, spec, topology) for x, spec in zip(leaves, specs, strict=True))


def _shard_bytes(x: Any, spec: Any, topology: Topology) -> int:
    cut = math.prod(topology.size(axes if isinstance(axes, tuple) else (axes,)) for axes in spec if axes)
    return x.size // cut * x.dtype.itemsize


def cache_bytes(config: Config, slots: int, context: int) -> int:
    """Bytes of all layers' caches on one device, for `slots` requests of `context` positions on each replica."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache_shapes(config, slots, context)))


@dataclasses.dataclass(frozen=True)
class LayerWeights:
    """Bytes of weights on one device.

    Attributes:
        routed: of one layer's routed experts.
        experts: how many of them this device owns.
        embedding: the token table, of which a step reads a few rows.
    """

    routed: int
    experts: int
    embedding: int


def weights_of(config: Config, topology: Topology) -> LayerWeights:
    """What of a device's weights a step does not read as a whole."""
    item = jnp.dtype(config.torch_dtype).itemsize
    own = 3 * config.hidden_size * config.moe_intermediate_size // topology.moe_tp * item
    experts = config.n_routed_experts * topology.moe_tp // topology.world
    return LayerWeights(experts * own, experts, config.vocab_size * config.hidden_size * item)


def model_bytes(
    config: Config, topology: Topology, plan: LayerPlan, context: int, placement: Placement | None = None
) -> Held:
    """What one device holds of the whole model: every layer, embedding, head; a request's caches for every row."""
    item = jnp.dtype(config.torch_dtype).itemsize
    table = config.vocab_size * config.hidden_size * item
    head = -(-table // topology.size(topology.group(plan.head)))
    weights = _layers_weight_bytes(config, topology, plan.shared_expert, placement) + table + head
    return Held(weights, plan.rows.rows * _slot_bytes(config, context))


@functools.lru_cache(maxsize=512)
def _layers_weight_bytes(config: Config, topology: Topology, shared: SharedExpert, placement: Placement | None) -> int:
    """All layers' weights on one device; layers of a kind have equally many."""
    dtype, known, total = jnp.dtype(config.torch_dtype), {}, 0
    for i in range(config.num_hidden_layers):
        kind = config.compress_ratios[i], config.routing_kind(i)
        if kind not in known:
            known[kind] = layer_weight_bytes(Layer(config, i, topology, dtype, shared, placement), topology)
        total += known[kind]
    return total


@functools.lru_cache(maxsize=64)
def _slot_bytes(config: Config, context: int) -> int:
    """All layers' caches of one request."""
    return cache_bytes(config, 1, context)
