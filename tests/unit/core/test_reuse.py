"""What idle times say about those who are still idle."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_core.reuse import BINS, ReuseGaps, bin_of, bins_of

idle = st.floats(0.0, 1e8)


@given(idle, idle)
def test_bins_are_in_order_and_half_an_octave_wide(a, b):
    low, high = sorted((a, b))
    assert 0 <= bin_of(low) <= bin_of(high) < BINS
    if low >= 128 and high >= 2.01 * low and bin_of(high) < BINS - 1:
        assert bin_of(high) >= bin_of(low) + 2


def test_nothing_seen_is_said_with_nothing():
    assert bins_of([]) == ()
    assert sum(bins_of([1.0, 1e3, 1e12])) == 3


@given(idle, st.floats(0.0, 1e7), st.floats(0.0, 1e7), st.lists(idle, max_size=30), st.lists(idle, max_size=30))
def test_chances_are_chances_and_grow_with_the_horizon(idle_ms, one_ms, two_ms, returns, losses):
    gaps = ReuseGaps()
    gaps.see(bins_of(returns), bins_of(losses), 1.0)
    shorter, longer = (gaps.returns_within(idle_ms, ms) for ms in sorted((one_ms, two_ms)))
    assert 0.0 <= shorter <= longer <= 1.0
    assert gaps.returns_within(idle_ms, 0.0) == 0.0


def test_it_learns_the_gaps_of_an_exponential_and_that_those_have_no_memory():
    source, gaps = Random(1), ReuseGaps()
    gaps.see(bins_of(source.expovariate(1 / 10_000.0) for _ in range(20_000)), (), 0.0)
    for idle_ms in (0.0, 5_000.0, 20_000.0):
        assert gaps.returns_within(idle_ms, 10_000.0) == pytest.approx(0.632, abs=0.06)


def test_prefixes_that_were_evicted_count_as_not_seen_to_return():
    gaps = ReuseGaps()
    gaps.see(bins_of([1000.0] * 100), bins_of([2000.0] * 300), 0.0)
    kept = ReuseGaps()
    kept.see(bins_of([1000.0] * 100), (), 0.0)
    assert gaps.returns_within(500.0, 1000.0) < 0.3 < 0.9 < kept.returns_within(500.0, 1000.0)


def test_what_was_seen_fades():
    gaps, fresh = ReuseGaps(half_life_s=10.0), ReuseGaps(half_life_s=10.0)
    gaps.see(bins_of([100.0] * 1000), (), 0.0)
    before = gaps.returns_within(0.0, 1000.0)
    gaps.see((), (), 400.0)
    assert before > 0.95
    assert gaps.returns_within(0.0, 1000.0) == pytest.approx(fresh.returns_within(0.0, 1000.0), abs=0.01)


def test_counts_of_other_versions_are_cut_not_refused():
    gaps = ReuseGaps()
    gaps.see((1,) * (BINS + 5), (), 0.0)
    assert gaps.returns_within(0.0, 1e9) > 0.9
