"""The clock of a simulation: what happens when, in one order, and a hash over all that happened."""

import struct
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final

from xxhash import xxh3_64

_ENTRY: Final = struct.Struct("<dqq")


class Timeline:
    """Calls in the order of their times, and among equal times in the order in which they were asked for.

    ``now_ms`` is the time of the call under way. ``note`` adds to the log, of which only the hash is kept.
    """

    __slots__ = ("_asked", "_calls", "_log", "events", "now_ms")

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.events = 0
        self._calls: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._asked = 0
        self._log = xxh3_64()

    def at(self, at_ms: float, call: Callable[..., None], *arguments: object) -> None:
        """Call ``call(*arguments)`` at ``at_ms``, or at once if that is past."""
        self._asked += 1
        heappush(self._calls, (at_ms if at_ms > self.now_ms else self.now_ms, self._asked, call, arguments))

    def later(self, delay_ms: float, call: Callable[..., None], *arguments: object) -> None:
        """Call it ``delay_ms`` from now."""
        self.at(self.now_ms + delay_ms, call, *arguments)

    def step(self) -> bool:
        """Make the next call; False when there is none."""
        if not self._calls:
            return False
        self.now_ms, _, call, arguments = heappop(self._calls)
        self.events += 1
        call(*arguments)
        return True

    def next_ms(self) -> float | None:
        """The time of the next call."""
        return self._calls[0][0] if self._calls else None

    def note(self, what: int, whose: int) -> None:
        """Add to the log that ``what`` happened to ``whose`` now."""
        self._log.update(_ENTRY.pack(self.now_ms, what, whose))

    def log_hash(self) -> str:
        """The hash of the log so far."""
        return self._log.hexdigest()
