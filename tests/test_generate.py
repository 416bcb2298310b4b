"""`jaxcoll generate`: prompts of unequal length in one batch give what the trace gives, on every mesh."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from golden import TINY
from programs import shared_programs
from safetensors.numpy import load_file

from jaxcoll.topology import Topology
from models import cli
from models.deepseek_v4.decoder import Decoder
from models.deepseek_v4.generate import generate
from models.deepseek_v4.requests import slots_for, spread

TRACE = load_file(TINY / "trace.safetensors")
IDS, GREEDY = TRACE["input_ids"], TRACE["greedy_ids"]
BEST = np.argmax(TRACE["logits"], axis=-1)  # [B, S]: what follows each prefix
# Unequal prefixes of the trace's requests, not in order of length; the whole of one of them.
CUTS = [(2, 5), (0, IDS.shape[1]), (1, 1), (3, 17), (0, 8), (3, 9), (1, 28)]  # request, length
PROMPTS = [IDS[request, :length].tolist() for request, length in CUTS]
FOLLOWS = [int(BEST[request, length - 1]) for request, length in CUTS]
NEW = GREEDY.shape[1]
MESHES = {"4x2": (4, 2), "2x4": (2, 4)}


@pytest.fixture(scope="module", autouse=True)
def one_program_per_shape() -> Iterator[None]:
    with shared_programs():
        yield


def run(
    capsys: pytest.CaptureFixture[str], mesh: str, prompts: Sequence[Sequence[int]], *more: str, folder: Path = TINY
) -> list[list[int]]:
    """The JSON's ids; stdout is one line of JSON and nothing else, stderr is empty."""
    dp, tp = MESHES[mesh]
    words = ["generate", str(folder), "--attn-dp", str(dp), "--attn-tp", str(tp), "--json", *more]
    for prompt in prompts:
        words += ["--prompt-ids", ",".join(map(str, prompt))]
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.count("\n") == 1
    result = json.loads(out)
    assert list(result) == ["generated"]
    return result["generated"]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """Every prompt's continuation when it is the only request of a one-device mesh."""
    decoder, _ = Decoder.load(TINY, Topology(1, 1), slots=1, max_seq_len=256)
    return [generate(decoder, [prompt], [(0, 0)], NEW)[0] for prompt in PROMPTS]


def test_one_device_gives_the_traces_argmax(alone):
    """The whole of the trace's input gives the trace's greedy ids."""
    assert [ids[0] for ids in alone] == FOLLOWS
    assert alone[CUTS.index((0, IDS.shape[1]))] == GREEDY[0].tolist()


def test_the_prompts_are_worth_it():
    lengths = [len(prompt) for prompt in PROMPTS]
    assert len(set(lengths)) == len(lengths) and sorted(lengths) != lengths
    assert len(set(FOLLOWS)) > 4


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["4x2", "2x4"])
def test_prefixes_give_the_traces_argmax_in_prompt_order(mesh, alone, capsys):
    """More prompts than replicas; the same ids as on one device, where each prompt ran alone."""
    found = run(capsys, mesh, PROMPTS, "--max-new-tokens", str(NEW), "--ignore-eos")
    assert [ids[0] for ids in found] == FOLLOWS
    assert found[CUTS.index((0, IDS.shape[1]))] == GREEDY[0].tolist()
    assert found == alone


def test_a_continuation_is_a_prompt(alone):
    """Feeding the first new ids as part of the prompt changes nothing."""
    decoder, _ = Decoder.load(TINY, Topology(1, 1), slots=1, max_seq_len=256)
    for prompt, ids in zip(PROMPTS[:3], alone, strict=False):
        assert generate(decoder, [[*prompt, *ids[:3]]], [(0, 0)], NEW - 3) == [ids[3:]]
    assert decoder.compiles == 1


@pytest.mark.parametrize("new", [1, 3])
def test_max_new_tokens(new, alone, capsys):
    found = run(capsys, "4x2", PROMPTS, "--max-new-tokens", str(new), "--ignore-eos")
    assert found == [ids[:new] for ids in alone]


def test_eight_new_tokens_by_default_in_the_prompts_order(alone, capsys):
    assert NEW == 8
    assert run(capsys, "4x2", PROMPTS[::-1], "--ignore-eos") == alone[::-1]


@pytest.mark.slow
def test_fewer_prompts_than_replicas(alone, capsys):
    """Idle replicas take part; which replica a prompt lands on does not matter."""
    found = run(capsys, "4x2", [PROMPTS[3], PROMPTS[0]], "--ignore-eos")
    assert found == [alone[3], alone[0]]
    assert run(capsys, "4x2", [PROMPTS[4], PROMPTS[6]], "--ignore-eos") == [alone[4], alone[6]]


def with_eos(folder: Path, eos: int | list[int] | None) -> Path:
    """The tiny model with other ids that end a sequence."""
    config = json.loads((TINY / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": eos}))
    shutil.copy(TINY / "model.safetensors", folder / "model.safetensors")
    return folder


def until(ids: list[int], stop: Sequence[int]) -> list[int]:
    end = next((i for i, token in enumerate(ids) if token in stop), len(ids))
    return ids[: end + 1]


def test_an_end_of_sequence_id_ends_its_request_only(alone, capsys, tmp_path):
    """The id itself is part of the output; the others go on without being compiled anew."""
    end = alone[0][2]
    expected = [until(ids, [end]) for ids in alone]
    assert len(expected[0]) <= 3 and NEW in map(len, expected)
    folder = with_eos(tmp_path, end)
    assert run(capsys, "4x2", PROMPTS, folder=folder) == expected
    assert run(capsys, "4x2", PROMPTS, "--ignore-eos", folder=folder) == alone


def test_several_end_of_sequence_ids(alone, capsys, tmp_path):
    ends = [alone[0][2], alone[1][0], alone[3][5]]
    expected = [until(ids, ends) for ids in alone]
    assert len({len(ids) for ids in expected}) > 2
    assert run(capsys, "4x2", PROMPTS, folder=with_eos(tmp_path, ends)) == expected


def test_without_trace_and_end_of_sequence_id_the_plain_output_is_a_line_per_prompt(alone, capsys, tmp_path):
    folder = with_eos(tmp_path, None)
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
    words = ["generate", str(folder), "--attn-dp", "4", "--attn-tp", "2"]
    for prompt in PROMPTS:
        words += ["--prompt-ids", ",".join(map(str, prompt))]
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("".join(",".join(map(str, ids)) + "\n" for ids in alone), "")
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_one_program_however_the_batch_shrinks(alone):
    """Requests end at different steps, the last one runs alone: the batch keeps the program it began with."""
    topology = Topology(4, 2)
    homes = spread(len(PROMPTS), 4)
    decoder, _ = Decoder.load(TINY, topology, slots=slots_for(homes), max_seq_len=256)
    assert generate(decoder, PROMPTS, homes, NEW, stop=[alone[0][2], alone[1][0]])
    assert decoder.compiles == 1


def test_a_slot_is_used_again(alone):
    """A request finds nothing of the longer one that had its slot before."""
    decoder, _ = Decoder.load(TINY, Topology(1, 1), slots=1, max_seq_len=256)
    assert len(PROMPTS[1]) > len(PROMPTS[4]) > len(PROMPTS[2])
    for number in (1, 4, 2):
        assert generate(decoder, [PROMPTS[number]], [(0, 0)], NEW) == [alone[number]]
