"""Jobs of several processes as the tests start them, each process watched on its own; no tests in here."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from jaxcoll.launch import member_environment, reserved_port

ROOT = Path(__file__).parent.parent
WORKER = ROOT / "tests" / "job_worker.py"
START_SECONDS = 60  # a loaded machine imports slowly; the faults have limits of their own


@dataclasses.dataclass
class Ended:
    """How a process ended: exit code (-n for signal n, None where the test had to kill it), output, and when."""

    code: int | None
    out: str
    err: str
    when: float

    @property
    def last_words(self) -> str:
        """The lines of its own errors, without tracebacks and native noise."""
        return "\n".join(re.findall(r"^(?:jaxcoll|AssertionError).*$", self.err, re.MULTILINE))


def environment(**more: str) -> dict[str, str]:
    """This test's environment without its devices."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAXCOLL_", "JAX_NUM_CPU"))}
    return kept | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | more


def run_job(
    words: Sequence[str | Path],
    processes: int,
    *,
    devices_per_process: int = 1,
    missing: Iterable[int] = (),
    stopped: Iterable[int] = (),
    change: Callable[[int], Mapping[str, str]] = lambda rank: {},
    seconds: float = 45.0,
) -> dict[int, Ended]:
    """Starts the processes of a job and waits for them; nothing of it is left when this returns.

    Args:
        words: Python's arguments.
        missing: ranks that never start.
        stopped: ranks that nobody waits for; killed at the end.
        change: environment of one rank.
        seconds: for all of them, beside START_SECONDS.
    """
    members: dict[int, subprocess.Popen[str]] = {}
    ended: dict[int, Ended] = {}
    deadline = time.monotonic() + START_SECONDS + seconds
    with reserved_port() as port:
        for rank in sorted(set(range(processes)) - set(missing)):
            base = environment(**change(rank))
            members[rank] = subprocess.Popen(
                [sys.executable, *map(str, words)],
                env=member_environment(base, rank, processes, devices_per_process, port),
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                process_group=0,
            )
        threads = [
            threading.Thread(target=_collect, args=(rank, member, deadline, ended))
            for rank, member in members.items()
            if rank not in stopped
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for rank in stopped:
        members[rank].kill()
        _collect(rank, members[rank], time.monotonic() + 10, ended)
    return ended


def _collect(rank: int, member: subprocess.Popen[str], deadline: float, ended: dict[int, Ended]) -> None:
    killed = False
    try:
        out, err = member.communicate(timeout=max(deadline - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        killed = True
        member.send_signal(signal.SIGKILL)
        out, err = member.communicate()
    ended[rank] = Ended(None if killed else member.returncode, out, err, time.time())


def is_running(process: int) -> bool:
    """Whether a process of this number exists and is no zombie."""
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Polls; an AssertionError naming `what` after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
