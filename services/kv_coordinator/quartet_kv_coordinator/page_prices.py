"""What a page has to do with: the places it could go to now, and what moving it and computing it again would take."""

import heapq
import math
from collections.abc import Mapping
from functools import lru_cache

from quartet_bus.config.schema import KvSection, ModelSection
from quartet_bus.messages import Role, WorkerInfo
from quartet_core.catalogue import Catalogue, UnknownProfile
from quartet_core.paging import Cold, Offer, Price
from quartet_core.pairing import PAGE, lacking, why_not_pair
from quartet_core.profile import Profile
from quartet_kv_coordinator.lanes import Lanes
from quartet_kv_coordinator.pools import HOST, Pools, Told

TURN_TOKENS = 256
"""New tokens of the turn that a returning conversation brings, for what it costs to run it in another place. (Judged;
what a router then decides counts the real ones.)"""

MAX_OFFERS = 12
"""Workers, and stores, that are priced for each page: those with the most room."""

PAGE_DEADLINE_MS = 30_000.0
"""A page that has not arrived by then is given up: it waits for every transfer that somebody waits for."""

_pairs = lru_cache(maxsize=4096)(why_not_pair)


class PagePrices:
    """Prices for one coordinator. ``promised`` are tokens of pages on their way, by target."""

    def __init__(
        self, pools: Pools, lanes: Lanes, catalogue: Catalogue, models: Mapping[str, ModelSection], config: KvSection,
        promised: Mapping[str, int],
    ) -> None:  # fmt: skip
        self._pools = pools
        self._lanes = lanes
        self._catalogue = catalogue
        self._models = models
        self._high = config.page_high
        self._promised = promised

    def places(self, source: Told, now_ns: int) -> list[tuple[Told, int]]:
        """(worker or store, room in tokens): those that could take pages of ``source`` now, the roomiest of each."""
        info = source.replica.info
        workers: list[tuple[int, str, Told]] = []
        stores: list[tuple[int, str, Told]] = []
        for told in self._pools.others(info.model, info.id, now_ns):
            other = told.replica.info
            room = self.room_tokens(told)
            if room <= 0 or told.replica.place is None or PAGE not in other.capabilities:
                continue
            if other.cordoned or other.role is Role.DECODE:
                continue  # routers look for prefixes where prompts may be computed, and in stores
            if lacking(info, other) is not None or _pairs(info, other) is not None:
                continue
            (stores if told.tier == HOST else workers).append((room, other.id, told))
        found = [*heapq.nlargest(MAX_OFFERS, workers), *heapq.nlargest(MAX_OFFERS, stores)]
        return [(told, room) for room, _, told in found]

    def room_tokens(self, told: Told) -> int:
        """What pages may still be put there: what is empty above the high mark, less what is on its way. A store's idle
        blocks are room, too: they are nothing but older pages."""
        if told.tier == HOST:
            return self._empty_tokens(told) + told.state.idle_blocks * told.block_tokens
        return self._empty_tokens(told) - math.ceil(self._high * told.state.total_blocks) * told.block_tokens

    def _empty_tokens(self, told: Told) -> int:
        return told.state.empty_blocks * told.block_tokens - self._promised.get(told.state.worker, 0)

    def price(self, source: Told, places: list[tuple[Told, int]], cold: Cold, now_ns: int) -> Price | None:
        """Of one prefix; None where nobody knows how fast the source computes."""
        info, place = source.replica.info, source.replica.place
        profile = self._profile(info)
        if profile is None or place is None:
            return None
        kv_bytes = cold.tokens * info.layout.bytes_per_token
        deadline_ns = now_ns + int(PAGE_DEADLINE_MS * 1e6)
        turn_ms = profile.prefill_ms(cold.tokens, TURN_TOKENS)
        offers = []
        for told, room in places:
            target = told.replica.place
            assert target is not None  # looked at in ``places``
            theirs = None if told.tier == HOST else self._profile(told.replica.info)
            here_ms = math.inf if theirs is None else max(theirs.prefill_ms(cold.tokens, TURN_TOKENS) - turn_ms, 0.0)
            offers.append(
                Offer(
                    worker=told.replica.info.id,
                    room_tokens=room,
                    out_ms=self._lanes.look(place, target).predict_ms(kv_bytes, deadline_ns),
                    back_ms=self._lanes.look(target, place).predict_ms(kv_bytes, deadline_ns),
                    here_ms=here_ms,
                    displaces=self._empty_tokens(told) < cold.tokens,
                )
            )
        return Price(offers, _recompute_ms(profile, 0, cold.tokens), kv_bytes)

    def recompute_ms(self, source: Told, held: int, new: int) -> float:
        """What computing ``new`` tokens behind ``held`` ones takes at the source; 0 where nobody knows."""
        profile = self._profile(source.replica.info)
        return 0.0 if profile is None else _recompute_ms(profile, held, new)

    def _profile(self, info: WorkerInfo) -> Profile | None:
        served = self._models.get(info.model)
        try:
            return self._catalogue.profile(
                info.hardware, served.spec if served is not None else info.model, info.precision, info.tp
            )
        except UnknownProfile:
            return None


def _recompute_ms(profile: Profile, held: int, new: int) -> float:
    """As in ``quartet_core.links.choose``: the returning turn is prefilled in any case."""
    return max(profile.prefill_ms(held, new) - profile.a_ms, 0.0)
