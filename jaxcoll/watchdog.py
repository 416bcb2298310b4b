"""Sees that a process of the job has died, stopped, ended or fallen behind, and says so in every other process.

Every process beats: a thread writes its step to the coordination service and reads the others'. A second one
judges, because the first hangs when the service does. Nothing is sent per step.
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from jaxcoll import coordination
from jaxcoll.order import Order
from jaxcoll.peers import Flight, Peer, Verdict

PEER_SECONDS, STEP_SECONDS = 10.0, 20.0
_FOLDER = "jaxcoll/watch"
_JUDGE_SECONDS = 0.2
_LATE_SECONDS = 2.0  # how long a thread that can raise may take before the judge ends the process itself
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1e-3, 2e-3  # between looks at a step: a twentieth of what it has taken so far


class Watchdog:
    """This process's beats and its view of the others.

    Args:
        processes, process_id: the job.
        coordinator: host:port of the coordination service, for messages.
        peer_seconds: silence after which a process counts as lost.
        step_seconds: how long a dispatched step may take.
        give_up: called by the judge with the verdict when the main thread does not raise it; must end the process.
    """

    def __init__(
        self,
        processes: int,
        process_id: int,
        coordinator: str,
        *,
        peer_seconds: float = PEER_SECONDS,
        step_seconds: float = STEP_SECONDS,
        give_up: Callable[[Verdict], None],
    ):
        self.processes, self.process_id, self.coordinator = processes, process_id, coordinator
        self.peer_seconds, self.step_seconds = peer_seconds, step_seconds
        self.beat_seconds = min(1.0, peer_seconds / 5)
        self.step, self.doing = 0, "starting"
        self.order = Order()
        self.verdict: Verdict | None = None
        self.raised = False
        self.leaving = False  # all have ended well, and leave JAX's runtime together
        self.plan: Callable[[], str] | None = None  # describes the latest step
        self._give_up = give_up
        self._stop = threading.Event()
        now = time.monotonic()
        self.peers = {rank: Peer(now) for rank in range(processes) if rank != process_id}
        self._contact = now  # when the service last answered
        self._flight: Flight | None = None
        self._acquitted: BaseException | None = None
        self._errands: queue.SimpleQueue = queue.SimpleQueue()

    def start(self) -> None:
        """Starts the threads."""
        for target in (self._beat, self._judge, self._run_errands):
            threading.Thread(target=target, name=f"jaxcoll {target.__name__}", daemon=True).start()

    def stop(self) -> None:
        """Ends the beats; the others then need to have been told why."""
        self._stop.set()

    # What the main thread says and asks.

    @contextlib.contextmanager
    def dispatching(
        self, name: str, fingerprint: str, plan: Callable[[], str], *, counted: bool = True
    ) -> Iterator[Callable[[Any], Any]]:
        """A step is dispatched within it; what it gives takes the outputs, and hands them on.

        The step is in flight until its outputs are ready, deleted or forgotten.

        Raises:
            PeerTimeout: a process is lost.
            DisagreementError: a process has run other programs, or in another order.
        """
        self.check()
        self.step += counted
        self.order.note(fingerprint)
        self.doing, self.plan = name, plan
        flight = self._flight = Flight(time.monotonic())

        def note(outputs: Any) -> Any:
            flight.outputs = [weakref.ref(leaf) for leaf in jax.tree.leaves(outputs) if isinstance(leaf, jax.Array)]
            return outputs

        try:
            yield note
        except Exception as error:
            self.blame(error)
            raise

    def check(self) -> None:
        """Raises PeerTimeout or DisagreementError once a verdict is known."""
        if self.verdict is not None:
            self.raised = True
            raise self.verdict.error()

    def wait(self, arrays: Iterable[jax.Array]) -> None:
        """Blocks until the arrays are ready.

        Raises:
            PeerTimeout: a peer is lost, or the step takes too long.
            DisagreementError: a process has run other programs, or in another order.
            JaxRuntimeError: the step failed, and no peer is to blame.
        """
        waiting = arrays = list(arrays)
        began = time.monotonic()
        try:
            while waiting := [array for array in waiting if not array.is_ready()]:
                self.check()
                time.sleep(min(max(time.monotonic() - began, _SHORTEST_PAUSE) / 20, _LONGEST_PAUSE))
            jax.block_until_ready(arrays)
        except Exception as error:
            self.blame(error)
            raise

    def blame(self, error: BaseException) -> None:
        """Waits until it is clear whether a lost peer is behind an error of JAX's runtime; raises it if so."""
        if error is self._acquitted or not _of_the_runtime(error):
            return
        deadline = time.monotonic() + self.peer_seconds + 3 * self.beat_seconds
        while self.verdict is None and time.monotonic() < deadline:
            time.sleep(_JUDGE_SECONDS)
        if self.verdict is not None:
            self.raised = True
            raise self.verdict.error() from error
        self._acquitted = error  # nobody else has to wait again

    def waiting_for_others(self, doing: str) -> None:
        """This process waits outside of a step, so a peer that has ended is a lost one."""
        self.doing, self._flight = doing, Flight(time.monotonic(), patient=True)

    def done_waiting(self) -> None:
        """It has what it waited for."""
        self._flight = None

    def tell_end(self, code: int, reason: str) -> None:
        """Tells the others that this process ends now, and after which step."""
        record = {"code": code, "step": self.step, "reason": reason, "order": [self.order.position, self.order.mark]}
        coordination.put(f"{_FOLDER}/end.{self.process_id}", json.dumps(record))

    def tell_gone(self) -> None:
        """Tells process 0 that this one asks nothing more."""
        coordination.put(f"{_FOLDER}/gone.{self.process_id}", "")

    def have_gone(self) -> bool:
        """Whether no peer that still beats asks the service for anything; reads it."""
        self._read()
        return all(peer.gone or self._silent(peer) for peer in self.peers.values())

    def have_ended(self) -> bool:
        """Whether every peer that still beats has said that it ends; reads the service."""
        self._read()
        return all(peer.code is not None or self._silent(peer) for peer in self.peers.values())

    def accuse(self, verdict: Verdict) -> None:
        """Makes a verdict known here and, where the service answers, everywhere."""
        if self.verdict is not None:
            return
        self.verdict = verdict
        told = [verdict.lost, f"{verdict.text} (said by process {self.process_id})"]
        self.errand(0, coordination.put_first, f"{_FOLDER}/verdict", json.dumps(told))

    def errand(self, seconds: float, act: Callable, *args: Any) -> None:
        """Does something that may hang or fail with the service, and waits so long for it; nothing depends on it."""
        done = threading.Event()
        self._errands.put((act, args, done))
        done.wait(seconds)

    def coordinator_is_gone(self) -> Verdict:
        """The verdict where JAX's client has lost its server."""
        said = f"process 0 is lost: its coordination service at {self.coordinator} is gone; {self._everyone()}"
        return Verdict(lost=True, text=said)

    # The threads. No new one starts when the interpreter ends, so the one for errands is there from the start.

    def _run_errands(self) -> None:
        while True:
            act, args, done = self._errands.get()
            _try(act, *args)
            done.set()

    def _beat(self) -> None:
        count = 0
        while not self._stop.is_set():
            count += 1
            order = [self.order.position, self.order.mark]
            record = {"count": count, "step": self.step, "doing": self.doing, "order": order}
            if _try(coordination.put, f"{_FOLDER}/beat.{self.process_id}", json.dumps(record)):
                _try(self._read)
            self._stop.wait(self.beat_seconds)

    def _read(self) -> None:
        found = coordination.everything_under(_FOLDER)
        now = time.monotonic()
        for rank, peer in self.peers.items():
            peer.gone = f"gone.{rank}" in found
            if end := found.get(f"end.{rank}"):
                record = json.loads(end)
                peer.step, peer.reason, peer.order = record["step"], record["reason"], tuple(record["order"])
                peer.code = record["code"]
            if beat := found.get(f"beat.{rank}"):
                record = json.loads(beat)
                if record["count"] != peer.count:
                    peer.count, peer.heard, peer.doing = record["count"], now, record["doing"]
                    if peer.code is None:
                        peer.step, peer.order = record["step"], tuple(record["order"])
        self._contact = now
        if self.verdict is None and "verdict" in found:
            self.verdict = Verdict(*json.loads(found["verdict"]))

    def _judge(self) -> None:
        condemned: float | None = None
        while not self._stop.wait(_JUDGE_SECONDS):
            if self.verdict is None:
                self.judge()
            if self.verdict is not None:
                condemned = condemned or time.monotonic()
                if not self.raised and time.monotonic() - condemned > _LATE_SECONDS:
                    self._give_up(self.verdict)

    def judge(self) -> None:
        """Accuses whom there is reason to accuse."""
        self.judge_order()
        if self.verdict is None and (said := self._lost() or self._late()):
            self.accuse(Verdict(lost=True, text=said))

    def judge_order(self) -> None:
        """Accuses who has run other programs than this process, or in another order."""
        others = [rank for rank, peer in self.peers.items() if not self.order.fits(*peer.order)]
        if others and self.verdict is None:
            said = self._said(others, f"running other programs than process {self.process_id}, or in another order")
            self.accuse(Verdict(lost=False, text=said))

    def _silent(self, peer: Peer) -> bool:
        # By the time of the last answer, not by now: a process that was stopped itself must not accuse the others.
        return self._contact - peer.heard > self.peer_seconds

    def _lost(self) -> str | None:
        """Who is gone, if anyone is."""
        quiet = time.monotonic() - self._contact
        if quiet > self.peer_seconds:
            service = f"its coordination service at {self.coordinator}"
            return f"process 0 is lost or cut off: {service} has not answered for {quiet:.0f} s"
        if silent := [rank for rank, peer in self.peers.items() if self._beats(peer) and self._silent(peer)]:
            return self._said(silent, f"silent for more than {self.peer_seconds:g} s")
        if failed := [rank for rank, peer in self.peers.items() if peer.code]:
            return self._said(failed, "no longer there")
        left = [rank for rank, peer in self.peers.items() if peer.code == 0 and self._needs(peer)]
        return self._said(left, f"gone while process {self.process_id} is at {self._here()}") if left else None

    def _beats(self, peer: Peer) -> bool:
        """Whether it should: one that has ended well does so until all leave."""
        return peer.code is None or (self.leaving and peer.code == 0)

    def _needs(self, peer: Peer) -> bool:
        flight = self._in_flight()
        return flight is not None and (peer.order[0] < self.order.position or flight.patient)

    def _late(self) -> str | None:
        """Whether the step in flight takes too long, and who has not come to it."""
        flight = self._in_flight()
        if flight is None or flight.patient or time.monotonic() - flight.since <= self.step_seconds:
            return None
        behind = [rank for rank, peer in self.peers.items() if peer.step < self.step or peer.doing != self.doing]
        where = f"{self._here()} has not finished within {self.step_seconds:g} s"
        if behind:
            return f"{where}; {self._said(behind, 'not at it')}"
        return f"{where}, although every process is at it and alive; {self._everyone()}"

    def _in_flight(self) -> Flight | None:
        flight = self._flight
        return None if flight is None or flight.over() else flight

    # Words.

    def _said(self, ranks: list[int], what: str) -> str:
        names = f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        return f"{names} {'are' if len(ranks) > 1 else 'is'} {what}; {self._everyone()}"

    def _here(self) -> str:
        return f"step {self.step} ({self.doing})"

    def _everyone(self) -> str:
        reports = {rank: self._status(rank, peer) for rank, peer in self.peers.items()}
        reports[self.process_id] = f"process {self.process_id} at {self._here()}"
        return "last reports: " + ", ".join(reports[rank] for rank in sorted(reports))

    def _status(self, rank: int, peer: Peer) -> str:
        where = f"process {rank} at step {peer.step} ({peer.doing})"
        if peer.code is not None:
            where = f"process {rank} ended after step {peer.step} with exit code {peer.code}"
            where += f": {peer.reason}" if peer.reason else ""
        if not self._beats(peer):
            return where
        return f"{where}, silent for {time.monotonic() - peer.heard:.0f} s" if self._silent(peer) else where


def _of_the_runtime(error: BaseException) -> bool:
    """A failed step is a JaxRuntimeError, or a ValueError with a status in capitals: UNKNOWN: Gloo AllGather failed."""
    return isinstance(error, jax.errors.JaxRuntimeError | ValueError) and bool(re.match("[A-Z_]+: ", str(error)))


def _try(act: Callable, *args: Any) -> bool:
    """Whether it worked; a service that is gone is the judge's affair."""
    try:
        act(*args)
    except Exception:
        return False
    return True


_watching: Watchdog | None = None


def current() -> Watchdog | None:
    """The job's watchdog; None where there is no job of several processes."""
    return _watching


def watch(watchdog: Watchdog | None) -> None:
    """Makes it the process's own."""
    global _watching
    _watching = watchdog
    if watchdog is not None:
        watchdog.start()
