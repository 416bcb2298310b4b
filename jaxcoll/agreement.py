"""All processes say what they are about to run, before a collective makes them depend on each other.

What they say goes through the coordination service, once per compiled program; nothing is sent per step unless the
debug mode asks for it. With one process nothing happens at all.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jaxlib.version

from jaxcoll import coordination
from jaxcoll.coordination import DisagreementError, PeerTimeout
from jaxcoll.primitives import collective_axes, subjaxprs
from jaxcoll.settings import KERNELS_VARIABLE, VARIABLES, flag
from jaxcoll.topology import Topology
from jaxcoll.watchdog import current

AGREE_SECONDS = 120.0  # for a process that is alive and late; a lost one is told sooner
CHECK_STEPS = "JAXCOLL_CHECK_STEPS"
_FOLDER = "jaxcoll/agree"
_LONGEST_VALUE, _SHOWN_ITEMS = 300, 4
_PAUSE_SECONDS = 2e-3
_WHAT = "what comes next"
_HARMLESS_FLAGS = ("--xla_dump_", "--xla_force_host_platform_device_count")


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one agreement took this process, in seconds.

    Attributes:
        what: it was about.
        own: making and comparing the items, and asking the service.
        waited: for the last process to come.
    """

    what: str
    own: float
    waited: float


costs: collections.deque[Cost] = collections.deque(maxlen=1024)  # of the latest agreements
_count = 0  # agreements so far


def agreements() -> int:
    """How many there have been in this process."""
    return _count


def agree(what: str, items: Mapping[str, str], *, timeout: float = AGREE_SECONDS, began: float | None = None) -> None:
    """Returns when all processes have said the same; in a job of one, at once.

    The n-th call of each process meets the n-th of the others, so `what` itself must be the same as well.

    Args:
        what: is about to happen, such as "program decode".
        items: name to value; long values are cut and hashed.
        timeout: seconds for a process that lives but does not come.
        began: when this process began to make the items, for the cost.

    Raises:
        DisagreementError: with the item that differs, and the processes on each side; in every process.
        PeerTimeout: someone is lost, or did not come in time; the message says who.
    """
    if not coordination.in_a_job():
        return
    global _count
    start = time.perf_counter()
    folder, mine = f"{_FOLDER}/{_count}", coordination.process_index()
    said = {_WHAT: what} | {name: _short(value) for name, value in items.items()}
    coordination.put(f"{folder}/{mine}", json.dumps(said))
    asked = time.perf_counter()
    found = _everyone(folder, what, timeout)
    came = time.perf_counter()
    costs.append(Cost(what, own=asked - (began or start), waited=came - asked))
    _count += 1
    _compare({int(rank): json.loads(text) for rank, text in found.items()})
    if mine == 0 and _count > 1:
        coordination.drop(f"{_FOLDER}/{_count - 2}")  # who came to this one has read the one before


def _everyone(folder: str, what: str, timeout: float) -> dict[str, str]:
    """What every process said."""
    watchdog, deadline = current(), time.monotonic() + timeout
    if watchdog:
        watchdog.waiting_for_others(f"waiting for the others before {what}")
    while len(found := coordination.everything_under(folder)) < coordination.process_count():
        if watchdog:
            watchdog.check()
        if time.monotonic() > deadline:
            missing = sorted(set(range(coordination.process_count())) - {int(rank) for rank in found})
            raise PeerTimeout(f"{_named(missing)} did not come to {what} within {timeout:g} s")
        time.sleep(_PAUSE_SECONDS)
    if watchdog:
        watchdog.done_waiting()
    return found


def _compare(said: Mapping[int, Mapping[str, str]]) -> None:
    names = dict.fromkeys(name for rank in sorted(said) for name in said[rank])  # a set's order is each process's own
    differing = [name for name in names if len({items.get(name) for items in said.values()}) > 1]
    if not differing:
        return
    what = said[0][_WHAT]
    about = "" if _WHAT in differing else f" about {what}"
    shown = "; ".join(f"{name}: {_sides(name, said)}" for name in differing[:_SHOWN_ITEMS])
    more = f"; and {len(differing) - _SHOWN_ITEMS} more items" if len(differing) > _SHOWN_ITEMS else ""
    raise DisagreementError(f"the processes disagree{about}: {shown}{more}")


def _sides(name: str, said: Mapping[int, Mapping[str, str]]) -> str:
    sides: dict[str | None, list[int]] = {}
    for rank in sorted(said):
        sides.setdefault(said[rank].get(name), []).append(rank)
    return ", ".join(f"{'nothing' if value is None else repr(value)} on {_named(r)}" for value, r in sides.items())


def agree_on_environment() -> None:
    """All processes run the same versions, flags and settings."""
    given = [word for word in os.environ.get("XLA_FLAGS", "").split() if not word.startswith(_HARMLESS_FLAGS)]
    flags = {word.partition("=")[0]: word for word in given}.values()  # the last one of a name counts
    items = {
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "Python": platform.python_version(),
        "byte order": sys.byteorder,
        "XLA_FLAGS": " ".join(sorted(flags)),
        "64-bit types": str(jax.config.jax_enable_x64),
    }
    items |= {name: os.environ.get(name, "") for name in (*VARIABLES.values(), KERNELS_VARIABLE)}
    items[CHECK_STEPS] = str(steps_are_checked())
    agree("the environment", items)


def agree_on_program(name: str, topology: Topology, traced: Any, lowered: jax.stages.Lowered, args: Any) -> str:
    """All processes have lowered the same program, for the same mesh and shapes.

    Args:
        args: abstract arguments with their shardings.

    Returns:
        The program's fingerprint, "" in a job of one.
    """
    if not coordination.in_a_job():
        return ""
    began = time.perf_counter()
    devices = [f"{d.id} of process {d.process_index}" for d in topology.mesh.devices.flat]
    fingerprint = hashlib.sha256(lowered.as_text().encode()).hexdigest()[:16]
    items = {
        "mesh": str(dict(topology.mesh.shape)),
        "devices in rank order": ", ".join(devices),
        "shapes": ", ".join(_shapes(args)),
        "collectives": ", ".join(_collectives(traced.jaxpr.jaxpr)),
        "lowered program": fingerprint,
    }
    agree(f"program {name}", items, began=began)
    if coordination.process_index() == 0:
        own, waited = costs[-1].own * 1e3, costs[-1].waited * 1e3
        many = coordination.process_count()
        said = f"{many} processes agree on program {name}: {own:.1f} ms of work, {waited:.1f} ms until all had come"
        print(f"jaxcoll: {said}", file=sys.stderr)
    return fingerprint


def agree_on_step(number: int, name: str, fingerprint: str) -> None:
    """The debug mode: all processes are about to run the same program as the same step."""
    agree(f"step {number}, program {name}", {"lowered program": fingerprint})


def steps_are_checked() -> bool:
    """Whether JAXCOLL_CHECK_STEPS asks for the debug mode.

    Raises:
        SettingsError: it is neither on nor off.
    """
    return bool(os.environ.get(CHECK_STEPS)) and flag(os.environ, CHECK_STEPS)


def _shapes(args: Any) -> Iterator[str]:
    """Global and per-device shapes."""
    for leaf in jax.tree.leaves(args):
        local = list(leaf.sharding.shard_shape(leaf.shape))
        yield f"{leaf.dtype}{list(leaf.shape)} in parts of {local}"


def _collectives(jaxpr: Any) -> Iterator[str]:
    """What the program communicates, in order."""
    for eqn in jaxpr.eqns:
        if axes := collective_axes(eqn):
            yield f"{eqn.primitive.name} over {'/'.join(sorted(axes))}"
        for body in subjaxprs(eqn):
            yield from _collectives(body)


def _short(value: str) -> str:
    if len(value) <= _LONGEST_VALUE:
        return value
    return f"{value[:_LONGEST_VALUE]}... (sha256 {hashlib.sha256(value.encode()).hexdigest()[:16]})"


def _named(ranks: Sequence[int]) -> str:
    return f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
