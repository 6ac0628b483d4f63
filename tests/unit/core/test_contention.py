"""Whether a worker suffers from the NIC beside it: found when it does, and not found in noise."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_core.contention import Contention, ContentionLimits, rank_correlation

LIMITS = ContentionLimits()


def sluggish(source: random.Random, memory: float, scale: float):
    """Noise in which each value is much like the one before."""
    value = source.gauss(0, 1)
    while True:
        value = memory * value + source.gauss(0, 1) * math.sqrt(1 - memory * memory)
        yield value * scale


def traffic(period: int):
    """How busy a NIC is that is used half of the time."""
    second = 0
    while True:
        yield 0.7 if second // (period // 2) % 2 else 0.02
        second += 1


def drifts_under(shares, slowdown: float, source: random.Random):
    """The drift of a worker that suffers, as an agent learns it: with a delay, and noise."""
    drift, noise = 1.0, sluggish(source, 0.8, 0.05)
    for share in shares:
        drift += 0.3 * ((slowdown if share > 0.3 else 1.0) - drift)
        yield max(1.0, drift + next(noise)), share


def first_alarm(contention: Contention, readings, seconds: int) -> int | None:
    for second, (drift, share) in zip(range(seconds), readings, strict=False):
        contention.feed(drift, share)
        if contention.alarm:
            return second
    return None


@pytest.mark.parametrize("period", [20, 40, 60, 120])
@pytest.mark.parametrize("slowdown", [1.4, 2.0])
def test_a_worker_that_slows_down_with_its_nic_is_found_within_the_window(period, slowdown):
    for seed in range(3):
        readings = drifts_under(traffic(period), slowdown, random.Random(seed))
        assert first_alarm(Contention(LIMITS), readings, LIMITS.window) is not None


@pytest.mark.parametrize(("of_drift", "of_nic"), [(0.0, 0.0), (0.8, 0.95), (0.95, 0.95), (0.99, 0.99)])
def test_noise_does_not_alarm_however_sluggish_it_is(of_drift, of_nic):
    for seed in range(4):
        source = random.Random(seed)
        drifts, shares = sluggish(source, of_drift, 0.35), sluggish(source, of_nic, 0.5)
        readings = ((max(1.0, 1.3 + next(drifts)), min(1.0, max(0.0, 0.3 + next(shares)))) for _ in iter(int, 1))
        assert first_alarm(Contention(LIMITS), readings, 1800) is None


def test_a_slowdown_that_no_router_could_see_does_not_alarm():
    readings = drifts_under(traffic(40), 1.05, random.Random(1))
    assert first_alarm(Contention(LIMITS), readings, 1200) is None


def test_a_worker_that_is_faster_while_its_nic_is_busy_does_not_alarm():
    readings = ((2.0 if share < 0.3 else 1.0, share) for share in traffic(40))
    assert first_alarm(Contention(LIMITS), readings, 1200) is None


def alarmed() -> Contention:
    contention = Contention(LIMITS)
    assert first_alarm(contention, drifts_under(traffic(40), 2.0, random.Random(1)), 600) is not None
    return contention


def test_an_alarm_ends_when_the_worker_no_longer_suffers():
    contention = alarmed()
    noise = sluggish(random.Random(2), 0.5, 0.02)
    for share, _ in zip(traffic(40), range(2 * LIMITS.window), strict=False):
        contention.feed(max(1.0, 1.0 + next(noise)), share)
    assert not contention.alarm


def test_an_alarm_stays_while_the_nic_is_always_busy_and_ends_when_it_is_always_quiet():
    contention = alarmed()
    for _ in range(2 * LIMITS.window):
        contention.feed(2.0, 0.7)
    assert contention.alarm
    assert contention.finding is None  # nothing can be told
    for _ in range(2 * LIMITS.window):
        contention.feed(1.0, 0.01)
    assert not contention.alarm


def test_a_steady_nic_says_nothing():
    contention = Contention(LIMITS)
    for second in range(600):
        contention.feed(1.0 + second % 2, 0.5)
    assert (contention.alarm, contention.finding) == (False, None)


@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=80))
def test_no_reading_is_too_odd(readings):
    contention = Contention(ContentionLimits(window=20, least=5, least_each=1, stride=1))
    for drift, share in readings:
        contention.feed(drift, share)
        if contention.finding is not None:
            assert -1.0000001 <= contention.finding.correlation <= 1.0000001


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=3, max_size=40))
def test_the_correlation_is_pearsons_of_the_ranks(pairs):
    first, second = [float(one) for one, _ in pairs], [float(other) for _, other in pairs]

    def ranks(values):
        return [sum(other < value for other in values) + (values.count(value) + 1) / 2 for value in values]

    ones, others = ranks(first), ranks(second)
    mean = (len(pairs) + 1) / 2
    above = sum((one - mean) * (other - mean) for one, other in zip(ones, others, strict=True))
    below = math.sqrt(sum((one - mean) ** 2 for one in ones) * sum((other - mean) ** 2 for other in others))
    assert rank_correlation(first, second)[0] == pytest.approx(above / below if below else 0.0, abs=1e-9)


def test_sluggish_series_count_as_few_readings():
    source = random.Random(3)
    fresh = [[source.random() for _ in range(200)] for _ in range(2)]
    slow = [[next(series) for _ in range(200)] for series in (sluggish(source, 0.98, 1.0), sluggish(source, 0.98, 1.0))]
    assert rank_correlation(*fresh)[2] > 150
    assert rank_correlation(*slow)[2] < 20
