"""The physical KV blocks of one engine: reference counts, the prefix cache, and who is evicted next.

A block is in exactly one of three states: *free*; *referenced* by one or more sequences, leases or pins; or *idle*:
referenced by nobody, but kept, because the cache finds it by its content id, until its room is needed.

A block is cached under its content id (``quartet_sim.content``) as soon as it is full, and there is one block to an
id: who computes a content that is already cached moves over to the block that has it. Because references are dropped
deepest block first, a parent is never evicted before its child: a cached block's whole prefix is cached, so a prefix
match may stop at the first miss, and whoever holds a rung of the ladder holds the shallower ones.
"""

from collections import OrderedDict
from collections.abc import Sequence

from msgspec import Struct


class Census(Struct, frozen=True):
    """How many blocks are in each state."""

    free: int
    idle: int
    referenced: int


class BlockCache:
    """``total`` blocks and the prefix cache over them. Evicts least recently used; never a referenced block."""

    __slots__ = ("_cached", "_content", "_free", "_idle", "_refs", "_rungs", "rungs_off", "rungs_on", "total")

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
        self.rungs_on: list[int] = []
        self.rungs_off: list[int] = []

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
        idle = self._idle
        found = [cached[content] for content in contents[:hits]]
        from_idle = sum(not refs[block] for block in found)
        if count - hits > self.available - from_idle:
            return None
        for block in found:
            if not refs[block]:
                del idle[block]
            refs[block] += 1
        found += [self._one() for _ in range(count - hits)]
        return found

    def allocate(self, count: int) -> list[int] | None:
        """References to ``count`` empty blocks; None, and nothing changed, when there are not as many."""
        return self.take((), 0, count)

    def _one(self) -> int:
        if not self._free:
            self.evict(1)
        block = self._free.pop()
        self._refs[block] = 1
        return block

    def keep(self, block: int, content: int) -> int:
        """Say that ``block`` (referenced, full) now holds ``content``; return the block to use from now on.

        That is another one when the content was cached already: the reference has then moved over.
        """
        other = self._cached.setdefault(content, block)
        if other == block:
            self._content[block] = content
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
        for block in reversed(blocks):
            left = refs[block] - 1
            if left < 0:
                raise ValueError(f"block {block} was released once too often")
            refs[block] = left
            if left:
                continue
            if cached.get(content[block]) == block:
                self._idle[block] = None
            else:
                content[block] = 0
                self._free.append(block)

    def evict(self, count: int) -> int:
        """Forget up to ``count`` idle blocks, least recently used first; return how many there were."""
        evicted = min(count, len(self._idle))
        for _ in range(evicted):
            block, _unused = self._idle.popitem(last=False)
            del self._cached[self._content[block]]
            self._content[block] = 0
            self._free.append(block)
            rungs = self._rungs.pop(block, None)
            if rungs:
                self.rungs_off += rungs
        return evicted
