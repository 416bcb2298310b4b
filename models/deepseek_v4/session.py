"""A checkpoint opened for a set of requests: what every command does before it decodes."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxcoll.agreement import agree
from jaxcoll.coordination import in_a_job
from jaxcoll.settings import Settings
from jaxcoll.step import COMPILE_SECONDS
from jaxcoll.topology import Topology
from models.deepseek_v4 import report
from models.deepseek_v4.config import Config
from models.deepseek_v4.contents import weights_hash
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
    contents: Mapping[str, str] = types.MappingProxyType({}),
) -> Session:
    """Loads a checkpoint for `requests` requests; what can be refused is refused before weights are read.

    Args:
        folder, config: the checkpoint.
        options: topology and cache length.
        requests, positions: how many, and what the longest takes; `what` names it in an error.
        counts: requests per replica; None spreads them evenly.
        contents: name and hash of what else every process of a job must have the same of.

    Raises:
        UserError, TopologyError, PlanError, SettingsError: with the reason.
        DisagreementError: another process of the job has another config, option or setting, or other contents.
    """
    topology, settings = Topology.here(*options.topology.sizes), settings or Settings.from_environment()
    homes = spread(requests, topology.attn_dp, counts)
    room = tuple(sum(replica == r for replica, _ in homes) for r in range(topology.attn_dp))
    length = cache_length(config, options.max_seq_len, positions, what)
    plan_decode(config, topology, room, settings)
    more = {"requests": requests, "positions": positions, "cache length": length, **contents}
    _agree(folder, config, options, settings, more)
    working.stage("loading weights")
    kept = {"slots": slots_for(homes), "max_seq_len": length, "results": results, "settings": settings}
    decoder, loaded = Decoder.load(folder, topology, config=config, progress=working.advance, **kept)
    agree("the first program", {}, timeout=COMPILE_SECONDS)  # disks may differ more than processors
    working.stage("compiling the step")
    return Session(decoder, homes, report.ignored_notes(config, loaded.ignored))


def _agree(
    folder: Path, config: Config, options: RunOptions, settings: Settings, more: Mapping[str, int | str]
) -> None:
    """All processes of a job are asked for the same; a folder may be elsewhere on another host."""
    if not in_a_job():
        return
    items = {"config": config, "option": options, "setting": settings}
    said = {f"{kind}.{name}": str(v) for kind, held in items.items() for name, v in _fields(held) if v is not None}
    said |= {"contents of the weights": weights_hash(folder, config)}
    agree("the model and the request", said | {name: str(value) for name, value in more.items()})


def _fields(held: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of a dataclass and of those in it, folders left out."""
    for field in dataclasses.fields(held):
        value = getattr(held, field.name)
        if dataclasses.is_dataclass(value):
            yield from _fields(value)
        elif not isinstance(value, Path):
            yield field.name, value
