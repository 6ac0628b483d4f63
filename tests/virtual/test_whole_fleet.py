"""The whole fleet under virtual time answers a trace, twice the same, and loses nothing when parts of it die."""

import asyncio
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from virtual.trace_run import run

from quartet_bus.loop import run_virtual
from quartet_bus.messages import Phase, Role

SEED = 7


@pytest.fixture(scope="module")
def thousand():
    return run_virtual(run(SEED, 1000))


def ends(outcome, *roles):
    return [event for event in outcome.events if event.phase is Phase.END and event.role in roles]


def test_a_thousand_requests_are_all_answered_in_full(thousand):
    assert Counter(status for _, status in thousand.answers) == {0: 1000}
    for (_, _, request), (chunks, _) in zip(thousand.requests, thousand.answers, strict=True):
        assert chunks >= request.output_tokens


def test_splits_holds_and_hits_all_happen_and_every_split_verified_its_blocks(thousand):
    totals = thousand.fleet.router()._figures.totals()
    assert totals["dispatched"] >= 1000
    assert min(totals["splits"], totals["holds"], totals["affinity_hits"]) > 0
    decoded = ends(thousand, Role.DECODE)
    assert len(decoded) == totals["splits"]
    for event in decoded:
        assert event.verified_blocks == -(-event.prompt_tokens // 16)


def test_nothing_is_left_over(thousand):
    assert thousand.left == (0, 0, 0)


def test_every_request_ends_exactly_once(thousand):
    ended = Counter(event.stream.id for event in ends(thousand, Role.BOTH, Role.DECODE))
    assert len(ended) == 1000
    assert set(ended.values()) == {1}


def test_one_seed_gives_one_event_log_whatever_the_hash_seed(thousand):
    again = subprocess.run(
        [sys.executable, "-m", "virtual.trace_run", str(SEED), "1000"],
        capture_output=True, text=True, timeout=110, check=True,
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(Path(__file__).parents[1])},
    )  # fmt: skip
    assert again.stdout.split()[-2:] == [str(thousand.fleet.log.count), thousand.fleet.log.digest]
    assert thousand.fleet.log.count > 100_000


def test_another_seed_gives_another_event_log():
    first, second = (run_virtual(run(seed, 10)).fleet.log.digest for seed in (1, 2))
    assert first != second


def kill(name, after_s):
    async def during(fleet):
        await asyncio.sleep(after_s)
        await fleet.kill(name)

    return during


@pytest.mark.parametrize("victim", ["router-1", "collector-1", "l40s-0", "coordinator-0", "predictor-0", "admin-0"])
def test_a_killed_part_leaves_no_request_unanswered(victim):
    outcome = run_virtual(run(SEED, 60, kill(victim, 5.0), routers=2, collectors=2))
    statuses = Counter(status for _, status in outcome.answers)
    # A request whose worker dies after its first token is told so; anything else is answered.
    assert set(statuses) <= ({0, 502} if victim == "l40s-0" else {0})
    assert statuses[0] >= 45
