"""Who has come, before JAX's runtime starts: its client would end the process natively and name nobody.

Process 0 listens on the coordinator's own port until everyone has said its number, tells all of them how it went, and
leaves the port to JAX. The connections stay open while JAX's runtime starts (joining.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator

GREETING = b"jaxcoll"
_RETRY_SECONDS = 0.1
_SLACK_SECONDS = 3.0  # what process 0's answer may take after its own deadline


class MissingProcess(RuntimeError):
    """A job that not every process joined in time, or that one joined twice; the message says which."""


@contextlib.contextmanager
def call_roll(
    address: str, processes: int, process_id: int, timeout: float, *, bind: str | None = None
) -> Iterator[dict[int, socket.socket]]:
    """Enters in every process once all have come; gives process 0 its connections to all others, them theirs to it.

    Args:
        address: host:port of process 0.
        processes, process_id: how many, and which one this is.
        timeout: seconds to wait.
        bind: host:port that process 0 listens on, where it is not every interface.

    Raises:
        MissingProcess: in every process that did come: someone did not, came twice, or counts the processes otherwise.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as connections:
        if process_id == 0:
            bind_host = (bind.rpartition(":")[0] if bind else "").strip("[]")
            come = _answer(connections, bind_host, int(port), processes, deadline, timeout)
        else:
            late = deadline + _SLACK_SECONDS
            come = {0: _report(connections, host.strip("[]"), int(port), processes, process_id, late, address)}
        yield come


def _answer(
    connections: contextlib.ExitStack, host: str, port: int, processes: int, deadline: float, timeout: float
) -> dict[int, socket.socket]:
    """Process 0's side: waits for the others, and tells those who came what is wrong, or nothing."""
    come: dict[int, socket.socket] = {}
    fault = ""
    with _listening(host, port) as server:
        while not fault and len(come) < processes - 1:
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                peer = connections.enter_context(server.accept()[0])
            except TimeoutError:
                missing = [rank for rank in range(1, processes) if rank not in come]
                fault = f"{_named(missing)} of {processes} did not start within {timeout:g} s"
                break
            if (said := _introduction(peer)) is None:
                continue
            rank, counted = said
            if counted != processes:
                fault = f"process {rank} was told of {counted} processes, process 0 of {processes}"
            elif rank in come and not _hung_up(come[rank]):  # one that was started anew takes its own place
                fault = f"two processes say that they are process {rank} of {processes}"
            come[-rank if fault else rank] = peer
    for peer in come.values():
        with contextlib.suppress(OSError):
            peer.sendall(json.dumps({"fault": fault}).encode() + b"\n")
    if fault:
        raise MissingProcess(fault)
    return come


def _listening(host: str, port: int) -> socket.socket:
    """Shares the port with whoever only reserved it, and leaves it free at once.

    Raises:
        MissingProcess: somebody else has it, or this machine is not the coordinator's.
    """
    try:
        return _server(host, port)
    except OSError as error:
        reason = os.strerror(error.errno) if isinstance(error.errno, int) and error.errno > 0 else str(error)
        raise MissingProcess(f"process 0 cannot listen on {host or 'any address'}, port {port}: {reason}") from None


def _server(host: str, port: int) -> socket.socket:
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, reuse_port=True, dualstack_ipv6=True)
    family, _, _, _, found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(found, family=family, reuse_port=True)


def _introduction(peer: socket.socket) -> tuple[int, int] | None:
    """The number of the process that calls, and how many it counts; None from a stranger."""
    peer.settimeout(_SLACK_SECONDS)
    try:
        greeting, rank, counted = _line(peer).split()
        return (int(rank), int(counted)) if greeting == GREETING and int(rank) > 0 else None
    except (OSError, ValueError):
        return None


def _hung_up(peer: socket.socket) -> bool:
    """Whether the process at the other end is gone; it says nothing before it is told."""
    peer.setblocking(False)
    try:
        return peer.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        peer.settimeout(_SLACK_SECONDS)


def _report(
    connections: contextlib.ExitStack,
    host: str,
    port: int,
    processes: int,
    process_id: int,
    deadline: float,
    address: str,
) -> socket.socket:
    """The side of the others: says who it is, and waits for process 0's word."""
    reason = "it does not answer"
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.ExitStack() as attempt:
            try:
                peer = attempt.enter_context(socket.create_connection((host, port), timeout=left))
                peer.sendall(b"%s %d %d\n" % (GREETING, process_id, processes))
                peer.settimeout(max(deadline - time.monotonic(), _RETRY_SECONDS))
                fault = _word(_line(peer))
            except (OSError, ValueError) as error:
                reason = str(error)
                time.sleep(_RETRY_SECONDS)
                continue
            connections.push(attempt.pop_all())
        if fault:
            raise MissingProcess(fault)
        return peer
    raise MissingProcess(f"process 0 of {processes} did not start, or cannot be reached at {address}: {reason}")


def _word(line: bytes) -> str:
    """What process 0 says is wrong; ValueError where it is not process 0 that speaks."""
    if not line:
        raise ValueError("it hung up")
    try:
        fault = json.loads(line)["fault"]
    except (ValueError, TypeError, KeyError):
        fault = None
    if not isinstance(fault, str):
        raise ValueError("something else answers there")
    return fault


def _line(peer: socket.socket) -> bytes:
    """Up to the end of the line and no further: what follows is not the roll call's."""
    line = bytearray()
    while len(line) < 10_000 and (byte := peer.recv(1)):
        line += byte
        if byte == b"\n":
            break
    return bytes(line)


def _named(ranks: list[int]) -> str:
    return f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
