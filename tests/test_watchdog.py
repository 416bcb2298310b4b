"""Whom the watchdog accuses, and of what, from the beats that it hears; time and the service are the test's own."""

import json
import time

import jax.numpy as jnp
import pytest
from shared_store import Store

from jaxcoll.coordination import DisagreementError, PeerTimeout
from jaxcoll.order import Order
from jaxcoll.watchdog import Watchdog

ADDRESS = "127.0.0.1:1"


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def store(monkeypatch) -> Store:
    return Store(monkeypatch, 3)


@pytest.fixture
def watchdog(clock, store) -> Watchdog:
    def give_up(verdict):
        raise AssertionError(verdict)

    return Watchdog(3, 0, ADDRESS, peer_seconds=10, step_seconds=20, give_up=give_up)  # never started: no threads


def beats(store: Store, rank: int, count: int, step: int = 0, doing: str = "decode", order: Order | None = None):
    record = {"count": count, "step": step, "doing": doing}
    record["order"] = [order.position, order.mark] if order else [0, 0]
    store.held[f"jaxcoll/watch/beat.{rank}"] = json.dumps(record)


def hear(watchdog: Watchdog, clock: Clock, after: float, *beating: int, store: Store, **what) -> str | None:
    """Time passes, some peers beat, this process reads and judges."""
    clock.now += after
    for rank in beating:
        beats(store, rank, int(clock.now * 10), **what)
    watchdog.have_ended()
    watchdog.judge()
    return watchdog.verdict.text if watchdog.verdict else None


def dispatch(watchdog: Watchdog, name: str = "decode"):
    """A step whose output is not there yet."""
    with watchdog.dispatching(name, name, lambda: "plan"):
        pass


def test_a_peer_that_beats_is_never_accused(watchdog, clock, store):
    for _ in range(30):
        assert hear(watchdog, clock, 9.0, 1, 2, store=store) is None


def test_a_silent_peer_is_accused_after_its_time(watchdog, clock, store):
    assert hear(watchdog, clock, 5.0, 1, 2, store=store, step=3) is None
    assert hear(watchdog, clock, 9.9, 1, store=store, step=4) is None
    said = hear(watchdog, clock, 0.2, 1, store=store, step=4)
    assert said == (
        "process 2 is silent for more than 10 s; last reports: process 0 at step 0 (starting), "
        "process 1 at step 4 (decode), process 2 at step 3 (decode), silent for 10 s"
    )
    with pytest.raises(PeerTimeout, match="process 2 is silent"):
        watchdog.check()


def test_a_process_that_was_stopped_itself_accuses_nobody(watchdog, clock, store):
    hear(watchdog, clock, 1.0, 1, 2, store=store)
    clock.now += 500
    for rank in (1, 2):
        beats(store, rank, 7)
    watchdog.have_ended()  # the first thing it does again is to read
    watchdog.judge()
    assert watchdog.verdict is None


def test_a_service_that_does_not_answer_is_process_0s_loss(watchdog, clock, store):
    hear(watchdog, clock, 1.0, 1, 2, store=store)
    store.answers = False
    clock.now += 11
    watchdog.judge()
    assert watchdog.verdict is not None and watchdog.verdict.text == (
        "process 0 is lost or cut off: its coordination service at 127.0.0.1:1 has not answered for 11 s"
    )


def test_who_ended_well_is_missed_only_where_it_is_needed(watchdog, clock, store):
    dispatch(watchdog)
    end = {"code": 0, "step": 1, "reason": "", "order": [1, watchdog.order.mark]}
    store.held["jaxcoll/watch/end.1"] = json.dumps(end)
    order = watchdog.order
    assert hear(watchdog, clock, 1.0, 2, store=store, step=1, order=order) is None  # it took part in step 1
    dispatch(watchdog)
    said = hear(watchdog, clock, 1.0, 2, store=store, step=2, order=watchdog.order)
    assert said is not None and said.startswith("process 1 is gone while process 0 is at step 2 (decode); last reports")


def test_who_ended_well_within_the_same_step_is_missed_by_what_it_has_dispatched(watchdog, clock, store):
    dispatch(watchdog)
    end = {"code": 0, "step": 1, "reason": "", "order": [1, watchdog.order.mark]}
    store.held["jaxcoll/watch/end.1"] = json.dumps(end)
    with watchdog.dispatching("fetch", "fetch", lambda: "plan", counted=False):
        pass
    said = hear(watchdog, clock, 1.0, 2, store=store, step=1, order=watchdog.order)
    assert said is not None and said.startswith("process 1 is gone while process 0 is at step 1 (fetch); last reports")


def test_who_is_lost_while_all_leave_together_is_named(watchdog, clock, store):
    for rank in (1, 2):
        store.held[f"jaxcoll/watch/end.{rank}"] = json.dumps({"code": 0, "step": 0, "reason": "", "order": [0, 0]})
    assert hear(watchdog, clock, 30.0, 2, store=store) is None  # all have ended, whenever they beat
    watchdog.leaving = True
    assert hear(watchdog, clock, 1.0, 1, 2, store=store) is None
    assert hear(watchdog, clock, 6.0, 2, store=store) is None
    said = hear(watchdog, clock, 6.0, 2, store=store)
    assert said is not None and said.startswith("process 1 is silent for more than 10 s; last reports: ")
    assert said.endswith(
        "process 1 ended after step 0 with exit code 0, silent for 12 s, process 2 ended after step 0 with exit code 0"
    )


def test_who_failed_is_named_with_its_reason(watchdog, clock, store):
    end = {"code": 2, "step": 0, "reason": "no such folder", "order": [0, 0]}
    store.held["jaxcoll/watch/end.2"] = json.dumps(end)
    said = hear(watchdog, clock, 1.0, 1, store=store)
    assert said is not None and said.startswith("process 2 is no longer there; ")
    assert said.endswith("process 2 ended after step 0 with exit code 2: no such folder")


def test_a_late_step_names_who_has_not_come(watchdog, clock, store):
    dispatch(watchdog)
    for _ in range(4):
        assert hear(watchdog, clock, 5.0, 1, 2, store=store, step=1) is None
    beats(store, 1, 1, step=0, doing="loading")
    clock.now += 0.5
    watchdog.have_ended()
    watchdog.judge()
    assert watchdog.verdict is not None and watchdog.verdict.text.startswith(
        "step 1 (decode) has not finished within 20 s; process 1 is not at it; last reports: process 0 at step 1"
    )


def test_a_finished_step_is_never_late(watchdog, clock, store):
    with watchdog.dispatching("decode", "decode", lambda: "") as note:
        kept = note(jnp.zeros(3).block_until_ready())
    assert kept.shape == (3,)
    for _ in range(6):
        assert hear(watchdog, clock, 9.0, 1, 2, store=store) is None


def test_other_programs_or_another_order_are_seen_from_the_beats(watchdog, clock, store):
    same, other = Order(), Order()
    for name in ("first", "second", "first"):
        dispatch(watchdog, name)
        same.note(name)
    for name in ("first", "first"):
        other.note(name)
    beats(store, 1, 1, order=same)
    beats(store, 2, 1, order=other)
    watchdog.have_ended()
    watchdog.judge()
    assert watchdog.verdict is not None and not watchdog.verdict.lost
    with pytest.raises(DisagreementError, match="process 2 is running other programs than process 0, or in another or"):
        watchdog.check()


def test_order_compares_what_both_have_dispatched():
    ahead, behind, other = Order(), Order(), Order()
    for name in "aabb":
        ahead.note(name)
    for name in "aab":
        behind.note(name)
    for name in "aba":
        other.note(name)
    assert ahead.fits(behind.position, behind.mark) and not ahead.fits(other.position, other.mark)
    assert behind.fits(ahead.position, ahead.mark)  # nothing can be said yet
    assert ahead.fits(0, 0) and ahead.fits(ahead.position, ahead.mark)


def test_an_error_of_the_runtime_is_blamed_on_a_lost_peer_and_others_are_not(watchdog, monkeypatch, clock):
    monkeypatch.setattr(time, "sleep", lambda seconds: setattr(clock, "now", clock.now + 5))
    watchdog.blame(TypeError("a wrong argument"))
    watchdog.blame(ValueError("no status"))
    assert clock.now == 100
    broken = ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer")
    watchdog.blame(broken)  # nobody is lost: the error itself is the news
    waited = clock.now
    watchdog.blame(broken)
    assert clock.now == waited > 110
    watchdog.accuse(watchdog.coordinator_is_gone())
    with pytest.raises(PeerTimeout, match="process 0 is lost") as raised:
        watchdog.blame(ValueError("INTERNAL: something"))
    assert str(raised.value.__cause__) == "INTERNAL: something"
