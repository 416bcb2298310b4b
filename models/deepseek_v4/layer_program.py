"""One decode layer as a compiled program of its own: what every layer of a kind costs, without embedding and head."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxcoll.linear import partition_specs
from jaxcoll.placement import Placement
from jaxcoll.plan import LayerPlan
from jaxcoll.plan_exchange import compiler_options
from jaxcoll.step import Step, compile_step
from jaxcoll.topology import Topology
from models.deepseek_v4.batches import decode_layers
from models.deepseek_v4.bridge import Bridge
from models.deepseek_v4.cache import LayerCache, cache_shapes
from models.deepseek_v4.config import AttentionKind, Config
from models.deepseek_v4.layer import Layer
from models.deepseek_v4.model import check_sizes
from models.deepseek_v4.rows import Rows


@dataclasses.dataclass(frozen=True)
class LayerProgram:
    """A compiled layer.

    Attributes:
        step: the program, of (parameters, cache, streams, batch, counts, token ids of all rows).
        parameters, cache: abstract, global shapes; `layer` knows how they are cut.
    """

    step: Step
    layer: Layer
    parameters: dict
    cache: LayerCache


def one_layer(config: Config, kind: AttentionKind) -> Config:
    """The model cut down to one layer of that attention kind, routing by score.

    Raises:
        ValueError: the model has no such layer.
    """
    ratios = [r for i, r in enumerate(config.compress_ratios) if config.attention_kind(i) == kind]
    if not ratios:
        raise ValueError(f"the model has no {kind} layer")
    return dataclasses.replace(config, num_hidden_layers=1, num_hash_layers=0, compress_ratios=(ratios[0],))


def compile_layer(
    config: Config,
    topology: Topology,
    plan: LayerPlan,
    context: int,
    compiler: Callable[..., jax.stages.Compiled] | None = None,
    xla_options: dict[str, Any] | None = None,
    placement: Placement | None = None,
) -> LayerProgram:
    """Compiles a one-layer model's layer for the plan's shapes; nothing is allocated.

    Args:
        config: from `one_layer`.
        topology: the mesh; its devices need not exist.
        plan: paths and static shapes.
        context: positions that each request's caches hold; a replica has as many requests as rows.
        compiler: see `compile_step`.
        xla_options: over those that the plan's exchange needs.
        placement: where the experts live; None is in order, each once.

    Raises:
        TopologyError: the topology does not divide the model.
        StateError: the audit refuses the program.
    """
    check_sizes(config, topology)
    layer = Layer(config, 0, topology, jnp.dtype(config.torch_dtype), plan.shared_expert, placement)
    (cache,) = cache_shapes(config, plan.rows.rows * topology.attn_dp, context)
    parameters, by_replica = nnx.to_pure_dict(nnx.split(layer)[1]), P(topology.group("attn_dp"))
    with jax.default_matmul_precision("highest" if config.torch_dtype == "float32" else None):
        step = compile_step(
            _pure_layer(layer, topology, plan),
            topology,
            (parameters, cache, *_inputs(config, plan, topology.attn_dp)),
            in_specs=(partition_specs(layer), by_replica, by_replica, by_replica, P(), P()),
            out_specs=(by_replica, by_replica),
            donate_argnums=(1, 2),
            compiler=compiler,
            compiler_options=compiler_options(topology, plan.exchange, by_count=plan.by_count) | (xla_options or {}),
        )
    return LayerProgram(step, layer, parameters, cache)


def _inputs(config: Config, plan: LayerPlan, replicas: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Streams, batch, counts and all rows' token ids."""
    shape = jax.ShapeDtypeStruct
    return (
        shape((replicas * plan.rows.rows, config.hc_mult, config.hidden_size), jnp.dtype(config.torch_dtype)),
        shape((replicas, plan.rows.rows, 3), jnp.int32),
        shape((replicas,), jnp.int32),
        shape((plan.rows.total,), jnp.int32),
    )


def _pure_layer(layer: Layer, topology: Topology, plan: LayerPlan) -> Callable:
    """The layer's call as a pure function of its split state, per rank."""
    graph, state = nnx.split(layer)

    def run(parameters: dict, cache: LayerCache, streams: Any, batch: Any, counts: Any, world_tokens: Any) -> Any:
        loaded = jax.tree.map(lambda leaf: leaf, state)
        nnx.replace_by_pure_dict(loaded, parameters)
        rows = Rows.unpack(batch[0], counts[jax.lax.axis_index(topology.group("attn_dp"))])
        bridge, layers = Bridge(topology, plan, counts), [nnx.merge(graph, loaded)]
        (cache,), streams, _ = decode_layers(layers, streams, rows, world_tokens, [cache], bridge)
        return cache, streams[-1]

    return run
