"""Costs: what is summed, where, and that nothing is summed twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_admin import cost
from quartet_admin.cost import Column, CostLedger
from quartet_bus.messages import Phase, RequestEvent, Role, StreamId

PRICES = {"H100_SXM5": 3.6, "L40S_PCIE": 1.8}


def end(name="r1", *, attempt=1, try_=1, phase=Phase.END, **changes):
    fields = {
        "tenant": "acme",
        "model": "llama",
        "hardware": "H100_SXM5",
        "status": "ok",
        "prompt_tokens": 100,
        "cached_tokens": 40,
        "output_tokens": 20,
        "gpu_ms": 1000.0,
        "joules": 50.0,
    }
    return RequestEvent(phase, StreamId(name, attempt, try_), **(fields | changes))


def test_a_request_costs_its_gpu_time_at_its_classs_price():
    ledger = CostLedger(PRICES)
    assert ledger.heard(end())
    (line,) = ledger.sums()
    assert (line.model, line.tenant, line.hardware) == ("llama", "acme", "H100_SXM5")
    assert (line.requests, line.failed, line.prompt_tokens, line.cached_tokens, line.output_tokens) == (
        1, 0, 100, 40, 20,
    )  # fmt: skip
    assert line.gpu_ms == 1000.0
    assert line.dollars == pytest.approx(0.001)
    assert line.joules == 50.0
    assert line.dollars_per_million_tokens == pytest.approx(0.001 / 120 * 1e6)


def test_both_halves_of_a_split_cost_and_the_request_counts_once():
    ledger = CostLedger(PRICES)
    ledger.heard(end(role=Role.PREFILL, gpu_ms=600.0))
    ledger.heard(end(role=Role.DECODE, hardware="L40S_PCIE", gpu_ms=900.0))
    lines = {line.hardware: line for line in ledger.sums([Column.HARDWARE])}
    assert (lines["H100_SXM5"].requests, lines["H100_SXM5"].output_tokens) == (0, 0)
    assert (lines["L40S_PCIE"].requests, lines["L40S_PCIE"].output_tokens) == (1, 20)
    (whole,) = ledger.sums([Column.MODEL])
    assert whole.dollars == pytest.approx(0.6 / 3600 * 3.6 + 0.9 / 3600 * 1.8)
    assert whole.tenant == whole.hardware == ""


def test_errors_count_as_failed_and_still_cost():
    ledger = CostLedger(PRICES)
    ledger.heard(end("a", status="error"))
    ledger.heard(end("b", status="cancelled"))
    (line,) = ledger.sums()
    assert (line.requests, line.failed, line.gpu_ms) == (2, 1, 2000.0)


def test_a_class_without_a_price_is_counted_and_reported():
    ledger = CostLedger(PRICES)
    ledger.heard(end(hardware="ASIC"))
    assert ledger.sums()[0].dollars == 0.0
    assert ledger.sums()[0].gpu_ms == 1000.0
    assert ledger.unpriced == 1


def test_only_ends_count():
    ledger = CostLedger(PRICES)
    assert not any(ledger.heard(end(phase=phase)) for phase in Phase if phase is not Phase.END)
    assert ledger.sums() == []


def test_tries_of_one_request_are_ends_of_their_own():
    ledger = CostLedger(PRICES)
    assert ledger.heard(end(try_=1, status="error"))
    assert ledger.heard(end(try_=2))
    assert not ledger.heard(end(try_=2))


def test_a_line_without_tokens_has_no_price_per_token():
    ledger = CostLedger(PRICES)
    ledger.heard(end(prompt_tokens=0, output_tokens=0))
    assert ledger.sums()[0].dollars_per_million_tokens is None


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans())))
def test_an_event_counts_once_however_it_comes(arrivals):
    ledger = CostLedger(PRICES)
    for number, live in arrivals:
        (ledger.heard if live else ledger.replayed)(end(f"r{number}"))
    lines = ledger.sums()
    assert sum(line.requests for line in lines) == len({number for number, _ in arrivals})


def test_a_replay_longer_than_the_window_does_not_forget_what_came_live(monkeypatch):
    monkeypatch.setattr(cost, "_WINDOW", 10)
    ledger = CostLedger(PRICES)
    ledger.heard(end("live"))
    for number in range(100):
        ledger.replayed(end(f"r{number}"))
    assert not ledger.replayed(end("live"))
    assert ledger.sums()[0].requests == 101


def test_groups_are_whole_whatever_they_are_grouped_by():
    ledger = CostLedger(PRICES)
    for number in range(30):
        ledger.heard(end(f"r{number}", tenant=f"t{number % 3}", model=f"m{number % 5}", gpu_ms=float(number)))
    for by, groups in (([Column.TENANT], 3), ([Column.MODEL], 5), ([Column.MODEL, Column.TENANT], 15), ([], 15)):
        lines = ledger.sums(by)
        assert len(lines) == groups
        assert sum(line.requests for line in lines) == 30
        assert [line.gpu_ms for line in lines] == sorted((line.gpu_ms for line in lines), reverse=True)


def test_beyond_its_lines_a_ledger_sums_the_rest_together(monkeypatch):
    monkeypatch.setattr(cost, "MAX_LINES", 2)
    ledger = CostLedger(PRICES)
    for number in range(5):
        ledger.heard(end(f"r{number}", tenant=f"t{number}"))
    lines = {line.tenant: line.requests for line in ledger.sums([Column.TENANT])}
    assert lines == {"t0": 1, "t1": 1, cost.OTHER: 3}
