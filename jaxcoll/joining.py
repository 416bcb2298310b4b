"""Who is lost between the roll call and JAX's own service, whose client would end the process natively and name nobody.

The connections of the roll call stay open until JAX has let everyone in; a sign of life goes over them, nothing else.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping

_ALIVE, _JOINED, _FAILED = b".", b"+", b"!"
_BEAT_SECONDS = 0.2


@contextlib.contextmanager
def watched(
    lines: Mapping[int, socket.socket], process_id: int, silence: float, give_up: Callable[[str], None]
) -> Iterator[None]:
    """Within it this process joins JAX's service, and a thread says so where another one does not.

    Args:
        lines: connections of the roll call: process 0's to everyone, the others' to process 0.
        silence: seconds after which a process is lost that has not hung up.
        give_up: called by the thread with a sentence that names the lost process; must end this one.
    """
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(lines, silence, give_up, over), name="jaxcoll joining", daemon=True)
    thread.start()
    try:
        yield
    except BaseException as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        _tell(lines, _FAILED + f"{_ended(process_id)}: {reason}\n".encode())
        raise
    else:
        _tell(lines, _JOINED)
    finally:
        over.set()
        thread.join()


def _watch(
    lines: Mapping[int, socket.socket], silence: float, give_up: Callable[[str], None], over: threading.Event
) -> None:
    heard = dict.fromkeys(lines, time.monotonic())  # of those that are still joining
    with selectors.DefaultSelector() as selector:
        for rank, line in lines.items():
            selector.register(line, selectors.EVENT_READ, rank)
        while not over.wait(_BEAT_SECONDS) and heard:
            _tell(lines, _ALIVE)
            for key, _ in selector.select(0):
                said = _read(lines[key.data])
                if fault := _fault(key.data, said):
                    break
                heard[key.data] = time.monotonic()
                if _JOINED in said:
                    selector.unregister(lines[key.data])
                    del heard[key.data]
            else:
                silent = [rank for rank, when in heard.items() if time.monotonic() - when > silence]
                fault = f"process {silent[0]} has been silent for {silence:g} s before all had joined" if silent else ""
            if fault:
                _tell(lines, _FAILED + f"{fault}\n".encode())
                give_up(fault)


def _fault(rank: int, said: bytes) -> str:
    """What is wrong with the job, from what process `rank` said last."""
    if _FAILED in said:
        return said.partition(_FAILED)[2].partition(b"\n")[0].decode(errors="replace")
    return "" if said else _ended(rank)


def _ended(rank: int) -> str:
    return f"process {rank} ended before all had joined"


def _read(line: socket.socket) -> bytes:
    """Nothing where the other end is gone."""
    try:
        return line.recv(10_000)
    except OSError:
        return b""


def _tell(lines: Mapping[int, socket.socket], what: bytes) -> None:
    for line in lines.values():
        with contextlib.suppress(OSError):
            line.sendall(what)
