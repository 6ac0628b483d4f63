"""Simulated fleets: the same run again, everything that comes in goes out, and nothing is kept that nobody holds."""

import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quartet_core.catalogue import builtin
from quartet_core.routing import UnknownPolicy
from quartet_sim.simulation.policies import POLICIES
from quartet_sim.simulation.run import simulate
from quartet_sim.simulation.spec import (
    INTERACTIVE,
    RELAXED,
    Autoscale,
    Failure,
    FleetSpec,
    Group,
    Request,
    Settings,
    WrongFleet,
    parse_fleet,
)
from quartet_sim.simulation.world import World

CATALOGUE = builtin()
MODEL = "llama-3.1-8b"
MIXED = parse_fleet("1xH100_SXM5:llama-3.1-8b/fp8,2xL40S_PCIE:llama-3.1-8b/fp8")


def arrivals(count, gap_ms, *, prompt=1500, output=40, model=MODEL, units=True):
    """Requests of which each shares its first units with every third one before it."""
    return [
        Request(
            number=number,
            at_ms=number * gap_ms,
            model=model,
            prompt_tokens=prompt + 37 * (number % 5),
            output_tokens=output + number % 7,
            slo=INTERACTIVE if number % 2 else RELAXED,
            units=tuple(number % 3 * 100 + place for place in range(prompt // 512)) if units else (),
        )
        for number in range(count)
    ]


def hashed(seed):
    """The event log's hash of one run, in a process of its own with this hash seed."""
    code = (
        "from quartet_core.catalogue import builtin\n"
        "from quartet_sim.simulation.compare import Case, run\n"
        "from quartet_sim.simulation.spec import Failure, Settings, parse_fleet\n"
        "from quartet_sim.simulation.workload import Part, Workload\n"
        "parts = (Part(trace='mooncake', length_s=60, rate_per_s=8),"
        " Part(trace='servegen:m-mid', length_s=10, rate_per_s=20))\n"
        "fleet = parse_fleet('2xH100_SXM5:llama-3.1-8b/fp8,4xL40S_PCIE:llama-3.1-8b/fp8')\n"
        "for policy in ('finish-time', 'random'):\n"
        "    settings = Settings(view_loss=0.2, failures=(Failure(worker=1, at_ms=2000, for_ms=1500),))\n"
        "    print(run(Case(name='', fleet=fleet, workload=Workload(parts=parts), policy=policy, seed=5,"
        " settings=settings)).log_hash)\n"
    )
    environment = os.environ | {"PYTHONHASHSEED": seed}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    ).stdout


def test_the_same_seed_gives_the_same_events_under_any_hash_seed():
    first, second = hashed("1"), hashed("4242")
    assert first == second
    ours, random = first.split()
    assert ours != random


def test_another_seed_gives_other_ties_and_chances():
    requests = arrivals(60, 20.0)
    hashes = {simulate(CATALOGUE, MIXED, requests, policy="random", seed=seed).log_hash for seed in (1, 1, 2)}
    assert len(hashes) == 2


FLEETS = st.lists(
    st.tuples(
        st.sampled_from(["H100_SXM5", "L40S_PCIE"]),
        st.integers(1, 3),
        st.sampled_from(["both", "prefill", "decode"]),
        st.sampled_from([1.0, 2.5]),
        st.sampled_from([4, 64]),
    ),
    min_size=1,
    max_size=4,
)
REQUESTS = st.lists(
    st.tuples(
        st.floats(0.0, 60.0),  # gap
        st.one_of(st.integers(1, 1500), st.integers(2_000, 9_000), st.integers(60_000, 110_000)),  # prompt
        st.one_of(st.integers(1, 60), st.integers(300, 4_000)),  # output
        st.integers(0, 2),  # family
        st.sampled_from([False, False, True]),  # follows the one before
    ),
    min_size=5,
    max_size=30,
)
SETTINGS = st.builds(
    Settings,
    view_age_ms=st.sampled_from([0.5, 50.0, 1000.0]),
    view_loss=st.sampled_from([0.0, 0.3]),
    hold=st.booleans(),
    ledger=st.booleans(),
    affinity=st.booleans(),
    split=st.booleans(),
    fetch=st.booleans(),
    long_context_tokens=st.sampled_from([4096, 1 << 30]),
    drain_ms=st.just(900_000.0),  # the longest answers on the slowest card take minutes
    failures=st.lists(
        st.builds(
            Failure, worker=st.integers(0, 4), at_ms=st.floats(0.0, 3000.0), for_ms=st.sampled_from([50.0, 400.0, 1e6])
        ),
        max_size=3,
    ).map(tuple),
    autoscale=st.sampled_from([None, Autoscale(requests_per_worker=2.0, cold_start_ms=500.0, patience_ms=1000.0)]),
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(FLEETS, REQUESTS, SETTINGS, st.sampled_from([*["finish-time"] * len(POLICIES), *sorted(POLICIES)]))
def test_every_request_ends_once_and_nothing_is_left_behind(groups, asked, how, policy):
    fleet = FleetSpec(
        tuple(
            Group(hardware=h, model=MODEL, count=count, role=role, slowdown=slow, max_batch=batch, most=count + 1)
            for h, count, role, slow, batch in groups
        )
    )
    requests, at_ms = [], 0.0
    for number, (gap, prompt, output, family, follows) in enumerate(asked):
        at_ms += gap
        requests.append(
            Request(
                number=number,
                at_ms=at_ms,
                model=MODEL,
                prompt_tokens=prompt,
                output_tokens=output,
                slo=RELAXED,
                units=tuple(family * 100 + place for place in range(prompt // 512)),
                follows=number - 1 if follows and number else -1,
                think_ms=5.0,
            )
        )
    world = World(CATALOGUE, fleet, requests, policy=policy, seed=3, settings=how)
    world.run()
    figures = world.outcome(policy, 3)
    assert figures.requests == len(requests)
    assert figures.finished + figures.refused + figures.failed + figures.unfinished == len(requests)
    assert figures.unfinished == 0
    assert not world.open
    assert len(world.desk.holds) == 0
    # Let transfers and dispatches that are still on their way come to their end; then nobody holds a block.
    until_ms = world.timeline.now_ms + 60_000.0
    while (next_ms := world.timeline.next_ms()) is not None and next_ms < until_ms:
        world.timeline.step()
    assert len(world.carrier.lanes) == 0
    for site in world.sites:
        assert not site.flights
        if site.alive:
            assert site.engine.empty
            pool = site.engine.pool
            assert pool.free + pool.idle == pool.total
            assert pool.referenced == 0
            assert site.unread_ms == 0.0
    if how.ledger:
        assert len(world.routing.ledger) == 0


def test_split_requests_move_their_kv_over_links_that_they_share():
    fleet = parse_fleet("1xH100_SXM5:llama-3.1-8b/fp8@prefill,1xL40S_PCIE:llama-3.1-8b/fp8@decode")
    alone = simulate(CATALOGUE, fleet, arrivals(1, 0.0, prompt=8192, units=False))
    assert (alone.splits, alone.finished) == (1, 1)
    profile = CATALOGUE.profile("H100_SXM5", MODEL, "fp8", 1)
    # Four chunks, then 1 GiB into an L40S at its 28 GB/s.
    expected_ms = sum(profile.prefill_ms(2048 * chunk, 2048) for chunk in range(4)) + 8192 * 131072 / 28e6
    assert alone.ttft_ms.most == pytest.approx(expected_ms, rel=0.1)


def test_a_dead_workers_requests_go_elsewhere_and_those_already_answering_fail():
    requests = arrivals(30, 10.0, output=400)
    died = simulate(
        CATALOGUE, MIXED, requests, settings=Settings(failures=(Failure(worker=0, at_ms=400.0, for_ms=60_000.0),))
    )
    assert died.finished + died.failed == 30
    assert 0 < died.failed < 30
    calm = simulate(CATALOGUE, MIXED, requests)
    assert calm.finished == 30


def test_a_worker_that_comes_back_is_used_again():
    fleet = parse_fleet("1xH100_SXM5:llama-3.1-8b/fp8")
    settings_ = Settings(failures=(Failure(worker=0, at_ms=1000.0, for_ms=1000.0),))
    figures = simulate(CATALOGUE, fleet, arrivals(40, 100.0, output=2), settings=settings_)
    assert figures.finished > 25
    assert figures.refused + figures.failed + figures.finished == 40


def test_more_workers_come_after_their_cold_start_and_go_when_nobody_needs_them():
    fleet = FleetSpec((Group(hardware="L40S_PCIE", model=MODEL, count=1, most=4),))
    rule = Autoscale(requests_per_worker=4.0, period_ms=500.0, cold_start_ms=2_000.0, patience_ms=3_000.0)
    busy = arrivals(300, 60.0, prompt=900, output=60, units=False)
    late = [Request(number=300, at_ms=60_000.0, model=MODEL, prompt_tokens=10, output_tokens=2, slo=RELAXED)]
    world = World(CATALOGUE, fleet, [*busy, *late], policy="least-loaded", seed=0, settings=Settings(autoscale=rule))
    world.run()
    assert 2 <= len(world.sites) <= 8
    assert sum(site.alive for site in world.sites) == 1
    alone = simulate(CATALOGUE, fleet, [*busy, *late], policy="least-loaded")
    assert world.outcome("least-loaded", 0).within_slo > alone.within_slo
    assert world.outcome("least-loaded", 0).usd > alone.usd


def test_an_older_view_without_a_ledger_herds():
    requests = arrivals(300, 25.0, prompt=700, output=30, units=False)
    new = simulate(CATALOGUE, MIXED, requests, policy="least-loaded", settings=Settings(ledger=False, hold=False))
    old = simulate(
        CATALOGUE, MIXED, requests, policy="least-loaded",
        settings=Settings(ledger=False, hold=False, view_age_ms=1000.0),
    )  # fmt: skip
    credited = simulate(
        CATALOGUE, MIXED, requests, policy="least-loaded", settings=Settings(hold=False, view_age_ms=1000.0)
    )
    assert old.ttft_ms.p90 > 2 * new.ttft_ms.p90
    assert credited.ttft_ms.p90 < old.ttft_ms.p90


def test_drift_tells_the_router_of_a_slow_worker():
    group = {"hardware": "H100_SXM5", "model": MODEL}
    fleet = FleetSpec((Group(**group, count=1), Group(**group, count=1, slowdown=3.0)))
    requests = arrivals(200, 25.0, prompt=1000, output=60, units=False)
    knows = simulate(CATALOGUE, fleet, requests)
    knows_not = simulate(CATALOGUE, fleet, requests, settings=Settings(drift=False))
    assert knows.e2e_ms.mean < knows_not.e2e_ms.mean


def test_an_unknown_policy_and_fleets_that_cannot_be():
    with pytest.raises(UnknownPolicy, match="finish-time"):
        simulate(CATALOGUE, MIXED, [], policy="wishful")
    with pytest.raises(WrongFleet, match="L40S_PCIE"):
        FleetSpec((Group(hardware="L40S", model=MODEL),)).check(CATALOGUE)
    with pytest.raises(WrongFleet, match=r"qwen3-32b.*tp1"):
        parse_fleet("2xL40S_PCIE:qwen3-32b/bf16").check(CATALOGUE)
    with pytest.raises(WrongFleet, match="no workers"):
        FleetSpec(()).check(CATALOGUE)
    with pytest.raises(WrongFleet, match="COUNT"):
        parse_fleet("eight H100")


def test_fleets_are_read_as_they_are_written():
    fleet = parse_fleet("2..5xL40S_PCIEx4:llama-3.1-70b@decode, 1xH100_SXM5x4:llama-3.1-70b/fp8")
    first, second = fleet.groups
    assert (first.hardware, first.tp, first.count, first.most, first.role) == ("L40S_PCIE", 4, 2, 5, "decode")
    assert (second.hardware, second.tp, second.precision, second.most) == ("H100_SXM5", 4, "fp8", None)
    assert fleet.price_per_hour(CATALOGUE) == pytest.approx(8 * 1.0 + 4 * 3.5)


def test_a_prefix_is_fetched_where_its_holder_has_no_time():
    fleet = parse_fleet("3xH100_SXM5:llama-3.1-8b/fp8")
    units = tuple(range(120))

    def one(number, at_ms):
        return Request(
            number=number,
            at_ms=at_ms,
            model=MODEL,
            prompt_tokens=62_000,
            output_tokens=20,
            slo=INTERACTIVE,
            units=units,
        )

    requests = [one(0, 0.0), *(one(number, 20_000.0 + number) for number in range(1, 12))]
    fetching = simulate(CATALOGUE, fleet, requests, settings=Settings(split=False))
    computing = simulate(CATALOGUE, fleet, requests, settings=Settings(split=False, fetch=False))
    assert fetching.fetches > 0
    assert computing.fetches == 0
    assert fetching.ttft_ms.mean < computing.ttft_ms.mean
    assert fetching.finished == 12


def test_memory_that_runs_out_preempts_the_youngest_and_all_answers_come():
    fleet = parse_fleet("1xL40S_PCIE:llama-3.1-8b/bf16")
    requests = arrivals(60, 5.0, prompt=2500, output=3500, units=False)
    figures = simulate(CATALOGUE, fleet, requests, policy="least-loaded", settings=Settings(drain_ms=1e9))
    assert figures.preemptions > 0
    assert figures.finished == 60
    assert max(each.peak_kv_share for each in figures.classes) > 0.95
