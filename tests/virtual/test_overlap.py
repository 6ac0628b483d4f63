"""A split's first token comes sooner where its KV leaves while it is computed, and everything else is the same."""

import asyncio
import json

import msgspec
import pytest
from virtual.virtual_fleet import VirtualFleet

from quartet_bus import subjects
from quartet_bus.loop import run_virtual
from quartet_bus.messages import Phase, RequestEvent, Role, TransferReport

MODEL = "llama-8b"
PROMPT = list(range(16_000))  # 2.1 GB of KV: 233 ms over TCP
BODY = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "stream": True}).encode()


def node(name, role, overlap):
    engine = {"kind": "simulated", "model": MODEL, "hardware": "H100_SXM5", "role": role, "overlap": overlap}
    return {"node": name, "fabrics": ("TCP",), "engines": [engine]}


async def split(overlap):
    """(TTFT in ms, the answer's frames, the report of its transfer, the coordinator's metrics)."""
    nodes = (node("p", "prefill", overlap), node("d", "decode", overlap))
    async with VirtualFleet(3, nodes=nodes, router={"long_prompt_tokens": 1 << 20}) as fleet:
        ends, reports = [], []
        bus = fleet.buses["client"]
        event, report = (msgspec.msgpack.Decoder(kind).decode for kind in (RequestEvent, TransferReport))
        await bus.subscribe(subjects.request_events().subject, lambda message: ends.append(event(message.data)))
        await bus.subscribe(subjects.kv_done().subject, lambda message: reports.append(report(message.data)))
        await asyncio.sleep(1.0)
        loop = asyncio.get_running_loop()
        begun, first_ms, answer = loop.time(), 0.0, []
        async with await fleet.client.infer(MODEL, BODY) as frames:
            async for frame in frames:
                first_ms = first_ms or 1e3 * (loop.time() - begun)
                answer.append(frame)
        await asyncio.sleep(0.5)
        (end,) = (each for each in ends if each.phase is Phase.END and each.role is Role.DECODE)
        assert (end.status, end.verified_blocks) == ("ok", len(PROMPT) // 16)
        (done,) = reports
        coordinator = next(service for service in fleet.services.values() if service.name == "coordinator")
        return first_ms, answer, done, coordinator.metrics.exposition().decode()


def texts(answer):
    return [choice["text"] for frame in answer for choice in json.loads(frame)["choices"]]


@pytest.fixture(scope="module")
def both():
    return run_virtual(split(False)), run_virtual(split(True))


def test_the_first_token_comes_sooner_by_what_overlapped(both):
    (after_ms, _, after, *_), (while_ms, _, done, *_) = both
    assert after.overlap_ms == 0.0
    assert done.took_ms == pytest.approx(after.took_ms, rel=0.02)
    assert done.overlap_ms > 0.5 * done.took_ms
    print(f"first token {after_ms:.0f} ms sent after the prefill, {while_ms:.0f} ms while it computes")
    assert after_ms - while_ms == pytest.approx(done.overlap_ms, abs=3.0)


def test_the_answer_is_the_same(both):
    (_, after, *_), (_, meanwhile, *_) = both
    assert texts(after) == texts(meanwhile)
    assert len(texts(after)) >= 8


def test_the_coordinator_counts_what_overlapped(both):
    *_, done, exposition = both[1]
    counter = "quartet_coordinator_overlap_seconds_total"
    line = next(line for line in exposition.splitlines() if line.startswith(counter))
    assert float(line.split()[-1]) == pytest.approx(done.overlap_ms / 1e3)
    assert "quartet_coordinator_trickling 0.0" in exposition
