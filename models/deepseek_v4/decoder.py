"""A loaded model on a mesh: caches in slots, one compiled step per bucket of rows, the host side of decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxcoll.linear import partition_specs
from jaxcoll.step import Step, compile_step
from jaxcoll.topology import Topology
from models.deepseek_v4 import params
from models.deepseek_v4.cache import cache_shapes
from models.deepseek_v4.checkpoint import LoadReport
from models.deepseek_v4.config import Config
from models.deepseek_v4.model import DeepSeekV4
from models.errors import UserError

DEFAULT_MAX_SEQ_LEN = 4096
RESULTS = ("next_token",)
TRACE = ("next_token", "logits", "streams", "attn_out", "moe_out", "topk_ids", "topk_weights")


@dataclasses.dataclass(frozen=True)
class Row:
    """One request's next token: decoded on `replica`, with its past in cache `slot` of that replica."""

    token: int
    position: int
    replica: int
    slot: int


def bucket(count: int) -> int:
    """The rows that a step for `count` rows is compiled for: the next power of two, at least 1."""
    return 1 << max(count - 1, 0).bit_length()


class Decoder:
    """Decodes batches of rows on a mesh.

    Args:
        config, topology: the model and the mesh.
        parameters: from `params.load`.
        slots: requests that each replica can hold at a time.
        max_seq_len: positions that each slot can hold.
        results: which of the model's outputs a step returns.

    Raises:
        TopologyError: the topology does not divide the model, or there are not enough devices.
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
        model: DeepSeekV4 | None = None,
    ):
        self.config, self.topology, self.parameters = config, topology, parameters
        self.slots, self.max_seq_len, self.results = slots, max_seq_len, tuple(results)
        self.model = model or DeepSeekV4(config, topology)
        self.steps: dict[int, Step] = {}
        self.caches = self._empty_caches()
        self.input_sharding = topology.sharding(P(topology.group("attn_dp"), None, None))

    @classmethod
    def load(
        cls,
        folder: Path,
        topology: Topology,
        *,
        slots: int,
        max_seq_len: int,
        results: Sequence[str] = RESULTS,
        config: Config | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> tuple[Decoder, LoadReport]:
        """Reads a published checkpoint folder onto the mesh; see `params.load` for what is refused."""
        config = config or Config.from_folder(folder)
        model = DeepSeekV4(config, topology)
        parameters, report = params.load(folder, model, progress)
        decoder = cls(
            config, topology, parameters, slots=slots, max_seq_len=max_seq_len, results=results, model=model
        )
        return decoder, report

    @property
    def compiles(self) -> int:
        """Programs compiled so far: one per bucket, whatever the positions, counts and routing were."""
        return len(self.steps)

    def step(self, rows: Sequence[Row], at_least: int = 1) -> dict[str, Any]:
        """Decodes one token for each row; rows of a replica may come in any order, replicas may have none.

        Args:
            rows: at most one per (replica, slot).
            at_least: rows per replica to run a program for, so that a shrinking batch keeps its program.

        Returns:
            The chosen results as global arrays [attn_dp * bucket, ...]; `places` says where each row's are. They are
            ready when JAX says so.

        Raises:
            UserError: a token, position, slot or replica that does not exist, or a slot named twice.
        """
        batch, places = self._pack(rows, at_least)
        size = batch.shape[1]
        if size not in self.steps:
            self.steps[size] = self._compile(size)
        self.caches, seen = self.steps[size](
            self.parameters, self.caches, jax.device_put(batch, self.input_sharding)
        )
        return {**seen, "places": places}

    def next_tokens(self, rows: Sequence[Row], at_least: int = 1) -> list[int]:
        """Decodes one token for each row and returns the greedy continuations, in the order of `rows`."""
        out = self.step(rows, at_least)
        return np.asarray(out["next_token"])[out["places"]].tolist()

    def _pack(self, rows: Sequence[Row], at_least: int) -> tuple[np.ndarray, np.ndarray]:
        """The step's input [attn_dp, bucket, 4] and the flat index of each row in its outputs."""
        counts = [0] * self.topology.attn_dp
        places, seen = np.zeros(len(rows), np.int64), set()
        for i, row in enumerate(rows):
            self._check(row, seen)
            places[i] = counts[row.replica]
            counts[row.replica] += 1
        size = bucket(max(*counts, at_least))
        batch = np.zeros((self.topology.attn_dp, size, 4), np.int32)
        for row, place in zip(rows, places, strict=True):
            batch[row.replica, place] = row.token, row.position, row.slot, 1
        return batch, places + np.array([row.replica for row in rows], np.int64) * size

    def _check(self, row: Row, seen: set[tuple[int, int]]) -> None:
        for name, value, limit, what in (
            ("token id", row.token, self.config.vocab_size, "vocab_size"),
            ("position", row.position, self.max_seq_len, "the cache's max_seq_len"),
            ("replica", row.replica, self.topology.attn_dp, "attn_dp"),
            ("slot", row.slot, self.slots, "the replica's slots"),
        ):
            if not 0 <= value < limit:
                raise UserError(
                    f"{name} {value} is out of range: it must be from 0 to {limit - 1} ({what}={limit})"
                )
        if (row.replica, row.slot) in seen:
            raise UserError(f"slot {row.slot} of replica {row.replica} is named by two rows of one step")
        seen.add((row.replica, row.slot))

    def _compile(self, size: int) -> Step:
        graph, state = nnx.split(self.model)
        results = self.results

        def step(parameters: dict, caches: Any, batch: jax.Array) -> tuple[Any, dict]:
            loaded = jax.tree.map(lambda leaf: leaf, state)
            nnx.replace_by_pure_dict(loaded, parameters)
            caches, seen = nnx.merge(graph, loaded)(batch[0], caches)
            return caches, {name: seen[name] for name in results}

        by_replica = P(self.topology.group("attn_dp"))
        shape = (self.topology.attn_dp, size, 4)
        precision = "highest" if self.config.torch_dtype == "float32" else None
        with jax.default_matmul_precision(precision):
            return compile_step(
                step,
                self.topology,
                (self.parameters, self.caches, jax.ShapeDtypeStruct(shape, jnp.int32)),
                in_specs=(partition_specs(self.model), by_replica, by_replica),
                out_specs=(by_replica, by_replica),
                donate_argnums=(1,),
            )

    def _empty_caches(self) -> Any:
        shapes = cache_shapes(self.config, self.slots * self.topology.attn_dp, self.max_seq_len)
        sharding = self.topology.sharding(P(self.topology.group("attn_dp")))
        make = jax.jit(
            lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), out_shardings=sharding
        )
        return make()


def default_max_seq_len(config: Config) -> int:
    """Cache length where none is asked for."""
    return min(config.max_position_embeddings, DEFAULT_MAX_SEQ_LEN)
