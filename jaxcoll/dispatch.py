"""Rows to the ranks that own their experts, and the experts' results back: dispatch() and combine() over moe_ep.

It moves rows; it computes no expert. Every buffer has a proven bound, so no row is ever dropped. Each verb also comes
in two phases, so that independent work can lie between sending and using what arrives. Differentiable by rows and
weights where moe_tp is () and the wire not fp8; elsewhere jax raises NotImplementedError.
Source: communication semantics, section 5; DeepEP's `dispatch`, `combine` and their low-latency forms.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax import lax

from jaxcoll.collectives import all_gather, declare_partial, reduce_scatter
from jaxcoll.exchange import take_rows
from jaxcoll.level import (
    Arrived,
    Level,
    LevelHandle,
    Mode,
    add_up,
    depart,
    go_home,
    joined,
    local_expert_counts,
    routing_of,
)
from jaxcoll.ragged import Transport, require_complete_elsewhere, retyped_as_shard, transport_for
from jaxcoll.routing import RoutePlan, experts_per_rank, merge_repeats, named_experts
from jaxcoll.states import Group, State, as_group, group_size, require
from jaxcoll.topology import Topology, host_axes
from jaxcoll.wire import Encoded, Wire, WireChoice, home_dtype, pack, resolve, unpack
from pallas_kernels.choice import Kernels
from pallas_kernels.moe_dispatch import dispatch_rows
from pallas_kernels.moe_dispatch.quantize import ScaleKind

Array = jax.Array
_STATIC = {"static": True}


@dataclasses.dataclass(frozen=True)
class DispatchSpec:
    """How rows travel; the same on every rank and fixed when a step is compiled.

    Attributes:
        num_experts: E, all ranks' experts together (with a placement: its physical experts). Rank r of moe_ep owns
            [r*E/ep, (r+1)*E/ep).
        moe_ep: mesh axes of the ranks that own disjoint experts, in rank order.
        moe_tp: mesh axes of the ranks that share one expert's width; the rest of the world.
        hosts: leading axes of moe_ep that tell hosts apart: rows then travel in two levels, one copy per destination
            host, and on inside the host. () sends every copy straight to its rank.
        mode: "normal": one copy per (row, destination rank), whose experts' results are summed where they are
            computed. "low_latency": one copy per (row, expert) into a fixed buffer; the row's own rank weights them.
        transport: "ragged" sends real rows only; "dense" sends equal padded blocks and runs everywhere.
        wire: how rows look on the way: "auto" as they are, "f32", "bf16", "fp8" (results then come home in bfloat16).
        scale_kind: of fp8: "float32" or "power_of_two".
        kernels: what packs and adds up rows: "pallas", "xla", or None for what the device and the shapes allow.
        interpret: Pallas kernels are interpreted, which works on one device only.
        small_pair: rows (at least 1) of the block, from one rank to another, that the dense transport tries before the
            proven bound; None chooses it from the shapes.
        chosen_from: experts that rows choose from, where `num_experts` are only some of them (a wave); it sizes
            small_pair. None is all.
    """

    num_experts: int
    moe_ep: Group
    moe_tp: Group = ()
    hosts: Group = ()
    mode: Mode = "normal"
    transport: Transport = "dense"
    wire: WireChoice = "auto"
    scale_kind: ScaleKind = "float32"
    kernels: Kernels | None = None
    interpret: bool = False
    small_pair: int | None = None
    chosen_from: int | None = None

    def __post_init__(self):
        for name in ("moe_ep", "moe_tp", "hosts"):
            object.__setattr__(self, name, as_group(getattr(self, name)))
        choices = {"mode": Mode, "transport": Transport, "wire": WireChoice, "scale_kind": ScaleKind}
        choices |= {"kernels": Kernels} if self.kernels else {}
        for name, allowed in choices.items():
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; allowed are {', '.join(get_args(allowed))}")
        if set(self.moe_ep) & set(self.moe_tp):
            raise ValueError(f"moe_ep {self.moe_ep} and moe_tp {self.moe_tp} share an axis")
        if self.hosts and (self.hosts != self.moe_ep[: len(self.hosts)] or self.hosts == self.moe_ep):
            raise ValueError(f"hosts must be leading axes of moe_ep={self.moe_ep}, but not all, not {self.hosts}")
        for name, least in (("small_pair", 1), ("chosen_from", self.num_experts)):
            if (given := getattr(self, name)) is not None and given < least:
                raise ValueError(f"{name} must be at least {least}, not {given}")

    @classmethod
    def of(
        cls,
        topology: Topology,
        num_experts: int,
        *,
        transport: Transport | None = None,
        hosts: Group | None = None,
        **choices: Any,
    ) -> DispatchSpec:
        """For a topology: None takes the transport that its devices have, and two levels where `host_axes` finds them.

        Raises:
            ValueError: an unknown choice.
        """
        return cls(
            num_experts,
            topology.group("moe_ep"),
            topology.group("moe_tp"),
            hosts=host_axes(topology)[0] if hosts is None else hosts,
            transport=transport or transport_for(topology),
            **choices,
        )

    def levels(self, members: Callable[[Group], int] = group_size) -> tuple[Level, ...]:
        """The levels in the order in which rows pass them.

        Args:
            members: of a group; the default asks the mesh that is traced, `Topology.size` serves elsewhere.

        Raises:
            ValueError: moe_ep does not divide the experts.
        """
        inner = self.moe_ep[len(self.hosts) :]
        ranks, n_hosts = members(inner), members(self.hosts)
        local = experts_per_rank(self.num_experts, ranks * n_hosts)
        share = 1.0 if self.chosen_from is None else self.num_experts / self.chosen_from
        last = Level(inner, ranks, local, self.mode, self.transport, self.small_pair, share)
        if not self.hosts:
            return (last,)
        return Level(self.hosts, n_hosts, local * ranks, "normal", self.transport, self.small_pair, share), last


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Received:
    """Normal mode: the rows that chose one of this rank's experts, each once. SHARD over moe_ep, REPLICA over moe_tp.

    T is the rows of one sender: with moe_tp its own and its fellows', with two levels the whole bound of the first.

    Attributes:
        x: [R, D] rows in order of (source, row), closed up; zeros from the sum of `counts` on. R = ep*T.
        topk_ids: [R, K] int32 in 0..L-1, numbering this rank's own L experts, each once per row; -1 where the choice
            is not local and past the last row.
        topk_weights: [R, K] float32; 0 where the id is -1.
        counts: [n] int32, rows from every source: ranks of moe_ep, with two levels the ranks of this host.
        tokens_per_expert: [L] int32, rows that chose each of this rank's experts.
    """

    x: Array
    topk_ids: Array
    topk_weights: Array
    counts: Array
    tokens_per_expert: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReceivedPerExpert:
    """Low latency: the rows of every expert of this rank. SHARD over moe_ep, REPLICA over moe_tp.

    Attributes:
        x: [L, C, D]: rows of local expert l in order of (source, row), closed up; zeros from tokens_per_expert[l] on.
            C = ep*T is a proven bound; at most ep*T*min(K, L) rows of the buffer are real.
        counts: [L, n] int32, rows for each expert from every source: ranks of moe_ep, with two levels those of this
            host.
        tokens_per_expert: [L] int32, the sums over the sources.
    """

    x: Array
    counts: Array
    tokens_per_expert: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Handle:
    """What `combine` needs to know of the `dispatch` that it answers.

    Attributes:
        levels: one LevelHandle per level in dispatch order: where each row's copies lie in the senders' packed order,
            the weights that the senders keep, the agreed counts and the offsets of both directions.
        spec: how the rows travelled.
        wire: in which format.
        dtype: the rows' type, which the result gets.
        y_shape: shape of the results that `combine` takes: [R, D] or [L, C, D], as received.
    """

    levels: tuple[LevelHandle, ...]
    spec: DispatchSpec = dataclasses.field(metadata=_STATIC)
    wire: Wire = dataclasses.field(metadata=_STATIC)
    dtype: Any = dataclasses.field(metadata=_STATIC)
    y_shape: tuple[int, ...] = dataclasses.field(metadata=_STATIC)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dispatching:
    """Rows on their way, between `dispatch_start` and `dispatch_finish`; opaque to the caller."""

    arrived: Arrived
    handle: Handle


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Combining:
    """Results on their way, between `combine_start` and `combine_finish`; opaque to the caller."""

    home: Array
    handle: Handle


def dispatch(
    x: Array, topk_ids: Array, topk_weights: Array, spec: DispatchSpec, *, count: Array | None = None
) -> tuple[Received | ReceivedPerExpert, Handle]:
    """Sends each row to the ranks that own its experts.

    Args:
        x: [T, D] SHARD over moe_ep and moe_tp: this rank's own rows.
        topk_ids: [T, K] integers: experts in 0..E-1; -1, or any id outside, is nobody. An expert named twice by a row
            is taken once, with the summed weight.
        topk_weights: [T, K] floats; where nobody is named anything, NaN included.
        spec: how.
        count: int32 scalar; rows from it on are padding and may hold anything. Default: all T are real.

    Returns:
        What arrived (Received in normal mode, ReceivedPerExpert in low latency) and the handle for `combine`.
        Wire bytes per rank: see exchange.send; with wire.row_bytes per copy for another rank (first level of two: for
        another host), 8*K more in normal mode for ids and weights, and the counts.

    Raises:
        StateError: an argument is not SHARD over moe_ep and moe_tp, or is PARTIAL over other axes.
        ValueError: shapes that do not fit, a count that is no integer scalar, fp8 where 128 does not divide D, experts
            that moe_ep does not divide, no rows, or row numbers that would pass 2^31 - 1.
    """
    return dispatch_finish(dispatch_start(x, topk_ids, topk_weights, spec, count=count))


def dispatch_start(
    x: Array, topk_ids: Array, topk_weights: Array, spec: DispatchSpec, *, count: Array | None = None
) -> Dispatching:
    """The first phase of `dispatch`: counts are exchanged and rows sent, with two levels to their hosts. Arguments and
    errors are those of it."""
    return depart_rows(*rows_of_moe_tp(x, topk_ids, topk_weights, spec, count), spec)


def rows_of_moe_tp(
    x: Array, topk_ids: Array, topk_weights: Array, spec: DispatchSpec, count: Array | None
) -> tuple[Array, Array, Array]:
    """What `dispatch_start` does before rows depart: arguments checked, repeats merged, rows shared over moe_tp.

    Returns:
        x, ids (-1 for nobody, each expert once per row) and weights (0 where nobody), of the rows of all ranks of
        moe_tp; SHARD over moe_ep, REPLICA over moe_tp.
    """
    _check_rows(x, topk_ids, topk_weights, spec)
    ids, weights = merge_repeats(named_experts(topk_ids, spec.num_experts, count), topk_weights)
    x, ids, weights = (all_gather(a, spec.moe_tp, 0) for a in (x, ids, weights))
    return x, ids, weights


def depart_rows(x: Array, ids: Array, weights: Array, spec: DispatchSpec) -> Dispatching:
    """Sends rows that `rows_of_moe_tp` has prepared."""
    wire, levels = resolve(spec.wire, x.dtype, x.shape[1]), spec.levels()
    arrived, handle = depart(levels[0], ids, weights, functools.partial(_pack, x, spec, wire))
    return Dispatching(arrived, Handle((handle,), spec, wire, x.dtype, ()))


def dispatch_finish(sent: Dispatching) -> tuple[Received | ReceivedPerExpert, Handle]:
    """The second phase of `dispatch`: makes rows of what arrived. Result as there.

    With two levels rows go on inside the host here, so that work between the phases covers the links between hosts.
    """
    _require_phase(sent, Dispatching, "dispatch_finish", "dispatch_start")
    handle, arrived, levels = sent.handle, sent.arrived, sent.handle.spec.levels()
    level = levels[-1]
    if len(levels) == 2:
        ids, weights = routing_of(levels[0], arrived, handle.levels[0])
        onward = functools.partial(_pack_again, arrived.encoded(), handle.spec)
        arrived, inside = depart(level, ids, weights, onward)
        handle = dataclasses.replace(handle, levels=(*handle.levels, inside))
    y_shape = arrived.values.shape
    if level.mode == "low_latency":
        y_shape = (level.experts, y_shape[0] // level.experts, y_shape[1])
    handle, last = dataclasses.replace(handle, y_shape=y_shape), handle.levels[-1]
    x = unpack(arrived.encoded(), handle.dtype)
    counts = last.exchange.plan.recv_counts.reshape(level.ranks, -1)
    if level.mode == "low_latency":
        per_expert = local_expert_counts(level, None, last)
        return ReceivedPerExpert(x.reshape(handle.y_shape), counts.T, per_expert), handle
    ids, weights = routing_of(level, arrived, last)
    return Received(x, ids, weights, counts[:, 0], local_expert_counts(level, ids, last)), handle


def meanwhile[Sent: (Dispatching, Combining), Result](sent: Sent, result: Result) -> tuple[Sent, Result]:
    """Asks for independent work to be done while rows travel, there or home.

    XLA may schedule it anywhere. Here whatever uses the rows waits for the work's `result` (arrays, none PARTIAL), so
    the cheapest place for it is between the start of the exchange and its end; what XLA made of that, the compiled
    program says.

    Returns:
        `sent` for `dispatch_finish` or `combine_finish`, and the result.
    """
    if isinstance(sent, Combining):
        home, result = lax.optimization_barrier((sent.home, result))
        return dataclasses.replace(sent, home=home), result
    values, result = lax.optimization_barrier((sent.arrived.values, result))
    return dataclasses.replace(sent, arrived=dataclasses.replace(sent.arrived, values=values)), result


def combine(y: Array, handle: Handle) -> Array:
    """Sends experts' results home and adds up what belongs to one row.

    Args:
        y: [R, D] (normal: per row the float32 sum over this rank's experts, weighted) or [L, C, D] (low latency: each
            expert's result, unweighted), laid out as received; SHARD over moe_ep, PARTIAL over moe_tp. Rows past the
            counts may hold anything.
        handle: of the dispatch.

    Returns:
        [T, D] in the rows' type, SHARD over moe_ep and moe_tp: normal, the sum over ranks; low latency, the weighted
        float32 sum. Rows that are nobody's are zeros. Wire bytes: as for dispatch, without ids, weights and counts.

    Raises:
        StateError: `y` is in another state; a complete value would be counted once per rank of moe_tp.
        TypeError: a phase is handed what another one made.
        ValueError: `y` has another shape than what was received.
    """
    return combine_finish(combine_start(y, handle))


def combine_start(y: Array, handle: Handle) -> Combining:
    """The first phase of `combine`: results are sent home. Arguments and errors are those of it."""
    _require_phase(handle, Handle, "combine", "dispatch or dispatch_finish")
    spec = handle.spec
    if y.shape != handle.y_shape:
        raise ValueError(f"combine takes results as the rows were received, {handle.y_shape}, not {y.shape}")
    require(y, spec.moe_ep, State.SHARD, "combine (over moe_ep)")
    require(y, spec.moe_tp, State.PARTIAL, "combine (over moe_tp)")
    require_complete_elsewhere(y, spec.moe_ep + spec.moe_tp, "combine")
    if spec.moe_tp:
        y = retyped_as_shard(y, spec.moe_tp)
    y = y.reshape(-1, y.shape[-1]).astype(home_dtype(handle.wire))
    for level in reversed(handle.levels[1:]):
        y = add_up(go_home(y, level), level, y.dtype, spec.kernels, interpret=spec.interpret)
    return Combining(go_home(y, handle.levels[0]), handle)


def combine_finish(first: Combining, *more: Combining) -> Array:
    """The second phase of `combine`: adds up what came home. Result as there.

    Several: dispatches of the same rows to different experts (waves). Their results are added up as if they had
    travelled together, in one float32 sum that is rounded once.
    """
    for part in (first, *more):
        _require_phase(part, Combining, "combine_finish", "combine_start")
    handle, spec, sent = first.handle, first.handle.spec, (first, *more)
    whole = joined([s.handle.levels[0] for s in sent], [len(s.home) for s in sent])
    home = jnp.concatenate([s.home for s in sent]) if more else first.home
    rows = add_up(home, whole, handle.dtype, spec.kernels, interpret=spec.interpret)
    return reduce_scatter(declare_partial(rows, spec.moe_tp), spec.moe_tp, 0) if spec.moe_tp else rows


def _pack(x: Array, spec: DispatchSpec, wire: Wire, plan: RoutePlan) -> Encoded:
    return pack(x, plan.slots, len(plan.rows), wire, spec.scale_kind, spec.kernels, interpret=spec.interpret)


def _pack_again(rows: Encoded, spec: DispatchSpec, plan: RoutePlan) -> Encoded:
    """Copies rows that are encoded already."""
    if rows.scales is None:
        how = {"kernels": spec.kernels, "interpret": spec.interpret}
        return Encoded(dispatch_rows(rows.values, plan.slots, len(plan.rows), **how), None)
    return Encoded(take_rows(rows.values, plan.rows), take_rows(rows.scales, plan.rows))


def _check_rows(x: Array, topk_ids: Array, topk_weights: Array, spec: DispatchSpec) -> None:
    for name, value in (("x", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        require(value, spec.moe_ep + spec.moe_tp, State.SHARD, f"dispatch ({name})")
        require_complete_elsewhere(value, spec.moe_ep + spec.moe_tp, f"dispatch ({name})")
    shapes = f"x {list(x.shape)}, topk_ids {list(topk_ids.shape)}, topk_weights {list(topk_weights.shape)}"
    if x.ndim != 2 or topk_ids.ndim != 2 or topk_ids.shape[0] != x.shape[0] or topk_ids.shape != topk_weights.shape:
        raise ValueError(f"dispatch takes x [T, D], topk_ids [T, K] and topk_weights [T, K], not {shapes}")
    if not topk_ids.size or not x.size:
        raise ValueError(f"dispatch needs rows and choices ({shapes}); a rank without rows holds padding with id -1")


def _require_phase(found: Any, needed: type, verb: str, before: str) -> None:
    if not isinstance(found, needed):
        raise TypeError(f"{verb} takes the {needed.__name__} of {before}, not a {type(found).__name__}")
