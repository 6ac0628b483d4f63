"""Breakers: workers that fail rest for a while, and come back by way of one request, not all at once.

What counts as a failure is the worker's own: a missed ack, a connection reset, a 5xx answer. A 4xx is the request's
fault, a 429 or 503 says "later", a 504 is the request's deadline; none counts, or a wave of bad requests would darken
the fleet. A frozen worker (beats arrive, its engine does not step) rests in the same way: it may wait for nothing but
its next request, so avoiding it for ever would keep it frozen for ever.
"""

from msgspec import Struct

FAILURES_TO_OPEN = 3
PAUSE_MS = 500.0
PAUSE_MAX_MS = 30_000.0
FROZEN_PAUSE_MS = 1_000.0


def counts(code: int) -> bool:
    """Whether an answer with HTTP status ``code`` is held against the worker that gave it. 503 says "later", 504 that
    the request's own deadline passed, and how short that is, is the client's choice."""
    return code >= 500 and code not in (503, 504)


class _Record(Struct):
    failures: int = 0
    pause_ms: float = PAUSE_MS
    until_ms: float = 0.0
    frozen: bool = False


class Breakers:
    """The breakers of all slots. ``open`` is the plane of resting workers."""

    __slots__ = ("_records", "open", "opened", "trials")

    def __init__(self) -> None:
        self.open = 0
        self.opened = 0
        """How often a breaker opened."""
        self.trials = 0
        """How many requests went to resting workers to see whether they are back."""
        self._records: dict[int, _Record] = {}

    def failed(self, slot: int, now_ms: float) -> None:
        """A request failed by the fault of the worker in ``slot``. Three in a row, or one on trial, open its breaker;
        each time it stays open for twice as long, 30 s at most."""
        record = self._records.setdefault(slot, _Record())
        record.failures += 1
        if self.open >> slot & 1:
            record.pause_ms = min(record.pause_ms * 2.0, PAUSE_MAX_MS)
        elif record.failures < FAILURES_TO_OPEN:
            return
        else:
            self.open |= 1 << slot
            self.opened += 1
        record.until_ms = now_ms + record.pause_ms

    def succeeded(self, slot: int) -> None:
        """The worker in ``slot`` gave a first token: all is forgotten."""
        if self._records.pop(slot, None) is not None:
            self.open &= ~(1 << slot)

    def freeze(self, slot: int, now_ms: float) -> None:
        """Collectors say that the worker's engine does not step: it is due for a trial at once."""
        record = self._records.setdefault(slot, _Record())
        if not record.frozen:
            record.frozen = True
            record.pause_ms = FROZEN_PAUSE_MS
            record.until_ms = now_ms
            self.opened += not self.open >> slot & 1
            self.open |= 1 << slot

    def thaw(self, slot: int) -> None:
        """Its engine steps again."""
        record = self._records.get(slot)
        if record is not None and record.frozen:
            self.succeeded(slot)

    def drop(self, slot: int) -> None:
        """The worker is gone."""
        self.succeeded(slot)

    def due(self, now_ms: float) -> int:
        """The plane of resting workers that may be tried now with one request."""
        plane = 0
        if self.open:
            for slot, record in self._records.items():
                if record.until_ms <= now_ms and self.open >> slot & 1:
                    plane |= 1 << slot
        return plane

    def tried(self, slot: int, now_ms: float) -> None:
        """A request goes to the resting worker in ``slot``; the next one not before a pause."""
        record = self._records[slot]
        record.until_ms = now_ms + record.pause_ms
        self.trials += 1
