"""Rounds: the simulator has the last word, and the search for a cheaper mix ends."""

import msgspec
import pytest

from quartet_core.catalogue import builtin
from quartet_sim.capacity.carrying import Margins, alone_ms, options_of
from quartet_sim.capacity.demand import demand_of
from quartet_sim.capacity.mix import Limits, Program
from quartet_sim.capacity.rounds import confirmed, fleet_of, simulator
from quartet_sim.simulation.spec import parse_fleet
from quartet_sim.simulation.workload import Part, Workload, requests

CATALOGUE = builtin()
MODEL = "llama-3.1-8b"
STOCK = {"H100_SXM5": 6, "L40S_PCIE": 12}
TRACE = requests(Workload(parts=(Part(trace="azure-conv", length_s=60.0, rate_per_s=30.0),)), 0)


@pytest.fixture(scope="module")
def program():
    options = options_of(CATALOGUE, [MODEL], STOCK, ["fp8"])
    profile = CATALOGUE.profile(*options[0].key)
    return Program(demand_of(TRACE, lambda _, sample: alone_ms(profile, sample)), options, CATALOGUE)


@pytest.fixture(scope="module")
def outcome():
    """What a generous fleet makes of the trace: the pattern of what a judge says."""
    return simulator(CATALOGUE, 0)(parse_fleet("2xH100_SXM5:llama-3.1-8b/fp8"), TRACE)


def judge(outcome, enough):
    """A judge that lets fleets pass that ``enough(cards)`` says are."""

    def simulate(fleet, _):
        cards = {}
        for group in fleet.groups:
            cards[group.hardware] = cards.get(group.hardware, 0) + group.count * group.tp
        share = 1.0 if enough(cards) else 0.0
        part = msgspec.structs.replace(outcome.by_model[0], within_slo=share)
        return msgspec.structs.replace(outcome, by_model=(part,), within_slo=share)

    return simulate


def margins():
    return {MODEL: Margins()}


def test_the_simulator_confirms_a_mix_and_lets_no_worker_be_taken_away(program):
    limits = Limits(stock=STOCK)
    run = simulator(CATALOGUE, 0)
    found = confirmed(program, limits, margins(), TRACE, run)
    assert found.best is not None
    assert found.best.passed
    again = run(fleet_of(found.best.mix), TRACE)
    assert again.within_slo >= limits.goal
    assert again.log_hash == found.best.outcome.log_hash, "same seed, same run"
    assert "one worker less of any team does not pass" in found.ended
    passing = [made.mix.price_per_hour for made in found.rounds if made.passed]
    assert found.best.mix.price_per_hour == min(passing)


def test_a_judge_who_wants_twice_as_much_gets_it(program, outcome):
    first = program.solve(Limits(stock=STOCK), margins())
    power = {"H100_SXM5": 3.5, "L40S_PCIE": 1.0}

    def worth(cards):
        return sum(power[name] * count for name, count in cards.items())

    wanted = 2 * worth(first.cards)
    wants_twice = judge(outcome, lambda cards: worth(cards) >= wanted)
    found = confirmed(program, Limits(stock=STOCK), margins(), TRACE, wants_twice, most_runs=40)
    assert found.best is not None
    assert worth(found.best.mix.cards) >= wanted
    assert [made.kind for made in found.rounds[:2]] == ["solved", "tighter"]
    assert found.margins[MODEL].utilisation < Margins().utilisation


def test_a_judge_who_is_content_with_less_is_offered_less_until_there_is_nothing_left_to_take(program, outcome):
    content = judge(outcome, lambda cards: sum(cards.values()) >= 1)
    found = confirmed(program, Limits(stock=STOCK), margins(), TRACE, content, most_runs=60)
    assert sum(found.best.mix.cards.values()) == 1
    assert "looser" in [made.kind for made in found.rounds]


def test_a_judge_whom_nothing_pleases_ends_the_rounds_with_a_reason(program, outcome):
    never = judge(outcome, lambda _: False)
    found = confirmed(program, Limits(stock=STOCK), margins(), TRACE, never, most_runs=200)
    assert found.best is None
    assert "no mix within the limits leaves more room" in found.ended
    few = confirmed(program, Limits(stock=STOCK), margins(), TRACE, never, most_runs=2)
    assert few.ended.startswith("2 simulations, and none passed")
    assert len(few.rounds) == 2


def test_the_number_of_simulations_is_kept(program, outcome):
    calls = []
    counted = judge(outcome, lambda cards: calls.append(cards) or sum(cards.values()) >= 2)
    found = confirmed(program, Limits(stock=STOCK), margins(), TRACE, counted, most_runs=3)
    assert len(calls) == len(found.rounds) <= 3


def test_without_any_mix_nothing_is_simulated(program, outcome):
    limits = Limits(stock=STOCK, budget_per_hour=0.01)
    found = confirmed(program, limits, margins(), TRACE, judge(outcome, lambda _: True))
    assert found.rounds == ()
    assert found.ended == "no mix within the limits"
