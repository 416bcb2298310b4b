"""Hosts on one machine, for tests of jobs: a network namespace each, joined by veth through a bridge; no tests in here.

Every namespace is held by a process that dies with the tests, so nothing is left behind whatever happens to them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

PORT = 5555  # of the coordinator on host 0; a namespace's ports are its own
END_WITH_US = ("setpriv", "--pdeathsig", "KILL")  # not preexec_fn: it forks, of which JAX's threads warn

_NEEDS = (
    "hosts need Linux namespaces, which only root may make, with unshare and setpriv of util-linux and ip of iproute2"
)


class NotAllowed(RuntimeError):
    """This machine does not let us make network namespaces; the message says what it lacks."""


class Namespace:
    """A network, host-name and mount namespace, and what runs in it."""

    def __init__(self, name: str):
        self.name = name
        script = 'hostname "$1" && echo made && exec sleep inf'
        pipe = subprocess.PIPE
        try:
            self._holder = subprocess.Popen(
                [*END_WITH_US, "unshare", "--net", "--uts", "--mount", "sh", "-c", script, "sh", name],
                stdout=pipe,
                stderr=pipe,
                text=True,
            )
        except FileNotFoundError as error:
            raise NotAllowed(f"{_NEEDS}: {error}") from error
        assert self._holder.stdout and self._holder.stderr
        if self._holder.stdout.readline() != "made\n":
            with self._holder as failed:
                raise NotAllowed(f"{_NEEDS}: {failed.stderr and failed.stderr.read().strip()}")
        self.inode = os.stat(f"/proc/{self._holder.pid}/ns/net").st_ino

    def inside(self, *words: str) -> list[str]:
        """A command line that runs `words` in here."""
        return ["nsenter", "--target", str(self._holder.pid), "--net", "--uts", "--mount", "--", *words]

    def ip(self, words: str) -> None:
        """Runs iproute2 in here."""
        done = subprocess.run(self.inside("ip", *words.split()), capture_output=True, text=True, timeout=20)
        if done.returncode:
            raise NotAllowed(f"ip {words} in {self.name}: {done.stderr.strip()}")

    def take(self, device: str, source: Namespace) -> None:
        """Moves a network device of `source` in here."""
        source.ip(f"link set {device} netns {self._holder.pid}")

    def pids(self) -> list[int]:
        """Processes in here, however they were started."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self._holder.pid:
                with contextlib.suppress(OSError):
                    if os.stat(entry / "ns" / "net").st_ino == self.inode:
                        found.append(int(entry.name))
        return found

    def close(self) -> None:
        """Ends every process in here, and with the last one the namespace."""
        for pid in [*self.pids(), self._holder.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._holder.wait()
        for stream in (self._holder.stdout, self._holder.stderr):
            assert stream
            stream.close()


class Hosts:
    """Hosts 10.77.0.1, 10.77.0.2, ... on one bridge; use as a context manager.

    Args:
        count: how many.
        relayed: hosts whose cable can be slow or stuck; see `delay` and `stall`.
        names: what every host calls itself and the others; host0, host1, ... if none are given.

    Raises:
        NotAllowed: on entry, where this machine does not let us.
    """

    def __init__(self, count: int, relayed: Sequence[int] = (), names: Sequence[str] = ()):
        self.count, self.relayed = count, tuple(relayed)
        self.names = list(names) or [f"host{rank}" for rank in range(count)]
        self._relays: dict[int, subprocess.Popen[str]] = {}

    def __enter__(self) -> Hosts:
        with contextlib.ExitStack() as made:
            self._files = Path(made.enter_context(tempfile.TemporaryDirectory()))
            self.hub = self._made(made, "hub")
            self.hub.ip("link add bridge type bridge")
            self.hub.ip("link set bridge up")
            self.hosts = [self._host(made, rank) for rank in range(self.count)]
            for rank in self.relayed:
                self._relay(made, rank)
            self._made_things = made.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._made_things.close()

    @staticmethod
    def _made(made: contextlib.ExitStack, name: str) -> Namespace:
        namespace = Namespace(name)
        made.callback(namespace.close)
        return namespace

    def _host(self, made: contextlib.ExitStack, rank: int) -> Namespace:
        host = self._made(made, self.names[rank])
        self.hub.ip(f"link add port{rank} type veth peer name eth{rank}")
        host.take(f"eth{rank}", self.hub)
        self.hub.ip(f"link set port{rank} master bridge up")
        for words in ("link set lo up", f"addr add {self.address(rank)}/24 dev eth{rank}", f"link set eth{rank} up"):
            host.ip(words)
        # A host finds its own name at its own address, not at a loopback one that others cannot reach.
        names = self._files / host.name
        known = [f"{self.address(i)} {name} {name.split('.')[0]}" for i, name in enumerate(self.names)]
        names.write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
        subprocess.run(host.inside("mount", "--bind", str(names), "/etc/hosts"), check=True, timeout=20)
        return host

    def _relay(self, made: contextlib.ExitStack, rank: int) -> None:
        """Puts a relay into a host's cable: port - relay - near, and near's other end on the bridge."""
        self.hub.ip(f"link set port{rank} nomaster")
        self.hub.ip(f"link add near{rank} type veth peer name far{rank}")
        self.hub.ip(f"link set near{rank} up")
        self.hub.ip(f"link set far{rank} master bridge up")
        words = self.hub.inside(sys.executable, str(Path(__file__).with_name("relay.py")), f"port{rank}", f"near{rank}")
        pipe = subprocess.PIPE
        relay = self._relays[rank] = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True)
        made.callback(relay.__exit__, None, None, None)  # closes stdin, which ends it, and waits
        self._answered(rank)

    def _answered(self, rank: int) -> None:
        stream = self._relays[rank].stdout
        assert stream and stream.readline() == "done\n", f"the relay of host {rank} has ended"

    def _tell(self, rank: int, line: str) -> None:
        stream = self._relays[rank].stdin
        assert stream
        stream.write(f"{line}\n")
        stream.flush()
        self._answered(rank)

    def delay(self, rank: int, seconds: float) -> None:
        """Every frame to and from a relayed host takes this long from now on; ends a stall."""
        self._tell(rank, f"delay {seconds}")

    def stall(self, rank: int) -> None:
        """Frames to and from a relayed host are kept until `delay`."""
        self._tell(rank, "stall")

    @staticmethod
    def address(rank: int) -> str:
        return f"10.77.0.{rank + 1}"

    def job(self, rank: int) -> dict[str, str]:
        """What tells process `rank` of its job, whose coordinator is on host 0."""
        return {
            "JAX_COORDINATOR_ADDRESS": f"{self.address(0)}:{PORT}",
            "JAXCOLL_NUM_PROCESSES": str(self.count),
            "JAXCOLL_PROCESS_ID": str(rank),
        }

    def start(self, rank: int, words: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """Runs `words` on a host."""
        pipe = subprocess.PIPE
        command = [*END_WITH_US, *self.hosts[rank].inside(*words)]
        return subprocess.Popen(command, env=dict(environment), stdout=pipe, stderr=pipe, text=True)

    def cut(self, rank: int) -> None:
        """Unplugs a host: nothing comes or goes, and nobody is told."""
        self.hub.ip(f"link set port{rank} down")

    def left(self) -> list[int]:
        """Processes on any host."""
        return [pid for host in self.hosts for pid in host.pids()]
