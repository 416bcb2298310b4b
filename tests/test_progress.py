"""The progress line: on a terminal after a while, never elsewhere, gone at the end, in nobody's way."""

import io
import re
import sys
import threading
import time
from collections.abc import Callable

import pytest
from rich.console import Console

from models import progress
from models.progress import Working

SHOW_CURSOR, HIDE_CURSOR, ERASE_LINE = "\x1b[?25h", "\x1b[?25l", "\x1b[2K"


@pytest.fixture
def soon(monkeypatch) -> None:
    monkeypatch.setattr(progress, "SILENT_SECONDS", 0.01)


def terminal(width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, color_system=None, width=width, _environ={})


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "not shown in time"
        time.sleep(0.005)


def wait_until_shown(console: Console, text: str) -> None:
    wait_for(lambda: text in shown(console))


def test_it_shows_the_stage_and_how_far_it_is(soon):
    console = terminal()
    with Working(console) as working:
        working.stage("loading weights")
        working.advance(1, 4)
        wait_until_shown(console, "loading weights")
        working.stage("compiling the step")
        wait_until_shown(console, "compiling the step")
        working.decoded(1, 10)
        wait_until_shown(console, "decoding")
        working.decoded(10, 10)
    assert shown(console).index("loading weights") < shown(console).index("decoding")
    assert all(len(line) <= 80 for line in re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", shown(console)).splitlines())


def test_it_removes_itself(soon):
    console = terminal()
    with Working(console) as working:
        working.stage("compiling the step")
        wait_until_shown(console, "compiling")
    text = shown(console)
    assert text.count(HIDE_CURSOR) == text.count(SHOW_CURSOR) == 1
    assert text.endswith(ERASE_LINE) and "\n" not in text.rpartition(SHOW_CURSOR)[2]


def test_a_stage_after_a_finished_one_runs(soon, monkeypatch):
    """A stage of unknown length has a moving bar and a running clock, also after one that reached its total."""
    console = terminal()
    with Working(console) as working:
        working.stage("loading weights")
        working.advance(4, 4)
        working.stage("compiling the step")
        task = working._bar.tasks[0]
        assert len(working._bar.tasks) == 1
        assert (task.description, task.total, task.finished) == ("compiling the step", None, False)
        wait_for(lambda: (task.elapsed or 0) > 0.02)


def test_what_is_quick_shows_nothing(monkeypatch):
    monkeypatch.setattr(progress, "SILENT_SECONDS", 30)
    console = terminal()
    with Working(console) as working:
        working.stage("loading weights")
        working.advance(1, 2)
    assert shown(console) == ""


def test_two_seconds_are_quick():
    assert progress.SILENT_SECONDS == 2


@pytest.mark.parametrize("variable", [None, "FORCE_COLOR", "TTY_COMPATIBLE"])
def test_files_and_pipes_get_nothing(soon, variable, monkeypatch, capfd):
    if variable:
        monkeypatch.setenv(variable, "1")
    with Working() as working:
        working.stage("loading weights")
        working._timer.join()
    assert capfd.readouterr() == ("", "")


def test_a_terminal_gets_it_on_stderr_only(soon, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen)
    with Working() as working:
        working.stage("loading weights")
        wait_for(lambda: "loading weights" in screen.getvalue())
    assert capsys.readouterr().out == ""


def test_a_terminal_that_cannot_move_its_cursor_gets_nothing(soon):
    console = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    with Working(console) as working:
        working._timer.join()
    assert shown(console) == ""


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
@pytest.mark.parametrize("visible", [True, False])
def test_errors_pass_through(error, visible, monkeypatch):
    monkeypatch.setattr(progress, "SILENT_SECONDS", 0.01 if visible else 30)
    console = terminal()
    threads = threading.active_count()
    with pytest.raises(type(error)) as caught, Working(console) as working:
        working.stage("loading weights")
        if visible:
            wait_until_shown(console, "loading weights")
        raise error
    assert caught.value is error
    wait_for(lambda: threading.active_count() == threads)
    assert shown(console).count(SHOW_CURSOR) == shown(console).count(HIDE_CURSOR) == visible


def test_what_is_printed_meanwhile_stays_on_stdout(soon, capsys):
    console = terminal()
    with Working(console) as working:
        working.stage("loading weights")
        wait_until_shown(console, "loading weights")
        print("a line of output")
    assert "a line of output" not in shown(console)
    assert capsys.readouterr().out == "a line of output\n"
