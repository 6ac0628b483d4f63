"""A quota over a minute, alone and divided among gateways that take turns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_core.quota import ELSEWHERE_S, TURN_S, WINDOW_S, Claim, Minute, Quota, divide


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 50))), st.integers(0, 100))
def test_a_minute_is_the_sum_of_what_is_not_older(steps, later):
    minute, told, now_s = Minute(), [], 0
    for pause, amount in steps:
        now_s += pause
        minute.add(amount, now_s)
        told.append((now_s, amount))
    now_s += later
    minute.forget(now_s)
    assert minute.total == sum(amount for at_s, amount in told if at_s >= now_s - WINDOW_S)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 60)), min_size=1))
def test_alone_no_minute_has_more_than_the_limit_and_a_wait_is_never_too_short(asks):
    quota, used, now_s = Quota("g", 100), [], 0
    for pause, amount in asks:
        now_s += pause
        wait_s = quota.ask(amount, now_s)
        if wait_s is None:
            used.append((now_s, amount))
        else:
            assert quota.ask(amount, now_s + int(wait_s)) is None  # nobody else asks meanwhile
            now_s += int(wait_s)
            used.append((now_s, amount))
    for start_s, _ in used:
        assert sum(amount for at_s, amount in used if start_s <= at_s < start_s + WINDOW_S) <= 100


def test_what_was_not_used_is_given_back_and_what_was_used_in_excess_counts():
    quota = Quota("g", 100)
    assert quota.ask(80, 10) is None
    assert quota.ask(30, 10) == WINDOW_S + 1
    quota.settle(20, 80, 10, 12)
    assert quota.ask(70, 12) is None
    quota.settle(200, 70, 12, 13)
    assert quota.remaining(13) == 0
    assert quota.ask(1, 13 + WINDOW_S) is not None  # the excess is counted from second 13 on
    assert quota.ask(1, 14 + WINDOW_S) is None


def test_what_is_settled_after_its_minute_changes_nothing():
    quota = Quota("g", 100)
    assert quota.ask(80, 10) is None
    quota.settle(0, 80, 10, 200)
    assert quota.remaining(200) == 100
    assert quota.full_after_s(200) == 0.0


@given(
    st.integers(0, 10**6),
    st.dictionaries(
        st.sampled_from("abcdef"),
        st.builds(Claim, st.just(0), st.just(0), st.integers(0, 10**6), st.integers(0, 10**6)),
        min_size=1,
    ),
)
def test_a_division_gives_no_more_than_there_is_and_nobody_less_than_nothing(left, claims):
    parts = divide(left, claims)
    assert parts.keys() == claims.keys()
    assert min(parts.values()) >= 0
    assert sum(parts.values()) <= left * (1 + 1e-9) + 1e-9


def test_parts_follow_demand_but_leave_something_for_everybody():
    parts = divide(100, {"a": Claim(0, 0, 90, 0), "b": Claim(0, 0, 0, 0)})
    assert parts == {"a": pytest.approx(90), "b": pytest.approx(10)}
    assert divide(100, {"a": Claim(0, 0, 0, 0), "b": Claim(0, 0, 0, 0)}) == {"a": 50.0, "b": 50.0}


def test_two_that_want_more_than_their_parts_do_not_wait_for_each_other_for_ever():
    parts = divide(100, {"a": Claim(0, 0, 50, 80), "b": Claim(0, 0, 50, 80)})
    assert parts == {"a": 80.0, "b": 20.0}


class Gateways:
    """Some gateways that share a quota and hear each other's claims at once."""

    def __init__(self, count: int, limit: int) -> None:
        self.quotas = {name: Quota(name, limit) for name in "abcdef"[:count]}
        self.claims: dict[str, Claim] = {}
        for name in self.quotas:
            self.turn(name, 0)

    def turn(self, name: str, now_s: int) -> None:
        others = {other: claim for other, claim in self.claims.items() if other != name}
        known = {other: others.get(other, Claim(0, 0, 0, 0)) for other in self.quotas if other != name}
        self.claims[name] = self.quotas[name].turn(known, now_s)


@given(
    st.integers(2, 4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 60)), max_size=60),
)
def test_together_they_never_admit_more_than_the_limit_in_a_minute(count, asks):
    gateways, used, now_s = Gateways(count, 100), [], 0
    for pause, who, amount in asks:
        for _ in range(pause):
            now_s += 1
            for name in gateways.quotas:
                gateways.turn(name, now_s)
        name = "abcdef"[who % count]
        if gateways.quotas[name].ask(amount, now_s) is None:
            used.append((now_s, amount))
    for start_s, _ in used:
        assert sum(amount for at_s, amount in used if start_s <= at_s < start_s + WINDOW_S) <= 100


def test_whoever_has_all_the_demand_soon_has_nearly_all_of_the_quota():
    gateways, admitted = Gateways(4, 100), 0
    for now_s in range(1, 12):
        while gateways.quotas["a"].ask(1, now_s) is None:
            admitted += 1
        for name in gateways.quotas:
            gateways.turn(name, now_s)
    assert admitted >= 95


def test_a_quota_of_one_is_used_by_whoever_asks():
    gateways = Gateways(3, 1)
    assert gateways.quotas["c"].ask(1, 1) == TURN_S
    for now_s in (2, 3):  # in the first turn it is told, in the second one given
        for name in gateways.quotas:
            gateways.turn(name, now_s)
    assert gateways.quotas["c"].ask(1, 3) is None
    for now_s in (4, 5):
        for name in gateways.quotas:
            gateways.turn(name, now_s)
    assert gateways.quotas["a"].ask(1, 5) == ELSEWHERE_S
