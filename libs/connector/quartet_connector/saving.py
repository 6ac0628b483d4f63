"""Copies between an engine's cache and the arena: those of the step that is being scheduled, and those under way."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from quartet_connector import page as pages
from quartet_connector.arena import Arena, Page
from quartet_connector.contents import Root, root_id
from quartet_connector.engine import Copies, EngineBlocks
from quartet_connector.known import Block, Known
from quartet_connector.layout import PageLayout

SPILL_BLOCKS = 64
"""Blocks that are saved a step at most because they will be evicted next: what it adds to a step stays small."""


class Job(NamedTuple):
    """One step's copies: pages that are loaded and saved, and the engine's blocks that are held for that."""

    loading: list[Page]
    saving: list[Page]
    held: list[int]


class StepCopies:
    """Of one arena. Pages that are loaded were pinned by whoever found them; those that are saved, by their claim."""

    def __init__(
        self, layout: PageLayout, memory: memoryview, arena: Arena, known: Known, engine: EngineBlocks
    ) -> None:
        self._layout = layout
        self._fingerprint = layout.fingerprint
        self._memory = memory
        self._arena = arena
        self._known = known
        self._engine = engine
        self._next = Job([], [], [])
        self._loads: list[tuple[int, int]] = []
        self._saves: list[tuple[int, int]] = []
        self._jobs: dict[int, Job] = {}
        self._held: Counter[int] = Counter()
        self._last = 0

    @property
    def busy(self) -> bool:
        """Whether any copy is wanted or under way."""
        return bool(self._jobs or self._loads or self._saves)

    def unused(self, number: int) -> bool:
        """Whether nobody but a copy uses a block of the engine."""
        return self._engine.users(number) == self._held[number]

    def load(self, chain: Sequence[Page], pairs: Iterable[tuple[int, int]]) -> None:
        """Have (block, slot) loaded in this step; ``chain`` stays pinned until that is done."""
        self._next.loading.extend(chain)
        self._loads.extend(pairs)

    def save(self, block: Block, number: int) -> Page | None:
        """Have a cached block saved in this step; None when the arena has no room for it."""
        parent = block.parent.id if block.parent is not None else root_id(block.root or Root())
        page = self._arena.claim(parent, block.tokens, block.root)
        if page is None:
            return None
        layout = self._layout
        head = pages.encode(self._fingerprint, parent, block.tokens, block.root, layout.kv_bytes, layout.block_tokens)
        start = page.slot * layout.slot_bytes
        self._memory[start : start + len(head)] = head
        self._engine.hold([number])
        self._held[number] += 1
        self._next.held.append(number)
        self._next.saving.append(page)
        self._saves.append((number, page.slot))
        return page

    def save_ahead(self, ahead: int) -> None:
        """Save what is in the ``ahead`` blocks that the engine gives out next, with all that is before it."""
        left = SPILL_BLOCKS - len(self._saves)
        for hash_ in self._engine.next_evicted(ahead):
            end = self._known.by_hash(hash_)
            if end is None or self._arena.get(end.id) is not None:
                continue
            for block in self._known.chain(end.id):
                if self._arena.get(block.id) is not None:
                    continue
                number = self._engine.find(block.hash)
                if number is None or left <= 0 or self.save(block, number) is None:
                    break
                left -= 1
            if left <= 0:
                return

    def take(self) -> Copies:
        """The step is scheduled: its copies are under way from now on."""
        self._last += 1
        copies = Copies(self._last, self._loads, self._saves)
        if self._loads or self._saves:
            self._jobs[self._last] = self._next
            self._next, self._loads, self._saves = Job([], [], []), [], []
        return copies

    def done(self, number: int) -> Job | None:
        """A step's copies are over, however they went: nothing of the engine is held for them any more."""
        job = self._jobs.pop(number, None)
        if job is not None:
            self._engine.let_go(list(reversed(job.held)))
            self._held -= Counter(job.held)
            self._arena.unpin(job.loading)
        return job
