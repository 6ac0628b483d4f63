"""Paths and their prices: which link is taken, what it can carry, and when moving KV beats computing it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from quartet_core.catalogue import builtin
from quartet_core.links import Link, best_path, cheaper_to_move, link_between, place_on, transfer_ms
from quartet_core.profile import Profile

CATALOGUE = builtin()
H100 = CATALOGUE.hardware_class("H100_SXM5")
L40S = CATALOGUE.hardware_class("L40S_PCIE")


def h100(node="a", gpus=1, rdma="ib", nic=45.0):
    return place_on(node, H100, gpus, rdma, nic)


def l40s(node="b", gpus=1, rdma="ib", nic=45.0):
    return place_on(node, L40S, gpus, rdma, nic)


@pytest.mark.parametrize(
    ("source", "target", "path"),
    [
        (h100(), h100(), "NVLINK"),
        (l40s(), l40s(), "PCIE_P2P"),
        (h100("a"), l40s("a"), "PCIE_P2P"),
        (h100(), l40s(), "RDMA_IB"),
        (h100(rdma="roce"), l40s(rdma="roce"), "RDMA_ROCE"),
        (h100(rdma="ib"), l40s(rdma="roce"), "TCP"),
        (h100(), l40s(rdma=""), "TCP"),
        (h100(rdma=""), l40s(rdma=""), "TCP"),
    ],
)
def test_the_fastest_path_that_both_ends_have_is_taken(source, target, path):
    assert best_path(source, target) == path
    assert link_between(source, target).kind == path


def host(place):
    return structs.replace(place, host=True)


@pytest.mark.parametrize(
    ("source", "target", "path", "gb_per_s"),
    [
        (h100("a"), host(h100("a")), "HOST", 56.0),
        (host(h100("a")), l40s("a"), "HOST", 28.0),
        (h100("a"), host(l40s("b")), "RDMA_IB", 45.0),
        (host(l40s("a")), h100("b"), "RDMA_IB", 45.0),
        (host(h100("a")), l40s("b"), "RDMA_IB", 28.0),
        (h100("a", rdma="", nic=0.0), host(h100("b", rdma="", nic=0.0)), "TCP", 9.0),
    ],
)
def test_memory_of_a_node_is_reached_over_its_cards_pcie_or_the_net(source, target, path, gb_per_s):
    link = link_between(source, target)
    assert (link.kind, link.gb_per_s) == (path, gb_per_s)


def test_cards_that_cannot_reach_each_other_share_host_memory():
    lonely = l40s("a")
    assert best_path(lonely, type(lonely)(node="a", gpu_gb_per_s=20, host_gb_per_s=28, peer_to_peer=False)) == "SHM"


def test_one_l40s_takes_in_28_gb_per_s_and_four_take_what_the_nic_gives():
    assert link_between(h100(gpus=4), l40s(gpus=1)).gb_per_s == 28.0
    assert link_between(h100(gpus=4), l40s(gpus=4)).gb_per_s == 45.0


def test_a_slow_nic_at_either_end_caps_the_link():
    assert link_between(h100(nic=12.2), l40s(gpus=4)).gb_per_s == 12.2
    assert link_between(h100(gpus=4), l40s(gpus=4, nic=12.2)).gb_per_s == 12.2


@pytest.mark.parametrize(("gb_per_s", "ms"), [(45.0, 60), (28.0, 96), (12.2, 220)])
def test_an_8k_prompt_of_a_70b_takes_as_long_as_published(gb_per_s, ms):
    assert transfer_ms(Link("RDMA_IB", gb_per_s, 0.4), 8192 * 327_680) == pytest.approx(ms, rel=0.02)


def test_what_is_in_flight_goes_first_and_comes_back_once():
    link = Link("TCP", 1.0, 2.0)
    assert transfer_ms(link, 3_000_000) == pytest.approx(5.0)
    assert link.begin(10_000_000) == 0
    assert link.begin(1_000_000) == 10_000_000
    assert transfer_ms(link, 3_000_000) == pytest.approx(16.0)
    link.end(10_000_000)
    link.end(1_000_000)
    assert transfer_ms(link, 3_000_000) == pytest.approx(5.0)
    with pytest.raises(ValueError, match="in flight"):
        link.end(1)


def test_nothing_to_move_takes_no_time():
    assert transfer_ms(Link("TCP", 1.0, 2.0), 0) == 0.0


def test_crossing_sockets_to_the_nic_multiplies_the_moving_but_not_the_setup():
    near, far = Link("RDMA_IB", 10.0, 1.0), Link("RDMA_IB", 10.0, 1.0, numa_penalty=1.5)
    assert transfer_ms(far, 20_000_000) - 1.0 == pytest.approx(1.5 * (transfer_ms(near, 20_000_000) - 1.0))


@given(st.floats(0.5, 400), st.floats(0.5, 400), st.integers(64_000_000, 4_000_000_000), st.integers(0, 10**9))
def test_observing_what_a_link_really_does_leads_the_estimate_there(start, truth, size, ahead):
    link, real = Link("TCP", start, 0.1), Link("TCP", truth, 0.1)
    real.begin(ahead)
    for _ in range(60):
        link.observe(size, ahead, transfer_ms(real, size))
    assert link.gb_per_s == pytest.approx(truth, rel=0.1)


def test_small_transfers_teach_setup_and_leave_bandwidth_alone():
    link = Link("RDMA_IB", 45.0, 0.4)
    for _ in range(60):
        link.observe(1000, 0, 0.7)
    assert link.setup_ms == pytest.approx(0.7, rel=0.01)
    assert link.gb_per_s == 45.0


def test_a_link_that_silently_fell_back_to_tcp_is_noticed():
    link = link_between(h100(gpus=8), h100("b", gpus=8))
    assert not link.slowed
    for _ in range(20):
        link.observe(135_000_000, 0, 1803.0)
    assert link.slowed


@pytest.mark.parametrize("wrong", [{"gb_per_s": 0.0}, {"setup_ms": -1.0}, {"numa_penalty": 0.5}])
def test_a_link_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match="a link needs"):
        Link(**({"kind": "TCP", "gb_per_s": 1.0, "setup_ms": 0.0} | wrong))


PROFILE = Profile(5.0, 0.01, 0.0, (1, 2), (0, 1), ((1.0, 1.0), (1.0, 1.0)))


def test_either_side_of_the_crossover_the_cheaper_way_is_chosen():
    # 1,000 tokens: 10 ms to compute above the constant, 1 GB/s moves 1e6 bytes per ms
    link = Link("TCP", 1.0, 0.0)
    assert cheaper_to_move(9_900_000, link, PROFILE, 0, 1000).move
    assert not cheaper_to_move(10_100_000, link, PROFILE, 0, 1000).move
    assert not cheaper_to_move(10_000_000, link, PROFILE, 0, 1000).move


def test_the_choice_shows_both_prices_and_counts_drift_and_the_queue_on_the_link():
    link = Link("TCP", 1.0, 0.0)
    assert cheaper_to_move(15_000_000, link, PROFILE, 0, 1000, drift=2.0).move
    link.begin(10_000_000)
    choice = cheaper_to_move(15_000_000, link, PROFILE, 0, 1000, drift=2.0)
    assert (choice.move, choice.move_ms, choice.recompute_ms) == (False, pytest.approx(25.0), pytest.approx(20.0))


@given(st.integers(0, 30_000), st.integers(1, 30_000), st.integers(1, 30_000))
def test_recomputing_is_priced_as_what_having_the_prefix_would_save(cached, new, rest):
    profile = CATALOGUE.profile("L40S_PCIE", "llama-3.1-8b", "fp8", 1)
    without = profile.prefill_ms(cached, new + rest)
    with_it = profile.prefill_ms(cached + new, rest)
    choice = cheaper_to_move(1, Link("TCP", 1.0, 0.0), profile, cached, new)
    assert choice.recompute_ms == pytest.approx(without - with_it, rel=1e-6)


def test_kv_of_a_long_prompt_is_moved_over_rdma_and_computed_again_rather_than_sent_over_a_slow_line():
    profile = CATALOGUE.profile("L40S_PCIE", "llama-3.1-8b", "fp8", 1)
    size = 32_768 * 131_072
    assert cheaper_to_move(size, link_between(h100(), l40s()), profile, 0, 32_768).move
    assert not cheaper_to_move(size, Link("TCP", 0.1, 1.0), profile, 0, 32_768).move
