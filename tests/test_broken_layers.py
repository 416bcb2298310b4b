"""Deliberately broken layers: each is refused while it is traced, with a message that says what is wrong and where.

The layer, the bridge and the experts are the model's own; every test breaks one piece of them.
"""

import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax
from tiny_models import published

from jaxcoll import StateError, all_gather, all_reduce, take_shard, uniform_cond
from jaxcoll.gather import gather_partials, own_rows
from jaxcoll.plan import plan_layer
from jaxcoll.settings import Settings
from jaxcoll.topology import Topology
from models.deepseek_v4 import layer as layer_module
from models.deepseek_v4.bridge import Bridge
from models.deepseek_v4.cache import cache_shapes
from models.deepseek_v4.config import Config
from models.deepseek_v4.model import DeepSeekV4
from models.deepseek_v4.moe import MoE
from models.deepseek_v4.program import abstract_parameters, compile_decode

TOPOLOGY = Topology(2, 3)
WORLD, TP = TOPOLOGY.group("world"), TOPOLOGY.group("attn_tp")
CONFIG = Config.from_dict(published(compress_ratios=[0]))


def trace(**choices: Any) -> None:
    """Traces and audits a decode step of one layer; nothing is compiled."""
    settings = Settings(**{"gather": "max_len", "combine": "all_reduce", **choices})
    plan = plan_layer(TOPOLOGY, (3, 3), settings, shared_width=CONFIG.moe_intermediate_size)
    model = DeepSeekV4(CONFIG, TOPOLOGY, settings)
    caches = cache_shapes(CONFIG, 6, 8)
    compiler: Any = lambda lowered: lowered  # noqa: E731
    compile_decode(model, plan, abstract_parameters(model), caches, ("logits",), compiler)


def refusal(**choices: Any) -> str:
    """The whole message, with line numbers as N and functions without the test around them."""
    with pytest.raises(StateError) as error:
        trace(**choices)
    return re.sub(r"(\.py):\d+ \((?:\w+\.<locals>\.)?", r"\1:N (", str(error.value))


reduce_home, experts = Bridge.reduce_home, MoE.__call__


def breaks(monkeypatch: pytest.MonkeyPatch, *, attention: Any = None, gather: Any = None, moe: Any = None) -> Callable:
    """Replaces a hand-over of the layer; the returned function replaces the bridge's way home."""
    if attention:
        monkeypatch.setattr(layer_module, "all_reduce", attention)
    if gather:
        monkeypatch.setattr(Bridge, "to_everyone", gather)
    if moe:
        monkeypatch.setattr(MoE, "__call__", moe)
    return lambda way_home: monkeypatch.setattr(Bridge, "reduce_home", way_home)


def test_the_unbroken_layer_is_accepted():
    trace()
    trace(gather="sum_len", head="world", shared_expert_tp1=True)
    trace(gather="max_len", combine="reduce_scatter", shared_expert_tp1=True, shared_expert_local=True)


# A second reduction.

SECOND = (
    "combine by {way} over (attn_dp, attn_tp) needs PARTIAL, but this float32[6,24] is REPLICA; a replica is complete "
    "already and must not be summed again"
)


@pytest.mark.parametrize("way", ["all_reduce", "reduce_scatter"])
def test_experts_that_reduce_before_the_combine_does(monkeypatch, way):
    def reduced(self: MoE, x: Any, tokens: Any) -> Any:
        y, routing = experts(self, x, tokens)
        return all_reduce(y, WORLD), routing

    breaks(monkeypatch, moe=reduced)
    assert refusal(combine=way) == SECOND.format(way=way)


def test_a_raw_second_reduction_is_found_by_the_audit(monkeypatch):
    breaks(monkeypatch)(lambda self, y: self.take_home(lax.psum(all_reduce(y, WORLD), WORLD)))
    assert refusal() == (
        "psum_invariant at test_broken_layers.py:N (<lambda>) sums over (attn_dp, attn_tp), where every rank holds the "
        "same value: a replica would be counted once per rank"
    )


# A reduction over the wrong group.


def test_experts_reduced_over_attn_tp_only(monkeypatch):
    breaks(monkeypatch)(lambda self, y: self.take_home(all_reduce(y, TP)))
    assert refusal() == (
        "own_rows over (attn_dp, attn_tp) needs REPLICA, but this float32[6,24]{U:attn_dp} is mixed: PARTIAL over "
        "attn_dp, REPLICA over attn_tp"
    )


def test_attention_reduced_over_the_world(monkeypatch):
    breaks(monkeypatch, attention=lambda y, group: all_reduce(y, WORLD))
    assert refusal() == (
        "all_reduce over (attn_dp, attn_tp) needs PARTIAL, but this float32[3,24]{V:attn_dp, U:attn_tp} is mixed: "
        "SHARD over attn_dp, PARTIAL over attn_tp"
    )


# A replica summed.


def test_a_replica_gathered_as_if_it_were_a_partial_sum(monkeypatch):
    def gather(self: Bridge, x: Any) -> Any:
        return gather_partials(x, self.counts, self.topology, mode="max_len", total=self.plan.rows.total)

    breaks(monkeypatch, gather=gather)
    assert refusal() == (
        "gather_partials needs PARTIAL over (attn_tp), but this int32[3]{V:attn_dp} is REPLICA; gather_replicas "
        "gathers copies"
    )


def test_a_replica_that_is_called_different_and_summed(monkeypatch):
    def twice(y: Any, group: Any) -> Any:
        return lax.psum(lax.pcast(all_reduce(y, group), group, to="varying"), group)

    breaks(monkeypatch, attention=twice)
    assert refusal() == (
        "psum_invariant at test_broken_layers.py:N (twice) sums over (attn_tp), where every rank holds the same value: "
        "a replica would be counted once per rank"
    )


def test_a_whole_shared_expert_that_joins_before_the_reduction(monkeypatch):
    """Here jax itself refuses, in its own words."""

    def joined(self: MoE, x: Any, tokens: Any) -> Any:
        y, routing = experts(self, x, tokens)
        return y + self.shared_experts(x), routing

    breaks(monkeypatch, moe=joined)
    with pytest.raises(Exception, match="lhs is unreduced while rhs is not"):
        trace(shared_expert_tp1=True)


# A missing reduction.


def test_attention_that_nobody_reduces(monkeypatch):
    breaks(monkeypatch, attention=lambda y, group: y)
    assert refusal() == (
        "HyperConnection.write over (attn_tp) needs REPLICA, but this float32[3,24]{V:attn_dp, U:attn_tp} is PARTIAL; "
        "all_reduce completes a partial sum"
    )


def test_experts_that_nobody_reduces(monkeypatch):
    breaks(monkeypatch)(lambda self, y: take_shard(y, "attn_dp", 0))
    assert refusal() == (
        "take_shard over (attn_dp) needs REPLICA, but this float32[6,24]{U:(attn_dp,attn_tp)} is PARTIAL; all_reduce "
        "completes a partial sum"
    )
    breaks(monkeypatch)(lambda self, y: y[:3])
    assert refusal() == (
        "HyperConnection.write over (attn_tp) needs REPLICA, but this float32[3,24]{U:(attn_dp,attn_tp)} is PARTIAL; "
        "all_reduce completes a partial sum"
    )


# A partial sum gathered.


def test_a_partial_sum_gathered_from_the_experts(monkeypatch):
    breaks(monkeypatch)(lambda self, y: all_gather(y, TP, 0))
    assert refusal() == (
        "all_gather over (attn_tp) needs SHARD, but this float32[6,24]{U:(attn_dp,attn_tp)} is PARTIAL; reduce_scatter "
        "completes a partial sum and cuts it"
    )


# `where` on a partial sum: jax types the result as a replica.


def masked_late(self: MoE, x: Any, tokens: Any) -> Any:
    y, routing = experts(self, x, tokens)
    return jnp.where((tokens >= 0)[:, None], y, 0), routing


def test_padding_masked_after_the_partial_sum_was_born(monkeypatch):
    def home(self: Bridge, y: Any) -> Any:  # the lost mark makes it look complete
        return own_rows(y, self.counts, self.topology, mode="max_len", rows=self.plan.rows.rows)

    breaks(monkeypatch, moe=masked_late)(home)
    assert refusal() == (
        "select_n at test_broken_layers.py:N (masked_late) touches a value that is PARTIAL over (attn_dp, attn_tp); "
        "until all_reduce or reduce_scatter completes it only + - reshape transpose slice broadcast sum and "
        "concatenation of partials keep the sum right"
    )


def test_padding_masked_late_and_then_combined(monkeypatch):
    breaks(monkeypatch, moe=masked_late)
    assert refusal() == SECOND.format(way="all_reduce")


# A branch on a rank's own count around a collective.


def nobody(y: Any) -> Any:
    return lax.pcast(jnp.zeros((3, y.shape[1]), y.dtype), "attn_dp", to="varying")


def test_an_idle_replica_that_skips_the_reduction(monkeypatch):
    def home(self: Bridge, y: Any) -> Any:
        mine = self.counts[lax.axis_index("attn_dp")]
        return lax.cond(mine > 0, lambda y: reduce_home(self, y), nobody, y)

    breaks(monkeypatch)(home)
    assert refusal() == (
        "cond at test_broken_layers.py:N (home) communicates over (attn_dp, attn_tp) (unreduced_psum) under a "
        "predicate that differs over (attn_dp): ranks that disagree would wait for each other for ever; reduce the "
        "predicate first and use uniform_cond"
    )


def test_uniform_cond_on_a_ranks_own_count(monkeypatch):
    def home(self: Bridge, y: Any) -> Any:
        mine = self.counts[lax.axis_index("attn_dp")]
        return uniform_cond(mine > 0, WORLD, lambda y: reduce_home(self, y), nobody, y)

    breaks(monkeypatch)(home)
    assert refusal() == (
        "uniform_cond over (attn_dp, attn_tp) needs REPLICA, but this bool[]{V:attn_dp} is mixed: SHARD over attn_dp, "
        "REPLICA over attn_tp"
    )


def test_uniform_cond_on_everybodys_counts_is_accepted(monkeypatch):
    def home(self: Bridge, y: Any) -> Any:
        return uniform_cond(jnp.max(self.counts) > 0, WORLD, lambda y: reduce_home(self, y), nobody, y)

    breaks(monkeypatch)(home)
    trace()
