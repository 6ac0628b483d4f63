"""Names of requests: the caller's own where possible, never one that is already somebody else's."""

import random
import re

_SANE = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
"""What the bus takes as a request id (``quartet_bus.headers``)."""

REMEMBERED = 16_384


class RequestIds:
    """Chooses the id under which a request travels.

    A caller's ``X-Request-Id`` is taken as it is, once: on the bus an id names one request (a second one would be taken
    for a resend, and a cancel would end both), so one that this gateway saw among its last ``remembered`` gets a
    random ending. The answer's ``x-request-id`` says which id it became.
    """

    def __init__(self, random: random.Random, *, remembered: int = REMEMBERED) -> None:
        self._random = random
        self._remembered = remembered
        self._seen: dict[tuple[str, str], None] = {}

    def fresh(self) -> str:
        """A new id."""
        return f"req-{self._random.getrandbits(128):032x}"

    def choose(self, tenant: str, wanted: str | None) -> str:
        """The id of a request for which ``tenant`` wants the name ``wanted`` (None, or not sane: a new one)."""
        if wanted is None or not _SANE.fullmatch(wanted):
            return self.fresh()
        if (tenant, wanted) in self._seen:
            return f"{wanted[:100]}-{self._random.getrandbits(64):016x}"
        self._seen[tenant, wanted] = None
        if len(self._seen) > self._remembered:
            del self._seen[next(iter(self._seen))]
        return wanted
