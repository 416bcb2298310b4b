"""What a plan says of one hand-over of a layer: the path that runs, why, and why not another."""

from __future__ import annotations

import dataclasses


class PlanError(ValueError):
    """A plan that cannot exist here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Alternative:
    """A path that was not taken: `impossible` here, or only not what the rules choose."""

    path: str
    impossible: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {'impossible' if self.impossible else 'not chosen'} because {self.reason}"


@dataclasses.dataclass(frozen=True)
class HandOver:
    """One hand-over of a layer.

    Attributes:
        name: attention, gather or dispatch, combine, shared_expert or head.
        path: what runs.
        collectives: verb and group of each collective, in order.
        before, after: states over (attn_dp, attn_tp).
        reduces: whether a partial sum is completed here.
        reason: why this path.
        others: the paths that do not run.
    """

    name: str
    path: str
    collectives: tuple[tuple[str, str], ...]
    before: str
    after: str
    reduces: bool
    reason: str
    others: tuple[Alternative, ...] = ()
