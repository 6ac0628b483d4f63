"""Lanes of a large fleet: few of all pairs, the used ones told, room made without a look at all."""

import pytest

from quartet_bus.config.schema import KvSection
from quartet_core.links import Place
from quartet_kv_coordinator import lanes as module
from quartet_kv_coordinator.lanes import Lanes


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(module, "MAX_LANES", 4)
    monkeypatch.setattr(module, "MAX_ANNOUNCED", 2)
    return Lanes(KvSection())


def place(node):
    return Place(node=node, gpu_gb_per_s=25.0, host_gb_per_s=25.0)


def use(lane, name="t"):
    lane.enter(name, 9_000_000, 1.0)
    lane.leave(name, 3.0)


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
    second.wait("w", 1, 1)
    assert told(small) == ["c", "b"]
    third.enter("t", 1, 1.0)
    assert told(small) == ["d", "c"]
    small.route(place("a"), place("b"))
    assert told(small) == ["b", "d"]


def test_room_is_made_by_the_lane_longest_unplanned_that_is_not_busy(small):
    for node in ("b", "c", "d", "e"):
        small.route(place("a"), place(node))
    small.route(place("a"), place("b"))
    small.route(place("a"), place("c")).lane.enter("t", 1, 1.0)
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
