"""Cancels of streams that are not here (yet): they may overtake their dispatch, so they are remembered for a while."""

from collections import OrderedDict

from quartet_bus.messages import Cancel, StreamId

REMEMBER_S = 10.0
MAX_REMEMBERED = 65_536

_Key = tuple[str, str, int, int]


class CancelMemory:
    """The cancels of the last ten seconds, at most ``max_remembered``; one without a tenant is for any tenant."""

    def __init__(self, *, remember_s: float = REMEMBER_S, max_remembered: int = MAX_REMEMBERED) -> None:
        self._remember_s = remember_s
        self._max = max_remembered
        self._until_s: OrderedDict[_Key, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until_s)

    def remember(self, cancel: Cancel, now_s: float) -> None:
        """Take a cancel heard at ``now_s``."""
        key = (cancel.tenant, cancel.id, cancel.attempt, cancel.try_ if cancel.attempt else 0)
        self._until_s[key] = now_s + self._remember_s
        self._until_s.move_to_end(key)
        while self._until_s and (len(self._until_s) > self._max or next(iter(self._until_s.values())) <= now_s):
            self._until_s.popitem(last=False)

    def covers(self, tenant: str, stream: StreamId, now_s: float) -> bool:
        """Whether ``stream`` was cancelled: by its try, its attempt, or altogether."""
        return any(
            self._until_s.get((who, stream.id, attempt, try_), 0.0) > now_s
            for who in ("", tenant)
            for attempt, try_ in ((stream.attempt, stream.try_), (stream.attempt, 0), (0, 0))
        )


def matches(cancel: Cancel, tenant: str, stream: StreamId) -> bool:
    """Whether ``cancel`` means ``stream``: attempt 0 means every attempt, try 0 every try of the attempt."""
    if cancel.id != stream.id or cancel.tenant not in ("", tenant):
        return False
    return cancel.attempt == 0 or (cancel.attempt == stream.attempt and cancel.try_ in (0, stream.try_))
