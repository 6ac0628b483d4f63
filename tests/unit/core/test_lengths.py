"""Learned output lengths: clamped, decayed, bounded, and never above what the client allows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_core.lengths import OutputLengths


def taught(*lengths, tenant="t", model="m"):
    learned = OutputLengths(default=256.0)
    for length in lengths:
        learned.observe(tenant, model, length)
    return learned


def test_nothing_known_means_the_default_capped_by_the_clients_limit():
    assert taught().expect("t", "m", None) == 256.0
    assert taught().expect("t", "m", 10) == 10.0
    assert taught().quantile("t", "m", 0.9, 700) == 700.0


def test_the_mean_follows_what_answers_had_and_forgets_old_ones():
    learned = taught(*[100] * 50, *[500] * 200)
    assert learned.expect("t", "m", None) == pytest.approx(500, rel=0.05)
    assert learned.expect("t", "m", 300) == 300.0


def test_a_tenant_of_which_little_is_known_is_taken_for_the_models_average():
    learned = taught(*[1000] * 20, tenant="big")
    learned.observe("new", "m", 10)
    assert learned.expect("new", "m", None) > 500
    for _ in range(30):
        learned.observe("new", "m", 10)
    assert learned.expect("new", "m", None) == pytest.approx(10, rel=0.2)
    assert learned.expect("big", "m", None) == pytest.approx(1000, rel=0.01)


def test_models_do_not_share_lengths():
    assert taught(*[1000] * 20).expect("t", "other", None) == 256.0


@given(st.lists(st.integers(1, 30_000), min_size=6, max_size=40), st.floats(0.05, 0.95))
def test_quantiles_bracket_the_lengths_that_were_seen(lengths, share):
    learned = taught(*lengths)
    low, high = learned.quantile("t", "m", share, None), learned.quantile("t", "m", min(1.0, share + 0.05), None)
    assert min(lengths) <= low <= high <= max(lengths) * 1.2 + 1


@given(st.integers(-5, 10**9), st.integers(1, 10**6))
def test_any_length_is_clamped_and_the_limit_always_holds(length, limit):
    learned = taught(*[length] * 10)
    assert 1.0 <= learned.expect("t", "m", limit) <= limit
    assert 1.0 <= learned.expect("t", "m", None) <= 32_768


def test_memory_is_bounded_and_the_least_recent_pair_goes():
    learned = OutputLengths(most=3)
    for tenant in "abc":
        learned.observe(tenant, "m", 5)
    assert len(learned) == 3
