"""The forecast core: probabilities are probabilities, grow with the horizon, and beat the base rate where they can."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_core.demand import MEMBERS, Demand, Outlook

HORIZONS_S = (25.0, 300.0, 1800.0)

histories = st.lists(
    st.tuples(
        st.floats(0.0, 4000.0),  # seconds since the last step
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from(["t1", "t2"]),
        st.booleans(),  # a tick follows
    ),
    max_size=40,
)


def play(history: list[tuple[float, str, str, bool]], max_models: int = 10) -> tuple[Demand, list[list[Outlook]]]:
    demand = Demand(0.0, HORIZONS_S, max_models=max_models)
    now_s = 0.0
    ticks = []
    for pause_s, model, tenant, ticked in history:
        now_s += pause_s
        demand.arrived(model, tenant, 100, now_s)
        demand.served(model, "H100_SXM5", 10, now_s)
        if ticked:
            ticks.append(demand.tick(now_s + 0.5))
            now_s += 0.5
    ticks.append(demand.tick(now_s + 7.0))
    return demand, ticks


@given(histories)
@settings(max_examples=60, deadline=None)
def test_every_probability_is_one_and_grows_with_the_horizon(history):
    _, ticks = play(history)
    for outlook in (outlook for tick in ticks for outlook in tick):
        assert all(0.0 < probability < 1.0 for probability in outlook.probabilities)
        assert list(outlook.probabilities) == sorted(outlook.probabilities)
        assert all(rate >= 0.0 for rate in outlook.requests_per_s)


@given(histories)
@settings(max_examples=30, deadline=None)
def test_equal_histories_give_equal_forecasts(history):
    first, second = play(history), play(history)
    assert first[1] == second[1]
    assert first[0].scores() == second[0].scores()


@given(histories)
@settings(max_examples=30, deadline=None)
def test_the_parts_of_all_classes_are_the_whole(history):
    demand, ticks = play(history)
    for outlook in ticks[-1]:
        parts = demand.by_class(outlook, ["H100_SXM5", "L40S_PCIE"], 1e6)
        assert sum(part.share for part in parts) == pytest.approx(1.0)
        for index, rate in enumerate(outlook.requests_per_s):
            assert sum(part.requests_per_s[index] for part in parts) == pytest.approx(rate)
            missed = 1.0
            for part in parts:
                assert part.probabilities[index] <= outlook.probabilities[index] + 1e-12
                missed *= 1.0 - part.probabilities[index]
            assert 1.0 - missed == pytest.approx(outlook.probabilities[index])


def test_a_model_that_is_needed_every_quarter_of_an_hour_is_forecast_far_better_than_by_its_base_rate():
    demand = Demand(0.0, HORIZONS_S, max_models=10)
    for second in range(0, 12 * 3600, 10):
        if second % 900 == 0:
            demand.arrived("nightly", "t", 100, float(second))
        demand.tick(float(second))
    short, middle, _ = demand.scores()
    assert short.score.log_loss < 0.9 * short.score.base_log_loss
    assert short.score.brier < short.score.base_brier
    assert middle.score.log_loss < 0.6 * middle.score.base_log_loss
    assert max(middle.weights, key=middle.weights.__getitem__) == "chain"  # no rate knows when


def test_a_memoryless_model_costs_hardly_more_than_its_base_rate():
    demand = Demand(0.0, HORIZONS_S, max_models=10)
    source = random.Random(3)
    next_s = 0.0
    for second in range(0, 24 * 3600, 5):
        while next_s <= second:
            demand.arrived("steady", "t", 100, next_s)
            next_s += source.expovariate(1 / 120)
        demand.tick(float(second))
    for scored in demand.scores()[:2]:
        assert scored.score.log_loss < 1.05 * scored.score.base_log_loss


def test_a_longer_idling_lowers_the_forecast_of_a_model_that_comes_in_bursts():
    demand = Demand(0.0, HORIZONS_S, max_models=10)
    now_s = 0.0
    for _ in range(30):
        for _ in range(20):
            now_s += 3.0
            demand.arrived("bursty", "t", 100, now_s)
        now_s += 5000.0
    demand.arrived("bursty", "t", 100, now_s)
    soon = demand.tick(now_s + 1.0)[0].probabilities[0]
    later = demand.tick(now_s + 200.0)[0].probabilities[0]
    assert soon > 2 * later


def test_the_expected_load_of_a_steady_model_is_its_rate():
    demand = Demand(0.0, HORIZONS_S, max_models=10)
    for second in range(0, 3600, 2):
        demand.arrived("m", "t", 200, float(second))
        demand.served("m", "L40S_PCIE", 50, float(second))
    outlook = demand.tick(3600.0)[0]
    assert outlook.requests_per_s == pytest.approx((0.5, 0.5, 0.5), rel=0.05)
    assert outlook.prompt_tokens == pytest.approx(200)
    assert outlook.output_tokens == pytest.approx(50)


def test_load_goes_where_requests_were_served():
    demand = Demand(0.0, HORIZONS_S, max_models=10)
    for second in range(100):
        demand.arrived("m", "t", 200, float(second))
        demand.served("m", "L40S_PCIE" if second % 4 == 0 else "H100_SXM5", 50, float(second))
    outlook = demand.tick(100.0)[0]
    shares = {part.hardware: part.share for part in demand.by_class(outlook, [], 100.0)}
    assert shares == pytest.approx({"L40S_PCIE": 0.25, "H100_SXM5": 0.75}, abs=0.02)
    assert [part.hardware for part in demand.by_class(outlook, ["H200"], 100.0)] == ["H200"]


def test_a_model_nobody_served_yet_is_forecast_for_no_class():
    demand = Demand(0.0, HORIZONS_S, max_models=10)
    demand.arrived("new", "t", 200, 1.0)
    demand.served("never-asked", "H200", 5, 1.0)
    outlook = demand.tick(2.0)[0]
    assert [(part.hardware, part.share) for part in demand.by_class(outlook, [], 2.0)] == [("", 1.0)]
    assert len(demand) == 1


def test_the_model_longest_unasked_makes_room():
    demand = Demand(0.0, HORIZONS_S, max_models=2)
    for second, model in enumerate(["a", "b", "a", "c"]):
        demand.arrived(model, "t", 1, float(second))
    assert [outlook.model for outlook in demand.tick(10.0)] == ["a", "c"]


def test_forecasts_waiting_for_their_outcome_are_bounded():
    demand = Demand(0.0, HORIZONS_S, max_models=2)
    demand.arrived("a", "t", 1, 0.0)
    for second in range(10_000):
        demand.tick(float(second))
    assert [len(rounds) for rounds in demand._rounds] <= [5, 5, 5]
    assert all(score.score.scored > 0 for score in demand.scores())


def test_a_request_after_the_horizon_does_not_make_a_forecast_come_true():
    demand = Demand(0.0, (25.0,), max_models=2)
    demand.arrived("a", "t", 1, 0.0)
    demand.tick(1.0)
    demand.arrived("a", "t", 1, 27.0)  # due was 26.0, and nobody ticked in between
    score = demand.scores()[0].score
    assert score.scored == 1
    assert score.base_brier == pytest.approx(0.25)
    base = next(iter(demand._models.values())).base[0].value
    assert base < 0.5  # it did not happen


@pytest.mark.parametrize("horizons", [(), (0.0, 5.0), (5.0, 5.0), (30.0, 5.0)])
def test_horizons_must_rise(horizons):
    with pytest.raises(ValueError, match="rise"):
        Demand(0.0, horizons, max_models=2)


def test_weights_stay_a_distribution():
    demand = Demand(0.0, HORIZONS_S, max_models=10)
    for second in range(0, 7200, 10):
        if second % 700 == 0:
            demand.arrived("m", "t", 1, float(second))
        demand.tick(float(second))
    for scored in demand.scores():
        assert tuple(scored.weights) == MEMBERS
        assert sum(scored.weights.values()) == pytest.approx(1.0)
        assert min(scored.weights.values()) > 0.0
