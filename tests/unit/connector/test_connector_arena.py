"""The arena against the simplest thing that could be right, whatever is asked of it."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quartet_connector.arena import Arena
from quartet_connector.contents import Root, chain, root_id, token_bytes
from quartet_connector.words import Removed, Stored

ROOTS = (Root(), Root("s"))
PROMPTS = [[(seed if index > 1 else 0, index) for index in range(5)] for seed in range(4)]
prompts = st.tuples(st.sampled_from(ROOTS), st.sampled_from(PROMPTS), st.integers(1, 5))


def content(prompt):
    root, blocks, depth = prompt
    data = [token_bytes(block) for block in blocks[:depth]]
    return root, data, chain(root, data)


class Arenas(RuleBasedStateMachine):
    @initialize(slots=st.integers(1, 8))
    def make(self, slots):
        self.arena = Arena(slots)
        self.told: dict[int, Stored] = {}
        self.claimed = []
        self.pinned = []
        self.granted: list[int] = []

    @rule(prompt=prompts)
    def save(self, prompt):
        """As the scheduler does for a chain: what is missing, from the first on."""
        root, data, ids = content(prompt)
        parent = root_id(root)
        for index, (tokens, id_) in enumerate(zip(data, ids, strict=True)):
            if self.arena.get(id_) is None:
                page = self.arena.claim(parent, tokens, root if index == 0 else None)
                if page is None:
                    return
                assert page.id == id_
                self.claimed.append(page)
            parent = id_

    @rule(fails=st.booleans())
    def copied(self, fails):
        if fails:
            for page in reversed(self.claimed):
                self.arena.abandon(page)
        else:
            for page in self.claimed:
                self.arena.ready(page)
                self.arena.unpin([page])
        self.claimed = []

    @rule(prompt=prompts)
    def pin(self, prompt):
        found = self.arena.match(prompt[0], content(prompt)[1])
        self.arena.pin(found)
        self.pinned.append(found)

    @rule()
    def unpin(self):
        if self.pinned:
            self.arena.unpin(self.pinned.pop(0))

    @rule(prompt=prompts)
    def use(self, prompt):
        self.arena.touch(self.arena.match(prompt[0], content(prompt)[1]))

    @rule(count=st.integers(0, 9))
    def grant(self, count):
        self.granted += self.arena.grant(count)

    @rule(prompt=prompts, returned=st.booleans())
    def arrive(self, prompt, returned):
        root, data, ids = content(prompt)
        slots = [self.granted.pop() for _ in range(min(len(data), len(self.granted)))]
        if returned or len(slots) < len(data):
            self.arena.give_back(slots)
            return
        parent = root_id(root)
        for index, (slot, tokens, id_) in enumerate(zip(slots, data, ids, strict=True)):
            page = self.arena.adopt(slot, parent, tokens, root if index == 0 else None)
            if page is None:
                self.arena.give_back(slots[index:])
                return
            assert page.id == id_
            parent = id_

    @rule(prompt=prompts)
    def drop(self, prompt):
        self.arena.drop(self.arena.match(prompt[0], content(prompt)[1]))

    @rule()
    def agent_gone(self):
        self.arena.revoke()
        self.granted = []

    @invariant()
    def every_slot_is_one_things(self):
        if not hasattr(self, "arena"):
            return
        used = Counter(page.slot for page in self.arena._pages.values())
        used.update(self.granted)
        used.update(self.arena._free)
        assert used == Counter(range(self.arena.slots))
        assert self.arena.granted == len(self.granted)

    @invariant()
    def what_is_told_is_what_is_there(self):
        if not hasattr(self, "arena"):
            return
        for word in self.arena.drain():
            if isinstance(word, Stored):
                assert word.root is not None or word.parent in self.told
                self.told[word.id] = word
            else:
                assert isinstance(word, Removed)
                for id_ in word.ids:
                    del self.told[id_]
        assert self.told.keys() == {page.id for page in self.arena._pages.values() if page.ready}
        assert {word.id: word for word in self.arena.stored()} == self.told

    @invariant()
    def chains_have_no_holes_and_pinned_pages_stay(self):
        if not hasattr(self, "arena"):
            return
        for page in self.arena._pages.values():
            assert page.root is not None or page.parent in self.arena._pages
        for chains in self.pinned:
            for page in chains:
                assert self.arena.get(page.id) is page


Arenas.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestArenas = Arenas.TestCase


def test_the_longest_unused_chain_goes_first_from_its_end():
    arena = Arena(4)
    chains = []
    for seed in (1, 2):
        data = [token_bytes([seed, index]) for index in range(2)]
        ids = chain(Root(), data)
        pages = []
        for index, tokens in enumerate(data):
            page = arena.claim(ids[index - 1] if index else root_id(Root()), tokens, Root() if index == 0 else None)
            arena.ready(page)
            arena.unpin([page])
            pages.append(page)
        chains.append((data, pages))
    arena.touch(chains[0][1])
    arena.grant(1)
    assert arena.match(Root(), chains[0][0]) == chains[0][1]
    assert arena.match(Root(), chains[1][0]) == chains[1][1][:1]
    arena.grant(2)
    assert arena.match(Root(), chains[1][0]) == []
    assert arena.match(Root(), chains[0][0]) == chains[0][1][:1]
    assert arena.evicted == 3


def test_equal_ids_alone_find_nothing():
    arena = Arena(2)
    page = arena.claim(root_id(Root("one")), token_bytes([1]), Root("one"))
    arena.ready(page)
    arena.unpin([page])
    assert arena.match(Root("one"), [token_bytes([1])], [page.id]) == [page]
    assert arena.match(Root("one"), [token_bytes([2])], [page.id]) == []
    assert arena.match(Root("other"), [token_bytes([1])], [page.id]) == []
