"""A Slurm cluster of this machine alone, with everything in one folder, for tests; no tests in here."""

import contextlib
import functools
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from hosts import END_WITH_US

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "sinfo")
_SECONDS = 40.0
_CONFIG = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={controller_port}
SlurmdPort={node_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/node.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
FirstJobId={first_job}
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=1000
PartitionName=all Nodes=ALL Default=YES OverSubscribe=FORCE:8
"""


def installed() -> bool:
    """Whether its programs are here, and we are root, as its daemons have to be."""
    return os.geteuid() == 0 and all(map(shutil.which, PROGRAMS))


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Starts the daemons and ends them; gives the environment in which sbatch and srun find them."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    host = socket.gethostname().split(".")[0]
    # JAX's port for the coordinator is 61440 + the job's number.
    sizes = {"controller_port": free_port(), "node_port": free_port(), "first_job": free_port(61441) - 61440}
    config = folder / "slurm.conf"
    config.write_text(_CONFIG.format(folder=folder, host=host, cpus=os.cpu_count(), **sizes))
    environment = os.environ | {"SLURM_CONF": str(config)}
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "seed", "log")]
    with contextlib.ExitStack() as running:
        for number, words in enumerate((
            ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files],
            ["slurmctld", "-D"],
            ["slurmd", "-D"],
        )):  # fmt: skip
            log = running.enter_context((folder / f"{words[0]}.out").open("w"))
            daemon = subprocess.Popen([*END_WITH_US, *words], env=environment, stdout=log, stderr=log)
            running.callback(_end, daemon)
            if number == 0:
                _until((folder / "munge.socket").exists, folder)
        _until(lambda: _idle(environment), folder)
        yield environment


def submit(words: list[str], folder: Path, environment: dict[str, str], seconds: float) -> int:
    """Runs `sbatch words` in `folder` and waits for the job's exit code; `sbatch --wait` looks only every 10 seconds.

    Raises:
        TimeoutError: it has not ended.
    """
    run = functools.partial(subprocess.run, capture_output=True, text=True, env=environment, cwd=folder, timeout=30)
    sent = run(["sbatch", "--parsable", *words])
    assert sent.returncode == 0, sent.stderr
    deadline, shown = time.monotonic() + seconds, ""
    while time.monotonic() < deadline:
        shown = run(["scontrol", "--oneliner", "show", "job", sent.stdout.strip()]).stdout
        if match := re.search(r"JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL) .*ExitCode=(\d+):(\d+)", shown):
            return int(match[2]) or int(match[3]) + 128 * (match[3] != "0")
        time.sleep(0.2)
    raise TimeoutError(f"job {sent.stdout.strip()} has not ended within {seconds:g} s: {shown}")


def free_port(first: int = 20000) -> int:
    """A port from `first` on that nobody listens on."""
    for port in range(first, 65536):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("", port))
            if port not in _given:
                _given.add(port)
                return port
    raise RuntimeError(f"no port from {first} on is free")


_given: set[int] = set()


def _idle(environment: dict[str, str]) -> bool:
    words = ["sinfo", "--noheader", "--format=%T"]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=30).stdout.strip() == "idle"


def _until(there, folder: Path) -> None:
    deadline = time.monotonic() + _SECONDS
    while not there():
        if time.monotonic() > deadline:
            said = "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in folder.glob("*.out"))
            raise RuntimeError(f"Slurm did not start within {_SECONDS:g} s\n{said}")
        time.sleep(0.05)


def _end(daemon: subprocess.Popen) -> None:
    daemon.terminate()
    try:
        daemon.wait(timeout=10)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
