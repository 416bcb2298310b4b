"""What the watchdog knows: each other process as last heard of, what this one cannot finish alone, and a verdict."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, NamedTuple

from jaxcoll.coordination import DisagreementError, PeerTimeout


class Verdict(NamedTuple):
    """What is wrong with the job: someone is lost, or the processes differ."""

    lost: bool
    text: str

    def error(self) -> PeerTimeout | DisagreementError:
        """To be raised."""
        return (PeerTimeout if self.lost else DisagreementError)(self.text)


@dataclasses.dataclass
class Peer:
    """What is known of another process.

    Attributes:
        count: how often it has beaten.
        step, doing: the last step it dispatched, and what it said it does.
        heard: when its last beat arrived here.
        code: with which exit code it has ended; None if it has not.
        reason: why it has ended.
        gone: it asks the service for nothing any more.
        order: how many programs it has dispatched, and the mark of their order.
    """

    heard: float
    count: int = -1
    step: int = 0
    doing: str = "starting"
    code: int | None = None
    reason: str = ""
    gone: bool = False
    order: tuple[int, int] = (0, 0)


@dataclasses.dataclass
class Flight:
    """What this process cannot finish alone.

    Attributes:
        since: when it began.
        outputs: of a step; None while it is dispatched, or where it is no step.
        patient: lasts as long as the others need.
    """

    since: float
    outputs: list[weakref.ref] | None = None
    patient: bool = False

    def over(self) -> bool:
        """Its outputs are ready, deleted or forgotten."""
        return self.outputs is not None and not any(_unready(ref()) for ref in self.outputs)


def _unready(array: Any) -> bool:
    return array is not None and not array.is_deleted() and not array.is_ready()
