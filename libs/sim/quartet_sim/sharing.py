"""A link that its transfers share equally: processor sharing, as TCP flows and DMA engines come close to.

Served bytes per flow are one number: each flow that began at V is done when V has grown by its size, and V grows with
rate / flows. So a change costs a heap operation, however many flows there are.
"""

import heapq
from collections.abc import Hashable

_BYTES_PER_MS = 1e6  # of one GB/s


class SharedLink:
    """One directed link of ``gb_per_s`` (decimal). Time is handed in, in milliseconds, and never goes back."""

    def __init__(self, gb_per_s: float) -> None:
        if gb_per_s <= 0:
            raise ValueError("a link needs gb_per_s > 0")
        self._bytes_per_ms = gb_per_s * _BYTES_PER_MS
        self._served = 0.0
        self._at_ms = 0.0
        self._ends: list[tuple[float, int, Hashable]] = []
        self._live: dict[Hashable, tuple[int, float]] = {}  # number, and V at its end
        self._number = 0

    @property
    def flows(self) -> int:
        """Transfers under way."""
        return len(self._live)

    def begin(self, flow: Hashable, size_bytes: int, now_ms: float) -> None:
        """``flow`` begins to move ``size_bytes``. Raises ``ValueError`` for one that is under way."""
        if flow in self._live:
            raise ValueError(f"flow {flow!r} is under way")
        self._advance(now_ms)
        self._number += 1
        end = self._served + size_bytes
        self._live[flow] = self._number, end
        heapq.heappush(self._ends, (end, self._number, flow))

    def left_bytes(self, flow: Hashable, now_ms: float) -> float:
        """What of ``flow`` is not over yet; 0 for one that is not under way."""
        if flow not in self._live:
            return 0.0
        served = self._served + max(0.0, now_ms - self._at_ms) * self._bytes_per_ms / len(self._live)
        return max(0.0, self._live[flow][1] - served)

    def withdraw(self, flow: Hashable, now_ms: float) -> None:
        """``flow`` ends unfinished; one that is not under way is left alone."""
        self._advance(now_ms)
        self._live.pop(flow, None)

    def finished(self, now_ms: float) -> list[Hashable]:
        """The flows whose last byte is there by now, in that order; they are under way no longer."""
        done: list[Hashable] = []
        while (next_ms := self.next_ms()) is not None and next_ms <= now_ms:
            self._advance(next_ms)
            end, number, flow = heapq.heappop(self._ends)
            self._served = max(self._served, end)
            if self._live.get(flow, (0,))[0] == number:
                del self._live[flow]
                done.append(flow)
        self._advance(now_ms)
        return done

    def next_ms(self) -> float | None:
        """When the next flow is done if none begins or leaves before; None when none is under way."""
        while self._ends and self._live.get(self._ends[0][2], (0,))[0] != self._ends[0][1]:
            heapq.heappop(self._ends)
        if not self._ends:
            return None
        return self._at_ms + max(0.0, self._ends[0][0] - self._served) * len(self._live) / self._bytes_per_ms

    def _advance(self, now_ms: float) -> None:
        if self._live:
            self._served += max(0.0, now_ms - self._at_ms) * self._bytes_per_ms / len(self._live)
        self._at_ms = max(self._at_ms, now_ms)
