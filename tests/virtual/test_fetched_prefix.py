"""A conversation goes on elsewhere when its worker is overloaded: its prefix is moved there, and it says the same."""

import asyncio
import json
from collections import Counter

import msgspec
import pytest
from virtual.virtual_fleet import VirtualFleet

from quartet_bus import subjects
from quartet_bus.loop import run_virtual
from quartet_bus.messages import Phase, RequestEvent, Role, Run, StreamId, TransferReport

MODEL = "llama-8b"
FIRST = [(31 * i) % 120_000 for i in range(12_000)]
SECOND = FIRST + [(17 * i) % 110_000 for i in range(600)]
BUSY = 10
"""Other prompts that keep the first worker busy for some seconds."""


def node(name):
    engine = {"kind": "simulated", "model": MODEL, "hardware": "H100_SXM5"}
    return {"node": name, "fabrics": ("RDMA_ROCE", "TCP"), "engines": [engine]}


def body(tokens, max_tokens=24):
    return json.dumps({"model": MODEL, "prompt": tokens, "max_tokens": max_tokens, "stream": True}).encode()


class Told:
    """What was said on the bus, and what each turn was answered."""

    def __init__(self):
        self.events, self.done, self.failed, self.texts = [], [], [], []

    async def listen(self, fleet):
        for topic, into in (
            (subjects.request_events(), self.events), (subjects.kv_done(), self.done),
            (subjects.kv_failed(), self.failed),
        ):  # fmt: skip
            kind = RequestEvent if into is self.events else TransferReport
            await fleet.buses["client"].subscribe(
                topic.subject, lambda m, into=into, kind=kind: into.append(msgspec.msgpack.decode(m.data, type=kind))
            )

    def ends(self, *roles):
        ended = [e for e in self.events if e.phase is Phase.END and e.role in roles]
        return [e for e in ended if not e.stream.id.startswith("other-")]


async def say(fleet, tokens):
    text = ""
    async with await fleet.client.infer(MODEL, body(tokens)) as answer:
        async for chunk in answer:
            text += "".join(choice["text"] for choice in json.loads(bytes(chunk))["choices"])
    return text


def keep_busy(fleet, worker):
    """Work that another router gives to ``worker``, without asking this one."""
    agent = next(s for s in fleet.services.values() if worker in getattr(s, "workers", {}))
    for number in range(BUSY):
        prompt = [(number + 3 + 13 * i) % 100_000 for i in range(14_000)]
        run = Run(
            stream=StreamId(f"other-{number}"), tenant="acme", model=MODEL, worker=worker,
            incarnation=agent.workers[worker].incarnation, inbox=f"_INBOX.acme.other.{number}",
            body=body(prompt, 200), router="other", prompt_tokens=len(prompt), predicted_prefill_ms=400.0,
        )  # fmt: skip
        fleet.buses["client"].publish(subjects.worker_run(worker).subject, msgspec.msgpack.encode(run))


async def conversation(during=None, *, busy=True, nodes=("one", "two"), **sections):
    """Two turns; between them the first's worker gets a lot to do. ``during(fleet, worker)`` runs beside the second."""
    told = Told()
    async with VirtualFleet(5, nodes=[node(name) for name in nodes], **sections) as fleet:
        await told.listen(fleet)
        await asyncio.sleep(1.0)
        told.texts.append(await say(fleet, FIRST))
        await asyncio.sleep(0.5)
        (first,) = told.ends(Role.BOTH)
        told.holder = first.worker
        if busy:
            keep_busy(fleet, first.worker)
            await asyncio.sleep(0.3)
        beside = asyncio.ensure_future(during(fleet, first.worker)) if during else None
        told.texts.append(await say(fleet, SECOND))
        if beside is not None:
            await beside
        await asyncio.sleep(10.0)
        router = fleet.router()
        agents = [service for service in fleet.services.values() if hasattr(service, "arrivals")]
        told.left = [
            len(router.routing.ledger), len(router._flights), len(router._desk.holds),
            *(len(agent.arrivals) + len(agent.departures) + agent.streams.running for agent in agents),
            *(1.0 - w.adapter.load().free_kv_fraction for agent in agents for w in agent.workers.values()),
        ]  # fmt: skip
        told.fetches = router._figures.totals()["fetches"]
    told.digest = fleet.log.digest
    return told


@pytest.fixture(scope="module")
def undisturbed():
    return run_virtual(conversation(busy=False, nodes=("one",)))


@pytest.fixture(scope="module")
def fetched():
    return run_virtual(conversation())


def test_the_prefix_is_moved_and_the_answer_is_the_same(undisturbed, fetched):
    first, second = fetched.ends(Role.BOTH)
    assert second.worker != first.worker
    assert (second.status, second.output_tokens) == ("ok", 24)
    assert 10_000 < second.transferred_tokens <= 12_000
    assert second.cached_tokens == 0
    assert second.verified_blocks == second.transferred_tokens // 16
    assert fetched.texts == undisturbed.texts
    assert fetched.fetches == 1
    (done,) = fetched.done
    assert (done.reason, done.source, done.target) == ("fetch", first.worker, second.worker)
    assert done.wire_bytes == second.transferred_tokens * 64
    assert fetched.failed == []


def test_the_holder_lends_without_computing_and_the_first_token_comes_when_it_was_predicted(fetched):
    (lender,) = fetched.ends(Role.PREFILL)
    _, second = fetched.ends(Role.BOTH)
    assert (lender.worker, lender.status, lender.gpu_ms) == (fetched.holder, "ok", 0.0)
    assert lender.cached_tokens == second.transferred_tokens
    observed_ms = second.waited_ms + second.ttft_ms
    assert observed_ms == pytest.approx(second.predicted_ttft_ms, rel=0.5)


def test_without_fetching_the_same_turn_takes_longer_and_says_the_same(undisturbed, fetched):
    plain = run_virtual(conversation(router={"fetch": False, "long_prompt_tokens": 1 << 20}))
    assert plain.texts == undisturbed.texts
    assert plain.fetches == 0
    assert plain.ends(Role.BOTH)[1].ttft_ms > 1.5 * fetched.ends(Role.BOTH)[1].ttft_ms


def test_nothing_is_left_over(fetched):
    assert set(fetched.left) == {0}


def test_one_seed_gives_one_event_log(fetched):
    assert run_virtual(conversation()).digest == fetched.digest


async def kill_lender(fleet, holder):
    await asyncio.sleep(0.02)
    await fleet.kill(holder.rpartition("-")[0])


async def kill_coordinator(fleet, _):
    await asyncio.sleep(0.02)
    await fleet.kill("coordinator-0")


@pytest.mark.parametrize("misfortune", [kill_lender, kill_coordinator])
def test_whatever_happens_to_the_transfer_the_turn_is_answered(undisturbed, misfortune):
    told = run_virtual(conversation(misfortune))
    assert told.fetches == 1
    assert told.texts == undisturbed.texts
    assert set(told.left) == {0}
    assert Counter(end.status for end in told.ends(Role.BOTH)) == {"ok": 2}
    assert told.ends(Role.BOTH)[-1].transferred_tokens == 0
