"""The mirror of an engine's cache, against a model of that cache which is asked by whole prompts."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_core.block_mirror import BlockMirror
from quartet_core.kv_events import Cleared, Removed, Stored
from quartet_core.ladder import covered_tokens, sketch_tokens
from quartet_core.traffic_cache import TrafficCache


def salt_of(salt, adapter):
    return {"": adapter.encode(), "ours": b"tenant"}.get(salt)


class Engine:
    """A prefix cache by the simplest rule: prompts are cut into blocks, whose name is all tokens up to their end."""

    def __init__(self, block):
        self.block = block
        self.copies = Counter()  # (salt, prefix) -> copies
        self.said = []

    def name(self, salt, prefix):
        return hash((salt, prefix)) & (1 << 64) - 1

    def prefill(self, prompt, *, salt="", twice=False):
        """Compute what is not there; ``twice`` computes all of it, as two equal prompts side by side would."""
        ends = range(self.block, len(prompt) + 1, self.block)
        first = 0
        if not twice:
            while first < len(ends) and self.copies[salt, prompt[: ends[first]]]:
                first += 1
        new = ends[first:]
        if not new:
            return
        for end in new:
            self.copies[salt, prompt[:end]] += 1
        start = ends[first] - self.block
        keys = [[salt] if salt and end == self.block else None for end in new]
        self.said.append(
            Stored([self.name(salt, prompt[:end]) for end in new], self.name(salt, prompt[:start]) if start else None,
                   prompt[start : new[-1]], self.block, "GPU", "", "", keys, 0, "")
        )  # fmt: skip

    def evict(self, index):
        held = sorted(self.copies.keys())
        if held:
            salt, prefix = held[index % len(held)]
            self.copies[salt, prefix] -= 1
            self.copies += Counter()
            self.said.append(Removed([self.name(salt, prefix)], "GPU", 0))

    def clear(self):
        self.copies.clear()
        self.said.append(Cleared())

    def held_rungs(self, prompts):
        """Every rung of every prompt that a request could reuse, by asking block by block."""
        held = set()
        for salt, prompt in prompts:
            sketch = sketch_tokens(list(prompt), salt=salt_of(salt, ""))
            for index, rung in enumerate(sketch.rungs):
                needed = -(-covered_tokens(index) // self.block) * self.block
                ends = range(self.block, needed + 1, self.block)
                if needed <= len(prompt) and all(self.copies[salt, prompt[:end]] for end in ends):
                    held.add(rung)
        return held


# Prompts of up to eight 64-token pieces out of two, so that they share beginnings and part everywhere.
prompts = st.tuples(st.sampled_from(["", "ours"]), st.lists(st.sampled_from([3, 5]), min_size=1, max_size=8)).map(
    lambda pair: (pair[0], tuple(piece for piece in pair[1] for _ in range(64)))
)
histories = st.lists(
    st.tuples(st.just("prefill"), prompts, st.booleans())
    | st.tuples(st.just("evict"), st.integers(0, 100), st.none())
    | st.tuples(st.just("clear"), st.none(), st.none()),
    max_size=30,
)


@settings(deadline=None)
@given(histories, st.sampled_from([16, 32, 64, 128]))
def test_the_mirror_holds_the_rungs_that_the_engine_could_reuse(history, block):
    engine, mirror = Engine(block), BlockMirror(salt_of)
    asked, held = [], Counter()
    for action, what, twice in history:
        if action == "prefill":
            asked.append(what)
            engine.prefill(what[1], salt=what[0], twice=twice)
        elif action == "evict":
            engine.evict(what)
        else:
            engine.clear()
        for event in engine.said:
            mirror.apply(event)
        engine.said.clear()
        became, ended = mirror.drain()
        held.update(became)
        held.subtract(ended)
        assert min(held.values(), default=0) >= 0
        assert {rung for rung, count in held.items() if count} == engine.held_rungs(asked)
        assert block > 64 or max(held.values(), default=0) <= 1  # within a large block rungs may be shared
        assert mirror.held_blocks == len(engine.copies)
    assert mirror.orphans == mirror.unattributed == 0


def stored(hashes, parent, tokens, *, keys=None, adapter="", salt="", medium="GPU", group=0, attention=""):
    return Stored(hashes, parent, tokens, 64, medium, adapter, salt, keys or [None] * len(hashes), group, attention)


TOKENS = tuple(range(64))
RUNG = sketch_tokens(list(TOKENS)).rungs[0]


def test_a_block_counts_until_its_last_copy_on_any_medium_is_gone():
    mirror = BlockMirror(salt_of)
    mirror.apply(stored([1], None, TOKENS))
    mirror.apply(stored([1], None, TOKENS, medium="CPU"))
    assert mirror.drain() == ([RUNG], [])
    mirror.apply(Removed([1], "GPU", 0))
    assert mirror.drain() == ([], [])
    mirror.apply(Removed([1], "CPU", 0))
    assert mirror.drain() == ([], [RUNG])
    assert len(mirror) == 0


def test_blocks_behind_an_unknown_one_and_of_foreign_salts_are_nobodys():
    mirror = BlockMirror(salt_of)
    mirror.apply(stored([2], 1, TOKENS))
    mirror.apply(stored([3], None, TOKENS, keys=[["theirs"]]))
    mirror.apply(stored([4], None, TOKENS, keys=[[["image", 0]]]))
    mirror.apply(stored([5, 6], None, TOKENS * 2, keys=[None, [["image", 3]]]))
    assert (mirror.orphans, mirror.unattributed) == (1, 3)
    assert mirror.drain() == ([RUNG], [])


def test_salts_and_adapters_are_the_routers_own():
    mirror = BlockMirror(salt_of)
    mirror.apply(stored([1], None, TOKENS, keys=[["lora", "ours"]], adapter="lora"))
    mirror.apply(stored([2], None, TOKENS, keys=[["lora"]], adapter="lora"))
    mirror.apply(stored([3], None, TOKENS, salt="ours"))
    became, _ = mirror.drain()
    of = {salt: sketch_tokens(list(TOKENS), salt=salt).rungs[0] for salt in (b"tenant", b"lora")}
    assert Counter(became) == {of[b"tenant"]: 2, of[b"lora"]: 1}


def test_only_the_group_that_holds_whole_prefixes_is_followed():
    mirror = BlockMirror(salt_of)
    mirror.apply(stored([1], None, TOKENS, group=0, attention="sliding_window"))
    mirror.apply(stored([1], None, TOKENS, group=1, attention="full_attention"))
    mirror.apply(Removed([1], "GPU", 0))
    assert mirror.drain() == ([RUNG], [])


def test_more_blocks_than_an_engine_can_have_begin_the_mirror_anew():
    mirror = BlockMirror(salt_of, max_blocks=2)
    mirror.apply(stored([1, 2, 3], None, TOKENS * 3))
    assert (len(mirror), mirror.overflows) == (0, 1)
    assert mirror.drain() == ([], [])


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.booleans()), max_size=30))
def test_traffic_holds_the_newest_prompts_that_fit(history):
    cache = TrafficCache(512)
    known = set()
    for pieces, clears in history:
        sketch = sketch_tokens([piece for piece in pieces for _ in range(64)])
        cache.read(sketch)
        if clears:
            cache.clear()
        became, ended = cache.drain()
        assert known.isdisjoint(became)
        assert known.issuperset(ended)
        known = (known | set(became)) - set(ended)
        assert cache.used_tokens <= 512
        assert len(known) == len(cache)
        # The newest prompt fits, so it is held whole.
        assert cache.held(sketch) == (0 if clears else len(pieces) * 64)


@pytest.mark.parametrize("capacity", [0, 63])
def test_traffic_without_room_holds_nothing(capacity):
    cache = TrafficCache(capacity)
    cache.read(sketch_tokens(list(range(64))))
    assert cache.drain() == ([], [])
