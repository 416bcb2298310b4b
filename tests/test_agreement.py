"""What the processes of a job tell each other before they run, and what is said where they differ."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from shared_store import Store

from jaxcoll import agreement, all_gather, step
from jaxcoll.agreement import agree
from jaxcoll.coordination import DisagreementError, PeerTimeout
from jaxcoll.settings import SettingsError
from jaxcoll.topology import Topology


@pytest.fixture
def store(monkeypatch) -> Store:
    monkeypatch.setattr(agreement, "_count", 0)
    return Store(monkeypatch, 4)


def others_say(store: Store, what: str, items: list[dict[str, str]]) -> None:
    for rank, said in enumerate(items, 1):
        store.held[f"jaxcoll/agree/{agreement.agreements()}/{rank}"] = json.dumps({"what comes next": what} | said)


def test_equal_words_are_agreement_and_cost_is_kept(store):
    others_say(store, "x", [{"a": "1"}] * 3)
    agree("x", {"a": "1"})
    cost = agreement.costs[-1]
    assert agreement.agreements() == 1
    assert cost.what == "x" and 0 <= cost.own < 1 and 0 <= cost.waited < 1


def test_what_was_said_before_is_forgotten_once_everyone_has_read_it(store):
    for _ in range(4):
        others_say(store, "x", [{}] * 3)
        agree("x", {})
    assert {key.split("/")[2] for key in store.held} == {"3"}


def test_the_item_and_the_sides_are_named(store):
    others_say(store, "program f", [{"a": "1", "b": "2"}, {"a": "7", "b": "2"}, {"b": "2"}])
    with pytest.raises(DisagreementError) as raised:
        agree("program f", {"a": "1", "b": "2"})
    assert str(raised.value) == (
        "the processes disagree about program f: a: '1' on processes 0, 1, '7' on process 2, nothing on process 3"
    )


def test_other_things_to_do_are_named_first(store):
    others_say(store, "program f", [{"a": "1"}] * 3)
    with pytest.raises(DisagreementError) as raised:
        agree("program g", {"a": "1"})
    assert str(raised.value) == (
        "the processes disagree: what comes next: 'program g' on process 0, 'program f' on processes 1, 2, 3"
    )


def test_many_items_are_cut_and_long_values_hashed(store):
    long = {f"item {i}": "y" * 1000 for i in range(9)}
    others_say(store, "x", [{name: "z" for name in long}] * 3)
    with pytest.raises(DisagreementError) as raised:
        agree("x", long)
    message = str(raised.value)
    assert message.endswith("; and 5 more items") and "y" * 300 + "... (sha256 " in message and "y" * 301 not in message


def test_long_values_that_differ_at_their_end_differ(store):
    others_say(store, "x", [{"a": agreement._short("y" * 999 + "1")}] * 3)
    with pytest.raises(DisagreementError, match="sha256"):
        agree("x", {"a": "y" * 999 + "2"})


def test_who_does_not_come_is_named(store):
    others_say(store, "x", [{}])
    with pytest.raises(PeerTimeout, match=r"^processes 2, 3 did not come to x within 0.05 s$"):
        agree("x", {}, timeout=0.05)


def test_one_process_agrees_with_itself_and_asks_nobody(monkeypatch):
    monkeypatch.setattr(agreement, "_count", 0)
    store = Store(monkeypatch, 1)
    agree("x", {"a": "1"})
    assert (store.held, agreement.agreements()) == ({}, 0)


def test_the_environment_is_versions_flags_and_settings(store, monkeypatch):
    monkeypatch.setenv(
        "XLA_FLAGS", "--b=3 --b=2 --a=1 --xla_dump_to=/somewhere --xla_force_host_platform_device_count=2"
    )
    monkeypatch.setenv("JAXCOLL_DP_USE_GATHERV", "on")
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    monkeypatch.setattr(agreement, "agree", lambda what, items: store.held.update(items))
    agreement.agree_on_environment()
    assert store.held["XLA_FLAGS"] == "--a=1 --b=2"
    assert (store.held["jax"], store.held["JAXCOLL_DP_USE_GATHERV"]) == (jax.__version__, "on")
    assert not any("HASH" in name for name in store.held)
    for text, said in (("", "False"), ("on", "True"), ("1", "True"), ("0", "False")):
        monkeypatch.setenv("JAXCOLL_CHECK_STEPS", text)
        agreement.agree_on_environment()
        assert store.held["JAXCOLL_CHECK_STEPS"] == said
    monkeypatch.setenv("JAXCOLL_CHECK_STEPS", "maybe")
    with pytest.raises(SettingsError, match="JAXCOLL_CHECK_STEPS='maybe' is neither on nor off"):
        agreement.agree_on_environment()


def test_a_program_is_known_by_mesh_shapes_collectives_and_text(monkeypatch):
    said: dict[str, dict[str, str]] = {}
    monkeypatch.setattr(agreement.coordination, "in_a_job", lambda: True)
    monkeypatch.setattr(agreement.coordination, "process_index", lambda: 1)
    for module in (agreement, step):
        monkeypatch.setattr(module, "agree", lambda what, items, **_: said.update({what: dict(items)}))
    topology = Topology(attn_dp=2, attn_tp=1)
    group = topology.group("attn_dp")

    def compiled(more: int) -> str:
        program = step.compile_step(
            lambda x: all_gather(x, group, 0) + more,
            topology,
            (jax.ShapeDtypeStruct((6, 4), jnp.float32),),
            in_specs=(P(group),),
            out_specs=P(),
            name="f",
        )
        return program.fingerprint

    first = compiled(1)
    assert said["program f"] == {
        "mesh": "{'attn_dp': 2, 'attn_tp': 1}",
        "devices in rank order": "0 of process 0, 1 of process 0",
        "shapes": "float32[6, 4] in parts of [3, 4]",
        "collectives": "all_gather_invariant over attn_dp",
        "lowered program": first,
    }
    assert list(said) == ["program f", "the first run of f"]
    assert compiled(1) == first != compiled(2)
