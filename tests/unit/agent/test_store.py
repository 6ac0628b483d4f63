"""A store keeps what came as it came, forgets the least used, and never what is lent."""

import asyncio
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from quartet_agent.engines.base import Failed, Prefilled, Work
from quartet_agent.engines.pools import BlocksFenced
from quartet_agent.store.adapter import StoreAdapter
from quartet_agent.store.hosted import host_stores
from quartet_agent.store.memory import StoreMemory
from quartet_agent.worker import HostedWorker, WorkerFacts
from quartet_bus.config.check import ConfigError
from quartet_bus.config.schema import KvSection
from quartet_bus.messages import KvLayout, PageManifest, Role
from quartet_core.ladder import BLOCK_TOKENS, RUNGS, rungs_within, sketch_tokens
from quartet_core.openai import Refused, parse
from quartet_sim.content import chain

TOTAL, BLOCK = 24, 16
PROMPTS = [[7 * seed + number for number in range(20 * BLOCK)] for seed in range(3)]
PROMPTS.append(PROMPTS[0][: 8 * BLOCK] + PROMPTS[1])
names = st.sampled_from(["s", "t", "u", "v"])


def page_of(prompt, blocks):
    """(manifest, bytes) of a prompt's first blocks."""
    tokens = prompt[: blocks * BLOCK]
    sketch = sketch_tokens(tokens)
    rungs = tuple((RUNGS[n] * BLOCK_TOKENS // BLOCK - 1, rung) for n, rung in enumerate(sketch.rungs))
    data = b"".join(token.to_bytes(4, "little") for token in tokens)
    contents = tuple(chain(data, 0, BLOCK * 4))
    return PageManifest(contents, rungs), [content.to_bytes(8, "little") * 4 for content in contents]


class StoreMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.now_ms = 0.0
        self.memory = StoreMemory(TOTAL, BLOCK, lambda: self.now_ms, stands_in=False)
        self.epoch = 0
        self.coming, self.lent, self.on = {}, {}, set()

    @rule(name=names, prompt=st.integers(0, 3), blocks=st.integers(1, 20))
    def reserve(self, name, prompt, blocks):
        if name in self.coming:
            return
        self.epoch += 1
        free = self.memory.cache.available
        assert self.memory.reserve(name, blocks * BLOCK, self.epoch) is (blocks <= free)
        if blocks <= free:
            self.coming[name] = (self.epoch, page_of(PROMPTS[prompt], blocks))

    @rule(name=names, missing=st.booleans())
    def come(self, name, missing):
        if name not in self.coming:
            return
        epoch, (manifest, blocks) = self.coming.pop(name)
        with pytest.raises(BlocksFenced):
            self.memory.write(name, epoch + 1, 0, blocks)
        with pytest.raises(BlocksFenced):
            self.memory.keep_pages(name, manifest)
        self.memory.write(name, epoch, 0, blocks[: len(blocks) - missing])
        self.memory.commit(name, epoch)
        kept = self.memory.keep_pages(name, manifest)
        assert kept == (len(blocks) - missing) * BLOCK
        assert self.memory.held(manifest) >= kept

    @rule(name=names, prompt=st.integers(0, 3), blocks=st.integers(1, 20))
    def lend(self, name, prompt, blocks):
        """A fetch is of whole blocks up to a rung, as routers plan it."""
        rungs = sketch_tokens(PROMPTS[prompt]).rungs
        depth = RUNGS[max(rungs_within(blocks * BLOCK) - 1, 0)] * BLOCK_TOKENS
        first = RUNGS.index(depth // BLOCK_TOKENS)
        known = any(rung in self.on for rung in rungs[first:])
        lent = self.memory.lend(name, rungs[first:], depth)
        self.drain()
        assert lent or not known
        if lent:
            self.lent[name] = page_of(PROMPTS[prompt], depth // BLOCK)[1]
            self.coming.pop(name, None)

    @rule(name=names)
    def release(self, name):
        self.memory.release(name)
        self.coming.pop(name, None)
        self.lent.pop(name, None)

    @rule(ms=st.floats(0.0, 1e4))
    def pass_time(self, ms):
        self.now_ms += ms

    @invariant()
    def what_is_lent_reads_as_it_came(self):
        for name, blocks in self.lent.items():
            assert list(self.memory.export(name)) == blocks

    @invariant()
    def nothing_is_lost_or_held_for_nobody(self):
        cache = self.memory.cache
        census = cache.census()
        assert census.free + census.idle + census.referenced == TOTAL
        if not self.coming and not self.lent:
            assert census.referenced == 0
        assert len(self.memory._bytes) <= TOTAL
        assert all(block in self.memory._bytes for block in cache._cached.values())

    @invariant()
    def drain(self):
        on, off = self.memory.drain_rungs()
        self.on.update(on)
        cached = {rung for rungs in self.memory.cache._rungs.values() for rung in rungs}
        self.on.difference_update(set(off) - cached)
        assert self.on == cached
        assert set(self.memory._of_rung) >= cached


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def work(tokens, prefix_tokens, role=Role.PREFILL):
    body = b'{"model": "m", "prompt": %s, "max_tokens": 3}' % str(tokens).encode()
    return Work("job", "job", "m", body, parse(body), role, 3, b"", "t", prefix_tokens)


def stored(prompt, blocks):
    memory = StoreMemory(TOTAL, BLOCK, lambda: 0.0, stands_in=False)
    manifest, data = page_of(prompt, blocks)
    assert memory.reserve("page", blocks * BLOCK, 1)
    memory.write("page", 1, 0, data)
    memory.commit("page", 1)
    memory.keep_pages("page", manifest)
    return memory


def told(memory, *works):
    async def main():
        events = []
        adapter = StoreAdapter(memory, asyncio.get_running_loop())
        await adapter.start(events.extend)
        for each in works:
            adapter.submit(each)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await adapter.stop()
        return events

    return asyncio.run(main())


def test_a_prefix_that_is_there_is_lent_and_another_is_refused():
    memory = stored(PROMPTS[0], 16)
    (lent,) = told(memory, work(PROMPTS[0], 12 * BLOCK))
    assert isinstance(lent, Prefilled)
    assert (lent.usage.prompt_tokens, lent.usage.cached_tokens, lent.usage.busy_ms) == (192, 192, 0.0)
    assert list(memory.export("t")) == page_of(PROMPTS[0], 12)[1]
    memory.release("t")
    (failed,) = told(memory, work(PROMPTS[1], 12 * BLOCK))
    assert isinstance(failed, Failed)
    assert failed.reason == "not_stored"


def test_a_store_computes_nothing():
    with pytest.raises(Refused, match="computes nothing"):
        told(stored(PROMPTS[0], 16), work(PROMPTS[0], 0, Role.BOTH))


def test_stores_share_the_memory_and_too_little_is_refused():
    with pytest.raises(ConfigError, match=r"kv.store_bytes = 1000: must be at least 4194304"):
        _hosted(1000)
    stores = _hosted(10_000_000)
    assert [(store.role, store.facts.model, store.facts.kv_tokens) for store in stores] == [
        (Role.STORE, "a", 2 * 16), (Role.STORE, "b", 2 * 16)
    ]  # fmt: skip
    assert [store.id for store in stores] == ["n-2", "n-3"]
    assert _hosted(0) == []


def _hosted(store_bytes):
    memory = StoreMemory(4, 16, lambda: 0.0, stands_in=True)
    workers = []
    for ordinal, model in enumerate(("a", "b")):
        facts = WorkerFacts(
            model=model, hardware="H100_SXM5", precision="fp8", tp=1, gpus=(ordinal,), kv_tokens=64, max_context=64,
            max_batch=4, chunk_tokens=64, layout=KvLayout(16, 131_072, "bf16"), engine="simulated",
            capabilities=("export", "import", "reserve", "page"),
        )  # fmt: skip
        workers.append(HostedWorker("n", ordinal, 1, facts, StoreAdapter(memory, None), Role.BOTH))
    return host_stores("n", workers, KvSection(pool=True, store_bytes=store_bytes), None, lambda: 0.0, Random(1))
