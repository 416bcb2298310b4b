"""Ends what the processes of a launched job have started, wherever it went: into a session of its own, or past the end
of its launcher.

What inherits a job's environment carries its mark. Run as a program, it waits for the launcher's end: it has to be
there after a SIGKILL that nobody can handle. Standard library only, Linux only.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

MARK = "JAXCOLL_LAUNCHED"
_ALL_WELL = b"all well"
_LAST_RESORT_SECONDS = 5.0
_PAUSE_SECONDS = 0.02


def with_mark(environment: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """The environment of a new job's processes, and its mark; a job inside another one carries both marks."""
    mark = f"{os.getpid()}-{secrets.token_hex(8)}"
    outer = environment.get(MARK)
    return {**environment, MARK: f"{outer} {mark}" if outer else mark}, mark


def kill_marked(mark: str) -> None:
    """Kills every process that carries the mark, also those that they start meanwhile."""
    deadline = time.monotonic() + _LAST_RESORT_SECONDS  # nobody can kill a process that the kernel keeps
    while (found := list(_marked(mark))) and time.monotonic() < deadline:
        for process in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_PAUSE_SECONDS)


@contextlib.contextmanager
def reaped(mark: str) -> Iterator[None]:
    """Nothing that carries the mark is left after this, also if this process is killed meanwhile."""
    if sys.platform != "linux":
        yield
        return
    words = [sys.executable, "-I", "-S", __file__, mark]
    nowhere = subprocess.DEVNULL
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True
    ) as reaper:
        try:
            yield
        finally:
            kill_marked(mark)
            assert reaper.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                reaper.stdin.write(_ALL_WELL)
                reaper.stdin.close()


def _marked(mark: str) -> Iterator[int]:
    """Processes with the mark in their environment; a dead one has none."""
    needle = mark.encode()
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if needle in file.read_bytes():
                yield int(file.parent.name)


def _wait_for_the_end(mark: str) -> None:
    if sys.stdin.buffer.read() != _ALL_WELL:
        kill_marked(mark)


if __name__ == "__main__":
    _wait_for_the_end(sys.argv[1])
