"""Paging: which cached prefixes leave a full cache, where they go, and when rather not. Pure; prices are handed in.

A prefix that will be evicted anyway can be moved while it is still there. That is worth something when it comes back:

    worth = (P_later − P_soon) · (recompute − return) − out        milliseconds, per byte that is moved

P_later is the chance that it is used again within the horizon for which a page is likely to be kept, P_soon the chance
that it is within the time in which paging it only disturbs (``quartet_core.reuse``); recompute is the prefill that is
saved, return the cheaper of moving it back and of running its next turn where it is, out the time on the link. A
millisecond on a link counts as one of prefill. Nothing is moved that can be computed in the time that both ways take.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

from msgspec import Struct


class Watermarks:
    """Whether too few blocks are empty, with hysteresis: from below ``low`` on, until ``high`` is reached.

    Both are shares of all blocks. Raises ``ValueError`` unless 0 <= low < high <= 1.
    """

    __slots__ = ("_high", "_low", "pressed")

    def __init__(self, low: float, high: float) -> None:
        if not 0.0 <= low < high <= 1.0:
            raise ValueError(f"watermarks are shares with low < high, not {low} and {high}")
        self._low, self._high = low, high
        self.pressed = False

    def look(self, empty_blocks: int, total_blocks: int) -> bool:
        """Take how many blocks are empty now; return whether too few are."""
        share = empty_blocks / total_blocks
        self.pressed = share < self._low or (self.pressed and share < self._high)
        return self.pressed


def missing_blocks(high: float, empty_blocks: int, total_blocks: int) -> int:
    """How many blocks must still come free until a share of ``high`` is empty."""
    return max(math.ceil(high * total_blocks) - empty_blocks, 0)


class Cold(Struct, frozen=True):
    """A prefix as its worker tells of it (``quartet_bus.messages.ColdPrefix``)."""

    prefix: int
    tokens: int
    idle_ms: float
    uses: int = 0
    paged: int = 0


class Offer(Struct, frozen=True):
    """A place for pages: room, and what one page takes to get there, to come back, and to be used where it is.

    ``here_ms`` is how much longer the next turn takes there than at the source; infinite where nothing is computed.
    ``displaces``: older pages would have to make room.
    """

    worker: str
    room_tokens: int
    out_ms: float
    back_ms: float
    here_ms: float = math.inf
    displaces: bool = False

    @property
    def return_ms(self) -> float:
        """What its return costs at best."""
        return min(self.back_ms, self.here_ms)


class PageLimits(Struct, frozen=True):
    """``least_tokens`` and ``least_idle_ms`` of a page; ``horizon_ms`` for P_later, ``soon_ms`` for P_soon."""

    least_tokens: int
    least_idle_ms: float
    horizon_ms: float
    soon_ms: float


class Unpaged(StrEnum):
    """Why a prefix stays where it is: a closed set, fit for a metric's label."""

    SMALL = "small"
    RECENT = "recent"
    GUARDED = "guarded"
    NO_ROOM = "no_room"
    RECOMPUTE = "recompute"
    NOT_WORTH = "not_worth"


class PageOut(Struct, frozen=True):
    """A page that shall leave for ``target``. ``worth_ns_per_byte`` is what orders pages of one worker."""

    cold: Cold
    target: str
    out_ms: float
    worth_ns_per_byte: float


class ThrashGuard:
    """Leaves prefixes alone that come back soon after they were paged out, for longer each time.

    A cycle is from a page-out to the last use of the prefix that came back (by then grown, maybe). After a cycle
    shorter than ``cycle_ms`` the next page-out wants ``guard_ms`` of idle time, after each further one twice as long,
    up to ``MAX_STRIKES`` times; a longer cycle takes one strike back. Remembers ``size`` prefixes.
    """

    MAX_STRIKES = 7

    __slots__ = ("_cycle_ms", "_guard_ms", "_paged", "_size")

    def __init__(self, *, cycle_ms: float, guard_ms: float, size: int = 65_536) -> None:
        self._cycle_ms = cycle_ms
        self._guard_ms = guard_ms
        self._size = size
        self._paged: OrderedDict[int, tuple[float, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._paged)

    def strikes(self, cold: Cold, now_ms: float) -> int:
        """How many short cycles in a row stand against paging it out now."""
        known = self._paged.get(cold.paged) if cold.paged else None
        if known is None:
            return 0
        paged_ms, strikes = known
        short = now_ms - cold.idle_ms - paged_ms < self._cycle_ms
        return min(strikes + 1, self.MAX_STRIKES) if short else max(strikes - 1, 0)

    def wanted_idle_ms(self, cold: Cold, now_ms: float) -> float:
        """How long it must have been idle before it may be paged out."""
        strikes = self.strikes(cold, now_ms)
        return self._guard_ms * 2.0 ** (strikes - 1) if strikes else 0.0

    def paged(self, cold: Cold, now_ms: float) -> None:
        """It is paged out now."""
        strikes = self.strikes(cold, now_ms)
        self._paged.pop(cold.paged, None)
        self._paged.pop(cold.prefix, None)
        self._paged[cold.prefix] = (now_ms, strikes)
        while len(self._paged) > self._size:
            self._paged.popitem(last=False)


class Price(Struct, frozen=True):
    """What a prefix has to do with: the places it could go to, what computing it again takes, and its bytes."""

    offers: Sequence[Offer]
    recompute_ms: float
    kv_bytes: int


def weigh(cold: Cold, price: Price, chance: float) -> PageOut | Unpaged:
    """The best place for ``cold``, or why it stays. ``chance`` is P_later − P_soon.

    The cheapest, where any is worth it, but older pages are displaced only where nothing else is: what they would have
    saved is unknown here, and surely more than an empty block does.
    """
    reason = Unpaged.NO_ROOM
    fitting = [offer for offer in price.offers if offer.room_tokens >= cold.tokens]
    for displaces in (False, True):
        group = [offer for offer in fitting if offer.displaces is displaces]
        if not group:
            continue
        best = min(group, key=lambda offer: offer.out_ms + chance * offer.return_ms)
        worth_ms = chance * (price.recompute_ms - best.return_ms) - best.out_ms
        if price.recompute_ms > best.out_ms + best.return_ms and worth_ms > 0.0:
            return PageOut(cold, best.worker, best.out_ms, worth_ms * 1e6 / price.kv_bytes)
        reason = Unpaged.RECOMPUTE if price.recompute_ms <= best.out_ms + best.return_ms else Unpaged.NOT_WORTH
    return reason


def choose(
    colds: Iterable[Cold], price: Callable[[Cold], Price], returns_within: Callable[[float, float], float],
    guard: ThrashGuard, limits: PageLimits, now_ms: float,
) -> tuple[PageOut | None, dict[int, Unpaged]]:  # fmt: skip
    """The one of ``colds`` that is best paged out now, and why others are not: by prefix.

    ``returns_within(idle_ms, within_ms)`` is the chance of a prefix idle for so long to be used within so long.
    """
    best: PageOut | None = None
    stay: dict[int, Unpaged] = {}
    for cold in colds:
        if cold.tokens < limits.least_tokens:
            stay[cold.prefix] = Unpaged.SMALL
        elif cold.idle_ms < limits.least_idle_ms:
            stay[cold.prefix] = Unpaged.RECENT
        elif cold.idle_ms < guard.wanted_idle_ms(cold, now_ms):
            stay[cold.prefix] = Unpaged.GUARDED
        else:
            soon = returns_within(cold.idle_ms, limits.soon_ms)
            later = returns_within(cold.idle_ms, limits.horizon_ms)
            found = weigh(cold, price(cold), max(later - soon, 0.0))
            if isinstance(found, Unpaged):
                stay[cold.prefix] = found
            elif best is None or found.worth_ns_per_byte > best.worth_ns_per_byte:
                best = found
    return best, stay
