"""A loaded model on a mesh: caches in slots, one compiled step per bucket of rows, the host side of decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxcoll.host_arrays import Fetcher, place
from jaxcoll.plan import LayerPlan
from jaxcoll.settings import Settings
from jaxcoll.step import Step
from jaxcoll.step_metadata import StepExchange, own_rows
from jaxcoll.topology import Topology
from jaxcoll.watchdog import current
from models.deepseek_v4.cache import cache_shapes
from models.deepseek_v4.config import Config
from models.deepseek_v4.model import DeepSeekV4
from models.deepseek_v4.program import compile_decode, plan_decode
from models.errors import UserError

if TYPE_CHECKING:
    from models.deepseek_v4.checkpoint import LoadReport

DEFAULT_MAX_SEQ_LEN = 4096
MOST_PLANS = 4096  # plans kept by their counts; making one anew costs a fraction of a millisecond
RESULTS = ("next_token",)
TRACE = ("next_token", "logits", "streams", "attn_out", "moe_out", "topk_ids", "topk_weights")


@dataclasses.dataclass(frozen=True)
class Row:
    """One request's next token: decoded on `replica`, with its past in cache `slot` of that replica."""

    token: int
    position: int
    replica: int
    slot: int


class Decoder:
    """Decodes batches of rows on a mesh.

    Args:
        config, topology: the model and the mesh.
        parameters: from `params.load`.
        slots: requests that each replica can hold at a time.
        max_seq_len: positions that each slot can hold.
        results: which of the model's outputs a step returns.
        settings: choices of the paths; None reads the environment.

    Raises:
        TopologyError: the topology does not divide the model, or there are not enough devices.
        SettingsError: an environment variable has a value that does not exist.
    """

    def __init__(
        self,
        config: Config,
        topology: Topology,
        parameters: dict,
        *,
        slots: int,
        max_seq_len: int,
        results: Sequence[str] = RESULTS,
        settings: Settings | None = None,
        model: DeepSeekV4 | None = None,
    ):
        self.config, self.topology, self.parameters = config, topology, parameters
        self.slots, self.max_seq_len, self.results = slots, max_seq_len, tuple(results)
        self.settings = settings or Settings.from_environment()
        self.model = model or DeepSeekV4(config, topology, self.settings)
        self.steps: dict[tuple, Step] = {}
        self.plans: list[LayerPlan] = []  # one for each compiled program
        self.room: Sequence[int] | None = None  # of steps that name none; None plans for the step's own counts
        self._planned: dict[tuple, LayerPlan] = {}
        self.caches = self._empty_caches()
        self.fetch = Fetcher(topology)  # results of a step as NumPy arrays, in every process
        self.exchange = StepExchange(topology)
        self.input_shardings = tuple(map(topology.sharding, (P(topology.group("attn_dp"), None, None), P(None))))

    @classmethod
    def load(
        cls,
        folder: Path,
        topology: Topology,
        *,
        slots: int,
        max_seq_len: int,
        results: Sequence[str] = RESULTS,
        settings: Settings | None = None,
        config: Config | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> tuple[Decoder, LoadReport]:
        """Reads a published checkpoint folder onto the mesh; see `params.load` for what is refused."""
        from models.deepseek_v4 import params  # not above: the device check decodes without safetensors

        config = config or Config.from_folder(folder)
        settings = settings or Settings.from_environment()
        model = DeepSeekV4(config, topology, settings)
        parameters, report = params.load(folder, model, progress)
        kept = {"slots": slots, "max_seq_len": max_seq_len, "results": results}
        return cls(config, topology, parameters, settings=settings, model=model, **kept), report

    @property
    def compiles(self) -> int:
        """Programs compiled so far: one per (paths, bucket), whatever the positions, counts and routing were."""
        return len(self.steps)

    def step(self, rows: Sequence[Row], room: Sequence[int] | None = None) -> dict[str, Any]:
        """Decodes one token for each row; rows of a replica may come in any order, replicas may have none.

        Args:
            rows: at least one, and at most one per (replica, slot).
            room: rows per replica to plan for, at least what the step has; a shrinking batch keeps its program by
                keeping its room. Default: the decoder's.

        Returns:
            The chosen results as global arrays [attn_dp * M, ...]; `places` says where each row's are. They are ready
            when JAX says so.

        Raises:
            UserError: a token, position, slot or replica that does not exist, a slot named twice, or no row at all.
            PlanError: a named path is impossible for these rows.
        """
        if not rows:
            raise UserError("a step needs at least one row; when every replica is idle nobody runs")
        return self._run(rows, self._counts(rows), room)

    def _run(self, rows: Sequence[Row], counts: Sequence[int], room: Sequence[int] | None) -> dict[str, Any]:
        """One step of the rows that this process knows, in a batch of `counts`."""
        room = self.room if room is None else room
        plan = self._plan(tuple(counts), None if room is None else tuple(room))
        batch, places = self._pack(rows, plan.rows.rows)
        inputs = place((batch, np.array(counts, np.int32)), self.input_shardings)
        self.caches, seen = self.steps[plan.program](self.parameters, self.caches, *inputs)
        return {**seen, "places": places}

    def next_tokens(self, rows: Sequence[Row], room: Sequence[int] | None = None) -> list[int]:
        """Decodes one token for each row and returns the greedy continuations, in the order of `rows`."""
        out = self.step(rows, room)
        return self.fetch(out["next_token"])[out["places"]].tolist()

    def own_next_tokens(self, rows: Sequence[Row], room: Sequence[int] | None = None) -> list[int] | None:
        """Decodes the rows of this process's replicas, whatever the other processes bring; all call it in every step.

        Counts, padding mode and bucket follow from what all processes bring, so idle replicas run the same program.

        Args:
            rows: of own replicas (`exchange.own`), in any order; none where all of them are idle.
            room: as for `step`, the same in every process.

        Returns:
            The greedy continuations in the order of `rows`; None where nobody had a row and nobody ran.

        Raises:
            UserError, PlanError: as `step`.
            DisagreementError, PeerTimeout: a process is at another step, or lost.
        """
        counts = self._counts(rows)
        agreed = self.exchange({replica: counts[replica] for replica in self.exchange.own})
        if agreed.everyone_is_idle:
            return None
        out = self._run(rows, agreed.counts, room)
        tokens = out["next_token"]
        if (watchdog := current()) is not None:
            watchdog.wait([tokens])
        size = tokens.shape[0] // self.topology.attn_dp
        held = own_rows(tokens, size)
        return [int(held[at // size][at % size]) for at in out["places"].tolist()]

    def _plan(self, counts: tuple[int, ...], room: tuple[int, ...] | None) -> LayerPlan:
        """The step's plan, with its program compiled."""
        if (counts, room) in self._planned:
            return self._planned[counts, room]
        if len(self._planned) >= MOST_PLANS:
            self._planned.clear()
        plan = plan_decode(self.config, self.topology, counts, self.settings, room)
        self._planned[counts, room] = plan
        if plan.program not in self.steps:
            self.steps[plan.program] = compile_decode(self.model, plan, self.parameters, self.caches, self.results)
            self.plans.append(plan)
        return plan

    def _counts(self, rows: Sequence[Row]) -> list[int]:
        counts, seen = [0] * self.topology.attn_dp, set()
        for row in rows:
            self._check(row, seen)
            counts[row.replica] += 1
        return counts

    def _pack(self, rows: Sequence[Row], size: int) -> tuple[np.ndarray, np.ndarray]:
        """The step's input [attn_dp, size, 3] and the flat index of each row in its outputs."""
        batch = np.zeros((self.topology.attn_dp, size, 3), np.int32)
        filled, places = [0] * self.topology.attn_dp, np.zeros(len(rows), np.int64)
        for i, row in enumerate(rows):
            batch[row.replica, filled[row.replica]] = row.token, row.position, row.slot
            places[i] = row.replica * size + filled[row.replica]
            filled[row.replica] += 1
        return batch, places

    def _check(self, row: Row, seen: set[tuple[int, int]]) -> None:
        for name, value, limit, what in (
            ("token id", row.token, self.config.vocab_size, "vocab_size"),
            ("position", row.position, self.max_seq_len, "the cache's max_seq_len"),
            ("replica", row.replica, self.topology.attn_dp, "attn_dp"),
            ("slot", row.slot, self.slots, "the replica's slots"),
        ):
            if not 0 <= value < limit:
                raise UserError(f"{name} {value} is out of range: it must be from 0 to {limit - 1} ({what}={limit})")
        if (row.replica, row.slot) in seen:
            raise UserError(f"slot {row.slot} of replica {row.replica} is named by two rows of one step")
        seen.add((row.replica, row.slot))

    def _empty_caches(self) -> Any:
        shapes = cache_shapes(self.config, self.slots * self.topology.attn_dp, self.max_seq_len)
        sharding = self.topology.sharding(P(self.topology.group("attn_dp")))
        make = jax.jit(lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), out_shardings=sharding)
        return make()


def default_max_seq_len(config: Config) -> int:
    """Cache length where none is asked for."""
    return min(config.max_position_embeddings, DEFAULT_MAX_SEQ_LEN)
