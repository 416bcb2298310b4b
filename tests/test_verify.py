"""`jaxcoll verify` over topologies: the same numbers on every mesh, one program, and only the expected bytes sent."""

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import one_layer
import pytest
from golden import ODD, TINY, WIDE
from programs import shared_programs
from safetensors.numpy import load_file

from jaxcoll.topology import Topology
from models import cli

# What was measured is 1e-5; `verify` itself allows 2e-4. A slow decay shows here first.
CLOSE = 5e-5
FOLDERS = {"tiny": TINY, "odd": ODD, "wide": WIDE}
CONFIGS = {name: json.loads((folder / "config.json").read_text()) for name, folder in FOLDERS.items()}
CONFIGS["layer"] = one_layer.CONFIG
TRACES = {name: load_file(folder / "trace.safetensors") for name, folder in FOLDERS.items()}


@pytest.fixture(scope="module", autouse=True)
def layer_fixture(tmp_path_factory: pytest.TempPathFactory) -> None:
    FOLDERS["layer"] = one_layer.write_one_layer(tmp_path_factory.mktemp("layer"))
    TRACES["layer"] = load_file(FOLDERS["layer"] / "trace.safetensors")


class Case(NamedTuple):
    fixture: str
    attn_dp: int
    attn_tp: int
    moe_ep: int

    @property
    def world(self) -> int:
        return self.attn_dp * self.attn_tp

    @property
    def moe_tp(self) -> int:
        return self.world // self.moe_ep

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.attn_dp, self.attn_tp, self.moe_ep

    @property
    def options(self) -> list[str]:
        return ["--attn-dp", str(self.attn_dp), "--attn-tp", str(self.attn_tp), "--moe-ep", str(self.moe_ep)]

    def __str__(self) -> str:
        return f"{self.fixture}-{self.attn_dp}x{self.attn_tp}-ep{self.moe_ep}"


def factorisations(fixture: str, worlds: tuple[int, ...]) -> list[Case]:
    """All (attn_dp, attn_tp, moe_ep) of these worlds, possible or not."""
    found = []
    for world in worlds:
        divisors = [n for n in range(1, world + 1) if world % n == 0]
        found += [Case(fixture, world // tp, tp, ep) for tp in divisors for ep in divisors]
    return found


def obstacles(case: Case) -> list[str]:
    """What a refusal may name, from the specification's rules; empty where the topology is possible."""
    config, found = CONFIGS[case.fixture], []
    if case.attn_tp % case.moe_tp and case.moe_tp % case.attn_tp:
        found.append(f"neither attn_tp={case.attn_tp} nor moe_tp={case.moe_tp} divides the other")
    for group, name in (
        ("attn_tp", "num_attention_heads"),
        ("attn_tp", "o_groups"),
        ("moe_ep", "n_routed_experts"),
        ("moe_tp", "moe_intermediate_size"),
    ):
        if config[name] % getattr(case, group):
            found.append(f"{group}={getattr(case, group)} does not divide {name}={config[name]}")
    return found


def every(fixture: str, worlds: tuple[int, ...]) -> list[Case]:
    return [case for case in factorisations(fixture, worlds) if not obstacles(case)]


# A program of a golden fixture takes seconds to compile. So each fixture runs the meshes that matter most to it, and
# the remaining factorisations of up to 8 devices run on a model of one layer.
WORLDS = (1, 2, 3, 4, 6, 8)
GOLDEN = [
    *(Case("tiny", dp, tp, dp * tp) for dp, tp in
      ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2), (2, 4), (8, 1))),
    *(Case("odd", dp, tp, dp * tp) for dp, tp in ((3, 2), (2, 3), (6, 1), (1, 6))),
    Case("odd", 3, 2, 3), Case("odd", 2, 3, 2), Case("odd", 6, 1, 2), Case("odd", 4, 2, 4),
    Case("wide", 2, 2, 1), Case("wide", 4, 2, 2),
]  # fmt: skip
CASES = [*GOLDEN, *(c for c in every("layer", WORLDS) if c.sizes not in {golden.sizes for golden in GOLDEN})]


def test_the_cases_are_all_topologies():
    """Whatever divides a fixture runs on some model, and the one-layer model divides by everything that refines."""
    run = {case.sizes for case in CASES}
    for fixture, worlds, possible in (("tiny", (1, 2, 4, 8), 26), ("odd", (2, 3, 4, 6, 8), 36)):
        found = every(fixture, worlds)
        assert len(found) == possible
        assert {case.sizes for case in found} <= run
    refined = [c for c in factorisations("layer", WORLDS) if c.attn_tp % c.moe_tp == 0 or c.moe_tp % c.attn_tp == 0]
    assert run == {case.sizes for case in refined} and len(CASES) == len(run)


def strict_json(text: str) -> dict[str, Any]:
    """Parses what JSON allows: no NaN, no Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def verify(capsys: pytest.CaptureFixture[str], case: Case, *more: str) -> dict[str, Any]:
    """Runs the command; stdout is one line of JSON and nothing else, stderr is empty."""
    assert cli.main(["verify", str(FOLDERS[case.fixture]), *case.options, *more, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.count("\n") == 1
    return strict_json(out)


def assert_equal_to_the_trace(result: dict[str, Any], fixture: str) -> None:
    trace, layers = TRACES[fixture], CONFIGS[fixture]["num_hidden_layers"]
    names = ["logits", *(f"streams.{i}" for i in range(layers + 1))]
    names += [f"{name}.{i}" for name in ("attn_out", "moe_out") for i in range(layers)]
    assert result["ok"] is True and result["tolerance"] == 2e-4
    assert sorted(result["max_abs_err"]) == sorted(names)
    assert all(0 <= error < CLOSE for error in result["max_abs_err"].values()), result["max_abs_err"]
    assert result["max_abs_err"]["streams.0"] == 0  # the embedding only moves data
    assert result["topk_mismatches"] == 0 and result["greedy_match"] is True
    assert result["generated"] == trace["greedy_ids"].tolist()
    assert result["steps"] == trace["input_ids"].shape[1] + trace["greedy_ids"].shape[1] - 1
    assert result["compiles"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_topology_equals_the_trace(case: Case, capsys):
    result = verify(capsys, case)
    assert_equal_to_the_trace(result, case.fixture)
    assert result["topology"] == {
        "attn_dp": case.attn_dp,
        "attn_tp": case.attn_tp,
        "moe_ep": case.moe_ep,
        "moe_tp": case.moe_tp,
        "world": case.world,
        "processes": 1,
        "local_devices": case.world,
    }
    requests = TRACES[case.fixture]["input_ids"].shape[0]
    even = [requests // case.attn_dp + (r < requests % case.attn_dp) for r in range(case.attn_dp)]
    assert_communicates_as_planned(result, case, even)


def assert_communicates_as_planned(result: dict[str, Any], case: Case, counts: list[int]) -> None:
    """The compiled collectives of every layer, and those around the layers, are exactly the expected ones."""
    plan = result["plan"]
    assert (plan["moe_backend"], plan["dispatch"], plan["wire"], plan["kernels"]) == ("gather", None, None, "xla")
    assert plan["kernels_reason"].startswith("the gather backend packs no rows")
    records = result["collectives"]
    assert all(sorted(record) == sorted(RECORD) for record in records)
    found: dict[str, Counter] = {}
    for record in records:
        place = record["source"].split("/")[0].split(".")
        key = ".".join(place[:2]) if place[0] == "layer" else "around"
        sent = (record["kind"], record["group"], record["operand_bytes"], record["result_bytes"])
        assert record["count"] == 1
        found.setdefault(key, Counter())[sent] += 1
    expected = Expected(case, counts)
    layers = CONFIGS[case.fixture]["num_hidden_layers"]
    in_layer = expected.layer(plan["gather"], plan["combine"])
    assert found == {
        "around": expected.around(plan["gather"]),
        **{f"layer.{i}": in_layer for i in range(layers)},
    }


RECORD = ("kind", "group", "count", "operand_bytes", "result_bytes", "source")


def smallest_bucket(rows: int, attn_tp: int) -> int:
    """The smallest attn_tp * 2^k of at least `rows`."""
    return next(attn_tp * 2**k for k in itertools.count() if attn_tp * 2**k >= rows)


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a step must send, from the model's shapes alone: float32, M rows per replica."""

    case: Case
    counts: list[int]

    @property
    def rows(self) -> int:
        return smallest_bucket(max(self.counts), self.case.attn_tp)

    @property
    def all_rows(self) -> int:
        """G of sum_len: the replicas' rows one after the other, each aligned to attn_tp."""
        tp = self.case.attn_tp
        held = sum(-(-count // tp) * tp for count in self.counts)
        return min(smallest_bucket(held, tp), self.case.attn_dp * self.rows)

    def group(self, name: Any) -> str:
        """As the HLO reader names it: the mesh axes with more than one member."""
        topology = Topology(*self.case.sizes)
        return ",".join(axis for axis in topology.group(name) if topology.axes[axis] > 1) or "self"

    def gather(self, path: str, width: int) -> list[tuple[str, str, int, int]]:
        """Rows of `width` elements to everyone."""
        dp, tp, m, g = self.case.attn_dp, self.case.attn_tp, 4 * width * self.rows, 4 * width * self.all_rows
        return {
            "none": [("all_gather", self.group("attn_dp"), m, m)],
            "max_len": [("all_gather", self.group("world"), m // tp, m * dp)],
            "sum_len": [("all_reduce", self.group("world"), g, g)],
        }[path]

    def combine(self, path: str, gather: str, width: int) -> list[tuple[str, str, int, int]]:
        """Partial sums of everyone's rows to own rows."""
        dp, m = self.case.attn_dp, 4 * width * self.rows
        g = 4 * width * self.all_rows if gather == "sum_len" else m * dp
        return {
            "all_reduce": [("all_reduce", self.group("world"), g, g)],
            "reduce_scatter_v": [("reduce_scatter", self.group("world"), m * dp, m),
                                 ("all_gather", self.group("attn_tp"), m, m)],
        }[path]  # fmt: skip

    def layer(self, gather: str, combine: str) -> Counter:
        hidden = CONFIGS[self.case.fixture]["hidden_size"]
        heads = ("all_reduce", self.group("attn_tp"), 4 * hidden * self.rows, 4 * hidden * self.rows)
        return Counter([heads, *self.gather(gather, hidden), *self.combine(combine, gather, hidden)])

    def around(self, gather: str) -> Counter:
        """Token ids for the routers, and the logits' parts."""
        vocabulary, tp = CONFIGS[self.case.fixture]["vocab_size"], self.case.attn_tp
        part = 4 * self.rows * -(-vocabulary // tp)
        return Counter([*self.gather(gather, 1), ("all_gather", self.group("attn_tp"), part, part * tp)])


@pytest.fixture(scope="module")
def one_program_per_shape() -> Iterator[None]:
    with shared_programs():
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "counts"),
    [
        (Case("tiny", 4, 2, 8), [0, 3, 1, 0]),
        (Case("layer", 4, 2, 8), [0, 3, 1, 0]),
        (Case("layer", 4, 2, 8), [4, 0, 0, 0]),
        (Case("layer", 4, 2, 8), [0, 0, 0, 4]),
        (Case("layer", 4, 2, 4), [2, 0, 1, 1]),
        (Case("layer", 4, 1, 2), [0, 3, 1, 0]),
        (Case("layer", 4, 1, 4), [0, 0, 0, 4]),
    ],
    ids=str,
)
def test_idle_replicas_change_nothing(case: Case, counts: list[int], capsys, one_program_per_shape):
    result = verify(capsys, case, "--requests-per-replica", ",".join(map(str, counts)))
    assert_equal_to_the_trace(result, case.fixture)
    assert_communicates_as_planned(result, case, counts)


IMPOSSIBLE = [
    *(case for case in factorisations("tiny", tuple(range(1, 9))) if obstacles(case)),
    *(case for case in factorisations("odd", (2, 3, 4, 5, 6, 7, 8)) if obstacles(case)),
    Case("tiny", 1, 8, 8),
    Case("odd", 3, 2, 2),
    Case("odd", 5, 2, 10),
    Case("wide", 3, 1, 3),
]


@pytest.mark.parametrize("case", IMPOSSIBLE, ids=str)
def test_what_does_not_divide_is_refused_with_the_numbers(case: Case, capsys):
    assert cli.main(["verify", str(FOLDERS[case.fixture]), *case.options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert any(reason in err for reason in obstacles(case)), err


def test_moe_ep_must_divide_the_world(capsys):
    assert cli.main(["verify", str(TINY), "--attn-dp", "4", "--attn-tp", "2", "--moe-ep", "3"]) == 2
    assert capsys.readouterr() == (
        "",
        "jaxcoll: moe_ep=3 does not divide the world of attn_dp*attn_tp = 4*2 = 8 devices\n",
    )


def test_the_table_says_what_the_json_says_with_a_cache_just_long_enough(capsys, one_program_per_shape, monkeypatch):
    needed = str(TRACES["wide"]["input_ids"].shape[1] + TRACES["wide"]["greedy_ids"].shape[1] - 1)
    case, words = Case("wide", 2, 1, 2), ["verify", str(WIDE), "--attn-dp", "2", "--max-seq-len", needed]
    result = verify(capsys, case, "--max-seq-len", needed)
    assert_equal_to_the_trace(result, "wide")
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert err == "" and max(map(len, out.splitlines())) <= 80
    assert lines[0] == "2 devices: attn_dp 2 x attn_tp 1 = moe_ep 2 x moe_tp 1"
    errors = {name: f"{error:.1e}" for name, error in result["max_abs_err"].items()}
    for i in range(2):
        assert f"{i} {errors[f'streams.{i}']} {errors[f'attn_out.{i}']} {errors[f'moe_out.{i}']}" in lines
    assert f"head {errors['streams.2']}" in lines and f"logits {errors['logits']}" in lines
    for request, ids in enumerate(TRACES["wide"]["greedy_ids"].tolist()):
        assert f"request {request} on replica {request} continues with {', '.join(map(str, ids))}" in lines
    worst = max(result["max_abs_err"].values())
    assert lines[-2:] == [
        f"equal to the golden trace: largest difference {worst:.1e}, allowed 0.0002",
        "23 steps, 1 compiled program; greedy ids match; 0 expert choices differ",
    ]


def test_a_folder_without_weights_is_no_fixture(tmp_path: Path, capsys):
    (tmp_path / "config.json").write_text((WIDE / "config.json").read_text())
    assert cli.main(["verify", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "has no trace.safetensors: verify compares with one" in err and err.count("\n") == 1
