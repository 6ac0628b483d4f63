"""Admission: which transfer may send next, on a link and through the root complexes at its ends.

Earliest deadline first; but a smaller transfer goes before a larger one when, with it first, everybody that is due
before it still arrives in time. (Shortest first is best on average, earliest deadline first when time is short: where
there is slack we take the former.) A waiter that cannot be in time any more stands in nobody's way.
"""

from collections.abc import Callable, Sequence

from msgspec import Struct

LOOKED_AT = 32
"""Waiters of a lane that are weighed against each other, the earliest due first."""


class Waiting(Struct, frozen=True):
    """A transfer that is ready to send."""

    transfer: str
    deadline_ns: int
    kv_bytes: int


def first_of(waiting: Sequence[Waiting], now_ns: int, alone_ms: Callable[[int], float]) -> Waiting:
    """Who of ``waiting`` (at least one) sends next; ``alone_ms`` is how long so many bytes take on this lane."""
    due = sorted(waiting, key=lambda each: (each.deadline_ns, each.kv_bytes, each.transfer))[:LOOKED_AT]
    for small in sorted(due, key=lambda each: (each.kv_bytes, each.deadline_ns, each.transfer)):
        if small is due[0] or _in_time(small, due, now_ns, alone_ms):
            return small
    raise ValueError("nobody waits")


def _in_time(small: Waiting, due: Sequence[Waiting], now_ns: int, alone_ms: Callable[[int], float]) -> bool:
    """Whether those due before ``small`` are as much in time with it first as without it."""
    ahead_ns = alone_ms(small.kv_bytes) * 1e6
    clock_ns = float(now_ns)
    for each in due:
        if each is small:
            return True
        without_ns = clock_ns + alone_ms(each.kv_bytes) * 1e6
        if without_ns > each.deadline_ns:
            continue  # late whoever goes first
        if without_ns + ahead_ns > each.deadline_ns:
            return False
        clock_ns = without_ns
    return True


class Root:
    """One direction of one PCIe root complex: what all lanes that begin or end there have on the wire together."""

    __slots__ = ("bytes_in_flight", "gb_per_s", "limit", "sending")

    def __init__(self, gb_per_s: float, limit: int) -> None:
        self.gb_per_s = gb_per_s
        self.limit = limit
        self.sending = 0
        self.bytes_in_flight = 0

    @property
    def full(self) -> bool:
        """Whether no further transfer may send through it."""
        return self.sending >= self.limit

    def begin(self, kv_bytes: int) -> None:
        """A transfer sends."""
        self.sending += 1
        self.bytes_in_flight += kv_bytes

    def end(self, kv_bytes: int) -> None:
        """It does not any more."""
        self.sending -= 1
        self.bytes_in_flight -= kv_bytes

    def ready_ms(self, kv_bytes: int) -> float:
        """When ``kv_bytes`` more would be through, behind all that is on its way."""
        return (self.bytes_in_flight + kv_bytes) / (self.gb_per_s * 1e6)
