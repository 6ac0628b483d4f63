"""Blocks of KV in host memory: leases for pages that come, pins for what is lent, and the least used evicted.

The same rules as an engine's cache (``quartet_core.block_cache``), with the blocks' bytes beside. What is in them means
nothing here: it goes out as it came in. A prefix is found by the ladder's rungs that its manifest named.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from quartet_agent.engines.pools import BlocksFenced, Exportable, PoolCounts, PoolFill
from quartet_agent.kv.mover import Buffer
from quartet_bus.messages import ColdPrefix, PageManifest
from quartet_core.block_cache import BlockCache
from quartet_core.block_pages import BlockPages, Page


@dataclass(slots=True)
class _Lease:
    epoch: int
    tokens: int
    blocks: list[int]
    came: list[bytes | None] = field(default_factory=list)
    committed: bool = False


class StoreMemory:
    """``total_blocks`` blocks of ``block_tokens`` tokens: ``KvPool`` and ``PagePool`` of one store.

    ``stands_in`` says that its blocks come from simulated engines, which send less than the KV that they stand for.
    """

    def __init__(self, total_blocks: int, block_tokens: int, now_ms: Callable[[], float], *, stands_in: bool) -> None:
        self.cache = BlockCache(total_blocks)
        self._pages = BlockPages(self.cache)
        self._block_tokens = block_tokens
        self._stands_in = stands_in
        self._now_ms = now_ms
        # By block. Those of a block that came free stay until it is given again: there are never more than blocks.
        self._bytes: dict[int, bytes] = {}
        self._of_rung: dict[int, int] = {}  # rung → content of the block that it ends in
        self._leases: dict[str, _Lease] = {}
        self._lent: dict[str, list[int]] = {}

    @property
    def block_tokens(self) -> int:
        """As ``KvPool.block_tokens``."""
        return self._block_tokens

    @property
    def stands_in(self) -> bool:
        """As ``KvPool.stands_in``."""
        return self._stands_in

    @property
    def held_bytes(self) -> int:
        """Bytes of blocks in memory."""
        return sum(map(len, self._bytes.values()))

    # Coming

    def reserve(self, transfer: str, tokens: int, epoch: int) -> bool:
        """As ``KvPool.reserve``: the least used blocks make room."""
        held = self._leases.get(transfer)
        if held is not None:
            return held.epoch == epoch and held.tokens == tokens
        self._tell_time()
        blocks = self.cache.allocate(-(-tokens // self._block_tokens))
        if blocks is None:
            return False
        for block in blocks:
            self._bytes.pop(block, None)
        self._leases[transfer] = _Lease(epoch, tokens, blocks, [None] * len(blocks))
        return True

    def write(self, transfer: str, epoch: int, first_block: int, blocks: Sequence[Buffer]) -> None:
        """As ``KvPool.write``."""
        lease = self._held(transfer, epoch)
        if lease.committed:
            raise BlocksFenced(transfer, "already committed")
        if not 0 <= first_block <= len(lease.blocks) - len(blocks):
            raise BlocksFenced(transfer, f"block {first_block} is outside of a lease of {len(lease.blocks)}")
        for index, block in enumerate(blocks, first_block):
            lease.came[index] = bytes(block)

    def commit(self, transfer: str, epoch: int) -> None:
        """As ``KvPool.commit``."""
        self._held(transfer, epoch).committed = True

    def keep_pages(self, transfer: str, manifest: PageManifest) -> int:
        """As ``PagePool.keep_pages``: what came is kept up to the first block that did not come, or is of another size
        than the first."""
        lease = self._leases.get(transfer)
        if lease is None or not lease.committed:
            raise BlocksFenced(transfer, "no lease" if lease is None else "not committed")
        del self._leases[transfer]
        self._tell_time()
        right, most = 0, min(lease.tokens // self._block_tokens, len(manifest.contents))
        size = len(lease.came[0] or b"")
        while right < most and (came := lease.came[right]) and len(came) == size:
            right += 1
        for block, held in zip(lease.blocks[:right], lease.came, strict=False):
            assert held is not None  # counted just now
            self._bytes[block] = held
        self._pages.keep(lease.blocks, right, Page(manifest.contents, manifest.rungs, manifest.idle_ms, manifest.uses))
        for index, rung in manifest.rungs:
            if index < right:
                self._of_rung[rung] = manifest.contents[index]
        return right * self._block_tokens

    # Lending

    def lend(self, transfer: str, rungs: Sequence[int], tokens: int) -> bool:
        """Hold the first ``tokens`` tokens of a prompt, of which these are the rungs that cover as much or more, the
        shallowest first; False when none of them is here."""
        self._tell_time()
        count = -(-tokens // self._block_tokens)
        for rung in rungs:
            prefix = self.cache.prefix(self._of_rung[rung]) if rung in self._of_rung else None
            if prefix is None or len(prefix) < count:
                continue
            contents = [self.cache.content(block) for block in prefix[:count]]
            self.release(transfer)
            taken = self.cache.take(contents, count, count)
            assert taken is not None  # all of it is there
            self._lent[transfer] = taken
            return True
        return False

    async def ready(self, transfer: str) -> None:
        """As ``KvPool.ready``: what is there can be read at once."""

    def exportable(self, transfer: str) -> Exportable:
        """As ``KvPool.exportable``: all that is lent, or of a page that is pinned."""
        return Exportable(len(self._leaving(transfer)), whole=True)

    def export(self, transfer: str, first_block: int = 0) -> Iterator[bytes]:
        """As ``KvPool.export``."""
        for block in self._leaving(transfer)[first_block:]:
            self._leaving(transfer)
            yield self._bytes[block]

    def _leaving(self, transfer: str) -> list[int]:
        blocks = self._lent.get(transfer) or self._pages.pinned(transfer)
        if blocks is None:
            raise BlocksFenced(transfer, "nothing is lent")
        return blocks

    def release(self, transfer: str) -> None:
        """As ``KvPool.release``."""
        self._tell_time()
        lease = self._leases.pop(transfer, None)
        if lease is not None:
            self.cache.release(lease.blocks)
        lent = self._lent.pop(transfer, None)
        if lent is not None:
            self.cache.release(lent)
        self._pages.unpin(transfer)

    # As a part of the pool

    def fill(self) -> PoolFill:
        """As ``PagePool.fill``."""
        census = self.cache.census()
        return PoolFill(self.cache.total, census.free, census.idle)

    def counts(self) -> PoolCounts:
        """As ``PagePool.counts``."""
        found = self.cache.found_moved
        return PoolCounts(self._pages.in_blocks, self._pages.out_blocks, found, found * self._block_tokens)

    def coldest(self, limit: int, least_tokens: int) -> list[ColdPrefix]:
        """As ``PagePool.coldest``: there is nowhere colder, so nothing."""
        return []

    def drain_reuse(self) -> tuple[list[float], list[float]]:
        """As ``PagePool.drain_reuse``."""
        return self.cache.drain_reuse()

    def pin_pages(self, transfer: str, prefix: int) -> PageManifest | None:
        """As ``PagePool.pin_pages``."""
        self._tell_time()
        pinned = self._pages.pin(transfer, prefix)
        if pinned is None:
            return None
        page, _ = pinned
        return PageManifest(page.contents, page.rungs, page.idle_ms, page.uses)

    def held(self, manifest: PageManifest) -> int:
        """As ``PagePool.held``."""
        self._tell_time()
        return self._pages.held(manifest.contents) * self._block_tokens

    def drop_pages(self, transfer: str) -> int:
        """As ``PagePool.drop_pages``."""
        return self._pages.drop(transfer)

    def drain_rungs(self) -> tuple[list[int], list[int]]:
        """Rungs that became cached, and that were evicted, since the last call."""
        cache = self.cache
        on, off = cache.rungs_on, cache.rungs_off
        cache.rungs_on, cache.rungs_off = [], []
        for rung in off:
            content = self._of_rung.get(rung)
            if content is not None and cache.match((content,), 1) == 0:
                del self._of_rung[rung]
        return on, off

    def _held(self, transfer: str, epoch: int) -> _Lease:
        lease = self._leases.get(transfer)
        if lease is None:
            raise BlocksFenced(transfer, "no lease")
        if lease.epoch != epoch:
            raise BlocksFenced(transfer, f"the lease has epoch {lease.epoch}")
        return lease

    def _tell_time(self) -> None:
        self.cache.now_ms = max(self.cache.now_ms, self._now_ms())
