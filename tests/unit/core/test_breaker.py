"""Breakers: three failures in a row rest a worker, one trial at a time brings it back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_core.breaker import FROZEN_PAUSE_MS, PAUSE_MAX_MS, PAUSE_MS, Breakers, counts


@pytest.mark.parametrize(
    ("code", "held_against"),
    [(200, False), (400, False), (404, False), (413, False), (429, False), (499, False), (500, True), (502, True),
     (503, False), (504, False)],
)  # fmt: skip
def test_only_the_workers_own_faults_count(code, held_against):
    assert counts(code) is held_against


def test_three_failures_in_a_row_open_and_a_success_between_them_does_not():
    breakers = Breakers()
    for _ in range(2):
        breakers.failed(4, 0.0)
    breakers.succeeded(4)
    for _ in range(2):
        breakers.failed(4, 0.0)
    assert breakers.open == 0
    breakers.failed(4, 0.0)
    assert breakers.open == 1 << 4
    assert breakers.opened == 1


def test_a_resting_worker_is_due_after_its_pause_for_one_request_at_a_time():
    breakers = Breakers()
    for _ in range(3):
        breakers.failed(4, 100.0)
    assert breakers.due(100.0 + PAUSE_MS - 1) == 0
    assert breakers.due(100.0 + PAUSE_MS) == 1 << 4
    breakers.tried(4, 100.0 + PAUSE_MS)
    assert breakers.due(100.0 + PAUSE_MS) == 0
    breakers.succeeded(4)
    assert breakers.open == 0


def test_a_failed_trial_doubles_the_pause_up_to_its_bound():
    breakers, now = Breakers(), 0.0
    for _ in range(3):
        breakers.failed(1, now)
    pauses = []
    for _ in range(10):
        due = next(t for t in range(0, 100_000, 10) if breakers.due(now + t))
        pauses.append(due)
        now += due
        breakers.tried(1, now)
        breakers.failed(1, now)
    assert pauses[:3] == [PAUSE_MS, 2 * PAUSE_MS, 4 * PAUSE_MS]
    assert pauses[-1] == PAUSE_MAX_MS


def test_a_frozen_worker_is_tried_at_once_then_once_a_second_until_it_steps():
    breakers = Breakers()
    breakers.freeze(2, 0.0)
    breakers.freeze(2, 5.0)
    assert breakers.due(5.0) == 1 << 2
    breakers.tried(2, 5.0)
    assert breakers.due(5.0 + FROZEN_PAUSE_MS - 1) == 0
    assert breakers.due(5.0 + FROZEN_PAUSE_MS) == 1 << 2
    breakers.thaw(2)
    assert breakers.open == 0


def test_thawing_does_not_forgive_failures():
    breakers = Breakers()
    for _ in range(3):
        breakers.failed(2, 0.0)
    breakers.thaw(2)
    assert breakers.open == 1 << 2


events = st.lists(st.tuples(st.sampled_from("fstzdr"), st.integers(0, 5), st.floats(0, 50)), max_size=80)


@given(events)
def test_open_holds_only_slots_with_a_record_and_due_only_open_ones(history):
    breakers, now = Breakers(), 0.0
    for what, slot, step in history:
        now += step
        if what == "f":
            breakers.failed(slot, now)
        elif what == "s":
            breakers.succeeded(slot)
            assert not breakers.open >> slot & 1
        elif what == "z":
            breakers.freeze(slot, now)
            assert breakers.open >> slot & 1
        elif what == "d":
            breakers.drop(slot)
        elif what == "t" and breakers.due(now) >> slot & 1:
            breakers.tried(slot, now)
            assert not breakers.due(now) >> slot & 1
        assert breakers.due(now) & ~breakers.open == 0
        assert breakers.due(now + PAUSE_MAX_MS) == breakers.open
