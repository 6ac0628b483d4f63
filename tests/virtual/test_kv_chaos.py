"""Agents and coordinators are killed at random under load: afterwards nothing is leased, and nobody waits.

The same with processes, sockets and signals: ``make chaos``.
"""

import asyncio
import json
import random
from collections import Counter

import pytest
from virtual.virtual_fleet import VirtualFleet

from quartet_bus.client import InferError
from quartet_bus.loop import run_virtual

MODEL = "llama-8b"
SECONDS = 20.0
PER_S = 6.0


def node(name, hardware, role):
    engine = {"kind": "simulated", "model": MODEL, "hardware": hardware, "role": role}
    return {"node": name, "fabrics": ("RDMA_ROCE", "TCP"), "engines": [engine]}


NODES = [
    node("p0", "H100_SXM5", "prefill"), node("p1", "H100_SXM5", "prefill"),
    node("d0", "L40S_PCIE", "decode"), node("d1", "L40S_PCIE", "decode"), node("w0", "L40S_PCIE", "both"),
]  # fmt: skip


async def ask(fleet, source):
    tokens = [source.randrange(100_000) for _ in range(source.randrange(1500, 9000))]
    body = json.dumps({"model": MODEL, "prompt": tokens, "max_tokens": 6, "stream": True}).encode()
    try:
        async with await fleet.client.infer(MODEL, body) as answer:
            async for _ in answer:
                pass
    except InferError as error:
        return error.status
    return 200


async def disturb(fleet, source, log):
    loop = asyncio.get_running_loop()
    until_s = loop.time() + SECONDS
    while loop.time() < until_s:
        await asyncio.sleep(source.uniform(0.2, 1.5))
        name = source.choice([*fleet.agents(), "coordinator-0", "coordinator-1"])
        log[name.rstrip("0123456789")] += 1
        await fleet.kill(name)
        await asyncio.sleep(source.uniform(0.05, 1.5))
        await fleet.revive(name)


async def story(seed):
    source = random.Random(seed)
    killed = Counter()
    async with VirtualFleet(seed, nodes=NODES, coordinators=2) as fleet:
        await asyncio.sleep(1.5)
        beside = asyncio.ensure_future(disturb(fleet, source, killed))
        asked = []
        while not beside.done():
            asked.append(asyncio.ensure_future(ask(fleet, source)))
            await asyncio.sleep(source.expovariate(PER_S))
        await beside
        async with asyncio.timeout(120.0):
            answers = Counter(await asyncio.gather(*asked))
        await asyncio.sleep(fleet.services["p0"].config.kv.lease_ms / 1e3 + 1.0)
        agents = fleet.agents().values()
        return {
            "killed": killed,
            "answers": answers,
            "leased": sum(len(agent.arrivals) + len(agent.departures) for agent in agents),
            "streams": sum(agent.streams.running for agent in agents),
            "free": {load.free_kv_fraction for agent in agents for load in _loads(agent)},
            "live": [view.transfer for name in ("coordinator-0", "coordinator-1")
                     for view in fleet.services[name].transfers() if view.live],
            "done": sum(view.state == "released" for name in ("coordinator-0", "coordinator-1")
                        for view in fleet.services[name].transfers()),
        }  # fmt: skip


def _loads(agent):
    return [worker.adapter.load() for worker in agent.workers.values()]


@pytest.mark.parametrize("seed", [1, 2])
def test_after_random_deaths_nothing_is_leased_and_every_request_has_heard(seed):
    found = run_virtual(story(seed))
    print(found)
    assert {"p", "d", "coordinator-"} <= set(found["killed"]), "not everybody died at least once"
    assert (found["leased"], found["streams"], found["live"]) == (0, 0, [])
    assert found["free"] == {1.0}
    assert found["answers"][200] > 0.5 * found["answers"].total()
    assert found["done"] > 0, "nothing was moved, so nothing was shown"
