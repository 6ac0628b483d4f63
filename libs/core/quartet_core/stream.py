"""The receiving end of a stream: which of a request's tries is kept, when it is whole, and when to send again.

A stream is (id, attempt, try): ``attempt`` counts the client's sends and ``try`` the dispatches that the router made of
one of them, both from 1. Several may run at once, because silence never proves that nobody works. The first that
delivers a chunk (or ends) is kept and the others are cancelled. ``seq`` counts the frames of one try from 0; frames of
routers have none.

The receiver knows no clock, no bytes and no bus: it is told of frames and of time, and answers with a ``Step``.
"""

from enum import Enum, auto

SILENCE_MS = 2000.0
"""An agent or router says something every second until the end; twice that is silence."""

MAX_ATTEMPTS = 3

MAX_TRIES = 32
"""Tries whose frames are followed, far more than routers make of three attempts; further ones are ignored."""


class Kind(Enum):
    """What a frame is to the receiver. ``SIGN`` is any sign of life: held, accepted, alive."""

    SIGN = auto()
    CHUNK = auto()
    END = auto()
    ERROR = auto()
    STOPPING = auto()
    """A router gives the request back because it stops; another router may take it."""


class Step(Enum):
    """What the owner of the receiver does next."""

    NOTHING = auto()
    DELIVER = auto()
    """Hand the chunk on."""
    DONE = auto()
    """The answer is whole."""
    REFUSED = auto()
    """The request failed with the error of this frame."""
    RESEND = auto()
    """Send the request again, as attempt ``StreamReceiver.attempt``, on a fresh inbox."""
    GAP = auto()
    """A frame of the answer was lost on its way: the request failed."""
    LOST = auto()
    """Nobody answers any more: the request failed."""
    EXPIRED = auto()
    """The request's deadline passed: it failed."""


class StreamReceiver:
    """Follows one request from its first send, at ``now_ms``, to its end.

    ``deadline_ms`` is a time on the same clock as ``now_ms``, None for none. Of the steps DONE, REFUSED, GAP, LOST and
    EXPIRED exactly one is answered, once; afterwards everything is answered with NOTHING.
    """

    __slots__ = (
        "_cancels",
        "_deadline_ms",
        "_expected",
        "_heard_ms",
        "_max_attempts",
        "_silence_ms",
        "attempt",
        "kept",
        "over",
    )

    def __init__(
        self,
        now_ms: float,
        *,
        deadline_ms: float | None = None,
        silence_ms: float = SILENCE_MS,
        max_attempts: int = MAX_ATTEMPTS,
    ) -> None:
        self.attempt = 1
        """The newest attempt."""
        self.kept: tuple[int, int] | None = None
        """(attempt, try) of the stream whose chunks are delivered."""
        self.over = False
        self._heard_ms = now_ms
        self._deadline_ms = deadline_ms
        self._silence_ms = silence_ms
        self._max_attempts = max_attempts
        # The next seq of every try heard of; None once it is cancelled or has a gap.
        self._expected: dict[tuple[int, int], int | None] = {}
        self._cancels: list[tuple[int, int]] = []

    @property
    def due_ms(self) -> float:
        """When ``tick`` has something to do unless a frame comes before."""
        silent_ms = self._heard_ms + self._silence_ms
        return silent_ms if self._deadline_ms is None else min(silent_ms, self._deadline_ms)

    def take_cancels(self) -> list[tuple[int, int]]:
        """(attempt, try) of the streams to cancel since the last call; try 0 is all tries of the attempt."""
        cancels, self._cancels = self._cancels, []
        return cancels

    def hear(self, kind: Kind, attempt: int, try_: int, seq: int | None, now_ms: float) -> Step:
        """A frame came."""
        key = (attempt, try_)
        if self.over or not 1 <= attempt <= self.attempt:
            return Step.NOTHING
        if key not in self._expected and len(self._expected) >= MAX_TRIES:
            return Step.NOTHING
        if self.kept is not None and key != self.kept:
            self._give_up(key)
            return Step.NOTHING
        expected = self._expected.setdefault(key, 0)
        if expected is None:
            return Step.NOTHING
        if seq is not None:
            if seq < expected:
                return Step.NOTHING
            if seq > expected:
                return self._gap(key, now_ms)
            self._expected[key] = seq + 1
        self._heard_ms = now_ms
        if kind is Kind.SIGN:
            return Step.NOTHING
        if kind is Kind.ERROR:
            return self._refused(key)
        if kind is Kind.STOPPING:
            return self._given_back(key, now_ms)
        if self.kept is None:
            self._keep(key)
        if kind is Kind.CHUNK:
            return Step.DELIVER
        return self._finish(Step.DONE)

    def next_chunk(self, attempt: int, try_: int, seq: int, now_ms: float) -> bool:
        """Whether a chunk is the one that is due of the stream that is kept; if so, it was heard, and is to be
        delivered. If not, ``hear`` says what it is. Nearly every frame is this one."""
        key = self.kept
        if key is None or self.over or key[0] != attempt or key[1] != try_ or self._expected[key] != seq:
            return False
        self._expected[key] = seq + 1
        self._heard_ms = now_ms
        return True

    def tick(self, now_ms: float) -> Step:
        """Time passed; call it at ``due_ms``, or whenever."""
        if self.over:
            return Step.NOTHING
        if self._deadline_ms is not None and now_ms >= self._deadline_ms:
            return self._finish(Step.EXPIRED)
        if now_ms - self._heard_ms < self._silence_ms:
            return Step.NOTHING
        return self._finish(Step.LOST) if self.kept is not None else self._again(now_ms, Step.LOST)

    def _again(self, now_ms: float, otherwise: Step) -> Step:
        if self.attempt >= self._max_attempts:
            return self._finish(otherwise)
        self.attempt += 1
        self._heard_ms = now_ms
        return Step.RESEND

    def _gap(self, key: tuple[int, int], now_ms: float) -> Step:
        """Something of this try is missing. Before the first chunk that hurts nobody but the try."""
        if self.kept is not None:
            return self._finish(Step.GAP)
        self._give_up(key)
        return Step.NOTHING if self._superseded(key) else self._again(now_ms, Step.GAP)

    def _refused(self, key: tuple[int, int]) -> Step:
        if self.kept is None and self._superseded(key):
            return Step.NOTHING
        return self._finish(Step.REFUSED)

    def _given_back(self, key: tuple[int, int], now_ms: float) -> Step:
        """The router stops. Before the first chunk the request is sent again, as after silence but at once."""
        if self.kept is not None:
            return self._finish(Step.REFUSED)
        if self._superseded(key):
            return Step.NOTHING
        if self._deadline_ms is not None and now_ms >= self._deadline_ms:
            return self._finish(Step.EXPIRED)
        return self._again(now_ms, Step.REFUSED)

    def _superseded(self, key: tuple[int, int]) -> bool:
        """Whether something newer is on its way, so that what this try says is not the last word."""
        attempt, try_ = key
        return attempt < self.attempt or any(a == attempt and t > try_ > 0 for a, t in self._expected)

    def _keep(self, key: tuple[int, int]) -> None:
        self.kept = key
        self._cancels += [(attempt, 0) for attempt in range(1, self.attempt + 1) if attempt != key[0]]
        for other in list(self._expected):
            if other[0] == key[0] and other != key:
                self._give_up(other)

    def _give_up(self, key: tuple[int, int]) -> None:
        if self._expected.get(key, 0) is not None:
            self._expected[key] = None
            self._cancels.append(key)

    def _finish(self, step: Step) -> Step:
        self.over = True
        return step
