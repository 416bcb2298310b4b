"""A step's rows through the layers: all at once, or in two halves of which one computes while the other's rows travel.

In halves the order of one layer is attention A, attention B, experts A, experts B. A's rows go out under B's attention
and come home under B's experts; B's go out under A's experts and come home under A's next attention. SGLang does this
for prefill only (communication semantics, section 5, "TBO").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxcoll.dispatch import Combining, Handle, combine_finish, combine_start, meanwhile
from models.deepseek_v4.bridge import Bridge
from models.deepseek_v4.cache import LayerCache
from models.deepseek_v4.hyper_connection import Mix
from models.deepseek_v4.layer import Layer, passed_by
from models.deepseek_v4.moe import Going
from models.deepseek_v4.router import Routing
from models.deepseek_v4.rows import Rows

Array = jax.Array
scope = jax.named_scope


Decoded = tuple[list[LayerCache], list[Array], list[dict[str, Array]]]


def decode_layers(
    layers: Sequence[Layer],
    streams: Array,
    rows: Rows,
    world_tokens: Array,
    caches: Sequence[LayerCache],
    bridge: Bridge,
) -> Decoded:
    """All layers, in as many batches as the plan says.

    Args:
        layers: of the model, at least one.
        streams: [T, N, D] (S, R), as they enter the first layer.
        rows: of this replica, (S, R).
        world_tokens: as for `Layer`.
        caches: of each layer.
        bridge: of the whole step.

    Returns:
        The caches after the step, the streams [T, N, D] (S, R) as they enter each layer and as they leave the last, and
        what passed by in each layer; as `Layer` gives them.
    """
    if bridge.plan.batches == 2:
        return _decode_in_halves(layers, streams, rows, caches, bridge)
    after, entered, passed = [], [streams], []
    for layer, cache in zip(layers, caches, strict=True):
        streams, cache, by = layer(streams, rows, world_tokens, cache, bridge)
        after.append(cache)
        entered.append(streams)
        passed.append(by)
    return after, entered, passed


def _decode_in_halves(
    layers: Sequence[Layer], streams: Array, rows: Rows, caches: Sequence[LayerCache], bridge: Bridge
) -> Decoded:
    """In two halves: even rows are one, odd rows the other, so that both have real ones whatever the count."""
    a, b = (_Half.of(h, streams, rows, bridge) for h in (0, 1))
    after = []
    for layer, cache in zip(layers, caches, strict=True):
        after.append(_one_layer(a, b, layer, cache, first=layer is layers[0]))
    b.come_home()
    entered = [_joined(*pair, rows) for pair in zip(a.entered, b.entered, strict=True)]
    entered.append(_joined(a.streams, b.streams, rows))
    pairs = zip(a.passed, b.passed, strict=True)
    return after, entered, [{name: _joined(one[name], other[name], rows) for name in one} for one, other in pairs]


def _one_layer(a: _Half, b: _Half, layer: Layer, cache: LayerCache, *, first: bool) -> LayerCache:
    """Both halves through a layer, except that B's results are still on their way home."""
    with scope(layer.name):
        x, cache = a.attend(layer, cache)
    if not first:
        x = b.travel_home(under=x)
        b.come_home()
    with scope(layer.name):
        a.send(x)
        x, cache = b.attend(layer, cache)
        x = a.travel(under=x)
        b.send(x)
        y = a.at_experts()
        y = b.travel(under=y)
        a.go_home(y)
        y = b.at_experts()
        y = a.travel_home(under=y)
        b.go_home(y)
        a.come_home()
    return cache


@dataclasses.dataclass
class _Half:
    """One half's place in the step while it is traced; nothing of it outlives the trace."""

    rows: Rows
    bridge: Bridge
    streams: Array
    entered: list[Array]
    passed: list[dict[str, Array]]
    layer: Layer | None = None
    attn_out: Array | None = None
    mix: Mix | None = None
    going: Going | None = None
    handle: Handle | None = None
    home: Combining | None = None

    @classmethod
    def of(cls, half: int, streams: Array, rows: Rows, bridge: Bridge) -> _Half:
        """Rows `half`, `half` + 2, ...; one padding row more where they are odd in number, or none at all."""
        plan = bridge.plan.one_batch()
        size = plan.rows.rows
        counts = (bridge.counts + 1 - half) // 2
        padding = jnp.iinfo(jnp.int32).max
        mine = Rows(
            _every_second(rows.tokens, half, size, 0),
            _every_second(rows.positions, half, size, 0),
            _every_second(rows.slots, half, size, padding),
            _every_second(rows.active, half, size, False),
        )
        return cls(mine, Bridge(bridge.topology, plan, counts), _every_second(streams, half, size, 0), [], [])

    def attend(self, layer: Layer, cache: LayerCache) -> tuple[Array, LayerCache]:
        """mHC around attention; returns what the experts will see, [T/2, D] (S, R), and the caches."""
        self.layer = layer
        self.entered.append(self.streams)
        self.streams, self.attn_out, cache = layer.attend(self.streams, self.rows, cache)
        x, self.mix = layer.read_ffn(self.streams)
        return x, cache

    def send(self, x: Array) -> None:
        """Rows leave for their experts."""
        assert self.layer
        self.going = self.layer.ffn.send(self.bridge.own_chunk(x), self.bridge.own_chunk(self.rows.tokens), self.bridge)

    def travel(self, under: Array) -> Array:
        """Rows travel while `under` is computed; it comes back for use after that."""
        assert self.going
        sent, under = meanwhile(self.going.sent, under)
        self.going = self.going._replace(sent=sent)
        return under

    def at_experts(self) -> Array:
        """What arrived here from all ranks' halves, through this rank's experts; each rank of moe_tp its addend."""
        assert self.layer and self.going
        y, self.handle = self.layer.ffn.at_experts(self.going.sent)
        return y

    def go_home(self, y: Array) -> None:
        """Results leave for their rows' own ranks."""
        assert self.layer and self.handle
        self.home = combine_start(self.layer.ffn.partial(y), self.handle)

    def travel_home(self, under: Array) -> Array:
        """Results travel while `under` is computed; it comes back for use after that."""
        assert self.home
        self.home, under = meanwhile(self.home, under)
        return under

    def come_home(self) -> None:
        """Results enter the streams."""
        assert self.layer and self.going and self.home and self.mix and self.attn_out is not None
        with scope(self.layer.name):
            y = combine_finish(self.home) + self.layer.ffn.shared_of(self.going)
            moe_out, routing = self.bridge.join(y), Routing(*map(self.bridge.join, self.going.routing))
            self.streams = self.layer.write_ffn(self.streams, moe_out, self.mix)
        self.passed.append(passed_by(self.attn_out, moe_out, routing))


def _every_second(x: Array, half: int, size: int, fill: int | bool) -> Array:
    mine = x[half::2]
    missing = size - mine.shape[0]
    return jnp.pad(mine, ((0, missing), *((0, 0),) * (x.ndim - 1)), constant_values=fill) if missing else mine


def _joined(even: Array, odd: Array, rows: Rows) -> Array:
    """The halves' rows in turn, without the row that filled the second half up."""
    return jnp.stack([even, odd], axis=1).reshape(-1, *even.shape[1:])[: rows.tokens.shape[0]]
