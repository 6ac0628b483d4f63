"""Watermarks do not flap, guarded prefixes stay, and nothing is moved that is cheaper to compute."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_core.paging import (
    Cold,
    Offer,
    PageLimits,
    PageOut,
    Price,
    ThrashGuard,
    Unpaged,
    Watermarks,
    choose,
    missing_blocks,
    weigh,
)

LIMITS = PageLimits(least_tokens=1000, least_idle_ms=2000.0, horizon_ms=600_000.0, soon_ms=2000.0)
ms = st.floats(0.0, 1e7)


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(0, 999).flatmap(
    lambda low: st.tuples(st.just(low), st.integers(low + 1, 1000))))  # fmt: skip
def test_pressure_begins_below_the_low_mark_and_ends_at_the_high_one(fills, marks):
    low, high = marks
    water = Watermarks(low / 1000, high / 1000)
    pressed = False
    for empty in fills:
        before, pressed = pressed, water.look(empty, 1000)
        if empty < low:
            assert pressed
        elif empty >= high:
            assert not pressed
        else:
            assert pressed is before, "between the marks nothing changes"
        assert (missing_blocks(high / 1000, empty, 1000) > 0) is (empty < high)


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.3, 0.2), (-0.1, 0.5), (0.5, 1.1)])
def test_marks_that_cannot_be_are_refused(low, high):
    with pytest.raises(ValueError, match="low < high"):
        Watermarks(low, high)


@given(st.lists(st.tuples(st.floats(1.0, 200_000.0), st.floats(0.0, 100_000.0)), min_size=1, max_size=40))
def test_the_guard_asks_for_twice_the_idle_time_after_each_short_cycle_and_forgives_long_ones(cycles):
    guard = ThrashGuard(cycle_ms=30_000.0, guard_ms=10_000.0)
    now_ms, prefix, strikes = 0.0, 1, 0
    guard.paged(Cold(prefix, 5000, 0.0), now_ms)
    for used_after_ms, idle_ms in cycles:
        now_ms += used_after_ms + idle_ms
        prefix += 1
        cold = Cold(prefix, 5000, idle_ms, paged=prefix - 1)  # the conversation has grown
        strikes = min(strikes + 1, ThrashGuard.MAX_STRIKES) if used_after_ms < 30_000.0 else max(strikes - 1, 0)
        # time in floats: a cycle of just the limit may be told either way
        if math.isclose(used_after_ms, 30_000.0, rel_tol=1e-6):
            return
        assert guard.strikes(cold, now_ms) == strikes
        assert guard.wanted_idle_ms(cold, now_ms) == (10_000.0 * 2.0 ** (strikes - 1) if strikes else 0.0)
        guard.paged(cold, now_ms)
        assert len(guard) == 1, "a conversation is remembered once"


def test_the_guard_forgets_the_oldest():
    guard = ThrashGuard(cycle_ms=10.0, guard_ms=10.0, size=3)
    for prefix in range(1, 8):
        guard.paged(Cold(prefix, 1, 0.0), 0.0)
    assert len(guard) == 3
    assert guard.wanted_idle_ms(Cold(9, 1, 0.0, paged=1), 1.0) == 0.0
    assert guard.wanted_idle_ms(Cold(9, 1, 0.0, paged=7), 1.0) == 10.0


offers = st.lists(
    st.builds(Offer, st.sampled_from("abcdef"), st.integers(0, 20_000), ms, ms, ms | st.just(math.inf)), max_size=8
)


@given(offers, st.integers(1, 20_000), ms, st.floats(0.0, 1.0))
def test_what_leaves_has_room_is_worth_it_and_takes_the_cheapest_way(found, tokens, recompute_ms, chance):
    price = Price(found, recompute_ms, tokens * 100)
    page = weigh(Cold(1, tokens, 1e4), price, chance)
    roomy = [offer for offer in found if offer.room_tokens >= tokens]
    if page is Unpaged.NO_ROOM:
        assert not roomy
        return
    least = min(offer.out_ms + chance * offer.return_ms for offer in roomy)
    if isinstance(page, PageOut):
        chosen = [o for o in roomy if o.worker == page.target and o.out_ms == page.out_ms]
        assert any(o.out_ms + chance * o.return_ms == least for o in chosen)
        assert any(recompute_ms > o.out_ms + o.return_ms for o in chosen), "moved, though computing is quicker"
        assert page.worth_ns_per_byte > 0.0
    elif page is Unpaged.RECOMPUTE:
        best = [o for o in roomy if o.out_ms + chance * o.return_ms == least]
        assert any(recompute_ms <= o.out_ms + o.return_ms for o in best)


def test_older_pages_make_room_only_where_nothing_else_does():
    near = Offer("near", 30_000, 70.0, 70.0, displaces=True)
    far = Offer("far", 30_000, 85.0, 85.0)
    slow = Offer("slow", 30_000, 800.0, 800.0)

    def target(*offers):
        return weigh(Cold(1, 30_000, 1e4), Price(offers, 900.0, 1 << 30), 0.8).target

    assert target(near, far) == "far"
    assert target(near, slow) == "near", "the empty one is too slow to be worth it"
    assert target(near) == "near"


def _choose(colds, *, recompute_ms=900.0, out_ms=90.0, guard=None, later=0.8, soon=0.0):
    offer = Offer("store", 1 << 30, out_ms, out_ms)
    return choose(
        colds, lambda cold: Price([offer], recompute_ms * cold.tokens / 30_000, cold.tokens * 131_072),
        lambda idle_ms, within_ms: soon if within_ms == LIMITS.soon_ms else later,
        guard or ThrashGuard(cycle_ms=30_000.0, guard_ms=30_000.0), LIMITS, 1e6,
    )  # fmt: skip


def test_small_recent_guarded_and_worthless_prefixes_stay_and_say_why():
    guard = ThrashGuard(cycle_ms=30_000.0, guard_ms=30_000.0)
    guard.paged(Cold(7, 30_000, 0.0), 1e6 - 9000.0)
    best, stay = _choose(
        [Cold(1, 999, 1e5), Cold(2, 30_000, 1999.0), Cold(3, 30_000, 8000.0, paged=7), Cold(4, 30_000, 8000.0)],
        guard=guard,
    )
    assert stay == {1: Unpaged.SMALL, 2: Unpaged.RECENT, 3: Unpaged.GUARDED}
    assert best.cold.prefix == 4
    assert _choose([Cold(4, 30_000, 8000.0)], later=0.05)[1] == {4: Unpaged.NOT_WORTH}
    assert _choose([Cold(4, 30_000, 8000.0)], soon=0.8)[1] == {4: Unpaged.NOT_WORTH}, "it is about to return"
    assert _choose([Cold(4, 30_000, 8000.0)], out_ms=451.0)[1] == {4: Unpaged.RECOMPUTE}
    assert _choose([]) == (None, {})


@pytest.mark.parametrize(("link_ms", "moved"), [(449.0, True), (450.0, False)])
def test_at_the_crossover_of_both_ways_and_computing(link_ms, moved):
    best, stay = _choose([Cold(1, 30_000, 1e5)], out_ms=link_ms, later=1.0)
    assert (best is not None) is moved
    assert stay == ({} if moved else {1: Unpaged.RECOMPUTE})
