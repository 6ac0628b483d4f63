"""Studies: their rules say what they are thought to say, and their tables are tables."""

import pytest

from quartet_core.catalogue import builtin
from quartet_sim.simulation import compare
from quartet_sim.simulation.compare import Case
from quartet_sim.simulation.policies import POLICIES
from quartet_sim.simulation.spec import Settings, parse_fleet
from quartet_sim.simulation.studies import STUDIES, Table, markdown
from quartet_sim.simulation.studies.grounds import FLEETS, LOADS, TEST, TRAIN, workload
from quartet_sim.simulation.variants import VARIANTS
from quartet_sim.simulation.workload import Part, Workload, requests

PAIR = parse_fleet("1xH100_SXM5:llama-3.1-8b,1xL40S_PCIE:llama-3.1-8b")


def outcome(policy, **how):
    part = Part(trace="mooncake", length_s=240.0, rate_per_s=1.5)
    case = Case(name="", fleet=PAIR, workload=Workload(parts=(part,)), policy=policy, settings=Settings(**how))
    return compare.run(case)


@pytest.mark.parametrize("hold", [True, False])
def test_the_plain_objective_is_the_routers(hold):
    """With one worker of a kind there is one to a cell, and cells and bounds leave nothing out."""
    plain, ours = (outcome(policy, hold=hold, split=False, fetch=False) for policy in ("plain", "finish-time"))
    assert plain.log_hash == ours.log_hash
    assert ours.finished == ours.requests


def test_a_margin_makes_splits_rarer():
    for policy in ("plain", "finish-time"):
        always, clear = (outcome(policy, fetch=False, split_margin=margin) for margin in (1.0, 0.7))
        assert always.splits > clear.splits


def test_variants_are_not_for_routers():
    assert not set(VARIANTS) & set(POLICIES)


def test_no_request_is_in_both_halves_of_a_trace():
    for trace, (start_s, length_s) in TRAIN.items():
        test_start_s, _ = TEST[trace]
        assert start_s + length_s <= test_start_s


def test_every_load_has_a_fleet_and_is_one():
    for (fleet, model, trace), rate in LOADS.items():
        assert (fleet, model) in FLEETS
        made = requests(workload(trace, model, rate), 1)
        span_s = made[-1].at_ms / 1e3
        assert len(made) / span_s == pytest.approx(rate, rel=0.1)
    for spec in FLEETS.values():
        spec.check(builtin())


def test_tables_are_markdown():
    text = markdown([Table("Title", ("a", "b"), (("1", "2"), ("3", "4")), "Note.")])
    assert text == "**Title**\n\n| a | b |\n| --- | ---: |\n| 1 | 2 |\n| 3 | 4 |\n\nNote.\n"


def test_studies_can_be_asked_for_by_name():
    assert set(STUDIES) == {"policies", "knees", "objective", "phases", "ablations", "splits"}
