"""Starts the processes of a job on this machine, as a cluster would on many; it knows nothing of what they run.

Every process gets a process group of its own, so that signals reach all that it started; what has left its group is
found by a mark in its environment (reaper.py), so that nothing is left behind. It starts no device. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

from jaxcoll.reaper import kill_marked, reaped, with_mark

COORDINATOR = "JAX_COORDINATOR_ADDRESS"
BIND = "JAX_COORDINATOR_BIND_ADDRESS"
PROCESSES, PROCESS_ID = "JAXCOLL_NUM_PROCESSES", "JAXCOLL_PROCESS_ID"
CPU_DEVICES, LOCAL_DEVICES = "JAX_NUM_CPU_DEVICES", "JAX_LOCAL_DEVICE_IDS"
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
FORWARDED = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux
GRACE_SECONDS = 15.0
_LONGEST_LINE = 1 << 16  # bytes; what prints longer ones, or none at all, must not fill the memory
_LAST_WORDS_SECONDS = 5.0


class LaunchError(ValueError):
    """A job that cannot be started; the message says why."""


@dataclasses.dataclass
class _Member:
    """One process of the job, leader of its process group."""

    rank: int
    process: subprocess.Popen[bytes]
    code: int | None = None


def launch(
    command: Sequence[str], processes: int, devices_per_process: int, *, grace_seconds: float = GRACE_SECONDS
) -> int:
    """Runs `command` in every process of a job and waits until all have ended.

    Process 0's stdout is this process's; every other line is passed to stderr behind its process number. Signals are
    forwarded. When one process fails, the others have `grace_seconds` to say what they miss, and are then killed, a
    stopped one too; so are they after a signal that asks them to end.

    Args:
        command: program and arguments.
        processes: how many.
        devices_per_process: CPU devices that each one shows; of GPUs, those that each one takes.

    Returns:
        0, or the exit code of the first process that failed (128 + n for signal n).

    Raises:
        LaunchError: the program cannot be started.
    """
    environment, mark = with_mark(os.environ)
    with reserved_port() as port, _forwarding() as events, reaped(mark):
        members = _start(command, processes, devices_per_process, environment, port)
        pumps = list(_pumps(members))
        for member in members:
            threading.Thread(target=_watch, args=(member, events), daemon=True).start()
        try:
            return _supervise(members, events, grace_seconds)
        finally:
            for member in members:
                _kill(member)
                member.process.wait()
            kill_marked(mark)  # what has left its group may hold a pipe open
            deadline = time.monotonic() + _LAST_WORDS_SECONDS
            for pump in pumps:
                pump.join(max(deadline - time.monotonic(), 0))


def member_environment(
    environment: Mapping[str, str], rank: int, processes: int, devices_per_process: int, port: int
) -> dict[str, str]:
    """What process `rank` finds in its environment: who it is, where the coordinator is, and its devices."""
    flags = re.sub(r"--xla_force_host_platform_device_count=\S*", "", environment.get("XLA_FLAGS", "")).strip()
    first = rank * devices_per_process
    return {k: v for k, v in environment.items() if k != "XLA_FLAGS"} | ({"XLA_FLAGS": flags} if flags else {}) | {
        COORDINATOR: f"127.0.0.1:{port}",
        BIND: f"127.0.0.1:{port}",
        PROCESSES: str(processes),
        PROCESS_ID: str(rank),
        CPU_DEVICES: str(devices_per_process),
        LOCAL_DEVICES: ",".join(map(str, range(first, first + devices_per_process))),
    }  # fmt: skip


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A free port that nobody else gets: it stays bound here, and the coordinator's server shares it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@contextlib.contextmanager
def _forwarding() -> Iterator[queue.SimpleQueue]:
    """Turns signals into events of the queue while it lasts."""
    events: queue.SimpleQueue = queue.SimpleQueue()

    def put(number: int, _: object) -> None:
        events.put(signal.Signals(number))

    before = {number: signal.signal(number, put) for number in FORWARDED}
    try:
        yield events
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(
    command: Sequence[str], processes: int, devices_per_process: int, environment: Mapping[str, str], port: int
) -> list[_Member]:
    members: list[_Member] = []
    try:
        for rank in range(processes):
            process = subprocess.Popen(
                command,
                env=member_environment(environment, rank, processes, devices_per_process, port),
                stdin=subprocess.DEVNULL,
                stdout=None if rank == 0 else subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
            members.append(_Member(rank, process))
    except OSError as error:
        for member in members:
            _kill(member)
            member.process.wait()
        raise LaunchError(f"{command[0]} cannot be started: {error.strerror}") from error
    return members


def _end_with_parent() -> None:
    """Runs in the child: it is killed if the launcher is, which then can clean up nothing."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def _pumps(members: Sequence[_Member]) -> Iterator[threading.Thread]:
    lock = threading.Lock()
    for member in members:
        for stream in filter(None, (member.process.stdout, member.process.stderr)):
            pump = threading.Thread(target=_pump, args=(member.rank, stream, lock), daemon=True)
            pump.start()
            yield pump


def _pump(rank: int, stream: IO[bytes], lock: threading.Lock) -> None:
    """Passes lines on to stderr, whole ones up to _LONGEST_LINE, behind their process number."""
    while line := stream.readline(_LONGEST_LINE):
        with lock:
            _write(b"[%d] %s\n" % (rank, line.rstrip(b"\r\n")))


def _write(line: bytes) -> None:
    """To stderr, if there is one: where nobody reads it, the processes must still be able to write."""
    if sys.stderr is None:
        return
    with contextlib.suppress(OSError, ValueError):
        if (raw := getattr(sys.stderr, "buffer", None)) is not None:
            raw.write(line)
        else:  # a notebook's
            sys.stderr.write(line.decode(errors="replace"))
        sys.stderr.flush()


def _watch(member: _Member, events: queue.SimpleQueue) -> None:
    """Tells when a process has ended, without reaping it: until then nobody else gets its group's number."""
    os.waitid(os.P_PID, member.process.pid, os.WEXITED | os.WNOWAIT)
    events.put(member)


def _supervise(members: Sequence[_Member], events: queue.SimpleQueue, grace_seconds: float) -> int:
    """Handles signals and ends until every process has ended; returns the job's exit code."""
    first_failure, deadline, killed = 0, None, False
    while running := [member for member in members if member.code is None]:
        try:
            event = events.get(timeout=None if deadline is None else max(deadline - time.monotonic(), 0))
        except queue.Empty:
            _say(f"killing {_named(member.rank for member in running)} after {grace_seconds:g} s")
            for member in running:
                _kill(member)
            deadline, killed = None, True
            continue
        if isinstance(event, signal.Signals):
            for member in running:
                _send(member, event)
            failed = event in _ENDING
        else:
            _kill(event)  # what it started and left behind
            returned = event.process.wait()
            event.code = _exit_code(returned)
            failed = event.code != 0
            first_failure = first_failure or event.code
            if failed and not killed:
                _say(f"process {event.rank} {_described(returned)}")
        if failed and deadline is None and not killed:
            deadline = time.monotonic() + grace_seconds
    return first_failure


def _send(member: _Member, number: int) -> None:
    """To the whole group, while its leader is not yet reaped."""
    if member.code is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(member.process.pid, number)


def _kill(member: _Member) -> None:
    _send(member, signal.SIGKILL)
    _send(member, signal.SIGCONT)


def _exit_code(returned: int) -> int:
    return 128 - returned if returned < 0 else returned


def _described(returned: int) -> str:
    if returned >= 0:
        return f"ended with exit code {returned}"
    number = -returned
    return f"was ended by {signal.Signals(number).name if number in set(signal.Signals) else f'signal {number}'}"


def _named(ranks: Iterator[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    return f"process{'es' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def _say(what: str) -> None:
    _write(f"jaxcoll launch: {what}\n".encode())
