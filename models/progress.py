"""A progress line on stderr for anything that takes more than two seconds; never on stdout."""

from __future__ import annotations

import threading
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

SILENT_SECONDS = 2.0


class Working:
    """Shows what is being done once it has taken SILENT_SECONDS, and removes the line at the end.

    Use as a context manager; `stage` names the work, `advance` tells how far it is.
    """

    def __init__(self):
        columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("starting", total=None)
        self._timer = threading.Timer(SILENT_SECONDS, self._bar.start)
        self._timer.daemon = True

    def __enter__(self) -> Working:
        self._timer.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._timer.cancel()
        self._timer.join()
        self._bar.stop()

    def stage(self, what: str) -> None:
        """Names the work from here on, of unknown length."""
        self._bar.update(self._task, description=what, total=None, completed=0)

    def advance(self, done: int, total: int) -> None:
        """`done` of `total` of the present stage."""
        self._bar.update(self._task, completed=done, total=total)
