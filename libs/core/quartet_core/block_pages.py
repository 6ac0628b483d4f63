"""Pages: prefixes that leave a cache for another one, or come from one, while nobody uses them.

A page that leaves is *pinned*, read, and then either given back as if nothing had been, or, once it has arrived
elsewhere, *dropped*: its blocks are evicted, from the deepest up, to the first that was used since it was pinned, that
somebody else holds, or that something cached stands behind. A page that comes is *kept*: cached and idle, as if a
request had just left it.
"""

from collections.abc import Sequence

from msgspec import Struct

from quartet_core.block_cache import BlockCache

MAX_LEFT = 8192
"""Prefixes that were paged out of a cache and are remembered, to know them again when they come back."""


class ColdBlocks(Struct, frozen=True):
    """A cached prefix whose last block, of content ``prefix``, is idle. ``paged`` as in ``BlockUse``."""

    prefix: int
    blocks: int
    idle_ms: float
    uses: int
    paged: int


class Page(Struct, frozen=True):
    """What a page consists of, block by block: contents, and the rungs that end in them, as (block index, rung)."""

    contents: tuple[int, ...]
    rungs: tuple[tuple[int, int], ...] = ()
    idle_ms: float = 0.0
    uses: int = 0


class _Pin(Struct):
    blocks: list[int]
    uses: list[int]


class BlockPages:
    """The pages of one cache. Pins are by the name of their transfer."""

    __slots__ = ("_cache", "_pins", "in_blocks", "out_blocks")

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self._pins: dict[str, _Pin] = {}
        self.in_blocks = 0
        """Blocks of pages that came and were not here before."""
        self.out_blocks = 0
        """Blocks that were dropped because they are elsewhere."""

    def __len__(self) -> int:
        return len(self._pins)

    def coldest(self, limit: int, least_blocks: int = 1) -> list[ColdBlocks]:
        """Up to ``limit`` prefixes of ``least_blocks`` or more whose last block is idle with nothing cached behind it,
        the longest unused first: those that will be evicted next."""
        found: list[ColdBlocks] = []
        cache = self._cache
        for block in cache.idle():
            use = cache.use(block)
            if use.children or use.depth < least_blocks:
                continue
            idle_ms = max(cache.now_ms - use.since_ms, 0.0)
            found.append(ColdBlocks(cache.content(block), use.depth, idle_ms, use.uses, use.paged))
            if len(found) == limit:
                break
        return found

    def pin(self, name: str, prefix: int) -> tuple[Page, list[int]] | None:
        """Hold the blocks of ``prefix`` for a page-out; what they are, and which.

        None when it is not cached (any more), its last block is in use or has cached blocks behind it, or ``name`` has
        a pin already.
        """
        cache = self._cache
        blocks = cache.prefix(prefix)
        if blocks is None or name in self._pins or cache.references(blocks[-1]) or cache.use(blocks[-1]).children:
            return None
        cache.refer(blocks)
        self._pins[name] = _Pin(blocks, [cache.use(block).uses for block in blocks])
        last = cache.use(blocks[-1])
        rungs = tuple((index, rung) for index, block in enumerate(blocks) for rung in cache.rungs(block))
        contents = tuple(cache.content(block) for block in blocks)
        return Page(contents, rungs, max(cache.now_ms - last.since_ms, 0.0), last.uses), blocks

    def pinned(self, name: str) -> list[int] | None:
        """The blocks that are held under ``name``."""
        pin = self._pins.get(name)
        return None if pin is None else pin.blocks

    def unpin(self, name: str) -> bool:
        """Give the page back, to be as idle as it was; False when there is none of that name."""
        pin = self._pins.pop(name, None)
        if pin is None:
            return False
        used = self._used(pin)
        # shallower ones last: a parent must not be evicted before its child
        self._cache.give_back(pin.blocks[used:])
        self._cache.release(pin.blocks[:used])
        return True

    def drop(self, name: str) -> int:
        """The page is elsewhere: end its pin, and evict of it what nobody used since; returns how many blocks."""
        cache, pin = self._cache, self._pins.get(name)
        if pin is None:
            return 0
        used = self._used(pin)
        self.unpin(name)
        cache.left[cache.content(pin.blocks[-1])] = None
        while len(cache.left) > MAX_LEFT:
            cache.left.popitem(last=False)
        dropped = 0
        for block in reversed(pin.blocks[used:]):
            if cache.references(block) or cache.use(block).children:
                break
            cache.forget(block)
            dropped += 1
        self.out_blocks += dropped
        return dropped

    def held(self, contents: Sequence[int]) -> int:
        """How many leading blocks of a page are cached here; they are then as good as just kept."""
        cache = self._cache
        count = cache.match(contents, len(contents))
        if count:
            blocks = cache.prefix(contents[count - 1])
            assert blocks is not None  # matched just now
            cache.refer(blocks)
            cache.release(blocks)
        return count

    def keep(self, blocks: Sequence[int], right: int, page: Page) -> int:
        """Cache the first ``right`` of these referenced blocks as ``page`` says, and free the others; nobody refers to
        any of them then. Returns how many were not cached before."""
        cache = self._cache
        rungs: dict[int, list[int]] = {}
        for index, rung in page.rungs:
            rungs.setdefault(index, []).append(rung)
        kept: list[int] = []
        fresh = 0
        for index in range(right):
            block = cache.keep(blocks[index], page.contents[index], page.contents[index - 1] if index else 0)
            kept.append(block)
            if block != blocks[index]:
                continue
            fresh += 1
            use = cache.use(block)
            use.moved, use.uses = True, page.uses
            for rung in rungs.get(index, ()):
                cache.tag(block, rung)
        cache.release(kept)
        cache.release(blocks[right:])
        for block in kept:
            use = cache.use(block)
            if use.moved and not cache.references(block):
                use.since_ms = min(use.since_ms, cache.now_ms - page.idle_ms)
        self.in_blocks += fresh
        return fresh

    def _used(self, pin: _Pin) -> int:
        """How many of a pin's blocks, from the first one on, go to the last that was found by somebody since."""
        for index in range(len(pin.blocks) - 1, -1, -1):
            if self._cache.use(pin.blocks[index]).uses != pin.uses[index]:
                return index + 1
        return 0
