"""Joining a job: who this process is, who has come, and what is refused before JAX's runtime starts."""

import concurrent.futures
import socket

import pytest

from jaxcoll import coordination, distributed
from jaxcoll.coordination import Place
from jaxcoll.distributed import Job, JobError, find_place, seconds
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
    ],
)
def test_half_a_job_is_refused(change, reason):
    environment = {name: value for name, value in (VARIABLES | change).items() if value is not None}
    with pytest.raises(JobError) as raised:
        find_place(NOTHING, environment, None, 5)
    assert reason in str(raised.value)


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
            call_roll(f"localhost:{port}", processes, rank, timeout, bind=f"localhost:{port}")
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


def test_strangers_are_not_counted():
    with reserved_port() as port, concurrent.futures.ThreadPoolExecutor(2) as pool:
        address = f"127.0.0.1:{port}"
        first = pool.submit(call_roll, address, 2, 0, 10.0, bind=address)
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.sendall(b"GET / HTTP/1.1\n")
                break
            except ConnectionRefusedError:
                continue
        second = pool.submit(call_roll, address, 2, 1, 10.0)
        assert (first.result(), second.result()) == (None, None)
