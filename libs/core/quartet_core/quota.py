"""Quotas: what a tenant may use in a minute, divided among the gateways that are alive.

A quota counts over a sliding minute: no sixty seconds hold more than the limit. Several gateways share it by *claims*.
Once a second each takes a part of what nobody has used or claimed, and tells the others; until its next turn it admits
no more than it took. Parts follow demand, what was refused included, so that a tenant whose connections all end at one
gateway gets nearly the whole limit there; and a small even part remains for each, so that a first request finds some.
Claims are told before they are used, and each divides by what all have told, itself included: gateways that hear each
other never admit more than the limit together.

Time comes in as whole seconds of any steady clock; no two gateways' clocks are compared.
"""

from collections import deque
from collections.abc import Mapping

from msgspec import Struct

WINDOW_S = 60
EVEN = 0.2
"""The part of what is left that is divided evenly, whatever the demand."""

TURN_S = 1.0
"""How often a gateway takes its turn."""

ELSEWHERE_S = 5.0
"""When to try again what waits for use at other gateways, of which only the sum is known."""


class Claim(Struct, frozen=True, array_like=True):
    """What one gateway says of one quota at its turn.

    ``used`` is of the last minute, ``taken`` is for the coming second. ``asked`` is what callers wanted in the last
    minute, and ``wanted`` the largest single use that was refused since the turn before, 0 for none.
    """

    used: int
    taken: int
    asked: int
    wanted: int


class Minute:
    """A sum over the last minute, in slots of a second."""

    __slots__ = ("_slots", "total")

    def __init__(self) -> None:
        self.total = 0
        self._slots: deque[list[int]] = deque()

    def add(self, amount: int, now_s: int) -> None:
        """Count ``amount`` in the second ``now_s``, which is not before any earlier one."""
        self.forget(now_s)
        if self._slots and self._slots[-1][0] == now_s:
            self._slots[-1][1] += amount
        else:
            self._slots.append([now_s, amount])
        self.total += amount

    def correct(self, change: int, at_s: int) -> None:
        """Change what was counted in the second ``at_s`` by ``change``, if that second still counts."""
        for slot in reversed(self._slots):
            if slot[0] == at_s:
                slot[1] += change
                self.total += change
                return

    def forget(self, now_s: int) -> None:
        """Let go of what is older than a minute. A second that was cut by the minute's edge still counts whole."""
        while self._slots and self._slots[0][0] < now_s - WINDOW_S:
            self.total -= self._slots.popleft()[1]

    def wait_s(self, amount: float, now_s: int) -> float | None:
        """Seconds until ``amount`` less is counted, None when less than that is."""
        freed = 0.0
        for second, counted in self._slots:
            freed += counted
            if freed >= amount:
                return max(1.0, float(second + WINDOW_S + 1 - now_s))
        return None


def divide(left: int, claims: Mapping[str, Claim]) -> dict[str, float]:
    """Divide ``left`` among the gateways of ``claims``; whoever sees the same claims divides alike.

    When nobody's part is enough for the single use that it wants, whoever has most demand takes what it wants first:
    else two gateways that want more than half of a quota would wait for each other for ever.
    """
    left = max(0, left)
    asked = sum(claim.asked for claim in claims.values())
    parts = {
        name: left * (EVEN / len(claims) + ((1 - EVEN) * claim.asked / asked if asked else (1 - EVEN) / len(claims)))
        for name, claim in claims.items()
    }
    wanting = [name for name, claim in claims.items() if 0 < claim.wanted <= left]
    if not wanting or any(parts[name] >= claims[name].wanted for name in wanting):
        return parts
    first = min(wanting, key=lambda name: (-claims[name].asked, name))
    rest = left - claims[first].wanted
    return {name: claims[first].wanted if name == first else rest / (len(claims) - 1) for name in claims}


class Quota:
    """One limit (``limit`` a minute) of one tenant, as the gateway ``name`` keeps it."""

    __slots__ = ("_asked", "_claims", "_taken", "_told", "_used", "_wanted", "limit", "name")

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.limit = limit
        self._used = Minute()
        self._asked = Minute()
        self._wanted = 0
        self._taken = 0
        self._claims: dict[str, Claim] = {}
        self._told = Claim(0, 0, 0, 0)

    def ask(self, amount: int, now_s: int) -> float | None:
        """Use ``amount`` now: None when it was admitted, else the seconds after which it may be.

        More than the whole limit is never admitted; look at ``limit`` before.
        """
        self._used.forget(now_s)
        self._asked.add(min(amount, self.limit), now_s)
        mine = self._taken if self._claims else self.limit - self._used.total
        if amount <= mine:
            self._used.add(amount, now_s)
            self._taken = max(0, mine - amount)
            return None
        self._wanted = max(self._wanted, amount)
        over = amount - (self.limit - self._used.total - sum(claim.used for claim in self._claims.values()))
        if over <= 0:  # it is there, but not ours before our next turn
            return TURN_S
        return self._used.wait_s(over, now_s) or ELSEWHERE_S

    def settle(self, used: int, asked: int, at_s: int, now_s: int) -> None:
        """What was admitted as ``asked`` in the second ``at_s`` came to ``used``.

        What was not used is given back; what was used in excess counts from now on, as it was not foreseen then.
        """
        if used <= asked:
            self._used.correct(used - asked, at_s)
        else:
            self._used.add(used - asked, now_s)
            self._taken = max(0, self._taken - (used - asked))

    def turn(self, claims: Mapping[str, Claim], now_s: int) -> Claim:
        """Take this gateway's part for the coming second; ``claims`` are those of the others that are alive."""
        self._used.forget(now_s)
        self._asked.forget(now_s)
        self._claims = dict(claims)
        left = self.limit - self._used.total - sum(claim.used + claim.taken for claim in claims.values())
        # Whole units: the small parts that idle gateways keep would else make the last unit nobody's.
        self._taken = int(divide(left, {**claims, self.name: self._told})[self.name])
        self._told = Claim(self._used.total, self._taken, self._asked.total, self._wanted)
        self._wanted = 0
        return self._told

    def remaining(self, now_s: int) -> int:
        """What this gateway would admit now."""
        self._used.forget(now_s)
        return max(0, self._taken if self._claims else self.limit - self._used.total)

    def full_after_s(self, now_s: int) -> float:
        """Seconds until all that this gateway counted is forgotten."""
        self._used.forget(now_s)
        return self._used.wait_s(self._used.total, now_s) or 0.0 if self._used.total > 0 else 0.0
