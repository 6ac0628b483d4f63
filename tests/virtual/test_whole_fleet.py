"""The whole fleet under virtual time answers a trace, twice the same."""

import asyncio
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from quartet_bus.client import InferError
from quartet_bus.loop import run_virtual
from quartet_bus.messages import Phase, RequestEvent
from quartet_bus.subjects import request_events
from quartet_sim.prompts import completion_body
from quartet_sim.traces import azure_conversation, mooncake_conversation, sped_up, window

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from virtual_fleet import VirtualFleet  # noqa: E402


def load(count):
    """``count`` requests of both traces in order of arrival: (seconds, model, request)."""
    chat = [(r.at_s, "llama-8b", r) for r in window(sped_up(mooncake_conversation(1), 2.0), 0.0, 400.0)]
    azure = [(r.at_s, "llama-70b", r) for r in window(sped_up(azure_conversation(1), 2.0), 0.0, 400.0)]
    return sorted(chat + azure, key=lambda each: each[0])[:count]


async def replay(fleet, requests):
    """Send each request at its time; return (output chunks, error status) of each, in order."""
    start = asyncio.get_running_loop().time()

    async def one(at_s, model, request):
        await asyncio.sleep(start + at_s - asyncio.get_running_loop().time())
        try:
            chunks = 0
            async with await fleet.client.infer(model, completion_body(request, model)) as answer:
                async for _ in answer:
                    chunks += 1
            return chunks, 0
        except InferError as error:
            return 0, error.status

    return await asyncio.gather(*(one(*each) for each in requests))


async def run(seed, count):
    fleet = VirtualFleet(seed)
    events = []
    async with fleet:
        topic = request_events()

        def note(message):
            import msgspec

            events.append(msgspec.msgpack.decode(message.data, type=RequestEvent))

        await fleet.buses["client"].subscribe(topic.subject, note)
        await asyncio.sleep(1.0)
        requests = load(count)
        answers = await replay(fleet, requests)
        await asyncio.sleep(1.0)
        left = len(fleet.router().routing.ledger), len(fleet.router()._flights), len(fleet.router()._desk.holds)
    return fleet, requests, answers, events, left


@pytest.fixture(scope="module")
def thousand():
    return run_virtual(run(7, 1000))


def test_a_thousand_requests_are_all_answered_in_full(thousand):
    _, requests, answers, _, _ = thousand
    assert Counter(status for _, status in answers) == {0: 1000}
    for (_, _, request), (chunks, _) in zip(requests, answers, strict=True):
        assert chunks >= request.output_tokens


def test_splits_holds_and_hits_all_happen_and_every_split_verified_its_blocks(thousand):
    fleet, _, _, events, _ = thousand
    totals = fleet.router()._figures.totals()
    assert totals["dispatched"] >= 1000
    assert totals["splits"] > 0
    assert totals["holds"] > 0
    assert totals["affinity_hits"] > 0
    split_ends = [e for e in events if e.phase is Phase.END and e.role.value == "decode"]
    assert len(split_ends) >= totals["splits"] - totals["retries"]
    assert all(e.verified_blocks > 0 for e in split_ends if e.status == "ok")


def test_nothing_is_left_over(thousand):
    _, _, _, _, left = thousand
    assert left == (0, 0, 0)


def test_every_request_ends_exactly_once(thousand):
    _, _, _, events, _ = thousand
    ends = Counter(e.stream.id for e in events if e.phase is Phase.END and e.role.value != "prefill")
    assert len(ends) == 1000
    assert set(ends.values()) == {1}


def test_the_same_seed_gives_the_same_event_log_whatever_the_hash_seed():
    def digest(hash_seed):
        code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import test_whole_fleet as t; from quartet_bus.loop import run_virtual; f = run_virtual(t.run(3, 150))[0]; print(f.log.count, f.log.digest)"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )  # fmt: skip
        return done.stdout.strip()

    first, second = digest("1"), digest("2")
    assert first == second
    assert int(first.split()[0]) > 10_000
