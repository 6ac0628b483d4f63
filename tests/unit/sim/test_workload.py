"""Workloads: parts of traces, at the rate, with the models, targets and prefixes that were asked for."""

from collections import Counter, defaultdict

import pytest

from quartet_sim.simulation.spec import INTERACTIVE, RELAXED
from quartet_sim.simulation.workload import THINK_CAP_S, Part, Workload, requests
from quartet_sim.traces import WrongTrace, mooncake_conversation


def one(trace, seed=0, slos=(INTERACTIVE, RELAXED), **how):
    return requests(Workload(parts=(Part(trace=trace, **how),), slos=slos), seed)


def test_a_window_is_played_at_the_rate_that_is_asked_for():
    made = one("mooncake", start_s=300.0, length_s=300.0, rate_per_s=9.0)
    rows = [row for row in mooncake_conversation(0) if 300.0 <= row.at_s < 600.0]
    assert [request.prompt_tokens for request in made] == [row.prompt_tokens for row in rows]
    assert len(made) / made[-1].at_ms * 1e3 == pytest.approx(9.0, rel=0.02)
    assert [request.number for request in made] == list(range(len(made)))
    twice = one("mooncake", start_s=300.0, length_s=300.0, speed=2.0)
    plain = one("mooncake", start_s=300.0, length_s=300.0)
    assert twice[-1].at_ms == pytest.approx(plain[-1].at_ms / 2)


def test_classes_of_service_are_drawn_by_share_and_seed():
    made = one("azure-conv", length_s=300.0)
    counts = Counter(request.slo.name for request in made)
    assert counts["interactive"] / len(made) == pytest.approx(0.5, abs=0.05)
    assert made == one("azure-conv", length_s=300.0)
    assert made != one("azure-conv", seed=1, length_s=300.0)
    assert {request.slo for request in one("azure-conv", slos=(RELAXED,), length_s=60.0)} == {RELAXED}


def test_what_a_client_allows_is_never_less_than_its_answer():
    made = one("azure-code", length_s=600.0)
    assert all(request.max_tokens >= request.output_tokens >= 1 for request in made)
    assert sum(request.max_tokens == 4096 for request in made) / len(made) == pytest.approx(0.3, abs=0.05)


def test_conversations_ask_one_model_and_share_no_prefix_with_another_part():
    models = (("llama-3.1-8b", 2.0), ("llama-3.1-70b", 1.0))
    part = Part(trace="mooncake", length_s=300.0, models=models)
    made = requests(Workload(parts=(part, part)), 0)
    by_root, by_tenant = defaultdict(set), Counter()
    for request in made:
        by_tenant[request.model] += 1
        if len(request.units) > 1:
            by_root[request.units[1]].add(request.model)
    assert all(len(asked) == 1 for asked in by_root.values())
    assert by_tenant["llama-3.1-8b"] > by_tenant["llama-3.1-70b"] > 0
    first = {unit for request in made for unit in request.units if unit < 1 << 48}
    assert first
    assert len({unit for request in made for unit in request.units}) == 2 * len(first)


def test_sessions_wait_for_their_answers_and_pauses_are_capped():
    made = one("sessions", length_s=100.0, rate_per_s=0.05)
    by_number = {request.number: request for request in made}
    leaders = [request for request in made if request.follows < 0]
    assert 1 <= len({request.session for request in made}) <= len(leaders)
    assert max(leader.at_ms for leader in leaders) < 101e3
    for request in made:
        if request.follows >= 0:
            assert by_number[request.follows].session == request.session
            assert 0.0 <= request.think_ms <= THINK_CAP_S * 1e3
        assert request.prompt_tokens + request.output_tokens <= 131_072
        assert len(request.units) == request.prompt_tokens // 64


def test_a_session_ends_where_a_request_is_too_long():
    short = one("sessions", length_s=100.0, rate_per_s=0.05, most_tokens=40_000)
    whole = one("sessions", length_s=100.0, rate_per_s=0.05)
    assert 0 < len(short) < len(whole)
    assert max(request.prompt_tokens + request.output_tokens for request in short) <= 40_000


@pytest.mark.parametrize(
    ("trace", "how", "what"),
    [
        ("azure", {}, "there are: azure-conv"),
        ("sahara", {}, "no such trace"),
        ("servegen", {}, "name a service"),
        ("mooncake", {"start_s": 5000.0}, "no request from 5000"),
        ("mooncake", {"speed": 0.0}, "all are positive"),
        ("mooncake", {"most_tokens": 1}, "no requests"),
        ("mooncake:/nowhere", {}, "No such file"),
    ],
)
def test_workloads_that_cannot_be(trace, how, what):
    with pytest.raises(WrongTrace, match=what):
        one(trace, **how)


def test_faster_means_more_requests_a_second():
    workload = Workload(
        parts=(Part(trace="azure-conv", length_s=100.0), Part(trace="servegen:m-small", length_s=20.0, rate_per_s=5.0))
    )
    plain, quick = requests(workload, 0), requests(workload.faster(2.0), 0)
    of_azure = [request for request in plain if request.tenant == "azure-conv"]
    of_azure_quick = [request for request in quick if request.tenant == "azure-conv"]
    assert len(of_azure) == len(of_azure_quick)
    assert of_azure_quick[-1].at_ms == pytest.approx(of_azure[-1].at_ms / 2)
    assert len(quick) - len(of_azure_quick) > 1.5 * (len(plain) - len(of_azure))
