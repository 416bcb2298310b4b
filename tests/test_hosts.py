"""Jobs over hosts that are hosts: a cable that is cut, stuck or slow, between processes that share nothing else."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hosts import Hosts, Namespace, NotAllowed

ROOT = Path(__file__).parent.parent
KILLED_AFTER = 60.0  # no test waits longer for a process
SUMS = """
import jax, numpy as np
from jax.sharding import PartitionSpec as P
import jaxcoll as jc
from jaxcoll import distributed
from jaxcoll.step import compile_step

job = distributed.initialize()
topology = jc.Topology(job.processes, 1)
world = topology.group("world")
x = jax.make_array_from_callback((job.processes, 4096), topology.sharding(P(world)),
                                 lambda i: np.full((1, 4096), i[0].start + 1, np.float32))
step = compile_step(lambda x: jc.all_reduce(jc.declare_partial(x, world), world), topology, (x,),
                    in_specs=(P(world),), out_specs=P())
for number in range({steps}):
    total = np.asarray(step(x).addressable_data(0))
    assert (total == job.processes * (job.processes + 1) / 2).all()
    if job.leads:
        print("step", number, flush=True)
print("added up", {steps}, "times", flush=True)
"""


def environment(**more: str) -> dict[str, str]:
    job = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "JAXCOLL_START_TIMEOUT": "90"}
    return os.environ | {"PYTHONPATH": str(ROOT)} | job | more


def start(hosts: Hosts, steps: int, **more: str) -> list[subprocess.Popen[str]]:
    """A job of one process on each host, under way: the first steps are done."""
    words = [sys.executable, "-c", SUMS.format(steps=steps)]
    job = [hosts.start(rank, words, environment(**more) | hosts.job(rank)) for rank in range(hosts.count)]
    assert job[0].stdout
    for line in job[0].stdout:
        if line == "step 20\n":
            return job
    raise AssertionError("\n".join(ended(job)[1]))


def ended(job: list[subprocess.Popen[str]]) -> tuple[list[int], list[str], float]:
    """Exit codes and stderr of all processes, and the seconds until the last one had ended."""
    began, codes, said = time.monotonic(), [], []
    for process in job:
        with process:
            try:
                said.append(process.communicate(timeout=max(began + KILLED_AFTER - time.monotonic(), 0.1))[1])
            finally:
                process.kill()
        codes.append(process.returncode)
    return codes, said, time.monotonic() - began


def assert_gone(namespaces: list[Namespace]) -> None:
    """Nobody is in these network namespaces any more, so the kernel has removed them and their devices."""
    inodes, seen = {namespace.inode for namespace in namespaces}, set()
    for entry in Path("/proc").glob("[0-9]*/ns/net"):
        with contextlib.suppress(OSError):
            seen.add(os.stat(entry).st_ino)
    assert len(inodes) == len(namespaces) and inodes & seen == set()


@pytest.mark.slow
def test_a_cut_cable_ends_every_process_and_names_the_lost_host():
    """Host 2 of 3 is unplugged in mid-step: no packet tells the others, and it itself hears of nothing."""
    with Hosts(3) as hosts:
        job = start(hosts, steps=10**6)
        hosts.cut(2)
        codes, said, seconds = ended(job)
        assert codes == [75, 75, 75] and seconds < 30
        for text in said[:2]:
            assert "PeerTimeout: process 2 is silent for more than 10 s; last reports: process 0 at step " in text
            assert "plan of step" in text and "all_reduce over attn_dp" in text
        assert (
            "PeerTimeout: process 0 is lost or cut off: its coordination service at 10.77.0.1:5555 has not" in said[2]
        )
        assert hosts.left() == []
        made = [hosts.hub, *hosts.hosts]
    assert_gone(made)


@pytest.mark.slow
def test_a_slow_or_briefly_stuck_cable_is_no_lost_peer_and_a_stuck_one_is():
    with Hosts(2, relayed=(1,)) as hosts:
        hosts.delay(1, 0.005)
        job = start(hosts, steps=10**6, JAXCOLL_PEER_TIMEOUT="4")
        hosts.stall(1)
        time.sleep(1.5)  # what is stuck for less than the peer timeout goes on where it was
        hosts.delay(1, 0.005)
        assert job[0].stdout
        before = int(job[0].stdout.readline().split()[1])
        while int(job[0].stdout.readline().split()[1]) < before + 50:
            pass
        assert [process.poll() for process in job] == [None, None]
        hosts.stall(1)
        codes, said, seconds = ended(job)
        assert codes == [75, 75] and seconds < 20
        assert "PeerTimeout: process 1 is silent for more than 4 s" in said[0]
        assert "PeerTimeout: process 0 is lost or cut off" in said[1]
        assert hosts.left() == []


def test_what_runs_on_a_host_and_the_host_itself_go_with_a_failure():
    made: list[Namespace] = []
    started: list[subprocess.Popen[str]] = []
    with pytest.raises(ZeroDivisionError), Hosts(2) as hosts:
        made += [hosts.hub, *hosts.hosts]
        started.append(hosts.start(1, ["sh", "-c", "sleep 300 & exec sleep 300"], environment()))
        while len(hosts.left()) < 2:
            assert started[0].poll() is None
        _ = 1 / 0
    with started[0] as forgotten:
        assert forgotten.wait(timeout=20) == -9
    assert_gone(made)
    assert "port1" not in Path("/proc/net/dev").read_text()


def test_where_namespaces_are_not_allowed_a_sentence_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        NotAllowed, match="only root may make, with unshare and setpriv of util-linux and ip of iproute2: .*setpriv"
    ):
        Hosts(2).__enter__()
    (tmp_path / "setpriv").write_text("#!/bin/sh\necho unshare failed: Operation not permitted >&2\nexit 1\n")
    (tmp_path / "setpriv").chmod(0o755)
    with pytest.raises(NotAllowed, match="only root .*: unshare failed: Operation not permitted"):
        Hosts(2).__enter__()
