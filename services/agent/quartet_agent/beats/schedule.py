"""When to beat: slots at fixed distances from a fixed origin, without drift and without bursts."""


class Schedule:
    """Slots every ``interval_ns`` from ``origin_ns`` on, each beaten at most once and none made up for."""

    __slots__ = ("_interval_ns", "_origin_ns", "_slot", "skipped")

    def __init__(self, origin_ns: int, interval_ns: int) -> None:
        self._origin_ns = origin_ns
        self._interval_ns = interval_ns
        self._slot = 0
        self.skipped = 0
        """Slots that had passed before anyone could beat in them."""

    def next_ns(self, now_ns: int) -> int:
        """When to beat next: at the first slot after the last one given that is not over at ``now_ns``.

        A sleeper that wakes up within its slot's interval is on time; one that overslept whole slots has lost them.
        """
        current = (now_ns - self._origin_ns) // self._interval_ns
        slot = max(self._slot + 1, current)
        self.skipped += slot - self._slot - 1
        self._slot = slot
        return self._origin_ns + slot * self._interval_ns
