"""Adapters, isolation and replicas, on a whole fleet under virtual time."""

import asyncio
import json
from collections import Counter

import pytest
from virtual.trace_run import Outcome
from virtual.virtual_fleet import MODELS, VirtualFleet, node

from quartet_bus.client import InferError
from quartet_bus.loop import run_virtual
from quartet_bus.messages import Phase
from quartet_bus.subjects import request_events

PROMPT = [(7 * i) % 50_000 for i in range(6_000)]


def with_adapter(name, hardware):
    made = node(name, hardware)
    made["engines"][1]["adapters"] = ["tuned"]
    return made


async def play(script, **options):
    async with VirtualFleet(11, **options) as fleet:
        outcome = Outcome(fleet, [])
        await fleet.buses["client"].subscribe(request_events().subject, outcome.note)
        await asyncio.sleep(1.0)
        await script(fleet)
        await asyncio.sleep(0.5)
    return outcome


async def ask(fleet, model, ids=PROMPT, tokens=4):
    body = json.dumps({"prompt": ids, "max_tokens": tokens, "stream": True}).encode()
    async with await fleet.client.infer(model, body) as answer:
        return [json.loads(chunk) async for chunk in answer]


def ends(outcome):
    return [event for event in outcome.events if event.phase is Phase.END]


def test_an_adapter_runs_where_its_base_does_and_shares_no_cache_with_it():
    async def script(fleet):
        for model in ("llama-8b", "tuned", "tuned", "llama-8b"):
            await ask(fleet, model)

    models = MODELS | {"tuned": {"spec": "llama-3.1-8b", "base": "llama-8b", "sketch": "tokens"}}
    nodes = [with_adapter("h100-0", "H100_SXM5")]
    alone = {"split": False, "fetch": False, "long_prompt_tokens": 1 << 20}
    outcome = run_virtual(play(script, nodes=nodes, models=models, router=alone))
    found = [(event.model, event.cached_tokens > 5_000) for event in ends(outcome)]
    assert found == [("llama-8b", False), ("tuned", False), ("tuned", True), ("llama-8b", True)]


def test_an_adapter_that_no_worker_has_is_503_and_a_name_nobody_knows_404():
    statuses = []

    async def script(fleet):
        for model in ("tuned", "nobody"):
            with pytest.raises(InferError) as failed:
                await ask(fleet, model)
            statuses.append(failed.value.status)

    models = MODELS | {"tuned": {"spec": "llama-3.1-8b", "base": "llama-8b"}}
    run_virtual(play(script, models=models))
    assert statuses == [503, 404]


def test_two_replicas_with_a_shared_view_do_not_herd():
    """Sixteen equal workers, two routers, and twice as many equal requests at one moment: two on each."""

    async def script(fleet):
        requests = [ask(fleet, "llama-8b", [number, *PROMPT[:3_000]], 64) for number in range(32)]
        await asyncio.gather(*requests)

    engine = {"kind": "simulated", "model": "llama-8b", "hardware": "H100_SXM5", "count": 8}
    nodes = [{"node": f"h{n}", "fabrics": ("RDMA_ROCE",), "engines": [engine]} for n in range(2)]
    outcome = run_virtual(play(script, nodes=nodes, routers=2))
    routers = Counter(e.router for e in outcome.events if e.phase is Phase.DISPATCHED)
    workers = Counter(e.worker for e in outcome.events if e.phase is Phase.DISPATCHED)
    assert len(routers) == 2
    assert len(workers) == 16
    assert max(workers.values()) <= 4
