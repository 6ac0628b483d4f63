"""The hold queue: requests that wait at the router because a better worker frees soon.

Earliest deadline first within a priority, and in the order of arrival among equals, however often a request is taken
out, looked at and put back. A hold always ends: by a dispatch, at its ``until_ms``, or by a cancel. The
deadline is absolute, so a request gains rank as it ages. Bounded in requests and bytes.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from msgspec import Struct

HoldKey = tuple[str, str, int]
"""(tenant, request id, attempt): how a held request is known."""


class Held(Struct, order=True):
    """A held request. ``rank`` orders; ``body_bytes`` is what it costs to keep, ``work_ms`` what it costs to run."""

    rank: tuple[int, float, int]
    key: HoldKey
    model: str
    since_ms: float
    until_ms: float
    body_bytes: int
    work_ms: float


class HoldQueue:
    """All held requests, by model. ``max_requests`` and ``max_bytes`` bound them together."""

    def __init__(self, *, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._by_model: dict[str, list[Held]] = {}
        self._by_key: dict[HoldKey, Held] = {}
        self._until: list[tuple[float, HoldKey]] = []
        self._backlog_ms: dict[str, float] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: HoldKey) -> bool:
        return key in self._by_key

    def put(
        self, key: HoldKey, model: str, *, priority: int, deadline_ms: float, arrival: int, now_ms: float,
        until_ms: float, body_bytes: int, work_ms: float = 0.0,
    ) -> bool:  # fmt: skip
        """Hold a request; return False when there is no room, or it is held already.

        ``arrival`` numbers the caller's requests, each with a number of its own. ``work_ms`` is its predicted prefill.
        """
        if key in self._by_key or len(self) >= self._max_requests or self.bytes + body_bytes > self._max_bytes:
            return False
        self._backlog_ms[key[0]] = self._backlog_ms.get(key[0], 0.0) + work_ms
        held = Held((-priority, deadline_ms, arrival), key, model, now_ms, until_ms, body_bytes, work_ms)
        insort(self._by_model.setdefault(model, []), held)
        insort(self._until, (until_ms, key))
        self._by_key[key] = held
        self.bytes += body_bytes
        return True

    def backlog_ms(self, tenant: str) -> float:
        """The predicted prefill that a tenant has waiting."""
        return self._backlog_ms.get(tenant, 0.0)

    def take(self, key: HoldKey) -> Held | None:
        """End a hold; None when it is not held."""
        held = self._by_key.pop(key, None)
        if held is None:
            return None
        queue = self._by_model[held.model]
        del queue[bisect_left(queue, held)]
        if not queue:
            del self._by_model[held.model]
        del self._until[bisect_left(self._until, (held.until_ms, key))]
        self.bytes -= held.body_bytes
        left_ms = self._backlog_ms.get(key[0], 0.0) - held.work_ms
        if left_ms > 1e-6:
            self._backlog_ms[key[0]] = left_ms
        else:
            self._backlog_ms.pop(key[0], None)
        return held

    def first(self, model: str, most: int) -> list[Held]:
        """The up to ``most`` holds of a model that come first."""
        return self._by_model.get(model, [])[:most]

    def __iter__(self) -> Iterator[HoldKey]:
        """The keys of all held requests."""
        return iter(list(self._by_key))

    def due(self, now_ms: float) -> list[Held]:
        """Holds whose time is over, which the caller now ends."""
        end = bisect_left(self._until, (now_ms, ("\U0010ffff", "", 0)))
        return [self._by_key[key] for _, key in self._until[:end]]
