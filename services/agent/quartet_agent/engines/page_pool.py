"""An engine's pages as transfers and the virtual VRAM pool know them: ``KvPool`` and ``PagePool`` over its arena.

What is done to the engine's own blocks takes a step of the engine, so that it is asked for here and told later: a pin's
pages can be read once ``ready`` says so, and what came is in the engine's hands once ``kept`` does. Room for what comes
is granted ahead, so that a lease is answered at once.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import takewhile

from quartet_agent.engines.pools import BlocksFenced, Exportable, PoolCounts, PoolFill
from quartet_agent.kv.mover import Buffer
from quartet_bus.messages import ColdPrefix, PageManifest
from quartet_connector import page as pages
from quartet_connector.layout import PageLayout
from quartet_connector.words import (
    AgentWord,
    Ask,
    Coldest,
    Drop,
    Dropped,
    EngineWord,
    Fill,
    Granted,
    Keep,
    Kept,
    NotPinned,
    Pin,
    Pinned,
    Release,
    Return,
    Want,
)

_GRANTED_SHARE = 4
"""One in so many slots is kept for what comes: no prefix that is larger can come."""

_COLDEST = 16
_READY_S = 10.0
_NUDGE_S = 0.05
_MAX_KEEPS = 1024

_Waits = asyncio.Future[str]


class _Arrival:
    """A lease for pages of ``tokens`` tokens; a last block that is not full has no slot."""

    __slots__ = ("committed", "epoch", "last", "slots", "tokens", "written")

    def __init__(self, epoch: int, tokens: int, slots: list[int]) -> None:
        self.epoch = epoch
        self.tokens = tokens
        self.slots = slots
        self.written = 0
        self.last = 0  # the id of the last page written
        self.committed = False


class _Pin:
    __slots__ = ("ids", "ready", "slots", "tail")

    def __init__(self, ids: list[int], tail: bytes, ready: _Waits) -> None:
        self.ids = ids
        self.tail = tail
        self.ready = ready
        """Done when ``slots`` hold the pages; its result is why they do not, "" when they do."""
        self.slots: list[int] = []


class ServedPages:
    """Pages of one life of one engine.

    ``say`` takes words for its connector. ``nudge`` has an idle engine make a step, which it does not by itself.
    ``there`` are the ids of all pages in its arena.
    """

    def __init__(
        self,
        layout: PageLayout,
        slots: int,
        memory: memoryview,
        loop: asyncio.AbstractEventLoop,
        say: Callable[[AgentWord], None],
        nudge: Callable[[], None],
        there: Container[int],
    ) -> None:
        self.layout = layout
        self.refused = ""
        """Why the engine took a page not that had come, the last time."""
        self._fingerprint = layout.fingerprint
        self._slots = slots
        self._memory = memory
        self._loop = loop
        self._say = say
        self._nudge = nudge
        self._there = there
        self._alive = True
        self._granted: deque[int] = deque()
        self._arrivals: dict[str, _Arrival] = {}
        self._pins: dict[str, _Pin] = {}
        self._keeps: dict[str, asyncio.Future[int]] = {}
        self._cold: dict[int, ColdPrefix] = {}
        self._cold_ids: dict[int, list[int]] = {}
        self._returns_ms: list[float] = []
        self._asked: set[str] = set()  # what takes a step and was not answered yet
        self._fill = Fill(slots=slots)
        say(Ask(_COLDEST))
        self._want()

    def hear(self, word: EngineWord) -> None:
        """A word of the connector that is about transfers or the pool."""
        match word:
            case Granted(slots):
                self._granted.extend(slots)
            case Pinned(transfer, slots):
                self._asked.discard(transfer)
                pin = self._pins.get(transfer)
                if pin is not None and not pin.ready.done():
                    pin.slots = slots
                    pin.ready.set_result("")
            case NotPinned(transfer, reason):
                self._asked.discard(transfer)
                pin = self._pins.pop(transfer, None)
                if pin is not None and not pin.ready.done():
                    pin.ready.set_result(reason)
            case Kept(transfer, count, refused):
                self.refused = refused or self.refused
                kept = self._keeps.get(transfer)
                if kept is not None and not kept.done():
                    kept.set_result(count * self.block_tokens)
                self._want()
            case Dropped(transfer):
                self._asked.discard(transfer)
            case Fill():
                self._fill = word
            case Coldest(prefixes, returns_ms):
                self._cold = {
                    cold.ids[-1]: ColdPrefix(cold.ids[-1], cold.tokens, cold.idle_ms, cold.uses) for cold in prefixes
                }
                self._cold_ids = {cold.ids[-1]: cold.ids for cold in prefixes}
                self._returns_ms += returns_ms

    def end(self) -> None:
        """The line is gone: nothing of it counts any more, and whoever waits is told."""
        self._alive = False
        self._arrivals.clear()
        for pin in self._pins.values():
            if not pin.ready.done():
                pin.ready.set_result("the connector is gone")
        self._pins.clear()
        for kept in self._keeps.values():
            if not kept.done():
                kept.set_result(0)
        self._keeps.clear()

    @property
    def figures(self) -> dict[str, int]:
        """What an operator is shown."""
        fill = self._fill
        return {
            "slots": fill.slots, "pages": fill.pages, "granted": len(self._granted), "saved": fill.saved,
            "loaded": fill.loaded, "evicted": fill.evicted, "kept": fill.kept, "dropped": fill.dropped,
            "failed_loads": fill.failed_loads, "pins": len(self._pins), "leases": len(self._arrivals),
        }  # fmt: skip

    # As ``KvPool``

    @property
    def block_tokens(self) -> int:
        """As ``KvPool.block_tokens``."""
        return self.layout.block_tokens

    @property
    def stands_in(self) -> bool:
        """As ``KvPool.stands_in``: these are the engine's own bytes."""
        return False

    def reserve(self, transfer: str, tokens: int, epoch: int) -> bool:
        """As ``KvPool.reserve``; False, too, for more than is ever granted."""
        old = self._arrivals.pop(transfer, None)
        if old is not None and not old.committed:
            self._granted.extend(old.slots)
        full = tokens // self.block_tokens
        if not self._alive or not 0 < full <= len(self._granted):
            self._want()
            return False
        self._arrivals[transfer] = _Arrival(epoch, tokens, [self._granted.popleft() for _ in range(full)])
        return True

    def write(self, transfer: str, epoch: int, first_block: int, blocks: Sequence[Buffer]) -> None:
        """As ``KvPool.write``. A page of another layout, or not behind the one before it, is fenced, too."""
        arrival = self._held(transfer, epoch)
        if arrival.committed or first_block != arrival.written:
            raise BlocksFenced(transfer, f"block {first_block} after {arrival.written} of {len(arrival.slots)}")
        for block in blocks:
            index = arrival.written
            try:
                head = pages.decode(block, self._fingerprint, self.block_tokens, self.layout.kv_bytes)
            except pages.PageRefused as error:
                raise BlocksFenced(transfer, f"block {index}: {error}") from error
            behind = head.root is not None if index == 0 else head.root is None and head.parent == arrival.last
            if not behind or head.tail != (index >= len(arrival.slots)):
                raise BlocksFenced(transfer, f"block {index} is not the next page of its chain")
            if not head.tail:
                start = arrival.slots[index] * self.layout.slot_bytes
                self._memory[start : start + len(block)] = block
            arrival.last = head.id
            arrival.written += 1

    def commit(self, transfer: str, epoch: int) -> None:
        """As ``KvPool.commit``: the pages are the engine's from now on, whoever asks for them."""
        arrival = self._held(transfer, epoch)
        if arrival.committed:
            return
        if arrival.written < len(arrival.slots):
            raise BlocksFenced(transfer, f"{arrival.written} of {len(arrival.slots)} pages were written")
        arrival.committed = True
        while len(self._keeps) >= _MAX_KEEPS:
            del self._keeps[next(iter(self._keeps))]
        self._keeps[transfer] = self._loop.create_future()
        self._say(Keep(transfer, arrival.slots))

    def exportable(self, transfer: str) -> Exportable:
        """As ``KvPool.exportable``: all, once it is in the arena."""
        pin = self._copied(transfer)
        return Exportable(len(pin.slots) + bool(pin.tail), whole=True)

    def export(self, transfer: str, first_block: int = 0) -> Iterator[Buffer]:
        """As ``KvPool.export``: slots as they lie, and of a last block that is not full its header alone."""
        pin = self._copied(transfer)
        size = self.layout.slot_bytes
        for slot in list(pin.slots)[first_block:]:
            if self._pins.get(transfer) is not pin:
                raise BlocksFenced(transfer, "released")
            yield self._memory[slot * size : (slot + 1) * size]
        if pin.tail and first_block <= len(pin.slots):
            yield pages.encode(self._fingerprint, pin.ids[-1], pin.tail, None, 0, self.block_tokens)

    def _copied(self, transfer: str) -> _Pin:
        pin = self._pins.get(transfer)
        if pin is None or not pin.ready.done():
            raise BlocksFenced(transfer, "its pages are not in the arena")
        return pin

    def release(self, transfer: str) -> None:
        """As ``KvPool.release``."""
        arrival = self._arrivals.pop(transfer, None)
        if arrival is not None and not arrival.committed:
            self._say(Return(arrival.slots))
            self._want()
        self._keeps.pop(transfer, None)
        if self._pins.pop(transfer, None) is not None:
            self._asked.discard(transfer)
            self._say(Release(transfer))

    async def ready(self, transfer: str) -> None:
        """As ``KvPool.ready``: until the engine has copied the pin's pages. Raises ``BlocksFenced``."""
        pin = self._pins.get(transfer)
        if pin is None:
            raise BlocksFenced(transfer, "nothing is pinned")
        try:
            async with asyncio.timeout(_READY_S):
                reason = await asyncio.shield(pin.ready)
        except TimeoutError:
            reason = f"the engine did not copy it within {_READY_S:g} s"
        if reason:
            raise BlocksFenced(transfer, reason)

    # As ``PagePool``

    def fill(self) -> PoolFill:
        """As ``PagePool.fill``."""
        return PoolFill(self._fill.total, self._fill.empty, self._fill.idle)

    def counts(self) -> PoolCounts:
        """As ``PagePool.counts``."""
        fill = self._fill
        return PoolCounts(fill.kept, fill.dropped, fill.hit_kept, fill.hit_kept * self.block_tokens)

    def coldest(self, limit: int, least_tokens: int = 0) -> list[ColdPrefix]:
        """As ``PagePool.coldest``; what the engine said at its last step, less what is pinned since."""
        pinned = {pin.ids[-1] for pin in self._pins.values()}
        return [cold for prefix, cold in self._cold.items() if prefix not in pinned and cold.tokens >= least_tokens][
            :limit
        ]

    def drain_reuse(self) -> tuple[list[float], list[float]]:
        """As ``PagePool.drain_reuse``; what was evicted the engine does not tell."""
        told, self._returns_ms = self._returns_ms, []
        return told, []

    def pin_pages(self, transfer: str, prefix: int) -> PageManifest | None:
        """As ``PagePool.pin_pages``."""
        ids, cold = self._cold_ids.get(prefix), self._cold.get(prefix)
        if not self._alive or ids is None or cold is None:
            return None
        self.pin(transfer, ids, idle=True)
        return PageManifest(tuple(ids), (), cold.idle_ms, cold.uses)

    def held(self, manifest: PageManifest) -> int:
        """As ``PagePool.held``: what is in the arena."""
        return sum(1 for _ in takewhile(self._there.__contains__, manifest.contents)) * self.block_tokens

    def keep_pages(self, transfer: str, manifest: PageManifest) -> int:
        """As ``PagePool.keep_pages``: they were the engine's with their commit, each as its header says."""
        arrival = self._arrivals.pop(transfer, None)
        if arrival is None or not arrival.committed:
            raise BlocksFenced(transfer, "no lease that is committed")
        return len(arrival.slots) * self.block_tokens

    def drop_pages(self, transfer: str) -> int:
        """As ``PagePool.drop_pages``. The engine tells later, by ``counts``, how many it evicted: 0 are known yet."""
        if self._pins.pop(transfer, None) is not None:
            self._ask(transfer, Drop(transfer))
        return 0

    # What an adapter's jobs need

    def pin(self, transfer: str, ids: list[int], *, tail: bytes = b"", idle: bool = False) -> None:
        """Have a chain's pages copied into the arena, as far as they are not, and kept. ``tail`` are tokens behind it
        that fill no block."""
        self.release(transfer)
        self._pins[transfer] = _Pin(ids, tail, self._loop.create_future())
        self._ask(transfer, Pin(transfer, ids, idle))

    async def kept(self, transfer: str) -> int:
        """Until the engine has what came by a committed transfer: how many tokens of it, 0 when there is no such."""
        kept = self._keeps.get(transfer)
        if kept is None:
            return 0
        try:
            async with asyncio.timeout(_READY_S):
                return await asyncio.shield(kept)
        except TimeoutError:
            return 0
        finally:
            self._keeps.pop(transfer, None)
            self._arrivals.pop(transfer, None)

    def holds(self, transfer: str) -> bool:
        """Whether a committed transfer waits for its job."""
        return transfer in self._keeps

    # Inside

    def _held(self, transfer: str, epoch: int) -> _Arrival:
        arrival = self._arrivals.get(transfer)
        if arrival is None or arrival.epoch != epoch:
            raise BlocksFenced(transfer, "no such lease")
        return arrival

    def _want(self) -> None:
        # those that are leased are still granted, as the connector counts
        self._say(Want(max(1, self._slots // _GRANTED_SHARE)))

    def _ask(self, transfer: str, word: AgentWord) -> None:
        self._asked.add(transfer)
        self._say(word)
        self._loop.call_later(_NUDGE_S, self._look_after, transfer)

    def _look_after(self, transfer: str) -> None:
        if self._alive and transfer in self._asked:
            self._nudge()
