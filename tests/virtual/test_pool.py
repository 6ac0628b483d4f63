"""A fleet whose H100s run out of KV: conversations wait elsewhere, and go on as if they had never left."""

import asyncio
import json
import random
from collections import Counter

import msgspec
from virtual.virtual_fleet import VirtualFleet

from quartet_bus import subjects
from quartet_bus.loop import run_virtual
from quartet_bus.messages import Phase, RequestEvent, Role, TransferReport

MODEL = "llama-8b"
TALKS = 14
TURNS = 3
FIRST_TOKENS = 5_000


def node(name, hardware, kv_tokens, **more):
    engine = {"kind": "simulated", "model": MODEL, "hardware": hardware, "kv_tokens": kv_tokens}
    return {"node": name, "fabrics": ("RDMA_ROCE", "TCP"), "engines": [engine | more]}


NODES = [node("h100-0", "H100_SXM5", 40_000), node("l40s-0", "L40S_PCIE", 120_000)]


class Told:
    def __init__(self):
        self.ends, self.done, self.failed, self.texts = [], [], [], {}

    async def listen(self, fleet):
        for topic, into, kind in (
            (subjects.request_event(Phase.END), self.ends, RequestEvent),
            (subjects.kv_done(), self.done, TransferReport), (subjects.kv_failed(), self.failed, TransferReport),
        ):  # fmt: skip
            await fleet.buses["client"].subscribe(
                topic.subject, lambda m, into=into, kind=kind: into.append(msgspec.msgpack.decode(m.data, type=kind))
            )

    def pages(self):
        return [report for report in self.done if report.reason == "page_out"]

    def computed(self):
        return sum(e.prompt_tokens - e.cached_tokens - e.transferred_tokens for e in self.ends if e.role is Role.BOTH)


async def talk(fleet, number, told, pause_s):
    source = random.Random(number)
    tokens = [source.randrange(120_000) for _ in range(FIRST_TOKENS)]
    await asyncio.sleep(1.0 * number)
    for turn in range(TURNS):
        body = json.dumps({"model": MODEL, "prompt": tokens, "max_tokens": 16, "stream": True}).encode()
        text = ""
        async with await fleet.client.infer(MODEL, body) as answer:
            async for chunk in answer:
                text += "".join(choice["text"] for choice in json.loads(bytes(chunk))["choices"])
        told.texts[number, turn] = text
        tokens += [source.randrange(120_000) for _ in range(400)]
        await asyncio.sleep(pause_s)


async def conversations(pool, nodes=NODES, pause_s=20.0, kv=None, **sections):
    told = Told()
    kv = {"pool": pool, "page_min_idle_ms": 1000.0, **(kv or {})}
    async with VirtualFleet(11, nodes=nodes, kv=kv, **sections) as fleet:
        await told.listen(fleet)
        await asyncio.sleep(1.5)
        await asyncio.gather(*(talk(fleet, number, told, pause_s) for number in range(TALKS)))
        await asyncio.sleep(10.0)
        told.left = [len(a.arrivals) + len(a.departures) + a.streams.running for a in fleet.agents().values()]
        told.free = [1 - w.adapter.load().free_kv_fraction for a in fleet.agents().values() for w in a.workers.values()]
        told.views = fleet.services["coordinator-0"].pager.views()
        told.refused = fleet.services["coordinator-0"].pager.refused
    return told


def test_look():
    for pool in (False, True):
        told = run_virtual(conversations(pool))
        print(
            pool,
            len(told.pages()),
            told.computed(),
            Counter(e.worker for e in told.ends if e.role is Role.BOTH),
            Counter((r.reason, r.source, r.target, r.link) for r in told.done),
            told.refused,
            told.left,
            told.free,
        )
        print(told.failed[:3])
        for v in told.views:
            print(v)
