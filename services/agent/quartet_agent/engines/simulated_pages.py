"""The simulated engine's prefix cache, as the virtual VRAM pool needs it."""

from collections.abc import Callable

from quartet_agent.engines.pools import BlocksFenced, PoolCounts, PoolFill
from quartet_bus.messages import ColdPrefix, PageManifest
from quartet_core.block_pages import Page
from quartet_sim.pool import Fenced, KvPool


class SimulatedPages:
    """``quartet_agent.engines.base.PagePool`` over a ``KvPool``.

    ``freed`` is called when blocks came free: an idle engine may have a job that waits for them.
    """

    def __init__(self, pool: KvPool, now_ms: Callable[[], float], freed: Callable[[], None]) -> None:
        self._pool = pool
        self._now_ms = now_ms
        self._freed = freed

    def fill(self) -> PoolFill:
        """As ``PagePool.fill``."""
        census = self._pool.blocks.census()
        return PoolFill(self._pool.blocks.total, census.free, census.idle)

    def counts(self) -> PoolCounts:
        """As ``PagePool.counts``."""
        pages, found = self._pool.pages, self._pool.blocks.found_moved
        return PoolCounts(pages.in_blocks, pages.out_blocks, found, found * self._pool.block_tokens)

    def coldest(self, limit: int, least_tokens: int) -> list[ColdPrefix]:
        """As ``PagePool.coldest``."""
        self._tell_time()
        block_tokens = self._pool.block_tokens
        return [
            ColdPrefix(cold.prefix, cold.blocks * block_tokens, cold.idle_ms, cold.uses, cold.paged)
            for cold in self._pool.pages.coldest(limit, -(-least_tokens // block_tokens))
        ]

    def drain_reuse(self) -> tuple[list[float], list[float]]:
        """As ``PagePool.drain_reuse``."""
        return self._pool.blocks.drain_reuse()

    def pin_pages(self, transfer: str, prefix: int) -> PageManifest | None:
        """As ``PagePool.pin_pages``."""
        self._tell_time()
        page = self._pool.pin_page(transfer, prefix)
        return None if page is None else PageManifest(page.contents, page.rungs, page.idle_ms, page.uses)

    def held(self, manifest: PageManifest) -> int:
        """As ``PagePool.held``."""
        self._tell_time()
        return self._pool.pages.held(manifest.contents) * self._pool.block_tokens

    def keep_pages(self, transfer: str, manifest: PageManifest) -> int:
        """As ``PagePool.keep_pages``."""
        self._tell_time()
        page = Page(manifest.contents, manifest.rungs, manifest.idle_ms, manifest.uses)
        try:
            right = self._pool.keep_page(transfer, page)
        except Fenced as error:
            raise BlocksFenced(transfer, error.reason) from error
        self._freed()
        return right * self._pool.block_tokens

    def drop_pages(self, transfer: str) -> int:
        """As ``PagePool.drop_pages``."""
        dropped = self._pool.drop_page(transfer)
        self._freed()
        return dropped

    def _tell_time(self) -> None:
        """An idle engine has not said for long what time it is."""
        self._pool.blocks.now_ms = max(self._pool.blocks.now_ms, self._now_ms())
