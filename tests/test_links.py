"""T = alpha + S/B on machines: where a group's members live, what crosses which link, and how long that takes."""

import pytest

from jaxcoll.cost import Transfer
from jaxcoll.links import (
    CONNECTX_7,
    CONNECTX_8,
    NVLINK_4,
    NVLINK_5,
    PCIE_5,
    START_SECONDS,
    collective_seconds,
    machines,
    spans,
    total_seconds,
)
from jaxcoll.topology import Topology

TWO_HOSTS = Topology(4, 4, devices=range(16))  # 2 machines of 8: attn_tp stays on one, attn_dp spans both
H200 = machines("h200")
MIB = 2**20


def moved(kind, group, size, operand, result, counted=None):
    return Transfer(kind, group, size, operand, result, "test", counted)


@pytest.mark.parametrize(
    ("group", "size", "wanted"), [("attn_tp", 4, (1, 4)), ("attn_dp", 4, (2, 2)), ("attn_dp,attn_tp", 16, (2, 8))]
)
def test_groups_live_on_machines(group, size, wanted):
    assert spans(moved("all_reduce", group, size, 8, 8), TWO_HOSTS, 8) == wanted


def test_the_widest_group_counts():
    """Of four ranks each on machines of six, the first group lies on one machine and the second on two."""
    assert spans(moved("all_reduce", "attn_tp", 4, 8, 8), Topology(3, 4, devices=range(12)), 6) == (2, 2)


def test_a_group_on_one_machine_uses_nvlink_alone():
    t = collective_seconds(moved("all_gather", "attn_tp", 4, MIB, 4 * MIB), TWO_HOSTS, H200)
    assert t.start == pytest.approx(START_SECONDS + 2 * 0.6e-6)
    assert (t.inside, t.between) == (pytest.approx(3 * MIB / 450e9), 0)
    assert t.total == pytest.approx(t.start + t.inside)


def test_a_group_over_machines_runs_in_two_phases():
    """All 16 gather 16 MiB: 8 cards each bring an eighth of the other machine's half, NVLink spreads 7 of 8 parts."""
    t = collective_seconds(moved("all_gather", "attn_dp,attn_tp", 16, MIB, 16 * MIB), TWO_HOSTS, H200)
    assert t.between == pytest.approx(16 * MIB / 2 / 8 / 50e9)
    assert t.inside == pytest.approx(16 * MIB * 7 / 8 / 450e9)
    assert t.start == pytest.approx(START_SECONDS + 3 * 0.6e-6 + 5e-6)
    assert t.total == pytest.approx(t.start + t.inside + t.between)


def test_a_reduction_sends_twice_what_its_halves_do():
    whole = collective_seconds(moved("all_reduce", "attn_dp,attn_tp", 16, 16 * MIB, 16 * MIB), TWO_HOSTS, H200)
    half = collective_seconds(moved("reduce_scatter", "attn_dp,attn_tp", 16, 16 * MIB, MIB), TWO_HOSTS, H200)
    assert (whole.inside, whole.between) == (pytest.approx(2 * half.inside), pytest.approx(2 * half.between))


def test_an_exchange_uses_both_links_at_a_time_and_pays_for_imbalance():
    sent = moved("ragged_all_to_all", "attn_dp,attn_tp", 16, 99 * MIB, 99 * MIB, counted=16 * MIB)
    t = collective_seconds(sent, TWO_HOSTS, H200)
    assert t.inside == pytest.approx(7 * MIB / 450e9) and t.between == pytest.approx(8 * MIB / 50e9)
    assert t.total == pytest.approx(t.start + t.between)
    busy = collective_seconds(sent, TWO_HOSTS, H200, imbalance=2)
    assert (busy.inside, busy.between, busy.start) == (2 * t.inside, 2 * t.between, t.start)
    gather = moved("all_gather", "attn_tp", 4, MIB, 4 * MIB)
    both = total_seconds([sent, gather], TWO_HOSTS, H200, imbalance=2)
    assert both.between == 2 * t.between
    assert both.total == pytest.approx(busy.total + collective_seconds(gather, TWO_HOSTS, H200).total)


def test_cards_are_behind_the_bus_that_they_are_sold_with():
    assert machines("h100").inside == machines("h200").inside == NVLINK_4 and machines("b200").inside == NVLINK_5
    assert machines("b200").between.bandwidth == CONNECTX_7.bandwidth == 50e9 < PCIE_5.bandwidth
    assert machines("b200", network="connectx8").between.bandwidth == CONNECTX_8.bandwidth == 100e9
    assert machines("h200", inside="pcie").inside == PCIE_5
