"""Containment: long prefills keep to a share of the workers, so that everybody else finds one without.

An engine that computes a cold prompt of 100k tokens is busy with it for seconds, and whoever comes after it waits. A
prefill is *long* on a worker where what is not cached takes more than ``long_ms`` to compute. When ``share`` of a
model's workers have long prefills ahead, further ones go to these same workers, and wait there for one another; nobody
is refused or kept back for it. A fleet whose requests are all long has nobody to protect: then nothing is contained.
"""

from quartet_core.fleet import Fleet, Kind
from quartet_core.ledger import Ledger
from quartet_core.plan import Ask, Candidates

OTHERS_MS = 10_000.0
"""So long after the last request that is not long, there may be more of them: they are protected."""


class Containment:
    """Takes workers out of the candidates for a long prefill. ``ledger`` knows who has long prefills ahead."""

    def __init__(self, fleet: Fleet, ledger: Ledger, *, long_ms: float, share: float) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._long_ms = long_ms
        self._share = share
        self._short: dict[str, tuple[int, int]] = {}  # by model: of how many kinds, and which prompts are long on none
        self._others_ms: dict[str, float] = {}

    def contain(self, ask: Ask, candidates: Candidates) -> None:
        """Leave in ``candidates`` only who may take this prompt. The last one is never taken out."""
        kinds = self._fleet.kinds_of[ask.model]
        short = self._short.get(ask.model)
        if short is None or short[0] != len(kinds):
            short = self._short[ask.model] = len(kinds), min(map(self._longest_short, kinds))
        long = self._long(ask, candidates, kinds) if ask.prompt_tokens > short[1] else 0
        if not long:
            self._others_ms[ask.model] = ask.at_ms
            return
        fleet = self._fleet
        workers = fleet.serving[ask.model] & (fleet.up | fleet.suspect | fleet.frozen) & fleet.prefills
        occupied = self._ledger.long & workers
        if occupied.bit_count() < max(1, int(self._share * workers.bit_count())) or not self._others(workers, ask):
            return
        barred = long ^ (long & occupied)
        whole = candidates.whole ^ (candidates.whole & barred)
        prefill = candidates.prefill ^ (candidates.prefill & barred)
        if prefill == candidates.prefill or not prefill or (candidates.whole and not whole):
            return
        candidates.whole, candidates.prefill = whole, prefill
        candidates.holders = [(cached, plane & prefill) for cached, plane in candidates.holders if plane & prefill]
        candidates.left = (*candidates.left, prefill.bit_count())

    def _others(self, workers: int, ask: Ask) -> bool:
        """Whether these workers had requests that are not long lately."""
        serving = self._fleet.serving
        return any(
            ask.at_ms - at_ms <= OTHERS_MS and serving.get(model, 0) & workers
            for model, at_ms in self._others_ms.items()
        )

    def _long(self, ask: Ask, candidates: Candidates, kinds: list[Kind]) -> int:
        """The candidates on which this prompt is a long prefill."""
        rest = candidates.prefill
        long = 0
        for cached, holders in (*candidates.holders, (0, rest)):
            plane = holders & rest
            rest ^= plane
            for kind in kinds:
                there = kind.plane & plane
                if there and kind.profile.prefill_ms(cached, ask.prompt_tokens - cached) > self._long_ms:
                    long |= there
        return long

    def _longest_short(self, kind: Kind) -> int:
        """The longest prompt, in tokens, whose prefill is not long on a kind, however little of it is cached."""
        low, high = 0, kind.max_context
        while low < high:
            middle = (low + high + 1) // 2
            if kind.profile.prefill_ms(0, middle) > self._long_ms:
                high = middle - 1
            else:
                low = middle
        return low
