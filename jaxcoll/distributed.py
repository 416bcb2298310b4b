"""One job over several processes: joining it, and leaving it without hanging, whatever happened.

JAX's own runtime and cluster detection do the work; one process alone is a job too, and nothing is started for it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import NoReturn

import jax

from jaxcoll import coordination, joining
from jaxcoll.agreement import agree_on_environment
from jaxcoll.coordination import PeerTimeout, Place
from jaxcoll.launch import BIND, COORDINATOR, LOCAL_DEVICES, PROCESS_ID, PROCESSES
from jaxcoll.leaving import catch_errors, finish, give_up, guard, leave, leave_by
from jaxcoll.roll_call import MissingProcess, call_roll
from jaxcoll.watchdog import PEER_SECONDS, STEP_SECONDS, Watchdog, current
from jaxcoll.whole import whole_number

CLUSTER = "JAXCOLL_CLUSTER"
START_TIMEOUT, PEER_TIMEOUT, STEP_TIMEOUT = "JAXCOLL_START_TIMEOUT", "JAXCOLL_PEER_TIMEOUT", "JAXCOLL_STEP_TIMEOUT"
START_SECONDS = 20.0
_NATIVE_SECONDS = 100.0  # JAX's own heartbeat, whose client aborts; ours has to be faster

__all__ = ["Job", "JobError", "finish", "initialize", "leave"]


class JobError(ValueError):
    """A job that is described in contradicting or incomplete words; the message says what is missing."""


@dataclasses.dataclass(frozen=True)
class Job:
    """This process's place in its job."""

    processes: int = 1
    process_id: int = 0

    @property
    def leads(self) -> bool:
        """Whether this is the one process that prints."""
        return self.process_id == 0


_joined: Job | None = None


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
    *,
    cluster: str | None = None,
    start_timeout: float | None = None,
    peer_timeout: float | None = None,
    step_timeout: float | None = None,
) -> Job:
    """Joins the job that this process belongs to, before any device is started; later calls return the same job.

    What is not given is read from JAX_COORDINATOR_ADDRESS, JAXCOLL_NUM_PROCESSES and JAXCOLL_PROCESS_ID, and where
    those do not say it either, from the cluster as JAX detects it.

    Args:
        coordinator: host:port of process 0.
        processes, process_id: how many, and which one this is.
        cluster: one cluster's name in JAX, "deactivate" for none; None reads JAXCOLL_CLUSTER, or tries all.
        start_timeout: seconds until the last process must have come; None reads JAXCOLL_START_TIMEOUT, or 20.
        peer_timeout: seconds of silence after which a process is lost; None reads JAXCOLL_PEER_TIMEOUT, or 10.
        step_timeout: seconds that a step may take; None reads JAXCOLL_STEP_TIMEOUT, or 20.

    Raises:
        JobError: the three do not make a job, a time is none, devices have started, or this process has left its job.
        PeerTimeout: somebody did not come; in every process that did.
        DisagreementError: the processes have other versions, flags or settings.
    """
    global _joined
    if _joined is not None:
        return _still_joined(_joined)
    peer_timeout = seconds(PEER_TIMEOUT, PEER_SECONDS, peer_timeout)
    times = {"peer_seconds": peer_timeout, "step_seconds": seconds(STEP_TIMEOUT, STEP_SECONDS, step_timeout)}
    start_timeout = seconds(START_TIMEOUT, START_SECONDS, start_timeout)
    place = find_place(Place(coordinator, processes, process_id, None), os.environ, cluster, start_timeout)
    if place.processes != 1:
        _join(place, start_timeout, times)
    _joined = Job(place.processes or 1, place.process_id or 0)
    return _joined


def _still_joined(job: Job) -> Job:
    if job.processes > 1 and current() is None:  # nobody would be watched any more
        raise JobError("this process has left its job, and a process joins one job only")
    return job


def find_place(given: Place, environment: Mapping[str, str], cluster: str | None, timeout: float) -> Place:
    """Completes what was given from the environment and the cluster.

    Raises:
        JobError: something is missing or out of range.
    """
    place = Place(
        given.coordinator or environment.get(COORDINATOR),
        given.processes if given.processes is not None else _number(environment, PROCESSES),
        given.process_id if given.process_id is not None else _number(environment, PROCESS_ID),
        None,
    )
    if place.processes is None and place.process_id is None:
        found = _detected(cluster or environment.get(CLUSTER), timeout)
        local = None if environment.get(LOCAL_DEVICES) else found.local_device_ids  # JAX reads the variable itself
        place = found._replace(coordinator=place.coordinator or found.coordinator, local_device_ids=local)
        if place.processes is None and place.coordinator is None:
            return Place(None, 1, 0, None)
    if place.processes == 1 and place.process_id in (None, 0):
        return Place(None, 1, 0, None)
    _check_place(place)
    return place


def _detected(cluster: str | None, timeout: float) -> Place:
    try:
        return coordination.detect_cluster(cluster, timeout)
    except (ValueError, RuntimeError) as error:
        raise JobError(f"{error}; {CLUSTER}={coordination.DEACTIVATE} looks for none") from error


def _check_place(place: Place) -> None:
    for value, least, what, name in (
        (place.processes, 1, "the number of processes", PROCESSES),
        (place.process_id, 0, "this process's number", PROCESS_ID),
    ):
        if value is None:
            raise JobError(f"a job of several processes needs {what}; set {name}")
        whole_number(what, value, least, JobError)
    assert place.processes is not None and place.process_id is not None
    if place.process_id >= place.processes:
        raise JobError(f"{PROCESS_ID} must be from 0 to {place.processes - 1}, not {place.process_id}")
    if place.coordinator is None:
        raise JobError(f"a job of several processes needs the coordinator's host:port; set {COORDINATOR}")
    host, _, port = place.coordinator.rpartition(":")
    if not host or not _is_whole(port) or not 0 < int(port) < 1 << 16:
        raise JobError(f"{COORDINATOR} must be host:port, not {place.coordinator!r}")


def _join(place: Place, timeout: float, times: dict[str, float]) -> None:
    """Waits for everyone, joins JAX's runtime, and has the others watched from here on."""
    assert place.processes is not None and place.process_id is not None and place.coordinator is not None
    if coordination.runtime_has_started():
        raise JobError("a process joins its job before any device is started, and by initialize() of jaxcoll alone")
    catch_errors()
    # JAX's preemption service would take SIGTERM for a notice and go on.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    silence = times["peer_seconds"]
    try:
        with (
            call_roll(
                place.coordinator, place.processes, place.process_id, timeout, bind=os.environ.get(BIND)
            ) as lines,
            joining.watched(lines, place.process_id, silence, _give_up_joining),
        ):
            jax.distributed.initialize(
                place.coordinator,
                place.processes,
                place.process_id,
                local_device_ids=place.local_device_ids,
                cluster_detection_method="deactivate",
                # Everyone is there, and who goes is told by `joining`; JAX's client would name nobody.
                initialization_timeout=int(max(timeout, 3 * silence)) + 1,
                heartbeat_timeout_seconds=int(max(_NATIVE_SECONDS, 5 * silence)),
                shutdown_timeout_seconds=int(3 * silence) + 1,  # the watchdog is sooner
            )
    except MissingProcess as error:
        raise PeerTimeout(f"the job did not start: {error}") from None
    guard(Watchdog(place.processes, place.process_id, place.coordinator, give_up=give_up, **times))
    agree_on_environment()


def _give_up_joining(fault: str) -> NoReturn:
    """In a thread of its own: the main one waits natively for who will not come."""
    leave_by(PeerTimeout(f"the job did not start: {fault}"))


def seconds(name: str, default: float, given: float | None = None) -> float:
    """A time as it was given, or from the environment.

    Raises:
        JobError: it is no positive number.
    """
    said, value = (os.environ.get(name), default) if given is None else (given, given)
    if given is None and said:
        try:
            value = float(said)
        except ValueError:
            value = -1.0
    if not _is_a_time(value):
        raise JobError(f"{name}={said!r} must be a positive number of seconds")
    return value


def _is_a_time(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < 1e9


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if text is None:
        return None
    if not _is_whole(text) or (name == PROCESSES and not int(text)):
        raise JobError(f"{name}={text!r} must be a whole number of at least {int(name == PROCESSES)}")
    return int(text)
