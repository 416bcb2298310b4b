"""Who has come, before JAX's runtime starts: its client would end the process natively and name nobody.

Process 0 listens on the coordinator's own port until everyone has said its number, tells all of them how it went, and
leaves the port to JAX. Nothing else is ever sent this way.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time

GREETING = b"jaxcoll"
_RETRY_SECONDS = 0.1
_SLACK_SECONDS = 3.0  # what process 0's answer may take after its own deadline


class MissingProcess(RuntimeError):
    """A job that not every process joined in time, or that one joined twice; the message says which."""


def call_roll(address: str, processes: int, process_id: int, timeout: float, *, bind: str | None = None) -> None:
    """Returns in every process once all have come.

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
    if process_id == 0:
        bind_host = bind.rpartition(":")[0] if bind else ""
        fault = _answer(bind_host.strip("[]"), int(port), processes, deadline, timeout)
    else:
        fault = _report(host.strip("[]"), int(port), processes, process_id, deadline + _SLACK_SECONDS, address)
    if fault:
        raise MissingProcess(fault)


def _answer(host: str, port: int, processes: int, deadline: float, timeout: float) -> str:
    """Process 0's side: waits for the others, and tells those who came what is wrong, or nothing."""
    come: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as callers, _listening(host, port) as server:
        fault = ""
        while not fault and len(come) < processes - 1:
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                peer = callers.enter_context(server.accept()[0])
            except TimeoutError:
                missing = [rank for rank in range(1, processes) if rank not in come]
                fault = f"{_named(missing)} of {processes} did not start within {timeout:g} s"
                break
            if (said := _introduction(peer)) is None:
                continue
            rank, counted = said
            if counted != processes:
                fault = f"process {rank} was told of {counted} processes, process 0 of {processes}"
            elif rank in come:
                fault = f"two processes say that they are process {rank} of {processes}"
            come[-rank if fault else rank] = peer
        for peer in come.values():
            with contextlib.suppress(OSError):
                peer.sendall(json.dumps({"fault": fault}).encode() + b"\n")
    return fault


def _listening(host: str, port: int) -> socket.socket:
    """Shares the port with whoever only reserved it, and leaves it free at once."""
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


def _report(host: str, port: int, processes: int, process_id: int, deadline: float, address: str) -> str:
    """The side of the others: says who it is, and waits for process 0's word."""
    reason = "it does not answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=left) as peer:
                peer.sendall(b"%s %d %d\n" % (GREETING, process_id, processes))
                peer.settimeout(max(deadline - time.monotonic(), _RETRY_SECONDS))
                return json.loads(_line(peer))["fault"]
        except (OSError, ValueError) as error:
            reason = str(error)
            time.sleep(_RETRY_SECONDS)
    return f"process 0 of {processes} did not start, or cannot be reached at {address}: {reason}"


def _line(peer: socket.socket) -> bytes:
    with peer.makefile("rb") as stream:
        return stream.readline(10_000)


def _named(ranks: list[int]) -> str:
    return f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
