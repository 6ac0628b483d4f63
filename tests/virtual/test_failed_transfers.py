"""A fleet of one pair, prefill and decode: transfers that fail take neither of the two out."""

import asyncio
import json
from collections import Counter

import msgspec
import pytest
from virtual.virtual_fleet import VirtualFleet

from quartet_agent.kv.mover import MoveError, MoveReason
from quartet_bus import subjects
from quartet_bus.client import InferError
from quartet_bus.loop import run_virtual
from quartet_bus.messages import Phase, RequestEvent, Role

MODEL = "llama-8b"
BODY = json.dumps({"model": MODEL, "prompt": list(range(6_000)), "max_tokens": 8, "stream": True}).encode()


def node(name, role):
    engine = {"kind": "simulated", "model": MODEL, "hardware": "H100_SXM5", "role": role}
    return {"node": name, "fabrics": ("RDMA_ROCE", "TCP"), "engines": [engine]}


async def pair(failing, *, requests=1, **router):
    """Ask so many times at once while the first ``failing`` transfers find nobody at the other end."""
    nodes = (node("p", "prefill"), node("d", "decode"))
    async with VirtualFleet(3, nodes=nodes, router={"long_prompt_tokens": 1 << 20, **router}) as fleet:
        events = []
        decode = msgspec.msgpack.Decoder(RequestEvent).decode
        await fleet.buses["client"].subscribe(
            subjects.request_events().subject, lambda message: events.append(decode(message.data))
        )
        await asyncio.sleep(1.0)
        find, left = fleet._network.find, [failing]

        def flaky(address):
            if left[0]:
                left[0] -= 1
                raise MoveError(MoveReason.CONNECTION, "the link is down")
            return find(address)

        fleet._network.find = flaky

        async def ask():
            try:
                async with await fleet.client.infer(MODEL, BODY) as answer:
                    async for _ in answer:
                        pass
            except InferError as error:
                return error.status, error.body.code
            return 200, None

        answers = await asyncio.gather(*(ask() for _ in range(requests)))
        await asyncio.sleep(10.0)
        agents = [service for service in fleet.services.values() if hasattr(service, "arrivals")]
        left_over = [
            len(fleet.router().routing.ledger), len(fleet.router()._flights),
            *(len(agent.arrivals) + len(agent.departures) + agent.streams.running for agent in agents),
            *(1.0 - w.adapter.load().free_kv_fraction for agent in agents for w in agent.workers.values()),
        ]  # fmt: skip
        return answers, [e for e in events if e.phase is Phase.END and e.status == "ok"], left_over, fleet.router()


def test_after_one_failed_transfer_the_same_two_are_asked_again():
    answers, ends, left_over, _ = run_virtual(pair(1))
    assert answers == [(200, None)]
    assert {(end.worker, end.role, end.stream.try_) for end in ends} == {
        ("p-0", Role.PREFILL, 2), ("d-0", Role.DECODE, 2),
    }  # fmt: skip
    assert set(left_over) == {0}


def test_while_no_transfer_arrives_one_half_does_all_in_the_last_try():
    answers, ends, left_over, router = run_virtual(pair(1_000, requests=4))
    assert answers == [(200, None)] * 4
    assert Counter((end.role, end.stream.try_) for end in ends) == {(Role.BOTH, 3): 4}
    assert router.routing.fallbacks == 4
    assert set(left_over) == {0}


async def refused_unheard():
    """The coordinator refuses the first plan, and the word that says so is lost."""
    async with VirtualFleet(3, nodes=(node("p", "prefill"), node("d", "decode")),
                            router={"long_prompt_tokens": 1 << 20}) as fleet:  # fmt: skip
        await asyncio.sleep(1.0)
        coordinator = next(service for service in fleet.services.values() if service.name == "coordinator")
        plan, announce, lost = coordinator._conductor.plan, coordinator.announce, []

        def refuse(told, heard_ns):
            told.deadline_ms = 0.001 if not lost else told.deadline_ms
            plan(told, heard_ns)

        def mumble(report, failure):
            if failure is not None and not lost:
                lost.append(report)
            else:
                announce(report, failure)

        coordinator._conductor.plan, coordinator.announce = refuse, mumble
        begun = asyncio.get_running_loop().time()
        async with await fleet.client.infer(MODEL, BODY) as answer:
            async for _ in answer:
                pass
        return lost, asyncio.get_running_loop().time() - begun


def test_a_plan_whose_refusal_nobody_heard_costs_a_retry_and_not_the_requests_own_deadline():
    lost, took_s = run_virtual(refused_unheard())
    assert [report.state for report in lost] == ["aborted"]
    assert 1.5 < took_s < 2.5


@pytest.mark.parametrize("requests", [1, 4])
def test_where_halves_may_not_do_all_the_tries_end_in_one_clear_error(requests):
    answers, _, left_over, _ = run_virtual(pair(1_000, requests=requests, split_without_prefill_worker="error"))
    assert answers == [(502, "transfer_failed")] * requests
    assert set(left_over) == {0}
