"""When the beating child beats, and what it may say of an agent that hangs."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_agent.beats.child import may_beat
from quartet_agent.beats.schedule import Schedule

INTERVAL_NS = 500_000


@given(origin=st.integers(0, 10**15), naps=st.lists(st.integers(0, 20 * INTERVAL_NS), min_size=1, max_size=60))
def test_slots_never_drift_never_repeat_and_are_never_made_up_for(origin, naps):
    schedule = Schedule(origin, INTERVAL_NS)
    now = origin
    given_slots = []
    for nap in naps:
        due = schedule.next_ns(now)
        assert (due - origin) % INTERVAL_NS == 0
        assert due > now - INTERVAL_NS  # a slot that is over is not beaten
        given_slots.append((due - origin) // INTERVAL_NS)
        now = max(now, due) + nap
    assert all(later > earlier for earlier, later in pairwise(given_slots))
    assert given_slots[-1] == len(given_slots) + schedule.skipped


def test_a_sleeper_on_time_gets_every_slot():
    schedule = Schedule(1000, INTERVAL_NS)
    now = 1000
    for slot in range(1, 100):
        due = schedule.next_ns(now)
        assert due == 1000 + slot * INTERVAL_NS
        now = due + 70_000  # wakes up a little late each time
    assert schedule.skipped == 0


def test_after_a_pause_of_ten_slots_one_beat_follows_not_ten():
    schedule = Schedule(0, INTERVAL_NS)
    assert schedule.next_ns(0) == INTERVAL_NS
    late = 11 * INTERVAL_NS + 1
    assert schedule.next_ns(late) == 11 * INTERVAL_NS
    assert schedule.next_ns(late) == 12 * INTERVAL_NS
    assert schedule.skipped == 9


@pytest.mark.parametrize(
    ("age_ms", "beats", "accepts"),
    [(0, True, True), (249, True, True), (250, True, False), (999, True, False), (1000, False, False)],
)
def test_a_hung_agent_first_stops_accepting_and_then_stops_beating(age_ms, beats, accepts):
    assert may_beat(age_ms * 1_000_000) == (beats, accepts)
