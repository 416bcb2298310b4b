"""A progress line on the terminal for anything that takes more than two seconds; never on stdout, never in a file."""

from __future__ import annotations

import sys
import threading
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

SILENT_SECONDS = 2.0


class Working:
    """Shows what is being done once it has taken SILENT_SECONDS, and removes the line at the end.

    Use as a context manager; `stage` names the work, `advance` tells how far it is.

    Args:
        console: where to show it; None takes stderr, where a file or a pipe gets nothing at all.
    """

    def __init__(self, console: Console | None = None):
        # Rich takes a pipe for a terminal where FORCE_COLOR is set; a line that is redrawn has no place in a log.
        console = console or Console(stderr=True, force_terminal=None if sys.stderr.isatty() else False)
        columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        # What is printed meanwhile stays on stdout, which may be a file where stderr is the terminal.
        self._bar = Progress(*columns, console=console, transient=True, redirect_stdout=False)
        self._task = self._bar.add_task("starting", total=None)
        self._timer = threading.Timer(SILENT_SECONDS, self._show)
        self._timer.daemon = True

    def __enter__(self) -> Working:
        self._timer.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._timer.cancel()
        self._timer.join()
        if self._bar.live.is_started:  # stopping a line that never was would print an empty one
            self._bar.stop()

    def _show(self) -> None:
        if self._bar.console.is_interactive:
            self._bar.start()

    def stage(self, what: str) -> None:
        """Names the work from here on, of unknown length."""
        # A new task, because rich keeps the clock of one that has reached its total.
        self._bar.remove_task(self._task)
        self._task = self._bar.add_task(what, total=None)

    def advance(self, done: int, total: int) -> None:
        """`done` of `total` of the present stage."""
        self._bar.update(self._task, completed=done, total=total)

    def decoded(self, steps: int, total: int) -> None:
        """`steps` of `total` decode steps are done; the first one has compiled the program."""
        if steps == 1:
            self.stage("decoding")
        self.advance(steps, total)
