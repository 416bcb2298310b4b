"""`jaxcoll launch`: what its processes find, what becomes of their output, and that nothing of a job is left."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import ROOT, environment, is_running, until

from jaxcoll.launch import member_environment
from models import cli

LAUNCH = [sys.executable, "-m", "models.cli", "launch"]


def start(script: str, processes: int = 3, **more: str) -> subprocess.Popen[bytes]:
    """Launches a shell script in every process, with two devices each and a grace of one second."""
    sizes = ["--processes", str(processes), "--devices-per-process", "2", "--grace-seconds", "1"]
    words = [*LAUNCH, *sizes, "--", "sh", "-c", script]
    return subprocess.Popen(words, env=environment(**more), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(launched: subprocess.Popen[bytes]) -> tuple[int, bytes, list[bytes]]:
    try:
        out, err = launched.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        launched.kill()  # its processes end with it
        raise
    return launched.returncode, out, sorted(filter(None, err.split(b"\n")))


def noted(folder: Path) -> list[int]:
    """Process numbers that the scripts wrote down, one file each."""
    return [int(file.read_text()) for file in folder.iterdir() if file.read_text().endswith("\n")]


def test_process_0_keeps_stdout_and_everything_else_is_told_apart():
    script = 'printf "no newline\\r \\377"; echo word >&2; printf "last" >&2; exit 0'
    code, out, err = finish(start(script, processes=2))
    assert (code, out) == (0, b"no newline\r \xff")
    assert err == [b"[0] last", b"[0] word", b"[1] last", b"[1] no newline\r \xff", b"[1] word"]


def test_each_process_finds_its_place_and_its_devices():
    found = member_environment(
        {"HOME": "/h", "XLA_FLAGS": "--a=1 --xla_force_host_platform_device_count=8"}, 2, 4, 3, 5
    )
    assert found == {
        "HOME": "/h",
        "XLA_FLAGS": "--a=1",
        "JAX_COORDINATOR_ADDRESS": "127.0.0.1:5",
        "JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1:5",
        "JAXCOLL_NUM_PROCESSES": "4",
        "JAXCOLL_PROCESS_ID": "2",
        "JAX_NUM_CPU_DEVICES": "3",
        "JAX_LOCAL_DEVICE_IDS": "6,7,8",
    }
    assert "XLA_FLAGS" not in member_environment({"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}, 0, 1, 1, 5)


def test_the_first_failure_is_the_jobs_and_the_rest_is_killed(tmp_path):
    script = """
        sleep 600 & echo $! > NOTES/$JAXCOLL_PROCESS_ID.child; echo $$ > NOTES/$JAXCOLL_PROCESS_ID
        case $JAXCOLL_PROCESS_ID in 1) exit 7;; 2) kill -STOP $$;; esac
        trap '' TERM INT HUP; while :; do sleep 600; done
    """
    code, _, err = finish(start(script.replace("NOTES", str(tmp_path))))
    assert code == 7
    assert err == [
        b"jaxcoll launch: killing processes 0, 2 after 1 s",
        b"jaxcoll launch: process 1 ended with exit code 7",
    ]
    assert len(noted(tmp_path)) == 6
    assert [process for process in noted(tmp_path) if is_running(process)] == []


def test_what_a_process_leaves_behind_is_killed_when_it_ends_well(tmp_path):
    script = f"sleep 600 & echo $! > {tmp_path}/$JAXCOLL_PROCESS_ID"
    assert finish(start(script)) == (0, b"", [])
    assert len(noted(tmp_path)) == 3
    assert [process for process in noted(tmp_path) if is_running(process)] == []


def test_what_has_left_its_process_group_is_killed_as_well(tmp_path):
    script = f"setsid sleep 600 & echo $! > {tmp_path}/$JAXCOLL_PROCESS_ID"  # it holds stdout and stderr
    assert finish(start(script)) == (0, b"", [])
    assert len(noted(tmp_path)) == 3
    assert [process for process in noted(tmp_path) if is_running(process)] == []


def test_lines_without_an_end_are_passed_on_in_pieces():
    code, _, err = finish(start("head -c 200000 /dev/zero | tr '\\0' x >&2", processes=1))
    assert code == 0
    assert [line.count(b"x") for line in reversed(err)] == [65536] * 3 + [200000 - 3 * 65536]


def test_nobody_has_to_read_stderr():
    words = [*LAUNCH, "--processes", "2", "--", "sh", "-c", "head -c 200000 /dev/zero >&2; echo done"]
    line = " ".join(f"'{word}'" for word in words)
    for end in ("2>&-", "2> >(exec 2>&-; exec true)"):
        ended = subprocess.run(
            ["bash", "-c", f"{line} {end}"], env=environment(), cwd=ROOT, stdout=subprocess.PIPE, timeout=60
        )
        assert (ended.returncode, ended.stdout) == (0, b"done\n"), end


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 9), (signal.SIGINT, 9), (signal.SIGUSR1, 0)], ids=lambda value: str(value)
)
def test_signals_are_forwarded(tmp_path, number, code):
    script = f"""
        trap 'echo asked >&2; exit 9' TERM INT; trap 'echo told >&2; exit 0' USR1
        echo $$ > {tmp_path}/$JAXCOLL_PROCESS_ID; while :; do sleep 0.1; done
    """
    launched = start(script, processes=2)
    until(lambda: len(noted(tmp_path)) == 2, "the processes did not start")
    launched.send_signal(number)
    got, _, err = finish(launched)
    words = b"told" if number == signal.SIGUSR1 else b"asked"
    assert got == code
    assert {b"[0] " + words, b"[1] " + words} <= set(err)  # the shell may report its own sleeping child


def test_processes_end_with_a_launcher_that_is_killed(tmp_path):
    """With all that they started, and in whatever process group it is."""
    script = """
        sleep 600 & echo $! > NOTES/$JAXCOLL_PROCESS_ID.child
        setsid sleep 600 & echo $! > NOTES/$JAXCOLL_PROCESS_ID.strayed
        echo $$ > NOTES/$JAXCOLL_PROCESS_ID; wait
    """
    launched = start(script.replace("NOTES", str(tmp_path)), processes=2)
    until(lambda: len(noted(tmp_path)) == 6, "the processes did not start")
    launched.kill()
    launched.communicate(timeout=20)
    until(lambda: not any(map(is_running, noted(tmp_path))), "processes outlive their launcher")


def test_a_signal_that_ends_a_process_counts_128_more():
    code, _, err = finish(start("test $JAXCOLL_PROCESS_ID = 1 && kill -KILL $$; exit 0"))
    assert (code, err) == (137, [b"jaxcoll launch: process 1 was ended by SIGKILL"])
    code, _, err = finish(start("test $JAXCOLL_PROCESS_ID = 1 && exit 137; exit 0"))
    assert (code, err) == (137, [b"jaxcoll launch: process 1 ended with exit code 137"])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "launch needs a command after --, such as -- jaxcoll verify FIXTURE --devices 8"),
        (["--processes", "0", "--", "true"], "--processes: must be a whole number from 1"),
        (["--", "no-such-program"], "no-such-program cannot be started: No such file or directory"),
        (["--nodes", "2", "--", "true"], "launch has no option --nodes"),
    ],
)
def test_a_job_that_cannot_be_started_is_one_sentence(words, reason):
    refused = subprocess.run([*LAUNCH, *words], env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert reason in refused.stderr and refused.stderr.count("\n") == 1


def test_the_command_keeps_its_own_options():
    command, options = cli.parse("launch --processes 4 --devices-per-process 2 -- jaxcoll verify x --devices 8".split())
    assert command == "launch"
    assert vars(options) == {
        "processes": 4,
        "devices_per_process": 2,
        "grace_seconds": 15,
        "command": ("jaxcoll", "verify", "x", "--devices", "8"),
    }
