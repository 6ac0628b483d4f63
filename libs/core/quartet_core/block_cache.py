"""KV blocks and the prefix cache over them: reference counts, what is found by which content, and who is evicted next.

A block is in exactly one of three states: *free*; *referenced* by one or more sequences, leases or pins; or *idle*:
referenced by nobody, but kept, because the cache finds it by its content id, until its room is needed.

A block is cached under its content id (which names its tokens and all before them) as soon as it is full, and there is
one block to an id: who computes a content that is already cached moves over to the block that has it. Because
references are dropped deepest block first, a parent is never evicted before its child: a cached block's whole prefix is
cached, so a prefix match may stop at the first miss, and whoever holds a rung of the ladder holds the shallower ones.

The simulated engine's KV and a node's store (``quartet_agent.store``) are both kept in this. Time is handed in.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from msgspec import Struct


class Census(Struct, frozen=True):
    """How many blocks are in each state."""

    free: int
    idle: int
    referenced: int


class BlockUse(Struct):
    """What is known of a cached block besides its content: where it stands, and how it was used.

    ``depth`` counts the blocks of its prefix, itself included; ``children`` the cached blocks right behind it.
    ``since_ms`` is when it was last given back, ``uses`` how often it was found. ``end`` says that the prefix which was
    given back last went no further. ``paged`` is its deepest prefix that was paged out before, and came back (0: none).
    ``moved`` says that it came by a page-out and was not found since.
    """

    parent: int
    depth: int
    children: int = 0
    since_ms: float = 0.0
    uses: int = 0
    end: bool = False
    paged: int = 0
    moved: bool = False


MAX_REUSE = 4096
"""Idle times that are remembered until somebody asks for them, at most."""


class BlockCache:
    """``total`` blocks and the prefix cache over them. Evicts least recently used; never a referenced block.

    ``now_ms`` is the time as its owner last said. ``returned_ms`` and ``lost_ms`` are how long prefixes had been idle
    when they were used again, and when they were evicted; ``found_moved`` counts blocks that page-outs brought and
    requests found.
    """

    __slots__ = ("_cached", "_content", "_free", "_idle", "_refs", "_rungs", "_use", "found_moved", "left", "lost_ms",
                 "now_ms", "returned_ms", "rungs_off", "rungs_on", "total")  # fmt: skip

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError("a KV pool needs at least one block")
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._refs = [0] * total
        self._content = [0] * total
        self._cached: dict[int, int] = {}
        # an OrderedDict, for its constant-time popitem at the old end; values are unused
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._rungs: dict[int, list[int]] = {}
        self._use: dict[int, BlockUse] = {}  # by block, of those that are cached
        self.rungs_on: list[int] = []
        self.rungs_off: list[int] = []
        self.now_ms = 0.0
        self.returned_ms: list[float] = []
        self.lost_ms: list[float] = []
        self.found_moved = 0
        self.left: OrderedDict[int, None] = OrderedDict()
        """Last contents of prefixes that were paged out of here, the oldest first; bounded by who adds to it."""

    @property
    def available(self) -> int:
        """Blocks that can be had without taking one from anybody."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        """Blocks that the prefix cache can find, referenced or idle."""
        return len(self._cached)

    def census(self) -> Census:
        """Counts by state; they sum to ``total``."""
        return Census(len(self._free), len(self._idle), self.total - len(self._free) - len(self._idle))

    def references(self, block: int) -> int:
        """How many sequences, leases and pins hold the block."""
        return self._refs[block]

    def content(self, block: int) -> int:
        """The content id of what was computed in the block; 0 when nothing was."""
        return self._content[block]

    def use(self, block: int) -> BlockUse:
        """How a cached block stands and was used. Raises ``KeyError`` for one that is not cached."""
        return self._use[block]

    def rungs(self, block: int) -> tuple[int, ...]:
        """The rungs that end in the block."""
        return tuple(self._rungs.get(block, ()))

    def idle(self) -> Iterator[int]:
        """Idle blocks, the longest unused first. Not to be changed meanwhile."""
        return iter(self._idle)

    def prefix(self, content: int) -> list[int] | None:
        """The blocks from the first one to that of ``content``; None when it is not cached."""
        block = self._cached.get(content)
        if block is None:
            return None
        blocks = [block]
        while (parent := self._use[blocks[-1]].parent) != 0:
            blocks.append(self._cached[parent])
        blocks.reverse()
        return blocks

    def match(self, contents: Sequence[int], limit: int) -> int:
        """How many of the first ``limit`` contents are cached, counted to the first that is not."""
        cached = self._cached
        for index in range(min(limit, len(contents))):
            if contents[index] not in cached:
                return index
        return min(limit, len(contents))

    def take(self, contents: Sequence[int], hits: int, count: int) -> list[int] | None:
        """References to the cached blocks of ``contents[:hits]`` and to ``count - hits`` empty ones after them.

        None, and nothing changed, when they do not fit. ``hits`` must come from ``match`` with no change since.
        """
        cached = self._cached
        refs = self._refs
        found = [cached[content] for content in contents[:hits]]
        from_idle = sum(not refs[block] for block in found)
        if count - hits > self.available - from_idle:
            return None
        self._found(found)
        self.refer(found)
        found += [self._one() for _ in range(count - hits)]
        return found

    def refer(self, blocks: Sequence[int]) -> None:
        """One more reference to each of these cached blocks, which does not count as a use."""
        refs, idle = self._refs, self._idle
        for block in blocks:
            if not refs[block]:
                del idle[block]
            refs[block] += 1

    def _found(self, blocks: Sequence[int]) -> None:
        if not blocks:
            return
        deepest = blocks[-1]
        if not self._refs[deepest] and len(self.returned_ms) < MAX_REUSE:
            self.returned_ms.append(max(self.now_ms - self._use[deepest].since_ms, 0.0))
        for block in blocks:
            use = self._use[block]
            use.uses += 1
            use.end = False
            if use.moved:
                use.moved = False
                self.found_moved += 1

    def drain_reuse(self) -> tuple[list[float], list[float]]:
        """(``returned_ms``, ``lost_ms``) since the last call."""
        returned_ms, lost_ms = self.returned_ms, self.lost_ms
        self.returned_ms, self.lost_ms = [], []
        return returned_ms, lost_ms

    def allocate(self, count: int) -> list[int] | None:
        """References to ``count`` empty blocks; None, and nothing changed, when there are not as many."""
        return self.take((), 0, count)

    def _one(self) -> int:
        if not self._free:
            self.evict(1)
        block = self._free.pop()
        self._refs[block] = 1
        return block

    def keep(self, block: int, content: int, parent: int = 0) -> int:
        """Say that ``block`` (referenced, full) now holds ``content``; return the block to use from now on.

        That is another one when the content was cached already: the reference has then moved over. ``parent`` is the
        content of the block before it, 0 for the first one of a prompt.
        """
        other = self._cached.setdefault(content, block)
        if other == block:
            self._content[block] = content
            before = self._use[self._cached[parent]] if parent in self._cached else None
            if before is None:
                use = BlockUse(0, 1, since_ms=self.now_ms)
            else:
                before.children += 1
                use = BlockUse(parent, before.depth + 1, since_ms=self.now_ms, paged=before.paged)
            if content in self.left:
                use.paged = content
            self._use[block] = use
            return block
        if not self._refs[other]:
            del self._idle[other]
        self._refs[other] += 1
        self.release((block,))
        return other

    def mark(self, block: int, content: int) -> None:
        """Say what a block that is not full holds. It is not cached: nobody else can continue it."""
        self._content[block] = content

    def tag(self, block: int, rung: int) -> None:
        """Say that the prefix whose rung hash is ``rung`` ends in this cached block; once for each block and rung."""
        self._rungs.setdefault(block, []).append(rung)
        self.rungs_on.append(rung)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each, deepest (last) first. Raises ``ValueError`` for one that has none left."""
        refs = self._refs
        content = self._content
        cached = self._cached
        last = True
        for block in reversed(blocks):
            left = refs[block] - 1
            if left < 0:
                raise ValueError(f"block {block} was released once too often")
            refs[block] = left
            if left:
                continue
            if cached.get(content[block]) == block:
                self._idle[block] = None
                use = self._use[block]
                use.since_ms = self.now_ms
                use.end, last = last and not use.children, False
            else:
                content[block] = 0
                self._free.append(block)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block of a prefix, which was no use of them: idle as long as they were before.

        What only this prefix has goes to where it was, the deepest first to be evicted. What others stand behind, too,
        goes to the end: it must not be evicted before they are.
        """
        refs, idle, use = self._refs, self._idle, self._use
        own = len(blocks)
        while own and use[blocks[own - 1]].children <= (own < len(blocks)):
            own -= 1
        for block in reversed(blocks[:own]):
            refs[block] -= 1
            if not refs[block]:
                idle[block] = None
        for block in blocks[own:]:
            refs[block] -= 1
            if not refs[block]:
                idle[block] = None
                idle.move_to_end(block, last=False)

    def evict(self, count: int) -> int:
        """Forget up to ``count`` idle blocks, least recently used first; return how many there were."""
        evicted = min(count, len(self._idle))
        for _ in range(evicted):
            block = next(iter(self._idle))
            use = self._use[block]
            if use.end and len(self.lost_ms) < MAX_REUSE:
                self.lost_ms.append(max(self.now_ms - use.since_ms, 0.0))
            self.forget(block)
        return evicted

    def forget(self, block: int) -> None:
        """Make an idle block without children free."""
        del self._idle[block]
        content = self._content[block]
        del self._cached[content]
        use = self._use.pop(block)
        if use.parent:
            self._use[self._cached[use.parent]].children -= 1
        self._content[block] = 0
        self._free.append(block)
        rungs = self._rungs.pop(block, None)
        if rungs:
            self.rungs_off += rungs
