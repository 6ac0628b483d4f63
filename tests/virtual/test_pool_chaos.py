"""Whoever dies in the middle of page-outs: afterwards no block is held for anybody, and every request has heard."""

import asyncio
import json
import random
from collections import Counter

import msgspec
import pytest
from virtual.virtual_fleet import VirtualFleet

from quartet_bus import subjects
from quartet_bus.client import InferError
from quartet_bus.loop import run_virtual
from quartet_bus.messages import TransferReport

MODEL = "llama-8b"
DEATHS = 6
KV = {
    "pool": True, "page_min_idle_ms": 0.0, "page_cycle_ms": 1.0, "store_bytes": 5_000_000_000,
    # slow enough for a page to be met on its way, quick enough for it to be worth it
    "links": {"RDMA_ROCE": {"gb_per_s": 9.0, "setup_ms": 1.0}, "HOST": {"gb_per_s": 9.0, "setup_ms": 1.0}},
}  # fmt: skip


def node(name, hardware, kv_tokens):
    engine = {"kind": "simulated", "model": MODEL, "hardware": hardware, "kv_tokens": kv_tokens}
    return {"node": name, "fabrics": ("RDMA_ROCE", "TCP"), "engines": [engine]}


NODES = [node("a", "H100_SXM5", 24_000), node("b", "H100_SXM5", 24_000), node("c", "L40S_PCIE", 120_000)]


async def ask(fleet, source):
    tokens = [source.randrange(100_000) for _ in range(source.randrange(6_000, 12_000))]
    for turn in range(2):
        body = json.dumps({"model": MODEL, "prompt": tokens, "max_tokens": 6, "stream": True}).encode()
        try:
            async with await fleet.client.infer(MODEL, body) as answer:
                async for _ in answer:
                    pass
        except InferError as error:
            return error.status
        tokens += [source.randrange(100_000) for _ in range(300)]
        await asyncio.sleep(2.0 * (1 - turn))
    return 200


def pagers(fleet):
    return {name: service.pager for name, service in fleet.services.items() if name.startswith("coordinator")}


async def disturb(fleet, source, killed):
    """Kill somebody who has part in a page-out, while it is under way."""
    async with asyncio.timeout(300.0):
        while killed.total() < DEATHS:
            going = [(name, going) for name, pager in pagers(fleet).items() for going in pager._going.values()]
            if not going:
                await asyncio.sleep(0.01)
                continue
            await asyncio.sleep(source.choice([0.0, 0.002, 0.05, 0.1]))
            leader, page = source.choice(going)
            part = source.choice(["source", "target", "coordinator"])
            name = leader if part == "coordinator" else getattr(page, part).rpartition("-")[0]
            killed[part] += 1
            await fleet.kill(name)
            await asyncio.sleep(source.uniform(0.05, 1.5))
            await fleet.revive(name)
            await asyncio.sleep(1.0)


async def story(seed):
    source, killed, done = random.Random(seed), Counter(), Counter()
    async with VirtualFleet(seed, nodes=NODES, coordinators=2, kv=KV) as fleet:
        await fleet.buses["client"].subscribe(
            subjects.kv_done().subject,
            lambda message: done.update([msgspec.msgpack.decode(message.data, type=TransferReport).reason.value]),
        )
        await asyncio.sleep(1.5)
        beside = asyncio.ensure_future(disturb(fleet, source, killed))
        asked = []
        while not beside.done():
            asked.append(asyncio.ensure_future(ask(fleet, source)))
            await asyncio.sleep(source.expovariate(2.0))
        await beside
        async with asyncio.timeout(120.0):
            answers = Counter(await asyncio.gather(*asked))
        await asyncio.sleep(fleet.services["a"].config.kv.lease_ms / 1e3 + 1.0)
        agents = fleet.agents().values()
        return {
            "killed": killed,
            "answers": answers,
            "paged": done["page_out"],
            "going": sum(len(pager) for pager in pagers(fleet).values()),
            "leased": sum(len(agent.arrivals) + len(agent.departures) + len(agent.pages) for agent in agents),
            "referenced": [
                worker.adapter.pages.fill().referenced_blocks for agent in agents for worker in agent.workers.values()
            ],
        }  # fmt: skip


@pytest.mark.parametrize("seed", [1])
def test_after_deaths_in_the_middle_of_page_outs_no_block_is_held(seed):
    found = run_virtual(story(seed))
    print(found)
    assert len(found["killed"]) > 1
    assert (found["leased"], found["going"]) == (0, 0)
    assert set(found["referenced"]) == {0}
    assert found["answers"][200] > 0.5 * found["answers"].total()
    assert found["paged"] > 0
