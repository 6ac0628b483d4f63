"""The flow of one departure: its blocks as they come to be, what the link is charged for them, and for how long.

A prefill that is done gives all its blocks at once. Of one that still computes, every ended chunk gives some; until the
next one ends there is nothing to send, and the time that passes is nobody's transfer time.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from quartet_agent.engines.pools import KvPool
from quartet_agent.kv.memory import TimedLink
from quartet_agent.kv.mover import Buffer

SIGN_OF_LIFE_S = 1.0
"""How long a sender that waits says nothing: a receiver gives up after five."""


class FlowClock:
    """How long something flowed, and how much of that was while the prefill still computed."""

    __slots__ = ("_at_ms", "_now_ms", "_whole_ms", "flowed_ms", "overlap_ms")

    def __init__(self, now_ms: Callable[[], float]) -> None:
        self._now_ms = now_ms
        self._at_ms = -1.0
        self._whole_ms = -1.0
        self.flowed_ms = 0.0
        self.overlap_ms = 0.0

    def start(self) -> None:
        """Something flows from now on, if it does not already."""
        if self._at_ms < 0.0:
            self._at_ms = self._now_ms()

    def stop(self) -> None:
        """Nothing flows from now on."""
        if self._at_ms < 0.0:
            return
        begun_ms, now_ms, self._at_ms = self._at_ms, self._now_ms(), -1.0
        self.flowed_ms += now_ms - begun_ms
        computing_ms = now_ms if self._whole_ms < 0.0 else self._whole_ms
        self.overlap_ms += max(0.0, computing_ms - begun_ms)

    def whole(self) -> None:
        """All is computed: nothing overlaps any more."""
        if self._whole_ms < 0.0:
            self._whole_ms = self._now_ms()


class Charge:
    """What a link takes for ``kv_bytes`` at ``gb_per_s`` after ``setup_ms``, handed to it in parts.

    It is on ``link`` only while a part is not through. ``link`` None takes no time. ``flows`` is told when it begins
    to take time, ``rests`` when it ends.
    """

    def __init__(
        self, setup_ms: float, kv_bytes: int, gb_per_s: float, link: TimedLink | None, now_ms: Callable[[], float]
    ) -> None:
        self._setup_ms = setup_ms
        self._size = int(kv_bytes / gb_per_s) if gb_per_s > 0 else 0
        self._link = link
        self._wanted = self._through = 0.0  # shares of the whole that were handed in, and that are over
        self._crossing = 0.0  # up to which share is on the link, or has been
        self._more = asyncio.Event()
        self.clock = FlowClock(now_ms)

    @property
    def over(self) -> float:
        """The share of the whole that the link has carried."""
        if self._link is None or not self._size:
            return self._through
        return self._crossing - self._link.left_bytes(self) / self._size

    def reach(self, share: float) -> None:
        """Everything up to ``share`` of the whole is to be carried; 1 is the end."""
        self._wanted = share
        self._more.set()

    async def run(self) -> None:
        """Until the whole is through."""
        self.clock.start()
        await asyncio.sleep(self._setup_ms / 1e3)
        while self._through < 1.0:
            upto = self._wanted
            if upto > self._through:
                self.clock.start()
                self._crossing = upto
                if self._link is not None:
                    await self._link.cross(round(self._size * (upto - self._through)), self)
                self._through = upto
            else:
                self.clock.stop()
                self._more.clear()
                await self._more.wait()
        self.clock.stop()


class Flow:
    """An ``AsyncIterable`` of batches, as ``mover.Blocks``. ``tokens`` is how many the whole has.

    Beginning again begins with the first block. Raises ``BlocksFenced`` when there is nothing to come any more.
    """

    def __init__(
        self, pool: KvPool, transfer: str, tokens: int, charge: Charge | None, now_ms: Callable[[], float]
    ) -> None:
        self._pool = pool
        self._transfer = transfer
        self._blocks = -(-tokens // pool.block_tokens)
        self._sent = 0
        self._more = asyncio.Event()
        self.charge = charge
        self.clock = charge.clock if charge is not None else FlowClock(now_ms)

    @property
    def over(self) -> float:
        """The share of the whole that has left, or (charged) that the link has carried."""
        if self.charge is not None:
            return self.charge.over
        return min(1.0, self._sent / self._blocks) if self._blocks else 1.0

    def grew(self) -> None:
        """More can be exported, or all: look again."""
        if self._pool.exportable(self._transfer).whole:
            self.clock.whole()
        self._more.set()

    async def __aiter__(self) -> AsyncIterator[Iterable[Buffer]]:
        self._sent = 0
        while True:
            self._more.clear()
            there = self._pool.exportable(self._transfer)
            if there.whole:
                self.clock.whole()
            if there.blocks > self._sent:
                self._begin(there.blocks, there.whole)
                yield self._counted(self._pool.export(self._transfer, self._sent))
            elif there.whole:
                return
            else:
                if self.charge is None:
                    self.clock.stop()
                await self._wait()
                if not self._more.is_set():
                    yield ()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(SIGN_OF_LIFE_S):
                await self._more.wait()
        except TimeoutError:
            return

    def _begin(self, blocks: int, whole: bool) -> None:
        if self.charge is None:
            self.clock.start()
        else:
            self.charge.reach(1.0 if whole else min(1.0, blocks / self._blocks))

    def _counted(self, blocks: Iterable[Buffer]) -> Iterator[Buffer]:
        for block in blocks:
            self._sent += 1
            yield block
