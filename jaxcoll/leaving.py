"""How a process leaves its job: together with the others, or alone with a message and an exit code, never hanging.

JAX's own exit waits for everyone, and its native client aborts where it waits in vain.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import NoReturn

import jax

from jaxcoll.coordination import DISAGREEMENT_EXIT, PEER_TIMEOUT_EXIT, DisagreementError, PeerTimeout, forget, in_a_job
from jaxcoll.peers import Verdict
from jaxcoll.watchdog import Watchdog, current, watch

_LINGER_SECONDS = 4.0  # the coordinator's process goes last, so that the others can still read why
_TELL_SECONDS = 1.0
_POLL_SECONDS = 0.02
_PROBE_SECONDS = 2.0
_LAST_RESORT_SECONDS = 10.0
_INTERRUPTED_EXIT = 130
_claimed = threading.Lock()  # held by the thread that ends the process
_leaver: int | None = None
_on_abort: object = None  # keeps the C function alive


def exit_code(error: BaseException) -> int:
    """The exit code that an uncaught error gives: 75 a lost peer, 76 a disagreement, 130 interrupted, else 1."""
    if isinstance(error, PeerTimeout):
        return PEER_TIMEOUT_EXIT
    if isinstance(error, DisagreementError):
        return DISAGREEMENT_EXIT
    return _INTERRUPTED_EXIT if isinstance(error, KeyboardInterrupt) else 1


def guard(watchdog: Watchdog) -> None:
    """Starts the watchdog, and leads every way out of this process through here."""
    watch(watchdog)
    _catch_native_aborts(watchdog)
    atexit.register(_finish)  # runs before the exit that JAX has registered
    os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    """A forked child is in no job, has none of its threads, and must not wait for what they did."""
    if in_a_job():
        watch(None)
        forget()
        sys.excepthook = sys.__excepthook__
        ctypes.CDLL(None).signal(signal.SIGABRT, None)


def catch_errors() -> None:
    """An uncaught error ends this process at once; at the interpreter's own end JAX would wait for the others."""
    sys.excepthook = _uncaught


def leave(code: int, reason: str) -> NoReturn:
    """Ends this process now, telling the others why; waits for nobody but, in process 0, for those who still read.

    Args:
        code: exit code, not 0.
        reason: one sentence for the others.
    """
    _claim()
    if (watchdog := current()) is not None:
        watchdog.errand(_TELL_SECONDS, watchdog.tell_end, code, reason)
        if watchdog.process_id == 0:
            watchdog.errand(_LINGER_SECONDS, _until_all_have_gone, watchdog)
        else:
            watchdog.errand(_TELL_SECONDS, watchdog.tell_gone)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def leave_by(error: BaseException) -> NoReturn:
    """Prints an error as Python would, with the plan of the step where a peer is to blame, and leaves."""
    _claim()
    if (watchdog := current()) is not None:
        error = _explained(watchdog, error)
    traceback.print_exception(error)
    if isinstance(error, PeerTimeout):
        _dump_plan()
    leave(exit_code(error), _in_a_line(error))


def _explained(watchdog: Watchdog, error: BaseException) -> BaseException:
    """The error itself, or what is wrong with the job where that may have caused it."""
    if isinstance(error, PeerTimeout | DisagreementError | KeyboardInterrupt):
        return error
    try:
        watchdog.blame(error)
    except (PeerTimeout, DisagreementError) as found:
        return found
    watchdog.errand(_TELL_SECONDS, watchdog.tell_end, exit_code(error), _in_a_line(error))
    # Programs in different orders give wrong numbers before they give anything else.
    watchdog.errand(2 * watchdog.beat_seconds, _until_disordered, watchdog)
    if watchdog.verdict is None or watchdog.verdict.lost:
        return error
    found = watchdog.verdict.error()
    found.__cause__ = error
    return found


def _in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def give_up(verdict: Verdict) -> NoReturn:
    """What the judge does when the main thread is stuck where no exception reaches it."""
    leave_by(verdict.error())


def finish() -> None:
    """Leaves the job together with the others, when all of them have come to their end.

    Where one of them failed instead, this process says so and ends with the exit code of what is wrong with the job.
    """
    watchdog = current()
    if watchdog is None or not in_a_job():  # never joined, or left by JAX's own shutdown
        return
    watchdog.errand(_TELL_SECONDS, watchdog.tell_end, 0, "")
    while watchdog.verdict is None and not watchdog.have_ended():
        time.sleep(_POLL_SECONDS)
    watchdog.judge()
    if watchdog.verdict is not None:
        _claim()
        print(f"jaxcoll: this process ended well, the job did not: {watchdog.verdict.text}", file=sys.stderr)
        leave(exit_code(watchdog.verdict.error()), watchdog.verdict.text)
    watchdog.leaving = True
    jax.distributed.shutdown()  # waits for everyone, so it is still watched
    watchdog.stop()
    watch(None)


def _finish() -> None:
    try:
        finish()
    except BaseException as error:  # an interrupt too: the interpreter would pass over it, and JAX wait on
        leave_by(error)


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    leave_by(error.with_traceback(trace))


def _claim() -> None:
    """Returns in the one thread that ends the process."""
    global _leaver
    if _leaver == threading.get_ident():
        return
    if not _claimed.acquire(timeout=_LAST_RESORT_SECONDS):
        os._exit(PEER_TIMEOUT_EXIT)
    _leaver = threading.get_ident()


def _until_all_have_gone(watchdog: Watchdog) -> None:
    while not watchdog.have_gone():
        time.sleep(_POLL_SECONDS)


def _until_disordered(watchdog: Watchdog) -> None:
    while watchdog.verdict is None and not watchdog.have_ended():
        watchdog.judge_order()
        time.sleep(_POLL_SECONDS)
    watchdog.judge_order()


def _dump_plan() -> None:
    watchdog = current()
    if watchdog is None or watchdog.plan is None:
        return
    try:
        plan = watchdog.plan()
    except Exception as error:  # this is a report on another fault
        plan = f"cannot be described: {error}"
    print(f"plan of step {watchdog.step} ({watchdog.doing}):\n{plan}", file=sys.stderr)


def _catch_native_aborts(watchdog: Watchdog) -> None:
    """Turns the abort of JAX's client, whose coordinator is gone, into a verdict; other aborts go their way.

    The client calls abort() in a thread of its own, which may run Python: nothing is interrupted by it.
    """
    global _on_abort
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]

    def on_abort(_: int) -> None:
        if watchdog.verdict is None and _answers(watchdog.coordinator):
            libc.signal(signal.SIGABRT, None)  # SIG_DFL: the abort goes on
            return
        watchdog.accuse(watchdog.coordinator_is_gone())
        time.sleep(_LAST_RESORT_SECONDS)  # the main thread or the judge speaks and ends the process
        os._exit(PEER_TIMEOUT_EXIT)

    _on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(on_abort)
    libc.signal(signal.SIGABRT, ctypes.cast(_on_abort, ctypes.c_void_p))


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_SECONDS).close()
    except OSError:
        return False
    return True
