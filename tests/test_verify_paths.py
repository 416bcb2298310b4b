"""Every possible gather x combine decodes to the golden trace, whatever the spread; an impossible one is refused."""

import dataclasses
import itertools

import pytest
from golden import ODD, TINY

from jaxcoll.combine import combine_impossible
from jaxcoll.gather import gather_impossible
from jaxcoll.settings import Settings
from jaxcoll.topology import Topology
from models.cli import main
from models.deepseek_v4 import params
from models.deepseek_v4.compare import compare
from models.deepseek_v4.config import Config
from models.deepseek_v4.decoder import TRACE, Decoder
from models.deepseek_v4.model import DeepSeekV4
from models.deepseek_v4.requests import spread
from models.deepseek_v4.trace import Trace
from models.progress import Working

POSITIONS = 10  # two closed CSA windows and one closed HCA window of the tiny model
WAYS = ("all_reduce", "reduce_scatter_v", "reduce_scatter")
MODES = ("gather_v", "sum_len", "max_len")
CELLS = [
    (fixture, mesh, mode, way)
    for fixture, mesh in ((TINY, (4, 1)), (TINY, (2, 2)), (TINY, (4, 2)), (TINY, (8, 1)), (ODD, (2, 3)), (ODD, (3, 2)))
    for mode, way in itertools.product(MODES, WAYS)
    if not gather_impossible(mode, Topology(*mesh)) and not combine_impossible(way, mode, Topology(*mesh))
]
# Differences of 1e-5 were seen; sums over ranks are in another order than the reference's.
CLOSE = 5e-5


def spreads(requests: int, replicas: int) -> list[tuple[int, ...]]:
    """Even, all but one on the first replica, all on the last."""
    even = [requests // replicas + (r < requests % replicas) for r in range(replicas)]
    uneven = [requests - 1, *[0] * (replicas - 2), 1]
    last = [*[0] * (replicas - 1), requests]
    return [tuple(even), tuple(uneven), tuple(last)]


@pytest.fixture(scope="module")
def loaded():
    """Parameters per (fixture, mesh): every cell of a mesh reads the same."""
    kept = {}

    def load(fixture, mesh):
        if (fixture, mesh) not in kept:
            kept.clear()
            config, topology = Config.from_folder(fixture), Topology(*mesh)
            kept[fixture, mesh] = config, topology, params.load(fixture, DeepSeekV4(config, topology))[0]
        return kept[fixture, mesh]

    return load


@pytest.mark.slow
@pytest.mark.parametrize(("fixture", "mesh", "mode", "way"), CELLS)
def test_every_cell_decodes_to_the_trace(loaded, fixture, mesh, mode, way):
    config, topology, parameters = loaded(fixture, mesh)
    trace = Trace.load(fixture, config)
    following = trace.values["logits"][:, POSITIONS - 1].argmax(-1)[:, None]
    trace = dataclasses.replace(trace, input_ids=trace.input_ids[:, :POSITIONS], greedy_ids=following)
    requests = len(trace.input_ids)
    settings = Settings(gather=mode, combine=way)
    kept = {"slots": requests, "max_seq_len": 16, "results": TRACE, "settings": settings}
    decoder = Decoder(config, topology, parameters, **kept)
    decoder.room = (requests,) * topology.attn_dp  # one program for all spreads
    for counts in spreads(requests, topology.attn_dp):
        with Working() as working:
            outcome = compare(decoder, trace, spread(requests, topology.attn_dp, counts), working)
        assert outcome["greedy_match"] and outcome["topk_mismatches"] == 0, counts
        assert max(outcome["max_abs_err"].values()) < CLOSE, counts
    assert decoder.compiles == 1 and decoder.plans[0].gather == mode and decoder.plans[0].combine == way


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--attn-dp", "2", "--attn-tp", "2", "--gather", "gather_v"), "gather_v sends each rank's own rows"),
        (("--attn-dp", "2", "--attn-tp", "2", "--combine", "reduce_scatter_v"), "it needs attn_tp = 1, not 2"),
        (
            ("--attn-dp", "4", "--gather", "sum_len", "--combine", "reduce_scatter"),
            "it needs the equal slots of max_len",
        ),
    ],
)
def test_an_impossible_cell_names_its_reason(capsys, words, reason):
    assert main(["verify", str(TINY), *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "impossible here because" in err and reason in err
