"""Lanes of a large fleet: few of all pairs, the used ones told, room made without a look at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_bus.config.schema import KvSection, LinkSection
from quartet_core.links import Place
from quartet_kv_coordinator import lanes as module
from quartet_kv_coordinator.admission import Waiting, first_of
from quartet_kv_coordinator.lanes import Lanes, Route


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(module, "MAX_LANES", 4)
    monkeypatch.setattr(module, "MAX_ANNOUNCED", 2)
    return Lanes(KvSection())


def place(node):
    return Place(node=node, gpu_gb_per_s=25.0, host_gb_per_s=25.0)


def use(lane, name="t"):
    lane.enter(name, 9_000_000, Route(lane, 1.0), 0)
    lane.leave(name, 3_000_000, 3.0)


def kept(lanes):
    return [lane.target for lane in lanes]


def told(lanes):
    return [state.target for state in lanes.states()]


def test_a_look_at_a_link_keeps_nothing():
    lanes = Lanes(KvSection())
    assert lanes.look(place("a"), place("b")).lane.link.gb_per_s == 9.0
    assert len(lanes) == 0
    lane = lanes.route(place("a"), place("b")).lane
    assert lanes.look(place("a"), place("b")).lane is lane


def test_only_measured_and_busy_lanes_are_told_the_last_planned_first(small):
    first, second, third = (small.route(place("a"), place(node)).lane for node in ("b", "c", "d"))
    assert told(small) == []
    use(first)
    second.wait("w", 1, 1, Route(second, 1.0))
    assert told(small) == ["c", "b"]
    third.enter("t", 1, Route(third, 1.0), 0)
    assert told(small) == ["d", "c"]
    small.route(place("a"), place("b"))
    assert told(small) == ["b", "d"]


def test_room_is_made_by_the_lane_longest_unplanned_that_is_not_busy(small):
    for node in ("b", "c", "d", "e"):
        small.route(place("a"), place(node))
    small.route(place("a"), place("b"))
    busy = small.route(place("a"), place("c"))
    busy.lane.enter("t", 1, busy, 0)
    for node in ("f", "g", "h", "i", "j"):
        small.route(place("a"), place(node))
    assert len(small) == 4
    assert "c" in kept(small)
    assert {"b", "d", "e", "f", "g"}.isdisjoint(kept(small))


def test_making_room_looks_at_no_more_lanes_than_it_forgets(monkeypatch):
    monkeypatch.setattr(module, "MAX_LANES", 64)
    looked = []
    busy = module.Lane.busy.fget
    monkeypatch.setattr(module.Lane, "busy", property(lambda lane: looked.append(lane) or busy(lane)))
    lanes = Lanes(KvSection())
    for number in range(1064):
        lanes.route(place("a"), place(f"n{number}"))
    assert len(looked) == 1000


def test_a_listing_has_used_links_first_and_ends_at_its_bound(small):
    use(small.route(place("a"), place("b")).lane)
    pairs = [(place(x), place(y)) for x in "cab" for y in "cab"]
    assert [(state.source, state.target) for state in small.listing(pairs)] == [("a", "b"), ("c", "c")]


# Sharing and admission ------------------------------------------------------------------------------------------------

MB = 1_000_000


def rooted(node, root, gb_per_s=28.0):
    return Place(node=node, gpu_gb_per_s=gb_per_s, host_gb_per_s=gb_per_s, root=root)


def test_a_link_learns_its_own_rate_from_transfers_that_shared_it():
    lanes = Lanes(KvSection())
    route = lanes.route(place("a"), place("b"))
    lane = route.lane
    for name in ("one", "two"):
        lane.enter(name, 90 * MB, route, 0)
    # two at once over 9 GB/s, each at half of it: both there after setup and 20 ms
    for name in ("one", "two"):
        lane.leave(name, 20_000_000, 21.0)
    assert lane.link.gb_per_s == pytest.approx(9.0, rel=0.01)


def test_a_small_transfer_beside_a_large_one_waits_for_its_share_and_not_for_all_of_it():
    lanes = Lanes(KvSection())
    route = lanes.route(place("a"), place("b"))
    route.lane.enter("large", 900 * MB, route, 0)
    assert route.lane.enter("small", 9 * MB, route, 0).predicted_ms == pytest.approx(1.0 + 2.0)


def test_one_root_complex_is_shared_by_links_from_everywhere():
    lanes = Lanes(KvSection(transfers_per_root=2, links={"TCP": LinkSection(50.0, 0.0)}))
    routes = [lanes.route(rooted(node, "r", 100.0), rooted("z", "r")) for node in "abc"]
    assert len({id(route.roots[1]) for route in routes}) == 1
    for name, route in zip("abc", routes, strict=True):
        route.lane.wait(name, 10**12, 28 * MB, route)
    assert [route.lane.grant(0) for route in routes] == ["a", "b", "c"]
    for name, route in zip("ab", routes, strict=False):
        route.lane.enter(name, 28 * MB, route, 0)
    routes[2].lane.wait("c", 10**12, 28 * MB, routes[2])
    assert routes[2].lane.grant(0) is None
    assert routes[2].predict_ms(28 * MB, 10**12) == pytest.approx(3.0)  # all three through 28 GB/s
    routes[0].lane.leave("a", 1_000_000)
    assert routes[2].lane.grant(1_000_000) == "c"
    routes[1].lane.leave("b", 1_000_000)
    assert (routes[0].roots[1].sending, routes[0].roots[1].bytes_in_flight) == (0, 0)


def test_nvlink_passes_no_root_complex_and_unknown_roots_hold_nobody_up():
    lanes = Lanes(KvSection())
    card = Place(node="n", gpu_gb_per_s=450.0, host_gb_per_s=55.0, gpu_link="nvlink", root="r")
    assert lanes.route(card, card).roots == ()
    assert lanes.route(place("a"), place("b")).roots == ()


def test_what_nobody_waits_for_goes_last_and_leaves_half_of_the_places_free():
    route = Lanes(KvSection(transfers_per_link=4)).route(place("a"), place("b"))
    lane = route.lane
    for number in range(4):
        lane.wait(f"page{number}", 10**9, MB, route, yields=True)
    lane.wait("split", 10**12, 900 * MB, route)
    granted = []
    while (name := lane.grant(0)) is not None:
        granted.append(name)
        lane.enter(name, MB, route, 0)
    assert granted == ["split", "page0", "page1"]
    lane.leave("page0", 1)
    assert lane.grant(1) == "page2"
    lane.enter("page2", MB, route, 1)
    lane.wait("fetch", 10**12, MB, route)
    assert lane.grant(1) == "fetch"
    single = Lanes(KvSection(transfers_per_link=1)).route(place("a"), place("b"))
    single.lane.wait("page", 10**9, MB, single, yields=True)
    assert single.lane.grant(0) == "page", "a link with one place is left to whoever is there"


def order(*waiting):
    left, told, now_ns = [Waiting(name, int(due_ms * 1e6), size) for name, due_ms, size in waiting], [], 0
    while left:
        granted = first_of(left, now_ns, lambda size: size / MB)
        told.append(granted.transfer)
        left.remove(granted)
        now_ns += int(granted.kv_bytes / MB * 1e6)
    return told


def test_a_small_one_goes_first_where_both_are_in_time_and_the_earlier_due_one_where_not():
    assert order(("large", 200, 100 * MB), ("small", 300, 10 * MB)) == ["small", "large"]
    assert order(("large", 105, 100 * MB), ("small", 300, 10 * MB)) == ["large", "small"]


def test_one_that_is_late_anyhow_stands_in_nobodys_way():
    assert order(("hopeless", 50, 100 * MB), ("small", 300, 10 * MB)) == ["small", "hopeless"]


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(1, 120)), min_size=1, max_size=8).map(
        lambda told: [(f"t{number}", due_ms, size * MB) for number, (due_ms, size) in enumerate(told)]
    )
)
def test_whoever_is_in_time_by_deadline_order_is_in_time_in_ours(waiting):
    def late(names):
        clock_ms, late = 0.0, set()
        for name in names:
            due_ms, size = next((due, size) for other, due, size in waiting if other == name)
            clock_ms += size / MB
            if clock_ms > due_ms:
                late.add(name)
        return late

    by_deadline = [name for name, due, size in sorted(waiting, key=lambda each: (each[1], each[2], each[0]))]
    if not late(by_deadline):
        assert not late(order(*waiting))
