"""`jaxcoll bench`: the median of completed steps after the warm-up, as JSON and in a sentence."""

import json
import time
from collections.abc import Iterator

import pytest
from golden import WIDE
from programs import shared_programs

from models import cli
from models.deepseek_v4 import bench
from models.deepseek_v4.decoder import Decoder

MESH = ("--attn-dp", "2", "--attn-tp", "2", "--moe-ep", "2")


@pytest.fixture(scope="module", autouse=True)
def one_program() -> Iterator[None]:
    with shared_programs():
        yield


class Clock:
    """Stands in for `time`: the n-th step takes seconds[n], a query itself nothing."""

    def __init__(self, seconds: list[float]):
        self.now, self.seconds, self.running = 100.0, iter(seconds), False

    def perf_counter(self) -> float:
        if self.running:
            self.now += next(self.seconds)
        self.running = not self.running
        return self.now


def test_the_median_leaves_out_the_warm_up(capsys, monkeypatch):
    """One slow step among the timed ones and four among the others do not count; the middle of 2, 4, 6 ms does."""
    monkeypatch.setattr(bench, "time", Clock([9.0, 1.0, 1.0, 1.0, 0.002, 7.0, 0.004, 0.002, 0.006]))
    assert cli.main(["bench", str(WIDE), *MESH, "--batch", "3", "--steps", "5", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.count("\n") == 1
    assert json.loads(out) == {
        "ms_per_step": 4.0,
        "tokens_per_s": 750.0,
        "batch": 3,
        "steps": 5,
        "compiles": 1,
        "per_process": [{"process": 0, "min_ms": 2.0, "median_ms": 4.0, "max_ms": 7000.0}],
        "slowest_process": 0,
        "profile": None,
        "topology": {
            "attn_dp": 2,
            "attn_tp": 2,
            "moe_ep": 2,
            "moe_tp": 2,
            "world": 4,
            "processes": 1,
            "local_devices": 4,
        },
    }


def test_real_times_agree_with_each_other(capsys):
    start = time.perf_counter()
    assert cli.main(["bench", str(WIDE), *MESH, "--batch", "3", "--steps", "6", "--json"]) == 0
    whole = 1e3 * (time.perf_counter() - start)
    result = json.loads(capsys.readouterr().out)
    assert result["tokens_per_s"] == pytest.approx(3e3 / result["ms_per_step"], rel=1e-2)
    assert 0.05 < result["ms_per_step"] < whole / 3  # more than half of the six steps took at least the median


def test_a_step_is_timed_until_its_ids_are_there(capsys, monkeypatch):
    """What was submitted only would be timed as nothing: the ids of every step are on the host before the clock."""
    asked, clock = [], Clock([0.001] * 8)
    next_tokens = Decoder.next_tokens

    def watched(self, rows, room=None):
        tokens = next_tokens(self, rows, room)
        assert clock.running and all(type(token) is int for token in tokens)
        asked.append([(row.position, row.token) for row in rows])
        assert len(asked) == 1 or [token for _, token in asked[-1]] == following[-1]
        following.append(tokens)
        return tokens

    following: list[list[int]] = []
    monkeypatch.setattr(bench, "time", clock)
    monkeypatch.setattr(Decoder, "next_tokens", watched)
    assert cli.main(["bench", str(WIDE), *MESH, "--batch", "3", "--steps", "4"]) == 0
    assert [{position for position, _ in rows} for rows in asked] == [{p} for p in range(bench.WARM_UP + 4)]
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("1.0 ms per step (median of 4), 3000.0 tokens/s, batch 3 on 4 devices\n")
    assert out.split()[-5:] == ["\u2500" * 37, "0", "1.0", "1.0", "1.0"]


def test_the_steps_must_fit_the_cache(capsys):
    words = ["bench", str(WIDE), *MESH, "--steps", "13", "--max-seq-len", "16"]
    assert cli.main(words) == 2
    assert capsys.readouterr() == (
        "",
        "jaxcoll: a run of 4 + 13 steps needs 17 positions, past the cache of 16; see --max-seq-len\n",
    )
