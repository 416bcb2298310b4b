"""A checkpoint opened for a set of requests: what every command does before it decodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxcoll.agreement import agree
from jaxcoll.settings import Settings
from jaxcoll.topology import Topology
from models.deepseek_v4 import report
from models.deepseek_v4.config import Config
from models.deepseek_v4.decoder import RESULTS, Decoder
from models.deepseek_v4.program import plan_decode
from models.deepseek_v4.requests import Home, cache_length, slots_for, spread
from models.options import RunOptions
from models.progress import Working


@dataclasses.dataclass(frozen=True)
class Session:
    """A loaded decoder with a home for every request.

    Attributes:
        decoder: on the mesh that the options ask for.
        homes: replica and slot of each request, in request order.
        notes: sentences about what the checkpoint holds and this model does not run.
    """

    decoder: Decoder
    homes: list[Home]
    notes: list[str]


def open_session(
    folder: Path,
    config: Config,
    options: RunOptions,
    working: Working,
    *,
    requests: int,
    positions: int,
    what: str,
    counts: Sequence[int] | None = None,
    settings: Settings | None = None,
    results: Sequence[str] = RESULTS,
) -> Session:
    """Loads a checkpoint for `requests` requests; what can be refused is refused before weights are read.

    Args:
        folder, config: the checkpoint.
        options: topology and cache length.
        requests, positions: how many, and what the longest takes; `what` names it in an error.
        counts: requests per replica; None spreads them evenly.

    Raises:
        UserError, TopologyError, PlanError, SettingsError: with the reason.
        DisagreementError: another process of the job has another config, option or setting.
    """
    topology = Topology.here(*options.topology.sizes)
    homes = spread(requests, topology.attn_dp, counts)
    room = tuple(sum(replica == r for replica, _ in homes) for r in range(topology.attn_dp))
    length = cache_length(config, options.max_seq_len, positions, what)
    settings = settings or Settings.from_environment()
    plan_decode(config, topology, room, settings)
    _agree(config, options, settings, {"requests": requests, "positions": positions, "cache length": length})
    working.stage("loading weights")
    kept = {"slots": slots_for(homes), "max_seq_len": length, "results": results, "settings": settings}
    decoder, loaded = Decoder.load(folder, topology, config=config, progress=working.advance, **kept)
    working.stage("compiling the step")
    return Session(decoder, homes, report.ignored_notes(config, loaded.ignored))


def _agree(config: Config, options: RunOptions, settings: Settings, sizes: dict[str, int]) -> None:
    """All processes of a job are asked for the same; a folder may be elsewhere on another host."""
    items = {"config": config, "option": options, "setting": settings}
    said = {f"{kind}.{name}": str(v) for kind, held in items.items() for name, v in _fields(held) if v is not None}
    agree("the model and the request", said | {name: str(value) for name, value in sizes.items()})


def _fields(held: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of a dataclass and of those in it, folders left out."""
    for field in dataclasses.fields(held):
        value = getattr(held, field.name)
        if dataclasses.is_dataclass(value):
            yield from _fields(value)
        elif not isinstance(value, Path):
            yield field.name, value
