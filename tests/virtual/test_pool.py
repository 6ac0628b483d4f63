"""A fleet whose H100s run out of KV: conversations wait elsewhere, and go on as if they had never left."""

import asyncio
import json
import random
import re
from pathlib import Path

import msgspec
import pytest
from virtual.virtual_fleet import VirtualFleet

from quartet_bus import subjects
from quartet_bus.config.load import load
from quartet_bus.loop import run_virtual
from quartet_bus.messages import Phase, RequestEvent, Role, TransferReport

PAGE = Path(__file__).parents[2] / "docs" / "pool.md"
MODEL = "llama-8b"
TALKS = 8
TURNS = 3
FIRST_TOKENS = 5_000
ADDED_TOKENS = 400


def node(name, hardware, kv_tokens, **more):
    engine = {"kind": "simulated", "model": MODEL, "hardware": hardware, "kv_tokens": kv_tokens}
    return {"node": name, "fabrics": ("RDMA_ROCE", "TCP"), "engines": [engine | more]}


NODES = [node("h100-0", "H100_SXM5", 26_000), node("l40s-0", "L40S_PCIE", 80_000)]


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
        """Prompt tokens that some engine computed: of whole requests, and of first halves."""
        halves = (Role.BOTH, Role.PREFILL)
        return sum(e.prompt_tokens - e.cached_tokens - e.transferred_tokens for e in self.ends if e.role in halves)


async def talk(fleet, number, told, pause_s):
    source = random.Random(number)
    tokens = [source.randrange(120_000) for _ in range(FIRST_TOKENS)]
    await asyncio.sleep(0.8 * number)
    for turn in range(TURNS):
        body = json.dumps({"model": MODEL, "prompt": tokens, "max_tokens": 16, "stream": True}).encode()
        text = ""
        async with await fleet.client.infer(MODEL, body) as answer:
            async for chunk in answer:
                text += "".join(choice["text"] for choice in json.loads(bytes(chunk))["choices"])
        told.texts[number, turn] = text
        tokens += [source.randrange(120_000) for _ in range(ADDED_TOKENS)]
        await asyncio.sleep(pause_s)


async def conversations(pool, nodes=NODES, pause_s=8.0, kv=None, **sections):
    told = Told()
    kv = {"pool": pool, "page_min_idle_ms": 1000.0, **(kv or {})}
    async with VirtualFleet(11, nodes=nodes, kv=kv, **sections) as fleet:
        await told.listen(fleet)
        await asyncio.sleep(1.5)
        await asyncio.gather(*(talk(fleet, number, told, pause_s) for number in range(TALKS)))
        await asyncio.sleep(6.0)
        told.left = [len(a.arrivals) + len(a.departures) + a.streams.running for a in fleet.agents().values()]
        told.free = [1 - w.adapter.load().free_kv_fraction for a in fleet.agents().values() for w in a.workers.values()]
        told.views = fleet.services["coordinator-0"].pager.views()
        told.refused = fleet.services["coordinator-0"].pager.refused
    return told


@pytest.fixture(scope="module")
def unpaged():
    return run_virtual(conversations(False))


@pytest.fixture(scope="module")
def paged():
    return run_virtual(conversations(True))


@pytest.fixture(scope="module")
def stored():
    return run_virtual(conversations(True, NODES[:1], kv={"store_bytes": 6_000_000_000}))


def view(told, tier):
    (found,) = [view for view in told.views if view.tier == tier]
    return found


def test_without_a_pool_what_does_not_fit_is_evicted_and_computed_again(unpaged):
    assert unpaged.done == []
    assert unpaged.computed() > 0.9 * sum(end.prompt_tokens for end in unpaged.ends)
    assert unpaged.views == []


def test_pages_go_out_and_conversations_return_to_them(paged):
    pages = paged.pages()
    assert pages
    assert {(page.source, page.target, page.link) for page in pages} == {("h100-0-0", "l40s-0-0", "RDMA_ROCE")}
    assert paged.failed == []
    there = view(paged, "L40S_PCIE")
    assert there.in_tokens > TALKS * FIRST_TOKENS * 0.8
    assert there.hit_tokens > 0.8 * there.in_tokens
    assert view(paged, "H100_SXM5").out_tokens >= there.in_tokens


def test_the_answers_are_those_of_the_run_without_and_most_is_not_computed_again(unpaged, paged, stored):
    assert len(unpaged.texts) == TALKS * TURNS
    assert all(unpaged.texts.values())
    assert paged.texts == unpaged.texts
    assert stored.texts == unpaged.texts
    for name, told in (("without", unpaged), ("with an L40S", paged), ("with a store", stored)):
        asked = sum(end.prompt_tokens for end in told.ends if end.role is not Role.PREFILL)
        moved = sum(page.tokens for page in told.pages())
        line = f"{name}: {asked:,} prompt tokens, {told.computed():,} computed, {moved:,} paged out"
        print(line)
        assert line in PAGE.read_text(), "docs/pool.md says otherwise"
    new = TALKS * (FIRST_TOKENS + (TURNS - 1) * ADDED_TOKENS)
    assert unpaged.computed() > 2.5 * new
    assert paged.computed() < 1.3 * new
    assert stored.computed() < 1.3 * new


def test_a_store_takes_pages_over_pcie_and_lends_them_back(stored):
    assert {(page.source, page.target, page.link) for page in stored.pages()} == {("h100-0-0", "h100-0-1", "HOST")}
    fetches = [report for report in stored.done if report.reason == "fetch"]
    assert {(fetch.source, fetch.target, fetch.link) for fetch in fetches} == {("h100-0-1", "h100-0-0", "HOST")}
    assert len(fetches) >= TALKS
    assert view(stored, "host").hit_tokens > 0.8 * view(stored, "host").in_tokens
    lent = [end for end in stored.ends if end.worker == "h100-0-1"]
    assert {(end.role, end.status, end.gpu_ms) for end in lent} == {(Role.PREFILL, "ok", 0.0)}
    assert {end.worker for end in stored.ends if end.role is Role.BOTH} == {"h100-0-0"}


def test_over_a_slow_link_nothing_is_moved_and_all_is_computed_again(unpaged):
    slow = {name: {"gb_per_s": 0.05, "setup_ms": 1.0} for name in ("RDMA_ROCE", "TCP", "HOST")}
    told = run_virtual(conversations(True, kv={"links": slow, "store_bytes": 6_000_000_000}))
    assert told.pages() == []
    assert told.refused["recompute"] > 0
    assert told.computed() == unpaged.computed()
    assert told.texts == unpaged.texts


def test_nothing_is_left_over(unpaged, paged, stored):
    for told in (unpaged, paged, stored):
        assert set(told.left) == {0}
        assert set(told.free) == {0.0}


def test_what_the_page_writes_into_a_file_is_a_configuration(tmp_path):
    (text,) = re.findall(r"cat > pool.toml <<'END'\n(.*?)END\n", PAGE.read_text(), re.DOTALL)
    (tmp_path / "pool.toml").write_text(text)
    assert load([tmp_path / "pool.toml"], {}).kv.pool
