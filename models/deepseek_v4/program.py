"""The decode step as one compiled program, for a mesh at hand or for GPUs that are not there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxcoll import cost
from jaxcoll.exchange_cost import exchange_transfers
from jaxcoll.kernels import RowShape
from jaxcoll.linear import partition_specs
from jaxcoll.plan import LayerPlan, plan_layer
from jaxcoll.plan_exchange import compiler_options
from jaxcoll.ragged import Transport
from jaxcoll.settings import Settings
from jaxcoll.step import Step, compile_step
from jaxcoll.topology import Topology
from models.deepseek_v4.config import Config
from models.deepseek_v4.model import DeepSeekV4


def abstract_parameters(model: DeepSeekV4) -> dict:
    """The tree of a model's parameters as shapes, where nothing is loaded."""
    return nnx.to_pure_dict(nnx.split(model)[1])


def plan_decode(
    config: Config, topology: Topology, counts: Sequence[int], settings: Settings, room: Sequence[int] | None = None
) -> LayerPlan:
    """The plan of one decode step of a model; arguments and errors are those of `plan_layer`."""
    row = _row_shape(config)
    width = config.moe_intermediate_size
    return plan_layer(topology, counts, settings, shared_width=width, room=room, row=row)


def _row_shape(config: Config) -> RowShape:
    return RowShape(config.hidden_size, config.torch_dtype, config.num_experts_per_tok)


def compile_decode(
    model: DeepSeekV4,
    plan: LayerPlan,
    parameters: dict,
    caches: Any,
    results: Sequence[str],
    compiler: Callable[..., jax.stages.Compiled] | None = None,
) -> Step:
    """Compiles step(parameters, caches, batch [attn_dp, M, 3], counts [attn_dp]) -> (caches, results).

    Args:
        model: whose split gives the step's shape.
        plan: paths and static shapes.
        parameters, caches: arrays or shapes; the caches' buffers are reused.
        results: which of the model's outputs are returned.
        compiler: see `compile_step`.

    Raises:
        StateError: the audit refuses the program.
    """
    topology = model.topology
    by_replica = P(topology.group("attn_dp"))
    batch = jax.ShapeDtypeStruct((topology.attn_dp, plan.rows.rows, 3), jnp.int32)
    counts = jax.ShapeDtypeStruct((topology.attn_dp,), jnp.int32)
    with jax.default_matmul_precision("highest" if model.config.torch_dtype == "float32" else None):
        return compile_step(
            _pure_step(model, plan, results),
            topology,
            (parameters, caches, batch, counts),
            in_specs=(partition_specs(model), by_replica, by_replica, P()),
            out_specs=(by_replica, by_replica),
            donate_argnums=(1,),
            compiler=compiler,
            compiler_options=compiler_options(topology, plan.exchange, by_count=plan.by_count),
            name="decode",
            plan=lambda: "\n".join(f"{h.name}: {h.path}, because {h.reason}" for h in plan.hand_overs),
        )


def _pure_step(model: DeepSeekV4, plan: LayerPlan, results: Sequence[str]) -> Callable:
    """The model's call as a pure function of its split state, per rank."""
    graph, state = nnx.split(model)

    def step(parameters: dict, caches: Any, batch: jax.Array, counts: jax.Array) -> tuple[Any, dict]:
        loaded = jax.tree.map(lambda leaf: leaf, state)
        nnx.replace_by_pure_dict(loaded, parameters)
        caches, seen = nnx.merge(graph, loaded)(batch[0], counts, caches, plan)
        return caches, {name: seen[name] for name in results}

    return step


def predicted_transfers(model: DeepSeekV4, plan: LayerPlan) -> list[cost.Transfer]:
    """What one decode step communicates by its plan and its sizes, with the transport of the model's devices."""
    config, topology = model.config, model.topology
    row = config.hidden_size * jnp.dtype(config.torch_dtype).itemsize
    found = cost.gather_transfers(topology, plan, 4, "ids")  # none where the plan gathers nothing
    found += config.num_hidden_layers * layer_transfers(config, topology, plan, experts=model.placement.num_physical)
    vocabulary = model.head.weight.shape[0] * 4  # logits are float32
    return found + cost.head_transfers(topology, plan, row, vocabulary)


def layer_transfers(
    config: Config,
    topology: Topology,
    plan: LayerPlan,
    transport: Transport | None = None,
    experts: int | None = None,
) -> list[cost.Transfer]:
    """What one layer communicates by its plan and its sizes.

    Args:
        experts: physical ones, where copies are held; None is the model's.
        transport: see `exchange_cost.exchange_transfers`.
    """
    row = config.hidden_size * jnp.dtype(config.torch_dtype).itemsize
    found = plan.batches * cost.attention_transfers(topology, plan.one_batch(), row)
    if plan.exchange:
        held, shape = experts or config.n_routed_experts, _row_shape(config)
        return found + exchange_transfers(topology, plan, shape, held, transport=transport)
    found += cost.gather_transfers(topology, plan, row, transport=transport)
    return found + cost.combine_transfers(topology, plan, row, transport=transport)
