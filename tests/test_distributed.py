"""Joining a job: who this process is, who has come, and what is refused before JAX's runtime starts."""

import concurrent.futures
import contextlib
import queue
import socket
import threading

import jax
import pytest

from jaxcoll import coordination, distributed
from jaxcoll.coordination import Place
from jaxcoll.distributed import Job, JobError, find_place, seconds
from jaxcoll.joining import watched
from jaxcoll.launch import reserved_port
from jaxcoll.roll_call import MissingProcess, call_roll

ALONE = Place(None, 1, 0, None)
NOTHING = Place(None, None, None, None)
VARIABLES = {"JAX_COORDINATOR_ADDRESS": "host:7", "JAXCOLL_NUM_PROCESSES": "4", "JAXCOLL_PROCESS_ID": "2"}


@pytest.fixture
def cluster(monkeypatch) -> list[tuple]:
    """What JAX was asked for; it finds the first process of a cluster of 3 that takes GPU 5."""
    asked: list[tuple] = []

    def detect(method, timeout):
        asked.append((method, timeout))
        return Place("slurm:9", 3, 1, [5])

    monkeypatch.setattr(coordination, "detect_cluster", detect)
    return asked


def test_one_process_alone_is_a_job_and_starts_nothing(monkeypatch):
    monkeypatch.setattr(distributed, "_joined", None)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    job = distributed.initialize(cluster="deactivate")
    assert job == Job(1, 0) and job.leads
    assert not coordination.in_a_job()
    assert (coordination.process_count(), coordination.process_index()) == (1, 0)


def test_arguments_win_over_variables_and_variables_over_the_cluster(cluster):
    assert find_place(NOTHING, VARIABLES, None, 5) == Place("host:7", 4, 2, None)
    assert find_place(Place("other:8", 3, 1, None), VARIABLES, None, 5) == Place("other:8", 3, 1, None)
    assert cluster == []
    assert find_place(NOTHING, {}, None, 5) == Place("slurm:9", 3, 1, [5])
    assert find_place(NOTHING, {"JAXCOLL_CLUSTER": "ompi"}, None, 5).processes == 3
    assert find_place(NOTHING, {"JAX_COORDINATOR_ADDRESS": "host:7"}, "slurm", 6).coordinator == "host:7"
    assert cluster == [(None, 5), ("ompi", 5), ("slurm", 6)]


def test_no_cluster_and_a_job_of_one_are_one_process(monkeypatch):
    monkeypatch.setattr(coordination, "detect_cluster", lambda method, timeout: NOTHING)
    assert find_place(NOTHING, {}, None, 5) == ALONE
    assert find_place(NOTHING, {"JAXCOLL_NUM_PROCESSES": "1"}, None, 5) == ALONE


def test_jaxs_own_detection_knows_slurm(monkeypatch):
    slurm = {"JOB_ID": "4100", "STEP_NODELIST": "node[07-09]", "NTASKS": "3", "PROCID": "2", "LOCALID": "1"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert coordination.detect_cluster(None, 5) == Place("node07:61444", 3, 2, [1])
    assert coordination.detect_cluster("deactivate", 5) == NOTHING


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"JAXCOLL_PROCESS_ID": None}, "needs this process's number; set JAXCOLL_PROCESS_ID"),
        ({"JAXCOLL_NUM_PROCESSES": None}, "needs the number of processes; set JAXCOLL_NUM_PROCESSES"),
        ({"JAX_COORDINATOR_ADDRESS": None}, "needs the coordinator's host:port; set JAX_COORDINATOR_ADDRESS"),
        ({"JAX_COORDINATOR_ADDRESS": "host"}, "JAX_COORDINATOR_ADDRESS must be host:port, not 'host'"),
        ({"JAXCOLL_PROCESS_ID": "4"}, "JAXCOLL_PROCESS_ID must be from 0 to 3, not 4"),
        ({"JAXCOLL_PROCESS_ID": "-1"}, "JAXCOLL_PROCESS_ID='-1' must be a whole number of at least 0"),
        ({"JAXCOLL_NUM_PROCESSES": "0"}, "JAXCOLL_NUM_PROCESSES='0' must be a whole number of at least 1"),
        ({"JAXCOLL_NUM_PROCESSES": "\u00b2"}, "JAXCOLL_NUM_PROCESSES='\u00b2' must be a whole number of at least 1"),
        ({"JAXCOLL_NUM_PROCESSES": "1"}, "JAXCOLL_PROCESS_ID must be from 0 to 0, not 2"),
        (
            {"JAXCOLL_NUM_PROCESSES": None, "JAXCOLL_PROCESS_ID": None, "JAXCOLL_CLUSTER": "deactivate"},
            "a job of several processes needs the number of processes; set JAXCOLL_NUM_PROCESSES",
        ),
        ({"JAX_COORDINATOR_ADDRESS": ":7"}, "JAX_COORDINATOR_ADDRESS must be host:port, not ':7'"),
        ({"JAX_COORDINATOR_ADDRESS": "host:0"}, "JAX_COORDINATOR_ADDRESS must be host:port, not 'host:0'"),
        ({"JAX_COORDINATOR_ADDRESS": "host:65536"}, "JAX_COORDINATOR_ADDRESS must be host:port, not 'host:65536'"),
    ],
)
def test_half_a_job_is_refused(change, reason):
    environment = {name: value for name, value in (VARIABLES | change).items() if value is not None}
    with pytest.raises(JobError) as raised:
        find_place(NOTHING, environment, None, 5)
    assert reason in str(raised.value)


@pytest.mark.parametrize(
    ("processes", "process_id", "reason"),
    [
        (0, 0, "the number of processes must be a whole number of at least 1, not 0"),
        (-2, 0, "the number of processes must be a whole number of at least 1, not -2"),
        (2.0, 0, "the number of processes must be a whole number of at least 1, not 2.0"),
        (2, "0", "this process's number must be a whole number of at least 0, not '0'"),
        (2, 2, "JAXCOLL_PROCESS_ID must be from 0 to 1, not 2"),
    ],
)
def test_arguments_that_make_no_job_are_refused(processes, process_id, reason):
    with pytest.raises(JobError) as raised:
        find_place(Place("host:7", processes, process_id, None), {}, "deactivate", 5)
    assert str(raised.value) == reason


@pytest.mark.parametrize("which", ["start", "peer", "step"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), "5"])
def test_times_that_are_given_are_positive_numbers(monkeypatch, which, value):
    monkeypatch.setattr(distributed, "_joined", None)
    with pytest.raises(
        JobError, match=f"JAXCOLL_{which.upper()}_TIMEOUT={value!r} must be a positive number of seconds"
    ):
        distributed.initialize("host:7", 1, 0, **{f"{which}_timeout": value})


def test_a_cluster_that_is_not_there_or_says_half_is_refused(monkeypatch):
    for name in ("SLURM_JOB_ID", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        JobError, match="the cluster must be one of .*slurm.*, not 'slurmm'; JAXCOLL_CLUSTER=deactivate"
    ):
        find_place(NOTHING, {}, "slurmm", 5)
    with pytest.raises(JobError, match="this process is in no cluster of slurm"):
        find_place(NOTHING, {"JAXCOLL_CLUSTER": "slurm"}, None, 5)
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "1.0;tcp://10.0.0.1:1")
    reason = "the cluster around this process says only half: KeyError: 'OMPI_COMM_WORLD_SIZE'"
    with pytest.raises(JobError, match=reason):
        find_place(NOTHING, {}, None, 5)


def test_who_has_left_does_not_come_again(monkeypatch):
    monkeypatch.setattr(distributed, "_joined", Job(2, 1))
    with pytest.raises(JobError, match="this process has left its job, and a process joins one job only"):
        distributed.initialize()
    monkeypatch.setattr(distributed, "_joined", Job(1, 0))
    assert distributed.initialize() == Job(1, 0)


def test_devices_that_have_started_are_too_late_for_a_job(monkeypatch):
    jax.devices()
    monkeypatch.setattr(distributed, "_joined", None)
    with pytest.raises(JobError, match="before any device is started"):
        distributed.initialize("127.0.0.1:7", 2, 0)


@pytest.mark.parametrize("text", ["0", "-3", "soon", "inf", "nan"])
def test_times_are_positive_numbers(monkeypatch, text):
    monkeypatch.setenv("JAXCOLL_PEER_TIMEOUT", text)
    with pytest.raises(JobError, match=f"JAXCOLL_PEER_TIMEOUT='{text}' must be a positive number of seconds"):
        seconds("JAXCOLL_PEER_TIMEOUT", 10)
    monkeypatch.setenv("JAXCOLL_PEER_TIMEOUT", "2.5")
    assert (seconds("JAXCOLL_PEER_TIMEOUT", 10), seconds("JAXCOLL_STEP_TIMEOUT", 20)) == (2.5, 20)


def roll(*callers: tuple[int, int], timeout: float = 10.0) -> list[str]:
    """What each caller, (process, how many it counts), hears; "" is that all have come."""

    def call(rank: int, processes: int) -> str:
        try:
            with call_roll(f"localhost:{port}", processes, rank, timeout, bind=f"localhost:{port}"):
                pass
        except MissingProcess as missing:
            return str(missing).replace(str(port), "PORT")
        return ""

    with reserved_port() as port, concurrent.futures.ThreadPoolExecutor(len(callers)) as pool:
        return list(pool.map(lambda caller: call(*caller), callers))


def test_all_come_in_any_order():
    assert roll((3, 4), (1, 4), (0, 4), (2, 4)) == ["", "", "", ""]


def test_who_is_missing_is_told_to_everyone_who_came():
    assert roll((0, 5), (2, 5), (4, 5), timeout=0.5) == ["processes 1, 3 of 5 did not start within 0.5 s"] * 3


def test_a_missing_coordinator_is_told_to_everyone():
    for said in roll((1, 3), (2, 3), timeout=0.1):
        assert said.startswith("process 0 of 3 did not start, or cannot be reached at localhost:PORT: ")


def test_a_number_that_comes_twice_and_another_count_are_faults():
    assert "two processes say that they are process 1 of 4" in roll((0, 4), (1, 4), (1, 4), timeout=5)
    assert roll((0, 2), (1, 3), timeout=5) == ["process 1 was told of 3 processes, process 0 of 2"] * 2


def first_process(pool: concurrent.futures.Executor, address: str) -> concurrent.futures.Future[list[int]]:
    """Process 0 of 2; gives whom it is connected to."""

    def call() -> list[int]:
        with call_roll(address, 2, 0, 10.0, bind=address) as lines:
            return sorted(lines)

    return pool.submit(call)


def connected(port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            continue


def test_strangers_are_not_counted():
    with reserved_port() as port, concurrent.futures.ThreadPoolExecutor(2) as pool:
        address = f"127.0.0.1:{port}"
        first = first_process(pool, address)
        with connected(port) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\n")
        with call_roll(address, 2, 1, 10.0) as lines:
            assert (first.result(), sorted(lines)) == ([1], [0])


def test_a_process_that_was_started_anew_takes_its_own_place():
    with reserved_port() as port, concurrent.futures.ThreadPoolExecutor(1) as pool:
        address = f"127.0.0.1:{port}"

        def call() -> list[int]:
            with call_roll(address, 3, 0, 10.0, bind=address) as lines:
                return sorted(lines)

        first = pool.submit(call)
        with connected(port) as gone:
            gone.sendall(b"jaxcoll 1 3\n")
        with connected(port) as anew, connected(port) as last:
            anew.sendall(b"jaxcoll 1 3\n")
            last.sendall(b"jaxcoll 2 3\n")
            assert first.result() == [1, 2]


def test_somebody_else_at_the_coordinators_address_is_said():
    with socket.create_server(("127.0.0.1", 0)) as other, concurrent.futures.ThreadPoolExecutor(1) as pool:
        port = other.getsockname()[1]
        address = f"127.0.0.1:{port}"
        words = f"process 0 cannot listen on 127.0.0.1, port {port}: Address already in use"
        with pytest.raises(MissingProcess, match=words), call_roll(address, 2, 0, 1.0, bind=address):
            pass

        def answer() -> None:
            with contextlib.suppress(OSError):  # closed by the test
                while True:
                    with other.accept()[0] as caller:
                        caller.sendall(b"[5]\n")
                        caller.recv(100)

        pool.submit(answer)
        with pytest.raises(MissingProcess) as raised, call_roll(address, 2, 1, -2.5):  # and 3 s of slack
            pass
        other.shutdown(socket.SHUT_RDWR)
        assert str(raised.value) == (
            f"process 0 of 2 did not start, or cannot be reached at {address}: something else answers there"
        )


def joining_job(*faults: Exception | None, silence: float = 10.0) -> list[str]:
    """What each process's thread says while all of them join JAX's service; one with a fault fails at it."""

    def join(rank: int) -> str:
        said: list[str] = []
        told = threading.Event()

        def give_up(fault: str) -> None:
            said.append(fault)
            told.set()

        with call_roll(address, len(faults), rank, 10.0, bind=address) as lines:
            try:
                with watched(lines, rank, silence, give_up):
                    if fault := faults[rank]:
                        raise fault
                    told.wait(0.05 if not any(faults) else 5)
            except OSError:
                pass
        return "".join(said)

    with reserved_port() as port, concurrent.futures.ThreadPoolExecutor(len(faults)) as pool:
        address = f"127.0.0.1:{port}"
        return list(pool.map(join, range(len(faults))))


def test_who_does_not_join_is_told_to_everyone():
    assert joining_job(None, None, None) == ["", "", ""]
    said = "process 1 ended before all had joined: OSError: no such device"
    assert joining_job(None, OSError("no such device"), None) == [said, "", said]
    said = "process 0 ended before all had joined: OSError: out of ports"
    assert joining_job(OSError("out of ports"), None) == ["", said]


@pytest.mark.parametrize(
    ("hangs_up", "said"),
    [
        (True, "process 1 ended before all had joined"),
        (False, "process 1 has been silent for 0.5 s before all had joined"),
    ],
)
def test_who_hangs_up_or_falls_silent_while_joining_is_named(hangs_up, said):
    ours, theirs = socket.socketpair()
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    with ours, theirs:
        if hangs_up:
            theirs.close()
        with watched({1: ours}, 0, 0.5, heard.put):
            assert heard.get(timeout=5) == said
