"""Hard filters: which workers may be thought of at all for a request, before any policy weighs them.

Filters that say "must" (model, alive, accepting, not tried yet, context length) may leave nobody; filters that say
"should" (not suspect, enough free KV, long prompts to long-context classes and not to workers at a limit) never take
the last candidate.
"""

from quartet_core.affinity import AffinityTable
from quartet_core.fleet import Fleet, Kind, free_kv_needed
from quartet_core.ladder import covered_tokens
from quartet_core.plan import Ask, Candidates, Reason
from quartet_core.word import free_kv_fraction, free_kv_level


class Filters:
    """Applies the filters, in one order, to one fleet.

    ``long_prompt_tokens`` is above how many *uncached* tokens a prompt is long: a worker that holds most of a long
    prompt is not asked to compute a long prompt.
    """

    def __init__(self, fleet: Fleet, affinity: AffinityTable, *, long_prompt_tokens: int) -> None:
        self._fleet = fleet
        self._affinity = affinity
        self._long_prompt_tokens = long_prompt_tokens

    def candidates(self, ask: Ask) -> Candidates | Reason:
        """The workers left for ``ask``, or the reason why there are none."""
        fleet = self._fleet
        serving = fleet.serving.get(ask.model)
        if serving is None:
            return Reason.UNKNOWN_MODEL
        left = {"model": serving.bit_count()}
        alive = serving & (fleet.up | fleet.suspect | fleet.frozen)
        left["alive"] = alive.bit_count()
        if not alive:
            return Reason.NO_WORKER
        fits, roomy, long_context = self._by_kind(ask, alive)
        left["context"] = fits.bit_count()
        if not fits:
            return Reason.TOO_LONG
        free = fits & fleet.accepting & fleet.open & ~ask.excluded
        left["accepting"] = free.bit_count()
        if not free:
            return Reason.ALL_BUSY if fits & ~ask.excluded else Reason.NO_WORKER
        for name, plane in (("healthy", fleet.up), ("free_kv", roomy)):
            free = free & plane or free
            left[name] = free.bit_count()
        holders = [
            (min(covered_tokens(rung), ask.prompt_tokens - 1), plane)
            for rung, plane in self._affinity.deepest(ask.sketch, free & fleet.prefills)
        ]
        if ask.prompt_tokens > self._long_prompt_tokens:
            free, holders = self._long(ask, free, holders, long_context)
            left["long_prompt"] = free.bit_count()
        return Candidates(
            whole=free & fleet.prefills & fleet.decodes,
            prefill=free & fleet.prefills,
            decode=fits & roomy & fleet.up & fleet.accepting & fleet.open & fleet.decodes & ~ask.excluded,
            holders=holders,
            left=left,
        )

    def _by_kind(self, ask: Ask, alive: int) -> tuple[int, int, int]:
        """Workers whose context fits the request, those whose free KV does too, and the long-context ones."""
        fits = roomy = long_context = 0
        need = ask.prompt_tokens + ask.output_tokens
        for kind in self._fleet.kinds:
            plane = kind.plane & alive
            if not plane or ask.prompt_tokens >= kind.max_context or ask.prompt_tokens >= kind.kv_tokens:
                continue
            fits |= plane
            short = self._fleet.planes.at_most("free_kv", _least_level(kind, need) - 1)
            roomy |= plane & ~short
            if kind.long_context:
                long_context |= plane
        return fits, roomy, long_context

    def _long(
        self, ask: Ask, free: int, holders: list[tuple[int, int]], long_context: int
    ) -> tuple[int, list[tuple[int, int]]]:
        """Take workers out that would have to compute a long prompt and should not."""
        enough_cached = 0
        for cached, plane in holders:
            if ask.prompt_tokens - cached <= self._long_prompt_tokens:
                enough_cached |= plane
        kept = free & (enough_cached | long_context & ~self._fleet.strained)
        kept = kept or free & long_context or free & ~self._fleet.strained or free
        return kept, [(cached, plane & kept) for cached, plane in holders if plane & kept]


def _least_level(kind: Kind, tokens: float) -> int:
    """The least free-KV level that surely has room for ``tokens``."""
    share = min(free_kv_needed(kind, int(tokens)), 1.0)
    level = free_kv_level(share)
    return level if free_kv_fraction(level) >= share else level + 1
