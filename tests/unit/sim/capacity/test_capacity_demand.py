"""Demand: every request is counted once, in its bucket; peaks are peaks; caches save what was seen before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_sim.capacity.demand import PROMPT_BORDERS, demand_of
from quartet_sim.simulation.spec import INTERACTIVE, RELAXED, Request

requests = st.lists(
    st.tuples(
        st.integers(1, 100_000), st.integers(1, 500), st.sampled_from([INTERACTIVE, RELAXED]), st.integers(0, 300_000),
        st.lists(st.integers(0, 5), max_size=8),
    ),
    min_size=1, max_size=60,
).map(
    lambda rows: [
        Request(number=i, at_ms=float(at), model="m", prompt_tokens=prompt, output_tokens=output, slo=slo,
                units=tuple(units[: prompt // 512]))
        for i, (prompt, output, slo, at, units) in enumerate(sorted(rows, key=lambda row: row[3]))
    ]
)  # fmt: skip


def asked(number, at_ms, prompt_tokens, units=()):
    return Request(
        number=number, at_ms=at_ms, model="m", prompt_tokens=prompt_tokens, output_tokens=1, slo=RELAXED, units=units
    )


def tokens(_, sample):
    return float(sample.uncached + sample.output)


@given(requests)
def test_every_request_is_in_one_kind_and_whole(rows):
    found = demand_of(rows, tokens)
    assert sum(bucket.mean_per_s for bucket in found.buckets) * found.span_s == pytest.approx(len(rows))
    assert sum(len(bucket.samples) for bucket in found.buckets) == len(rows)
    assert found.peak_over_mean["m"] >= 1
    prompts = sorted(row.prompt_tokens for row in rows)
    assert sorted(each.cached + each.uncached for bucket in found.buckets for each in bucket.samples) == prompts
    for bucket in found.buckets:
        assert bucket.rate_per_s == pytest.approx(bucket.mean_per_s * found.peak_over_mean["m"])
        for sample in bucket.samples:
            assert sample.uncached >= 1
            assert bucket.least <= sample.cached + sample.uncached
            assert not bucket.below or sample.cached + sample.uncached < bucket.below


def test_only_leading_units_that_were_seen_are_found_and_only_their_share():
    def asks(at, *units):
        return asked(at, at * 1e3, 2048, units)

    found = demand_of([asks(0, 1, 2, 3), asks(1, 1, 2, 9), asks(2, 7, 2, 3)], tokens, cached_share=0.5)
    assert [sample.cached for sample in found.buckets[0].samples] == [0, 512, 0]


def test_a_burst_makes_a_peak():
    calm = [asked(i, i * 1e3, 100) for i in range(600)]
    burst = [asked(600 + i, 300e3 + i, 100) for i in range(600)]
    rows = sorted(calm + burst, key=lambda row: row.at_ms)
    assert demand_of(calm, tokens, peak_percentile=100).peak_over_mean["m"] == pytest.approx(1, abs=0.05)
    assert demand_of(rows, tokens, peak_percentile=100).peak_over_mean["m"] > 4
    assert demand_of(rows, tokens, peak_percentile=50).peak_over_mean["m"] == 1


def test_no_requests_are_no_demand():
    with pytest.raises(ValueError, match="nothing to plan for"):
        demand_of([], tokens)


def test_borders_rise():
    assert list(PROMPT_BORDERS) == sorted(set(PROMPT_BORDERS))
