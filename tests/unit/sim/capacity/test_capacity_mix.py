"""The cheapest mix is as cheap as trying every mix finds, and keeps stock, budget, margins and goal."""

from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from quartet_core.catalogue import builtin
from quartet_sim.capacity.carrying import Margins, carried, options_of
from quartet_sim.capacity.demand import Bucket, Demand, Sample
from quartet_sim.capacity.mix import Limits, Program
from quartet_sim.capacity.sensitivity import binding, next_best, obstacles
from quartet_sim.simulation.spec import Slo

CATALOGUE = builtin()
MODEL = "llama-3.1-8b"
MARGINS = {MODEL: Margins(), "qwen3-32b": Margins()}


def bucket(prompt, output, rate, ttft_ms=2000.0, tpot_ms=50.0, model=MODEL, name="a"):
    samples = tuple(Sample(0, max(1, int(prompt * share)), output) for share in (0.5, 1.0, 1.5))
    return Bucket(model=model, slo=Slo(name, ttft_ms, tpot_ms), least=prompt, below=0, rate_per_s=rate, mean_per_s=rate,
                samples=samples)  # fmt: skip


def demand(*buckets):
    return Demand(buckets=buckets, peak_over_mean={MODEL: 1.0}, requests=10, span_s=60.0, output_tokens_per_s=100.0)


def program(asked, stock, models=(MODEL,), precisions=("fp8", "bf16")):
    return Program(asked, options_of(CATALOGUE, models, stock, precisions), CATALOGUE)


buckets = st.builds(
    bucket,
    st.sampled_from([200, 2000, 12000]),
    st.sampled_from([20, 300]),
    st.sampled_from([0.2, 2.0, 8.0]),
    st.sampled_from([500.0, 2000.0]),
    st.sampled_from([15.0, 50.0]),
    name=st.sampled_from(["a", "b"]),
)
demands = st.lists(buckets, min_size=1, max_size=3, unique_by=lambda each: each.name).map(lambda found: demand(*found))
stocks = st.dictionaries(st.sampled_from(["H100_SXM5", "L40S_PCIE", "A100"]), st.integers(1, 3), min_size=1, max_size=2)


def does(asked, options, counts, limits):
    """Whether so many workers do, by a linear program over the shares alone."""
    table = {
        (k, o): carried(option, CATALOGUE.profile(*option.key), each, MARGINS[each.model])
        for k, each in enumerate(asked.buckets)
        for o, option in enumerate(options)
        if option.model == each.model
    }
    pairs = list(table)
    upper, bound = [], []
    for o, option in enumerate(options):
        share = MARGINS[option.model].utilisation * counts[o]
        rates = [asked.buckets[k].rate_per_s if other == o else 0.0 for k, other in pairs]
        upper.append([rate * table[pair].seconds for rate, pair in zip(rates, pairs, strict=True)])
        upper.append(
            [rate * table[pair].kv_token_seconds / option.kv_tokens for rate, pair in zip(rates, pairs, strict=True)]
        )
        bound += [share, share]
    total = sum(each.rate_per_s for each in asked.buckets)
    upper.append([-asked.buckets[k].rate_per_s * table[k, o].within for k, o in pairs])
    bound.append(-limits.goal * total)
    equal = [[1.0 if k == other else 0.0 for other, _ in pairs] for k in range(len(asked.buckets))]
    found = linprog(
        np.zeros(len(pairs)), A_ub=upper, b_ub=np.array(bound) + 1e-9, A_eq=equal, b_eq=np.ones(len(asked.buckets))
    )
    return found.status == 0


@settings(deadline=None, max_examples=40)
@given(demands, stocks, st.sampled_from([None, 4.0, 8.0]), st.sampled_from([0.5, 0.9, 1.0]))
def test_no_mix_at_all_is_cheaper(asked, stock, budget, goal):
    of = program(asked, stock, precisions=("fp8",) if "A100" not in stock else ("bf16",))
    assume(of.options)
    limits = Limits(stock=stock, budget_per_hour=budget, goal=goal)
    mix = of.solve(limits, MARGINS)
    cheapest = None
    for counts in product(*(range(stock[option.hardware] // option.tp + 1) for option in of.options)):
        price = sum(count * option.price_per_hour for count, option in zip(counts, of.options, strict=True))
        within = all(
            sum(c * o.tp for c, o in zip(counts, of.options, strict=True) if o.hardware == name) <= cards
            for name, cards in stock.items()
        )
        cheaper = (budget is None or price <= budget) and (cheapest is None or price < cheapest - 1e-9)
        if within and cheaper and does(asked, of.options, counts, limits):
            cheapest = price
    assert (mix is None) == (cheapest is None)
    if mix is not None:
        assert mix.price_per_hour == pytest.approx(cheapest, abs=1e-3)


@settings(deadline=None, max_examples=40)
@given(demands, st.sampled_from([None, 30.0]))
def test_a_mix_keeps_what_it_must(asked, budget):
    stock = {"H100_SXM5": 6, "L40S_PCIE": 12}
    of = program(asked, stock)
    limits = Limits(stock=stock, budget_per_hour=budget)
    mix = of.solve(limits, MARGINS)
    if mix is None:
        assert obstacles(of, limits, MARGINS)
        return
    assert all(count <= stock[name] for name, count in mix.cards.items())
    assert budget is None or mix.price_per_hour <= budget + 1e-6
    served = {}
    for team in mix.teams:
        assert team.used <= MARGINS[MODEL].utilisation + 1e-6
        for name, share in team.serves.items():
            served[name] = served.get(name, 0.0) + share
    assert served == pytest.approx({each.name: 1.0 for each in asked.buckets}, abs=1e-6)


def test_other_mixes_cost_no_less_and_none_is_only_more_of_the_same():
    asked = demand(bucket(2000, 300, 10.0), bucket(200, 300, 20.0, 10_000, 150, name="b"))
    stock = {"H100_SXM5": 8, "L40S_PCIE": 24, "A100": 4}
    of = program(asked, stock)
    limits = Limits(stock=stock)
    mix = of.solve(limits, MARGINS)
    others = next_best(of, limits, MARGINS, mix, 4)
    prices = [mix.price_per_hour, *(other.price_per_hour for other in others)]
    assert len(others) == 4
    assert prices == sorted(prices)
    known = [mix.cards]
    for other in others:
        for before in known:
            assert any(other.cards.get(name, 0) < count for name, count in before.items())
        known.append(other.cards)


def test_a_budget_that_is_too_small_is_what_stands_in_the_way_and_the_price_is_told():
    asked = demand(bucket(2000, 300, 10.0))
    stock = {"H100_SXM5": 8}
    of = program(asked, stock)
    free = of.solve(Limits(stock=stock), MARGINS)
    found = obstacles(of, Limits(stock=stock, budget_per_hour=free.price_per_hour - 0.01), MARGINS)
    budget = next(each for each in found if each.limit == "budget")
    assert budget.price_per_hour == pytest.approx(free.price_per_hour)


def test_a_stock_that_is_too_small_is_named_by_its_class():
    asked = demand(bucket(2000, 300, 30.0))
    stock = {"H100_SXM5": 1, "L40S_PCIE": 1}
    of = program(asked, stock)
    found = obstacles(of, Limits(stock=stock), MARGINS)
    assert {"with more H100_SXM5 than 1", "with more L40S_PCIE than 1"} <= {each.text for each in found}


def test_a_target_that_no_card_keeps_is_told_with_what_the_card_takes():
    asked = demand(bucket(12000, 20, 1.0, ttft_ms=300.0))
    stock = {"L40S_PCIE": 8}
    of = program(asked, stock)
    texts = [each.text for each in obstacles(of, Limits(stock=stock), MARGINS)]
    assert "0.0% of llama-3.1-8b's requests can be in time on any card, 90% must" in texts[0]
    assert "an idle worker prefills in" in texts[1]


def test_what_binds_is_what_would_make_it_cheaper():
    asked = demand(bucket(2000, 300, 60.0, tpot_ms=20.0))
    stock = {"H100_SXM5": 40, "L40S_PCIE": 40}
    of = program(asked, stock)
    limits = Limits(stock=stock)
    mix = of.solve(limits, MARGINS)
    found = binding(of, limits, MARGINS, mix)
    assert "time per output token" in found[0].text
    assert found[0].price_per_hour < mix.price_per_hour


def test_two_models_get_workers_of_their_own():
    asked = demand(bucket(1000, 200, 5.0), bucket(1000, 200, 1.0, model="qwen3-32b"))
    stock = {"H100_SXM5": 8, "L40S_PCIE": 8}
    of = program(asked, stock, models=(MODEL, "qwen3-32b"))
    mix = of.solve(Limits(stock=stock), MARGINS)
    assert {team.option.model for team in mix.teams} == {MODEL, "qwen3-32b"}


@given(buckets, st.sampled_from(["H100_SXM5", "L40S_PCIE"]))
def test_looser_targets_never_let_a_worker_carry_less(each, hardware):
    option = options_of(CATALOGUE, [MODEL], {hardware: 1}, ["fp8"])[0]
    profile = CATALOGUE.profile(*option.key)
    tight = carried(option, profile, each, Margins())
    looser = bucket(each.least, each.samples[0].output, each.rate_per_s, each.slo.ttft_ms * 2, each.slo.tpot_ms * 2)
    loose = carried(option, profile, looser, Margins())
    assert loose.batch >= tight.batch
    assert 0 <= tight.within <= loose.within <= 1
    if tight.within:  # what is late anyway is served as it comes
        assert loose.seconds <= tight.seconds * (1 + 1e-9)
