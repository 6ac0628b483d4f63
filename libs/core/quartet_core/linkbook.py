"""The links between nodes as the active coordinator last told them: what a router prices transfers with."""

import math
from collections.abc import Mapping

from msgspec import Struct

from quartet_core.links import LINK_CLASSES, LinkClass, Place, best_path, ceiling_gb_per_s, crossing_ms


class PricedLink(Struct):
    """One directed link. ``gb_per_s`` is decimal."""

    kind: str
    gb_per_s: float
    setup_ms: float
    in_flight_bytes: int


class LinkBook:
    """Link prices by (source node, target node, class), and whether a coordinator is alive to use them.

    A table names only links that were used; one that is not named costs what its class says: the row ("", "", class)
    of the table, else ``classes``. ``silence_ms`` is after how long without a table there is no coordinator: no new
    splits start then.
    """

    def __init__(self, silence_ms: float, classes: Mapping[str, LinkClass] = LINK_CLASSES) -> None:
        self._silence_ms = silence_ms
        self._defaults = {name: PricedLink(name, known.gb_per_s, known.setup_ms, 0) for name, known in classes.items()}
        self._links: dict[tuple[str, str, str], PricedLink] = {}
        self._leader: tuple[int, str] = (0, "")
        self._heard_ms = -math.inf

    def hear(self, term: int, coordinator: str, now_ms: float) -> bool:
        """A table arrived; return whether its author is the active coordinator, whose links count."""
        if (term, coordinator) < self._leader and self.live(now_ms):
            return False
        self._leader = (term, coordinator)
        self._heard_ms = now_ms
        return True

    def put(self, source: str, target: str, link: PricedLink) -> None:
        """Take the state of one link, or with source and target "" the figures of a class."""
        self._links[source, target, link.kind] = link

    def clear(self) -> None:
        """Forget all links: a table is a full set."""
        self._links.clear()

    def live(self, now_ms: float) -> bool:
        """Whether a coordinator was heard lately."""
        return now_ms - self._heard_ms <= self._silence_ms

    @property
    def leader(self) -> str:
        """The active coordinator's instance, "" before the first table."""
        return self._leader[1]

    def price_ms(self, source: Place, target: Place, kv_bytes: int) -> tuple[float, str] | None:
        """(milliseconds, link class) of moving ``kv_bytes`` now over the best path of both ends.

        A link's rate is its own, or its class's until it was used; what the cards and NICs at its ends can send and
        take bounds it here. None when no coordinator was ever heard, so that nobody would move a thing; whether one is
        still there is for the caller to ask (`live`).
        """
        if not self._leader[0]:
            return None
        path = best_path(source, target)
        link = self._links.get((source.node, target.node, path))
        if link is None:
            link = self._links.get(("", "", path)) or self._defaults[path]
        gb_per_s = min(link.gb_per_s, ceiling_gb_per_s(path, source, target))
        return crossing_ms(gb_per_s, link.setup_ms, kv_bytes, link.in_flight_bytes), path
