"""The parts of the forecast core, each against the simplest thing that could be right."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_core.demand_chain import (
    AGE_EDGES_S,
    AGES,
    LEVELS,
    STATES,
    DemandChain,
    Exposure,
    age_of,
    level_of,
    state_of,
)
from quartet_core.demand_mix import Mix, Score, loss
from quartet_core.demand_rates import FAST_S, Ewma, Mean
from quartet_core.demand_tenants import ACTIVE_S, TenantChains


def walked(gaps_s: list[float]) -> tuple[DemandChain, Exposure, float]:
    pool = Exposure.pooled()
    chain = DemandChain(pool, 0.0)
    rate = Ewma(FAST_S, 0.0)
    now_s = 0.0
    for gap_s in gaps_s:
        now_s += gap_s
        rate.add(now_s)
        chain.arrived(now_s, rate.per_s(now_s))
    return chain, pool, now_s


gaps = st.lists(st.floats(0.0, 20_000.0), min_size=1, max_size=30)


@given(gaps, st.floats(0.0, 5_000.0))
@settings(deadline=None)
def test_all_time_and_all_arrivals_are_accounted_for(gaps_s, idle_s):
    chain, pool, now_s = walked(gaps_s)
    chain.advance(now_s + idle_s)
    assert sum(pool.seconds) == pytest.approx(now_s + idle_s)
    assert sum(pool.arrivals) == len(gaps_s)
    assert min(pool.seconds) >= 0.0


@given(gaps, st.floats(0.0, 50_000.0), st.lists(st.floats(0.1, 1e6), min_size=1, max_size=5, unique=True))
@settings(deadline=None)
def test_first_passage_is_a_probability_that_grows_with_the_horizon(gaps_s, idle_s, horizons_s):
    chain, _, now_s = walked(gaps_s)
    passages = chain.first_passage(now_s + idle_s, sorted(horizons_s))
    assert all(0.0 <= passage <= 1.0 for passage in passages)
    assert passages == sorted(passages)


@given(gaps, st.floats(0.0, 3_000.0), st.floats(1.0, 300.0))
@settings(max_examples=30, deadline=None)
def test_first_passage_equals_small_steps_through_the_chain(gaps_s, idle_s, horizon_s):
    """The absorbing chain, iterated: survive each small step with the rate of the state one is in."""
    chain, _, now_s = walked(gaps_s)
    start_s = now_s + idle_s
    survival, steps = 1.0, 2_000
    for step in range(steps):
        at_s = start_s + (step + 0.5) * horizon_s / steps
        state = chain.state(at_s)
        survival *= math.exp(-chain._rate_of(state, state % AGES) * horizon_s / steps)
    assert chain.first_passage(start_s, [horizon_s])[0] == pytest.approx(1.0 - survival, abs=0.03)


@given(gaps, st.floats(0.0, 3_000.0), st.floats(0.0, 3_000.0))
@settings(deadline=None)
def test_advancing_in_two_steps_equals_advancing_in_one(gaps_s, first_s, second_s):
    once, pool_once, now_s = walked(gaps_s)
    twice, pool_twice, _ = walked(gaps_s)
    once.advance(now_s + first_s + second_s)
    twice.advance(now_s + first_s)
    twice.advance(now_s + first_s + second_s)
    assert pool_once.seconds == pytest.approx(pool_twice.seconds, abs=1e-6)


def test_states_are_numbered_without_gaps_and_levels_and_ages_are_monotone():
    assert sorted(state_of(level, age) for level in range(LEVELS) for age in range(AGES)) == list(range(STATES))
    ages = [age_of(edge + delta) for edge in AGE_EDGES_S for delta in (-0.001, 0.0)]
    assert ages == sorted(ages)
    assert (age_of(0.0), age_of(1e9)) == (0, AGES - 1)
    assert (level_of(0.0), level_of(1e9)) == (0, LEVELS - 1)


def test_a_full_state_forgets_half_and_keeps_its_rate():
    exposure = Exposure(4.0)
    exposure.seconds[0] = 100.0
    for _ in range(5):
        exposure.arrived(0)
    assert (exposure.arrivals[0], exposure.seconds[0]) == (2.5, 50.0)


def test_a_model_new_to_the_watch_is_judged_by_what_all_models_do():
    pool = Exposure.pooled()
    busy = DemandChain(pool, 0.0)
    for second in range(0, 3000, 40):
        busy.arrived(float(second), 0.02)
    unknown = DemandChain(Exposure.pooled(), 3000.0)
    unknown.arrived(3000.0, 0.02)
    pooled = DemandChain(pool, 3000.0)
    pooled.arrived(3000.0, 0.02)
    # everybody came back after 40 s: who knows that expects it
    assert pooled.first_passage(3030.0, [20.0])[0] > 1.5 * unknown.first_passage(3030.0, [20.0])[0]


def test_an_ewma_of_a_steady_stream_is_its_rate_from_the_first_minutes_on():
    rate = Ewma(3 * 86400.0, 0.0)
    for second in range(0, 300, 3):
        rate.add(float(second))
    assert rate.per_s(300.0) == pytest.approx(1 / 3, rel=0.02)
    assert rate.per_s(300.0 + 30 * 86400.0) < 0.01 / 3


def test_a_single_event_at_the_start_is_not_taken_for_a_flood():
    rate = Ewma(FAST_S, 0.0)
    rate.add(0.001)
    assert rate.per_s(0.002) < 1 / 50


def test_a_mean_starts_as_a_plain_mean_and_counts_its_prior():
    mean = Mean()
    for value in (2.0, 4.0, 6.0):
        mean.add(value)
    assert mean.value == pytest.approx(4.0)
    prior = Mean(value=0.5, prior=1)
    prior.add(1.0)
    assert prior.value == pytest.approx(0.75)


def test_the_mix_moves_to_the_member_that_is_right_and_back_when_that_changes():
    mix = Mix(("optimist", "pessimist"))
    for _ in range(200):
        mix.learn((0.9, 0.1), True)
    assert mix.weights[0] > 0.95
    for _ in range(200):
        mix.learn((0.9, 0.1), False)
    assert mix.weights[1] > 0.95


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.booleans()), min_size=1, max_size=100))
@settings(deadline=None)
def test_blending_stays_between_its_members(history):
    mix = Mix(("a", "b"))
    for first, second, happened in history:
        blend = mix.blend((first, second))
        assert min(first, second) - 2e-4 <= blend <= max(first, second) + 2e-4
        mix.learn((first, second), happened)
        assert sum(mix.weights) == pytest.approx(1.0)


def test_scores_are_the_means_of_brier_and_log_loss():
    score = Score()
    for probability, happened in ((0.8, True), (0.3, False), (0.6, False)):
        score.add(probability, happened, 0.5)
    assert score.scored == 3
    assert score.brier == pytest.approx((0.04 + 0.09 + 0.36) / 3)
    assert score.log_loss == pytest.approx(-(math.log(0.8) + math.log(0.7) + math.log(0.4)) / 3)
    assert score.base_brier == pytest.approx(0.25)
    assert score.base_log_loss == pytest.approx(math.log(2))


def test_a_certain_error_costs_much_but_not_everything():
    assert 5 < loss(0.0, True) < 20


def test_a_tenant_that_alternates_is_expected_to_alternate():
    chains = TenantChains(0.0)
    for second in range(100):
        chains.asked("t", "ab"[second % 2], float(second))
    after_b = dict(chains.next_of("t"))
    assert after_b["a"] > 0.9
    assert sum(after_b.values()) == pytest.approx(1.0)


def test_a_new_tenant_is_expected_to_ask_for_the_same_model_again():
    chains = TenantChains(0.0)
    chains.asked("t", "a", 0.0)
    assert chains.next_of("t") == [("a", 1.0)]
    assert chains.next_of("stranger") == []


def test_intensities_add_up_the_tenants_and_forget_the_silent():
    chains = TenantChains(0.0)
    for second in range(0, 1200, 10):
        chains.asked("t1", "a", float(second))
        chains.asked("t2", "a", float(second))
    assert chains.intensities(1200.0)["a"] == pytest.approx(0.2, rel=0.25)
    assert chains.intensities(1200.0 + ACTIVE_S + 1) == {}
    assert len(chains) == 0


def test_tenants_and_their_pairs_are_bounded():
    chains = TenantChains(0.0, max_tenants=3)
    for number in range(10):
        chains.asked(f"t{number}", "a", float(number))
    assert len(chains) == 3
    for number in range(1_000):
        chains.asked("t9", f"m{number * number % 97}", 20.0 + number)
    assert len(chains.next_of("t9")) <= 33
