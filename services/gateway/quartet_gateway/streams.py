"""The requests being answered right now: how many there may be, how long each may take, and how they end at a stop."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from quartet_gateway.errors import bodies_full, stopping, timed_out, too_many_streams

_FAREWELL_S = 1.0
"""What ended requests get to send their error events and cancels."""


class Seat:
    """One admitted request, and what its body takes of the room for bodies."""

    __slots__ = ("_bytes", "_streams")

    def __init__(self, streams: "Streams") -> None:
        self._streams = streams
        self._bytes = 0

    def hold(self, size_bytes: int) -> None:
        """Take room for ``size_bytes`` more of the body. Raises ``Refused`` (429) when there is none."""
        streams = self._streams
        if streams.held_bytes + size_bytes > streams.room_bytes:
            raise bodies_full(streams.room_bytes)
        self._bytes += size_bytes
        streams.held_bytes += size_bytes

    def release(self) -> None:
        """Give the room back, once; when the answer begins, or the request ends."""
        self._streams.held_bytes -= self._bytes
        self._bytes = 0


class Streams:
    """At most ``limit`` open requests, whose bodies take at most ``room_bytes`` until their answers begin.

    ``on_change`` hears the number of open ones whenever it changes.
    """

    def __init__(self, limit: int, room_bytes: int, on_change: Callable[[int], object]) -> None:
        self.room_bytes = room_bytes
        self.held_bytes = 0
        self._limit = limit
        self._on_change = on_change
        self._open: dict[asyncio.Timeout, None] = {}
        self._stopping = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def open(self) -> int:
        """How many requests are being answered."""
        return len(self._open)

    @asynccontextmanager
    async def admit(self, timeout_ms: float) -> AsyncIterator[Seat]:
        """Answer one request inside. Raises ``Refused``: 429 when full, 504 after ``timeout_ms``, 503 at a stop."""
        if self._stopping:
            raise stopping()
        if len(self._open) >= self._limit:
            raise too_many_streams(self._limit)
        seat = Seat(self)
        timeout = asyncio.timeout(timeout_ms / 1e3)
        try:
            async with timeout:
                self._open[timeout] = None
                self._idle.clear()
                self._on_change(len(self._open))
                try:
                    yield seat
                finally:
                    seat.release()
                    del self._open[timeout]
                    self._on_change(len(self._open))
                    if not self._open:
                        self._idle.set()
        except TimeoutError:
            if not timeout.expired():
                raise
            raise (stopping() if self._stopping else timed_out(timeout_ms)) from None

    def refuse(self) -> None:
        """Admit nobody from now on."""
        self._stopping = True

    async def drain(self, timeout_s: float) -> int:
        """Wait until every open request is answered; after ``timeout_s`` end the rest. Returns how many were ended."""
        self.refuse()
        if await self._all_done(timeout_s):
            return 0
        unfinished = list(self._open)
        for timeout in unfinished:
            timeout.reschedule(asyncio.get_running_loop().time())
        await self._all_done(_FAREWELL_S)
        return len(unfinished)

    async def _all_done(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
