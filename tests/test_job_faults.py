"""Every way in which one process fails its job: each survivor says who, with a defined exit code, within 30 seconds."""

import concurrent.futures
import re
from pathlib import Path

import pytest
from jobs import WORKER, Ended, run_job
from tiny_models import published, random_tensors, write_model

from jaxcoll.coordination import DISAGREEMENT_EXIT, PEER_TIMEOUT_EXIT

VICTIM = 1
LOST, DIFFER = PEER_TIMEOUT_EXIT, DISAGREEMENT_EXIT
FAST = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
OTHER_FLAG = {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_enable_fast_math=true"}

# fault -> exit code and words of every survivor; the job has processes 0, 1 and 2.
FAULTS = {
    "missing": (LOST, r"PeerTimeout: the job did not start: process 1 of 3 did not start within 8 s$"),
    "joining": (LOST, r"PeerTimeout: the job did not start: process 1 ended before all had joined$"),
    "exits": (LOST, r"process 1 is gone while process \d is at step 4 .*process 1 ended after step 3 with exit code 0"),
    "raises": (LOST, r"process 1 is no longer there; .*step 4 with exit code 1: ZeroDivisionError: as the test asks"),
    "SIGKILL": (LOST, r"PeerTimeout: process 1 is silent for more than 10 s; last reports: process 0 at step 4 "),
    "SIGSTOP": (LOST, r"PeerTimeout: process 1 is silent for more than 10 s; last reports: process 0 at step 4 "),
    "leaving": (LOST, r"PeerTimeout: process 1 is silent for more than 10 s; last reports: .*"
                      r"process 1 ended after step 8 with exit code 0, silent for 1\d s"),
    "rows": (DIFFER, r"about program first: shapes: 'int32\[12\] in parts of \[4\]' on processes 0, 2, "
                     r"'int32\[24\] in parts of \[8\]' on process 1;"),
    "flag": (DIFFER, r"the processes disagree about the environment: XLA_FLAGS: '[^']*=0' on processes 0, 2, "
                     r"'[^']*fast_math=true' on process 1$"),
    "checked order": (DIFFER, r"the processes disagree: what comes next: 'step 1, program first' on processes 0, 2, "
                              r"'step 1, program second' on process 1;"),
    "order": (DIFFER, r"(process 1 is running other programs than process [02]|"
                      r"processes 0, 2 are running other programs than process 1), or in another order; last reports:"),
}  # fmt: skip


def run(fault: str, victim: int = VICTIM) -> dict[int, Ended]:
    def change(rank: int) -> dict[str, str]:
        more = {"JAXCOLL_START_TIMEOUT": "8"} | ({"JAXCOLL_CHECK_STEPS": "1"} if fault == "checked order" else {})
        return more | (OTHER_FLAG if (fault, rank) == ("flag", victim) else FAST)

    return run_job(
        [WORKER, fault, str(victim)],
        3,
        missing=[victim] if fault == "missing" else [],
        stopped=[victim] if fault == "SIGSTOP" else [],
        change=change,
    )


@pytest.fixture(scope="module")
def ended() -> dict[str, dict[int, Ended]]:
    """All jobs, three at a time: most of their time is spent waiting."""
    cases = {fault: (fault, VICTIM) for fault in FAULTS} | {"coordinator": ("SIGKILL", 0), "frozen": ("SIGSTOP", 0)}
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        return dict(zip(cases, pool.map(lambda case: run(*case), cases.values()), strict=True))


def survivors(job: dict[int, Ended], victim: int) -> dict[int, Ended]:
    return {rank: process for rank, process in job.items() if rank != victim}


def seconds_after_fault(job: dict[int, Ended], victim: int) -> float:
    said = re.search(r"^fault (\S+)$", job[victim].out, re.MULTILINE)
    assert said, job[victim].out
    return max(process.when for process in survivors(job, victim).values()) - float(said[1])


@pytest.mark.parametrize("fault", FAULTS)
def test_every_survivor_says_who_and_what(ended, fault):
    code, words = FAULTS[fault]
    others = survivors(ended[fault], VICTIM)
    assert sorted(others) == [0, 2]
    for rank, process in others.items():
        assert process.code == code, (rank, process.err)
        assert re.search(words, process.last_words, re.MULTILINE), (rank, process.err)


@pytest.mark.parametrize("fault", ["joining", "exits", "raises", "SIGKILL", "SIGSTOP", "leaving"])
def test_survivors_end_within_half_a_minute(ended, fault):
    assert seconds_after_fault(ended[fault], VICTIM) < 30


def test_who_is_at_fault_is_told_as_well(ended):
    for fault in ("rows", "flag", "order"):
        assert ended[fault][VICTIM].code == DIFFER, ended[fault][VICTIM].err
    assert ended["exits"][VICTIM].code == LOST
    assert "this process ended well, the job did not: process 1 is gone while" in ended["exits"][VICTIM].last_words
    assert ended["raises"][VICTIM].code == 1
    assert "ZeroDivisionError: as the test asks" in ended["raises"][VICTIM].err
    assert ended["SIGKILL"][VICTIM].code == -9


@pytest.mark.parametrize("fault", ["coordinator", "frozen"])
def test_the_coordinators_own_process_may_be_the_one(ended, fault):
    how = {"coordinator": "is gone", "frozen": r"has not answered for 1\d s"}[fault]
    for rank, process in survivors(ended[fault], 0).items():
        assert process.code == LOST, (rank, process.err)
        words = rf"PeerTimeout: process 0 is lost( or cut off)?: its coordination service at 127.0.0.1:\d+ {how}"
        assert re.search(words, process.last_words), (rank, process.err)
    assert seconds_after_fault(ended[fault], 0) < 30


def test_the_plan_of_the_step_is_printed_with_a_lost_peer(ended):
    assert re.search(r"^plan of step 4 \((fetch|second)\):\nall_gather over attn_dp$", ended["SIGSTOP"][0].err, re.M)


def test_another_config_in_one_process_is_named(tmp_path):
    config = published(compress_ratios=[0], num_hash_layers=0)
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        write_model(tmp_path / str(rank), config | {"swiglu_limit": 7.0 + 3 * rank}, random_tensors(config))
    code = f"import os, sys; from models.cli import main; sys.exit(main({words(tmp_path)}))"
    job = run_job(["-c", code], 2)
    for process in job.values():
        assert process.code == DIFFER, process.err
        assert "about the model and the request: config.swiglu_limit: '7.0' on process 0, '10.0' on process 1" in (
            process.last_words
        )


def test_other_weights_in_one_process_are_named(tmp_path):
    """One expert of many, which the other process does not even hold."""
    config = published(compress_ratios=[0], num_hash_layers=0)
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        tensors = random_tensors(config)
        if rank:
            tensors["layers.0.ffn.experts.0.w1.weight"][-1, -1] += 1
        write_model(tmp_path / str(rank), config, tensors)
    code = f"import os, sys; from models.cli import main; sys.exit(main({words(tmp_path)}))"
    said = r"about the model and the request: contents of the weights: '\w{16}' on process 0, '\w{16}' on process 1$"
    for process in run_job(["-c", code], 2).values():
        assert process.code == DIFFER, process.err
        assert re.search(said, process.last_words, re.MULTILINE), process.err


def words(folder: Path) -> str:
    """Python source of a command line whose folder depends on the process."""
    return f"['generate', '{folder}/' + os.environ['JAXCOLL_PROCESS_ID'], '--prompt-ids', '1,2', '--devices', '2']"


def test_a_process_that_is_interrupted_while_it_waits_for_the_others_ends():
    job = run_job([WORKER, "interrupted", "1"], 2, change=lambda rank: FAST)
    assert (job[0].code, job[1].code) == (LOST, 130), job[0].err
    assert "process 1 ended after step 8 with exit code 130: KeyboardInterrupt" in job[0].last_words


def test_a_forked_child_is_no_process_of_the_job():
    job = run_job(["-W", "ignore", WORKER, "forks", "1"], 2, change=lambda rank: FAST)
    for process in job.values():
        assert process.code == 0, process.err
        assert process.out.splitlines()[-1] == "equal"


def test_another_hash_seed_does_not_matter():
    job = run_job([WORKER, "none", "0"], 2, change=lambda rank: FAST | {"PYTHONHASHSEED": str(rank + 1)})
    for process in job.values():
        assert process.code == 0, process.err
        assert process.out.splitlines()[-1] == "equal"
