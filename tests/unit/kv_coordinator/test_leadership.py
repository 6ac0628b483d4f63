"""Who leads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_kv_coordinator.leadership import Leadership

SILENCE = 500


def test_a_newcomer_waits_out_the_silence_and_then_takes_term_1():
    one = Leadership("a", silence_ns=SILENCE, now_ns=0)
    assert not one.claim(SILENCE - 1)
    assert one.claim(SILENCE)
    assert (one.leads, one.term) == (True, 1)
    assert not one.claim(10 * SILENCE)


def test_a_newcomer_never_cuts_in_on_an_active_one():
    one = Leadership("z", silence_ns=SILENCE, now_ns=0)
    for now in range(100, 3000, 100):
        one.heard(4, "a", now)
        assert not one.claim(now)
    assert one.claim(2900 + SILENCE)
    assert one.term == 5


def test_of_two_that_claim_the_same_term_the_higher_id_stays():
    low, high = (Leadership(name, silence_ns=SILENCE, now_ns=0) for name in ("a", "b"))
    assert low.claim(SILENCE)
    assert high.claim(SILENCE)
    assert not high.heard(1, "a", SILENCE + 1)
    assert low.heard(1, "b", SILENCE + 1)
    assert (low.leads, high.leads) == (False, True)


def test_its_own_announcement_coming_back_means_nothing():
    one = Leadership("a", silence_ns=SILENCE, now_ns=0)
    one.claim(SILENCE)
    assert not one.heard(1, "a", SILENCE + 1)
    assert one.leads


def test_a_replaced_leader_that_still_talks_is_no_sign_of_life():
    one = Leadership("s", silence_ns=SILENCE, now_ns=0)
    one.heard(3, "new", 10)
    one.heard(2, "old", 400)
    assert one.claim(10 + SILENCE)


def test_fenced_by_a_higher_term_it_leads_on_above_it_at_once():
    one = Leadership("a", silence_ns=SILENCE, now_ns=0)
    one.claim(SILENCE)
    assert one.fenced(12, 600)
    assert (one.leads, one.term, one.highest_term) == (True, 13, 13)
    assert not one.heard(12, "z", 601)


@pytest.mark.parametrize("term", [0, 1])
def test_fenced_by_a_rival_of_its_own_term_it_steps_down_and_waits(term):
    one = Leadership("a", silence_ns=SILENCE, now_ns=0)
    one.claim(SILENCE)
    assert not one.fenced(term, 600)
    assert not one.leads
    assert not one.claim(600 + SILENCE - 1)
    assert one.claim(600 + SILENCE)
    assert one.term == 2


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 700)), max_size=60))
def test_however_they_come_and_go_silence_aside_only_the_highest_goes_on_leading(steps):
    now = 0
    all_of_them = [Leadership(name, silence_ns=SILENCE, now_ns=0) for name in "abc"]
    highest = 0
    for who, passed in steps:
        now += passed
        one = all_of_them[who]
        if one.claim(now):
            assert one.term >= highest
            highest = one.term
        if one.leads:
            for other in all_of_them:
                if other is not one:
                    other.heard(one.term, one.id, now)
    for one in all_of_them:
        for other in all_of_them:
            if one.leads and one is not other:
                other.heard(one.term, one.id, now)
    assert sum(one.leads for one in all_of_them) <= 1
