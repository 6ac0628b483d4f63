"""The order of one publisher's KV events: what may be applied, what is missing, and when all that is known is void.

A publisher numbers its batches from 0. Batches that were missed are asked for again (it keeps some thousands); if it
does not have them any more, or began anew, what was built from its events is worthless and is forgotten.

    at the start          ask for everything kept
    number as expected    apply
    number skipped        keep it, ask for what lies between
    number gone by        of a replay that overlaps: drop. Live, the publisher began anew: reset, ask for all
    replay ended          if the hole is closed, apply what was kept; if not, reset and go on from what there is
"""

from enum import Enum, auto
from typing import Final, NamedTuple

MAX_WAITING: Final = 4096
"""Live batches that are kept while a replay is under way; with more, the replay is given up."""


class Apply(NamedTuple):
    """Apply this batch, the next in order."""

    payload: bytes


class Replay(NamedTuple):
    """Ask the publisher for its batches from ``start`` on."""

    start: int


class Reset(NamedTuple):
    """Forget all that this publisher ever said."""


Step = Apply | Replay | Reset


class Line(Enum):
    """Where a sequence is."""

    LIVE = auto()
    REPLAYING = auto()


class EventSequence:
    """The state of one publisher's line. ``replays`` is whether it can be asked to say things again.

    All methods return what to do, in order.
    """

    def __init__(self, *, replays: bool = True, max_waiting: int = MAX_WAITING) -> None:
        self._replays = replays
        self._max_waiting = max_waiting
        self._next = 0
        self._line = Line.LIVE
        self._waiting: dict[int, bytes] = {}
        self.gaps = 0
        """Holes seen in the live line."""
        self.resets = 0
        """Times that everything had to be forgotten."""

    @property
    def replaying(self) -> bool:
        """Whether an answer to a ``Replay`` is awaited."""
        return self._line is Line.REPLAYING

    def connected(self) -> list[Step]:
        """A connection was made, or made anew: batches may have been missed on both sides of it."""
        return self._ask() if self._replays else []

    def live(self, number: int, payload: bytes) -> list[Step]:
        """A batch came as it was published."""
        if self._line is Line.REPLAYING:
            self._waiting[number] = payload
            if len(self._waiting) <= self._max_waiting:
                return []
            return self.replay_ended()
        if number == self._next:
            self._next += 1
            return [Apply(payload)]
        if number < self._next:
            # A publisher never says a number twice: another one has its place.
            self._waiting = {number: payload}
            steps = self._reset()
            self._next = 0
            return [*steps, *self._ask()] if self._replays else [*steps, *self._settle()]
        self.gaps += 1
        self._waiting = {number: payload}
        return self._ask() if self._replays else self._settle()

    def replayed(self, number: int, payload: bytes) -> list[Step]:
        """A batch came in answer to a replay; they come in order."""
        if self._line is not Line.REPLAYING or number < self._next:
            return []
        steps: list[Step] = []
        if number > self._next:
            # What lies between is not kept any more. At the very beginning nothing is known that could be void.
            if self._next > 0:
                steps += self._reset()
            self._next = number
        self._next += 1
        return [*steps, Apply(payload)]

    def replay_ended(self) -> list[Step]:
        """All that the publisher keeps was said, or it did not answer."""
        if self._line is not Line.REPLAYING:
            return []
        self._line = Line.LIVE
        return self._settle()

    def restarted(self) -> list[Step]:
        """The engine behind the publisher is another one now."""
        self._waiting.clear()
        steps = self._reset()
        self._next = 0
        self._line = Line.LIVE
        return steps

    def _ask(self) -> list[Step]:
        self._line = Line.REPLAYING
        return [Replay(self._next)]

    def _settle(self) -> list[Step]:
        """Apply what waited; a hole that is left makes what was before it void."""
        steps: list[Step] = []
        for number in sorted(self._waiting):
            if number < self._next:
                continue
            if number > self._next and self._next > 0:
                steps = self._reset()  # nothing before the hole matters, what was to be applied included
            self._next = number + 1
            steps.append(Apply(self._waiting[number]))
        self._waiting.clear()
        return steps

    def _reset(self) -> list[Step]:
        self.resets += 1
        return [Reset()]
