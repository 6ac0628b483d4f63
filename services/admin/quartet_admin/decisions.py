"""Decisions of all routers as they are made, for those who watch."""

from collections import deque

from quartet_bus.messages import RequestEvent

KEPT = 1_024
"""Decisions that a slow watcher may be behind; older ones are dropped, and their number is told."""


class Watcher:
    """One watcher: decisions on ``model`` and ``tenant`` ("" for all) that it has not taken yet."""

    __slots__ = ("_model", "_tenant", "dropped", "waiting")

    def __init__(self, model: str, tenant: str) -> None:
        self._model = model
        self._tenant = tenant
        self.waiting: deque[RequestEvent] = deque()
        self.dropped = 0

    def hear(self, event: RequestEvent) -> None:
        """A decision was made."""
        if self._model in ("", event.model) and self._tenant in ("", event.tenant):
            if len(self.waiting) >= KEPT:
                self.waiting.popleft()
                self.dropped += 1
            self.waiting.append(event)

    def take(self) -> list[RequestEvent]:
        """What came since the last time."""
        taken = list(self.waiting)
        self.waiting.clear()
        return taken


class Decisions:
    """All watchers."""

    def __init__(self) -> None:
        self._watchers: list[Watcher] = []

    def watch(self, model: str, tenant: str) -> Watcher:
        """Begin to watch."""
        watcher = Watcher(model, tenant)
        self._watchers.append(watcher)
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """Watch no more."""
        self._watchers.remove(watcher)

    def hear(self, event: RequestEvent) -> None:
        """A router held, dispatched or rejected a request."""
        for watcher in self._watchers:
            watcher.hear(event)
