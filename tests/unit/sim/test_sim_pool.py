"""KV blocks are never lost, never in two places, and never taken from who holds them."""

from array import array
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quartet_core.block_cache import BlockCache
from quartet_core.openai import Refused
from quartet_core.profile import Profile
from quartet_sim.content import chain, payload
from quartet_sim.engine import Finished, Job, SimulatedEngine
from quartet_sim.pool import Fenced, KvPool

PROFILE = Profile(
    a_ms=5.0,
    b_ms_per_token=0.02,
    c_ms_per_token2=0.0,
    batches=(1, 64),
    contexts=(0, 4096),
    step_ms=((5.0, 6.0), (7.0, 13.0)),
)
PROMPTS = [array("I", [number * 31 + seed // 2 * (number > 40) for number in range(200)]) for seed in range(4)]

names = st.integers(0, 29)
transfers = st.sampled_from(["s", "t", "u"])


class PoolMachine(RuleBasedStateMachine):
    """One small engine, everything that can happen to it, in any order."""

    def __init__(self):
        super().__init__()
        self.engine = SimulatedEngine(
            PROFILE, kv_tokens=40 * 4, block_tokens=4, chunk_tokens=48, max_batch=6, max_context=160
        )
        self.pool = self.engine.pool
        self.now_ms = 0.0
        self.rungs = Counter()
        self.pages = {}  # transfer → what was pinned under its name
        self.came = {}  # transfer → the page whose bytes its lease has

    @rule(name=names, prompt=st.sampled_from(PROMPTS), tokens=st.integers(1, 150), most=st.integers(1, 30))
    def submit(self, name, prompt, tokens, most):
        try:
            self.engine.submit(Job(f"w{name}", prompt[:tokens], max_tokens=most), self.now_ms)
        except (Refused, ValueError):
            assert tokens + most > 160 or self.engine.cancel(f"w{name}")

    @rule(first=names, prompt=st.sampled_from(PROMPTS), tokens=st.lists(st.integers(1, 90), min_size=2, max_size=6))
    def submit_many(self, first, prompt, tokens):
        for number, count in enumerate(tokens):
            self.submit(name=(first + number) % 30, prompt=prompt, tokens=count, most=4 * number + 1)

    @rule(name=names, transfer=transfers, prompt=st.sampled_from(PROMPTS), tokens=st.integers(1, 90))
    def submit_prefill(self, name, transfer, prompt, tokens):
        if not self.engine.cancel(f"p{name}"):
            job = Job(f"p{name}", prompt[:tokens], max_tokens=9, kind="prefill", transfer=transfer)
            self.engine.submit(job, self.now_ms)

    @rule(name=names, transfer=transfers, prompt=st.sampled_from(PROMPTS), most=st.integers(1, 30))
    def submit_decode(self, name, transfer, prompt, most):
        lease = self.pool.lease(transfer)
        tokens = lease.tokens if lease else 5
        try:
            job = Job(f"d{name}", prompt[:tokens], max_tokens=most, kind="decode", transfer=transfer)
            self.engine.submit(job, self.now_ms)
        except Fenced:
            assert lease is None or not lease.committed
        except (Refused, ValueError):
            assert tokens + most > 160 or self.engine.cancel(f"d{name}")

    @rule(name=names, transfer=transfers, prompt=st.sampled_from(PROMPTS), tokens=st.integers(1, 120))
    def submit_fetching(self, name, transfer, prompt, tokens):
        """A whole job whose first part came by transfer, of whatever prompt that was."""
        lease = self.pool.lease(transfer)
        if self.engine.cancel(f"f{name}"):
            return
        try:
            self.engine.submit(Job(f"f{name}", prompt[:tokens], max_tokens=7, transfer=transfer), self.now_ms)
        except Fenced:
            assert lease is None or not lease.committed
        else:
            assert self.pool.lease(transfer) is None

    @rule(name=names, kind=st.sampled_from("wpdf"))
    def cancel(self, name, kind):
        self.engine.cancel(f"{kind}{name}")

    @rule(transfer=transfers, tokens=st.integers(1, 170), epoch=st.integers(1, 3))
    def reserve(self, transfer, tokens, epoch):
        before = self.pool.lease(transfer)
        available = self.pool.blocks.available
        try:
            given = self.pool.reserve(transfer, tokens, epoch)
        except Fenced:
            assert before is not None
            assert epoch <= before.epoch
            return
        if before is None:
            assert given == (-(-tokens // 4) <= available)

    @rule(transfer=transfers, epoch=st.integers(1, 3), index=st.integers(0, 5), source=transfers)
    def write(self, transfer, epoch, index, source):
        lease = self.pool.lease(transfer)
        try:
            payload = list(self.pool.export(source))[index]
        except (Fenced, IndexError):
            payload = bytes(256)
        try:
            self.pool.write(transfer, epoch, index, payload)
        except Fenced:
            return
        assert lease is not None
        assert (lease.epoch, lease.committed) == (epoch, False)

    @rule(transfer=transfers, epoch=st.integers(1, 3))
    def commit(self, transfer, epoch):
        lease = self.pool.lease(transfer)
        try:
            self.pool.commit(transfer, epoch)
        except Fenced:
            assert lease is None or lease.epoch != epoch

    @rule(source=transfers, transfer=transfers)
    def receive_all_of_a_pin(self, source, transfer):
        """The whole way at once, which chance alone would hardly find."""
        pin = self.pool.pinned(source)
        if pin is None or transfer == source:
            return
        self.pool.release(transfer)
        if self.pool.reserve(transfer, pin.tokens, 3):
            for index, payload in enumerate(self.pool.export(source)):
                self.pool.write(transfer, 3, index, payload)
            self.pool.commit(transfer, 3)

    @rule(transfer=transfers, which=st.integers(0, 2))
    def pin_a_page(self, transfer, which):
        cold = self.pool.pages.coldest(3)
        assert [c.idle_ms for c in cold] == sorted((c.idle_ms for c in cold), reverse=True) or self.came
        if which >= len(cold):
            assert self.pool.pin_page(transfer, 12345) is None
            return
        taken = self.pool.pinned(transfer) is not None
        idle = self.pool.blocks.census().idle
        page = self.pool.pin_page(transfer, cold[which].prefix)
        assert (page is None) is taken
        if page is not None:
            assert len(page.contents) == cold[which].blocks
            assert page.contents[-1] == cold[which].prefix
            assert self.pool.blocks.census().idle < idle
            self.pages[transfer] = page

    @rule(transfer=transfers)
    def a_pinned_page_reads_as_it_was_said_to_be(self, transfer):
        pin = self.pool.pinned(transfer)
        if pin is not None and pin.page:
            said = [payload(content, 4) for content in self.pages[transfer].contents]
            assert list(self.pool.export(transfer)) == said

    @rule(transfer=transfers)
    def drop_a_page(self, transfer):
        pin = self.pool.pinned(transfer)
        before = self.pool.blocks.census()
        dropped = self.pool.drop_page(transfer)
        if pin is None or not pin.page:
            assert dropped == 0
            return
        assert self.pool.pinned(transfer) is None
        assert self.pool.blocks.census().free == before.free + dropped
        left = self.pool.blocks.match(self.pages[transfer].contents, len(pin.blocks))
        assert left == len(pin.blocks) - dropped

    @rule(source=transfers, transfer=transfers, upset=st.booleans())
    def a_page_comes(self, source, transfer, upset):
        """The whole way at once, of a page that is pinned here too or, with ``upset``, of one with a wrong block."""
        pin = self.pool.pinned(source)
        if pin is None or not pin.page or transfer == source:
            return
        self.pool.release(transfer)
        if not self.pool.reserve(transfer, pin.tokens, 3):
            return
        for index, block in enumerate(self.pool.export(source)):
            self.pool.write(transfer, 3, index, bytes(256) if upset and index == 1 else block)
        page = self.pages[source]
        with pytest.raises(Fenced):
            self.pool.keep_page(transfer, page)
        self.pool.commit(transfer, 3)
        kept = self.pool.keep_page(transfer, page)
        assert kept == (1 if upset and len(page.contents) > 1 else len(page.contents))
        assert self.pool.lease(transfer) is None
        self.came[transfer] = page

    @rule(transfer=transfers, upset=st.booleans())
    def a_page_comes_back(self, transfer, upset):
        """One that was pinned here once, and is not any more."""
        page = self.pages.get(transfer)
        if page is None or self.pool.pinned(transfer) or self.pool.lease(transfer):
            return
        if not self.pool.reserve(transfer, 4 * len(page.contents), 4):
            return
        for index, content in enumerate(page.contents):
            self.pool.write(transfer, 4, index, payload(content, 4))
        self.pool.commit(transfer, 4)
        assert self.pool.keep_page(transfer, page) == len(page.contents)
        assert self.pool.blocks.match(page.contents, len(page.contents)) == len(page.contents)
        self.came[transfer] = page

    @rule(transfer=transfers)
    def release(self, transfer):
        held = self.pool.lease(transfer) is not None or self.pool.pinned(transfer) is not None
        assert self.pool.release(transfer) is held
        assert not self.pool.release(transfer)

    @rule(count=st.integers(0, 12))
    def evict(self, count):
        idle = self.pool.blocks.census().idle
        assert self.pool.blocks.evict(count) == min(count, idle)

    @precondition(lambda self: not self.engine.busy)
    @rule()
    def begin(self):
        duration = self.engine.begin(self.now_ms)
        if duration is not None:
            assert duration > 0 or self.engine._schedule.lending
            self.now_ms += duration

    @precondition(lambda self: self.engine.busy)
    @rule()
    def finish(self):
        self.engine.finish(self.now_ms)

    @rule(most=st.integers(1, 40))
    def pass_iterations(self, most):
        for _ in range(most):
            if self.engine.busy:
                self.engine.finish(self.now_ms)
            if self.engine.begin(self.now_ms) is None:
                return

    @invariant()
    def every_reference_has_one_holder(self):
        schedule = self.engine._schedule
        holders = [
            s.blocks
            for q in (schedule.decoding, schedule.prefilling, schedule.ready, schedule.waiting, schedule.lending)
            for s in q
        ]
        holders += [lease.blocks for lease in self.pool.leases()] + [pin.blocks for pin in self.pool.pins()]
        held = Counter(block for blocks in holders for block in blocks)
        cache = self.pool.blocks
        assert {block: refs for block in range(40) if (refs := cache.references(block))} == dict(held)
        assert all(len(set(blocks)) == len(blocks) for blocks in holders)

    @invariant()
    def every_block_is_in_one_state(self):
        cache = self.pool.blocks
        free, idle = list(cache._free), list(cache._idle)
        referenced = [block for block in range(40) if cache.references(block)]
        assert sorted(free + idle + referenced) == list(range(40))
        census = cache.census()
        assert (census.free, census.idle, census.referenced) == (len(free), len(idle), len(referenced))
        assert all(cache.content(block) == 0 for block in free)
        assert all(cache.content(block) == content for content, block in cache._cached.items())
        assert set(idle) <= set(cache._cached.values())

    @invariant()
    def cached_prefixes_have_no_holes(self):
        cache = self.pool.blocks
        for prompt in PROMPTS:
            found = [content in cache._cached for content in chain(prompt.tobytes(), 0, 16)]
            assert found == sorted(found, reverse=True)

    @invariant()
    def every_cached_block_knows_where_it_stands(self):
        cache = self.pool.blocks
        parents = Counter()
        for content, block in cache._cached.items():
            use = cache.use(block)
            prefix = cache.prefix(content)
            assert len(prefix) == use.depth
            assert use.depth == 1 or cache.content(prefix[-2]) == use.parent
            parents[use.parent] += 1
        assert {c: cache.use(b).children for c, b in cache._cached.items()} == {c: parents[c] for c in cache._cached}
        assert len(cache._use) == len(cache._cached)

    @invariant()
    def nobody_is_evicted_before_who_stands_behind(self):
        cache = self.pool.blocks
        gone = set()
        for block in cache.idle():
            use = cache.use(block)
            children = [c for c, b in cache._cached.items() if cache.use(b).parent == cache.content(block)]
            assert gone.issuperset(children), "a parent would go before its child"
            assert use.children == len(children)
            gone.add(cache.content(block))

    @invariant()
    def rungs_told_are_those_cached(self):
        on, off = self.engine.drain_rungs()
        self.rungs.update(on)
        self.rungs.subtract(off)
        assert all(count in (0, 1) for count in self.rungs.values())
        cached = [rung for rungs in self.pool.blocks._rungs.values() for rung in rungs]
        assert sorted(+self.rungs) == sorted(cached)

    @invariant()
    def load_is_what_the_queues_say(self):
        schedule = self.engine._schedule
        queued = [*schedule.prefilling, *schedule.waiting]
        assert self.engine.queued_prefill_tokens == sum(sequence.queued_tokens for sequence in queued)
        assert self.engine.queued_prefill_ms() >= 0.0
        assert schedule.context_tokens == sum(sequence.context() for sequence in schedule.decoding)
        assert len(schedule.decoding) + len(schedule.prefilling) <= 6

    def teardown(self):
        for kind in "wpdf":
            for name in range(30):
                self.engine.cancel(f"{kind}{name}")
        if self.engine.busy:
            self.engine.finish(self.now_ms)
        for transfer in ("s", "t", "u"):
            self.pool.release(transfer)
        assert self.pool.blocks.census().referenced == 0
        assert self.engine.begin(self.now_ms) is None
        assert self.engine.queued_prefill_ms() == 0.0
        self.engine.submit(Job("last", PROMPTS[0][:130], max_tokens=30), self.now_ms)
        last = []
        while (duration := self.engine.begin(self.now_ms)) is not None:
            self.now_ms += duration
            last = self.engine.finish(self.now_ms)
        assert isinstance(last[-1], Finished)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def test_least_recently_used_goes_first_and_held_blocks_never():
    cache = BlockCache(4)
    blocks = cache.allocate(3)
    for block, content in zip(blocks, (11, 12, 13), strict=True):
        assert cache.keep(block, content) == block
    cache.release(blocks[:1])
    cache.release(blocks[1:2])
    assert cache.allocate(3) is not None  # the free one, 11 and 12
    assert cache.match([11], 1) == 0
    assert cache.match([13], 1) == 1
    assert cache.allocate(1) is None


def test_taking_a_hit_does_not_count_it_as_room():
    cache = BlockCache(2)
    blocks = cache.allocate(2)
    for block, content in zip(blocks, (11, 12), strict=True):
        cache.keep(block, content)
    cache.release(blocks)
    assert cache.take([11, 12], 2, 3) is None
    assert cache.census().idle == 2
    assert cache.take([11, 12], 2, 2) == blocks


def test_one_release_too_many_is_told():
    cache = BlockCache(1)
    (block,) = cache.allocate(1)
    cache.release([block])
    with pytest.raises(ValueError, match="once too often"):
        cache.release([block])


def test_a_write_outside_of_the_lease_is_fenced():
    pool = KvPool(8, 16)
    assert pool.reserve("t", 40, 1)
    pool.write("t", 1, 2, bytes(8 * 64))
    for index, size in ((3, 1024), (-1, 1024), (0, 1023), (2, 1024)):
        with pytest.raises(Fenced):
            pool.write("t", 1, index, bytes(size))
    pool.commit("t", 1)
    with pytest.raises(Fenced, match="committed"):
        pool.write("t", 1, 0, bytes(1024))


def test_reserving_twice_is_once_and_too_much_is_refused():
    pool = KvPool(8, 16)
    assert pool.reserve("t", 40, 1)
    assert pool.reserve("t", 40, 1)
    assert pool.blocks.available == 5
    assert not pool.reserve("u", 81, 1)
    assert pool.reserve("t", 128, 2)  # its own old blocks are room for it
    assert [lease.transfer for lease in pool.leases()] == ["t"]
    with pytest.raises(ValueError, match="at least one token"):
        pool.reserve("v", 0, 1)
