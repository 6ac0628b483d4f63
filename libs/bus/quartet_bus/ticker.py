"""A timer that keeps its beat."""

import asyncio
from collections.abc import Callable


class Ticker:
    """Calls ``call`` every ``interval_s`` on the grid of its own start, so that a late tick does not shift later ones.

    Ticks that a busy loop missed are skipped, never made up for in a burst.
    """

    __slots__ = ("_call", "_handle", "_interval_ns", "_loop", "_next_ns", "_now_ns")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, now_ns: Callable[[], int], interval_s: float, call: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._now_ns = now_ns
        self._call = call
        self._interval_ns = max(1, round(interval_s * 1e9))
        self._next_ns = now_ns() + self._interval_ns
        self._handle = loop.call_later(interval_s, self._fire)

    def stop(self) -> None:
        """No further call."""
        self._handle.cancel()

    def _fire(self) -> None:
        missed = max(0, (self._now_ns() - self._next_ns) // self._interval_ns)
        self._next_ns += self._interval_ns * (missed + 1)
        # Armed before the call, so that a tick that stops its service stops this, too.
        self._handle = self._loop.call_later(max(0, self._next_ns - self._now_ns()) / 1e9, self._fire)
        self._call()
