"""The decode engine: each request gets what it gets alone, whatever shares its batch, its slot or its padding."""

import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from golden import ODD
from reference import Reference
from safetensors.numpy import load_file
from tiny_models import not_owned

from jaxcoll.topology import Topology
from models.deepseek_v4.decoder import Decoder, Row
from models.deepseek_v4.generate import generate
from models.errors import UserError

GOLDEN = load_file(ODD / "trace.safetensors")
IDS, GREEDY = GOLDEN["input_ids"], GOLDEN["greedy_ids"]  # [3, 37], [3, 6]
RATIOS = json.loads((ODD / "config.json").read_text())["compress_ratios"]
REPLICAS, SLOTS, LENGTH = 2, 4, 43
ROOM = [4, 4]  # rows per replica that every step is planned for
ROWS = 6  # what a replica's 4 rows are padded to: a multiple of attn_tp
# Six requests in an order of their own; planned for 4 and 2 rows, they run the same program.
SIX_HOMES = [(0, 1), (1, 3), (0, 3), (0, 0), (1, 0), (0, 2)]
ANY_ROW = Row(1, 0, 0, 0)
SHORT = 22  # positions: four windows of 5, an entry of HCA 16, five of CSA with a top-k of 3

Home = tuple[int, int]  # replica, slot


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    """odd-11 on 2 x 3 devices, moe_ep 2 x moe_tp 3; every test runs its one program of 4 rows per replica."""
    results = ("next_token", "logits")
    return Decoder.load(ODD, Topology(REPLICAS, 3, 2), slots=SLOTS, max_seq_len=LENGTH, results=results)[0]


@pytest.fixture(scope="module", autouse=True)
def one_program(decoder):
    """Positions, counts, routing and homes of all tests below never compiled a second one."""
    yield
    assert decoder.compiles == len(decoder.steps) == 1


def logits(decoder: Decoder, rows: Sequence[Row]) -> np.ndarray:
    seen = decoder.step(rows, room=ROOM)
    return np.asarray(seen["logits"])[seen["places"]]


def run_alone(decoder: Decoder, ids: np.ndarray, home: Home = (0, 0)) -> np.ndarray:
    return np.stack([logits(decoder, [Row(int(t), p, *home)])[0] for p, t in enumerate(ids)])


def run_together(decoder: Decoder, homes: Sequence[Home], seed: int, length: int = SHORT) -> list[np.ndarray]:
    """All requests in one batch, rows in random order, each going on in about two of three steps."""
    draw, found = np.random.default_rng(seed), [[] for _ in homes]
    while any(len(f) < length for f in found):
        going = [i for i in draw.permutation(len(homes)) if len(found[i]) < length and draw.random() < 0.67]
        rows = [Row(int(IDS[i, len(found[i])]), len(found[i]), *homes[i]) for i in going]
        for i, row in zip(going, logits(decoder, rows) if rows else [], strict=True):
            found[i].append(row)
    return [np.stack(f) for f in found]


def snapshot(decoder: Decoder) -> Any:
    return jax.tree.map(np.asarray, decoder.caches)


def put(decoder: Decoder, caches: Any) -> None:
    decoder.caches = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), caches, decoder.caches)


def fill(decoder: Decoder, value: float) -> None:
    put(decoder, jax.tree.map(lambda a: np.full(a.shape, value, a.dtype), decoder.caches))


@pytest.fixture(scope="module")
def alone(decoder) -> list[np.ndarray]:
    """Each request's logits when nothing else ever ran, [SHORT, V] each."""
    found = []
    for ids in IDS:
        fill(decoder, 0.0)
        found.append(run_alone(decoder, ids[:SHORT]))
    return found


def test_a_request_alone_equals_the_trace_and_the_loop(alone):
    exact = Reference(json.loads((ODD / "config.json").read_text()), load_file(ODD / "model.safetensors"))
    for i, found in enumerate(alone):
        np.testing.assert_allclose(found, GOLDEN["logits"][i, :SHORT], atol=2e-5)
    np.testing.assert_allclose(alone[0], exact.run(IDS[0, :SHORT])["logits"], atol=2e-5)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "homes", [[(0, 0), (1, 3), (0, 2)], [(1, 1), (1, 0), (1, 3)], [(0, 3), (0, 1), (0, 0)]], ids=["both", "1", "0"]
)
def test_a_shared_batch_changes_no_bit(decoder, alone, homes, seed):
    """Requests at different positions, permuted rows and slots, on either replica, and replicas idle."""
    for found, wanted in zip(run_together(decoder, homes, seed), alone, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_slot_is_reused_after_a_longer_request(decoder, alone):
    run_alone(decoder, IDS[0], home=(1, 2))
    np.testing.assert_array_equal(run_alone(decoder, IDS[1, :SHORT], home=(1, 2)), alone[1])


@pytest.mark.parametrize("junk", [np.nan, 1e30])
def test_junk_in_every_unused_cache_place_changes_no_bit(decoder, alone, junk):
    """Before the start in all caches, and after each step wherever no running request keeps anything."""
    fill(decoder, junk)
    homes = [(0, 1), (1, 3), (0, 2)]
    for step in range(SHORT + 4):
        positions = {i: step - 2 * i for i in range(3) if 0 <= step - 2 * i < SHORT}
        found = logits(decoder, [Row(int(IDS[i, p]), p, *homes[i]) for i, p in positions.items()])
        for (i, p), row in zip(positions.items(), found, strict=True):
            np.testing.assert_array_equal(row, alone[i][p])
        owners = {homes[i][0] * SLOTS + homes[i][1]: p + 1 for i, p in positions.items()}
        caches = snapshot(decoder)
        put(decoder, [not_owned(cache, owners, ratio, junk) for cache, ratio in zip(caches, RATIOS, strict=True)])
    fill(decoder, 0.0)


PADDING = [(-5, 10**9, -1), (10**9, -1, 0), (0, 3, 1), (7, LENGTH, 2), (96, 5, 10**9)]


@pytest.mark.parametrize("junk", PADDING, ids=str)
def test_padding_rows_may_hold_anything(decoder, alone, junk):
    """Two real rows on replica 1, junk everywhere else; no cache place changes either."""
    homes = [(1, 2), (1, 1)]
    logits(decoder, [Row(int(IDS[i, 0]), 0, *homes[i]) for i in range(2)])
    (step,) = decoder.steps.values()
    before, caches = snapshot(decoder), []
    for value in ((0, 0, 0), junk):
        put(decoder, before)
        batch = np.tile(np.array(value, np.int32), (REPLICAS, ROWS, 1))
        batch[1, :2] = [(IDS[i, 1], 1, homes[i][1]) for i in range(2)]
        inputs = jax.device_put((batch, np.array([0, 2], np.int32)), decoder.input_shardings)
        decoder.caches, seen = step(decoder.parameters, decoder.caches, *inputs)
        caches.append(jax.tree.leaves(snapshot(decoder)))
        found = np.asarray(seen["logits"]).reshape(REPLICAS, ROWS, -1)
        for i in range(2):
            np.testing.assert_array_equal(found[1, i], alone[i][1])
    for clean, dirty in zip(*caches, strict=True):
        np.testing.assert_array_equal(clean, dirty)


BAD_ROWS: dict[str, list[Row]] = {
    "a step needs at least one row; when every replica is idle nobody runs": [],
    "token id -1 is out of range: it must be from 0 to 95 (vocab_size=96)": [Row(-1, 0, 0, 0)],
    "token id 96 is out of range: it must be from 0 to 95 (vocab_size=96)": [Row(0, 0, 0, 1), Row(96, 0, 0, 0)],
    "position -1 is out of range: it must be from 0 to 42 (the cache's max_seq_len=43)": [Row(0, -1, 0, 0)],
    "position 43 is out of range: it must be from 0 to 42 (the cache's max_seq_len=43)": [Row(0, 43, 0, 0)],
    "replica -1 is out of range: it must be from 0 to 1 (attn_dp=2)": [Row(0, 0, -1, 0)],
    "replica 2 is out of range: it must be from 0 to 1 (attn_dp=2)": [Row(0, 0, 2, 0)],
    "slot -1 is out of range: it must be from 0 to 3 (the replica's slots=4)": [Row(0, 0, 0, -1)],
    "slot 4 is out of range: it must be from 0 to 3 (the replica's slots=4)": [Row(0, 0, 1, 3), Row(0, 0, 0, 4)],
    "slot 2 of replica 1 is named by two rows of one step": [Row(0, 0, 1, 2), Row(1, 0, 0, 2), Row(2, 1, 1, 2)],
}


@pytest.mark.parametrize("sentence", BAD_ROWS)
def test_a_bad_row_is_one_sentence_and_changes_nothing(decoder, sentence):
    logits(decoder, [ANY_ROW])
    caches, before = decoder.caches, jax.tree.leaves(snapshot(decoder))
    with pytest.raises(UserError) as refused:
        decoder.step(BAD_ROWS[sentence], room=ROOM)
    assert str(refused.value) == sentence
    assert decoder.caches is caches
    for old, new in zip(before, jax.tree.leaves(snapshot(decoder)), strict=True):
        np.testing.assert_array_equal(old, new)


def test_the_old_caches_are_given_up(decoder):
    logits(decoder, [ANY_ROW])
    old = jax.tree.leaves(decoder.caches)
    logits(decoder, [ANY_ROW])
    assert all(leaf.is_deleted() for leaf in old)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((decoder.caches, decoder.parameters)))


def test_next_tokens_come_in_the_order_of_the_rows(decoder, alone):
    homes = [(1, 0), (0, 3), (1, 2)]
    for order in ([2, 0, 1], [1, 2, 0]):
        found = decoder.next_tokens([Row(int(IDS[i, 0]), 0, *homes[i]) for i in order], room=ROOM)
        assert found == [int(np.argmax(alone[i][0])) for i in order]
    assert len({int(np.argmax(a[0])) for a in alone}) == 3


def test_nothing_compiles_after_the_first_step(decoder):
    """Counted by jax itself: other positions, counts, homes and tokens."""
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if "compile" in event or "trace" in event:
            compiled.append(event)

    logits(decoder, [ANY_ROW])
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for homes in ([(0, 0), (1, 0), (1, 1)], [(1, 3), (1, 2), (0, 1)]):
            run_together(decoder, homes, seed=9, length=6)
        assert compiled == []
        jax.jit(lambda x: x * 3 + len(compiled))(1.5)  # the listener hears a compilation
        assert compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_prefixes_of_different_lengths_continue_like_the_trace(decoder):
    """One new token each: the trace's argmax at the prefix's last position."""
    lengths = [1, 4, 16, 5, 37, 17]
    prompts = [IDS[i % 3, :n].tolist() for i, n in enumerate(lengths)]
    wanted = [[int(np.argmax(GOLDEN["logits"][i % 3, n - 1]))] for i, n in enumerate(lengths)]
    assert generate(decoder, prompts, SIX_HOMES, 1) == wanted


def test_a_prompt_that_ends_later_gives_the_rest_of_the_greedy_ids(decoder):
    prompts = [[*IDS[i].tolist(), *GREEDY[i, : 2 * i].tolist()] for i in range(3)]
    wanted = [GREEDY[i, 2 * i : 2 * i + 2].tolist() for i in range(3)]
    assert generate(decoder, prompts * 2, SIX_HOMES, 2) == wanted * 2


def test_stop_ids_end_their_request_only(decoder):
    """Request 0 stops at its third new id, which it keeps; request 1 has it in its prompt only; request 2 never."""
    stop = int(GREEDY[0, 2])
    prompts = [IDS[0].tolist(), [*IDS[1, :7].tolist(), stop], IDS[2].tolist()]
    assert stop not in GREEDY[2] and stop not in GREEDY[0, :2]
    free, stopped = (generate(decoder, prompts * 2, SIX_HOMES, 6, stop=ids)[:3] for ids in ((), (96, stop)))
    assert stopped[0] == GREEDY[0, :3].tolist()
    assert stopped[2] == free[2] == GREEDY[2].tolist()
    assert free[0] == GREEDY[0].tolist() and len(free[1]) == 6 and stop not in free[1][:5]
    assert stopped[1] == free[1]
    assert generate(decoder, prompts * 2, SIX_HOMES, 6, stop=(int(free[1][1]),))[4] == free[1][:2]
