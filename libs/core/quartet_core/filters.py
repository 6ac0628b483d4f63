"""Hard filters: which workers may be thought of at all for a request, before any policy weighs them.

Filters that say "must" (model, alive, accepting, not tried yet, context length, or embeddings where they are asked)
may leave nobody; filters that say "should" (not suspect, enough free KV, long prompts to long-context classes and not
to workers at a limit) never take the last candidate.
"""

from quartet_core.affinity import AffinityTable
from quartet_core.fleet import Fleet
from quartet_core.ladder import covered_tokens
from quartet_core.plan import Ask, Candidates, Reason
from quartet_core.roster import Roster, Rosters
from quartet_core.word import free_kv_level_for

_GRAIN, _MAX_PROBES = 24, 14
"""Cached depths are told apart to 1/24 of the prompt, of prompts above 49k tokens to the ladder's longest step, with at
most so many probes. On the session trace what is then decided is what a look at every rung would have decided
(``docs/affinity.md``, column "looking at every rung")."""


EMBEDDINGS = "embeddings"
"""The capability of a worker whose engine answers ``/v1/embeddings``."""


class Filters:
    """Applies the filters, in one order, to one fleet.

    Both limits are of *uncached* tokens: a worker that holds most of a long prompt is not asked to compute a long one.
    Above ``long_prompt_tokens`` a worker at a limit (heat or power, PCIe, memory) takes none, above
    ``long_context_tokens`` only classes for long contexts do.
    """

    def __init__(
        self, fleet: Fleet, affinity: AffinityTable, *, long_prompt_tokens: int, long_context_tokens: int
    ) -> None:
        self._fleet = fleet
        self._affinity = affinity
        self._rosters = Rosters(fleet)
        self._long_prompt_tokens = long_prompt_tokens
        self._long_context_tokens = long_context_tokens
        self._least_long_tokens = min(long_prompt_tokens, long_context_tokens)

    def candidates(self, ask: Ask) -> Candidates | Reason:
        """The workers left for ``ask``, or the reason why there are none."""
        roster = self._rosters.of(ask.model)
        if roster is None:
            return Reason.UNKNOWN_MODEL
        fits, accepting, healthy, up = roster.alive, roster.working, roster.healthy, roster.up
        serves, lives, works, sound = roster.counts
        fit = lives
        prompt_tokens = ask.prompt_tokens
        if ask.embeds or ask.excluded or prompt_tokens + ask.max_tokens > roster.least_context:
            fitting = self._fitting(ask, roster)
            if isinstance(fitting, Reason):
                return fitting
            fits = fitting
            accepting &= fits
            if ask.excluded:
                accepting &= ~ask.excluded
            healthy = accepting & self._fleet.up
            up = healthy != 0
            healthy = healthy or accepting
            fit, works, sound = fits.bit_count(), accepting.bit_count(), healthy.bit_count()
        if not accepting:
            untried = fits & ~ask.excluded
            return Reason.ALL_BUSY if untried else Reason.NO_WORKER
        roomy = healthy ^ (healthy & self._short(ask, roster))
        free = roomy or healthy
        # Stores compute nothing, so what makes a worker unfit does not count: they are up, or they are not.
        fleet, stores = self._fleet, 0
        if ask.plans_fetch and (stores := fleet.stores.get(ask.model, 0)):
            stores &= fleet.up & fleet.open & fleet.planes.sound & ~ask.excluded
        lending = (free & fleet.prefills if roster.halves else free) | stores
        holders = [
            (covered if (covered := covered_tokens(rung)) < prompt_tokens else prompt_tokens - 1, plane)
            for rung, plane in self._affinity.deepest(ask.sketch, lending, max_probes=_MAX_PROBES, grain=_GRAIN)
        ]
        left = free
        if prompt_tokens > self._least_long_tokens:
            left, holders = self._long(ask, roster, free, holders, stores)
        whole, prefill, decode = left, left, roomy if up else 0
        if roster.halves:
            prefill &= fleet.prefills
            decode &= fleet.decodes
            whole = prefill & fleet.decodes
        counts = serves, lives, fit, works, sound, free.bit_count(), left.bit_count()
        return Candidates(whole, prefill, decode, holders, counts)

    def _fitting(self, ask: Ask, roster: Roster) -> int | Reason:
        """The living workers whose context and memory hold ``ask``, or that make embeddings if it wants them."""
        if not roster.alive:
            return Reason.NO_WORKER
        whole_tokens = ask.prompt_tokens + ask.max_tokens
        fits, offered = 0, False
        for kind in roster.kinds:
            if ask.embeds:
                if EMBEDDINGS in kind.facts.capabilities:
                    offered = True  # maybe by the dead alone
                    fits |= kind.plane
            elif whole_tokens <= kind.max_context and whole_tokens <= kind.kv_tokens:
                fits |= kind.plane
        fits &= roster.alive
        if fits:
            return fits
        return Reason.TOO_LONG if not ask.embeds else Reason.NO_WORKER if offered else Reason.NO_EMBEDDINGS

    def _short(self, ask: Ask, roster: Roster) -> int:
        """The plane of the workers below the level of free KV that surely has room."""
        needed_tokens = ask.prompt_tokens + (ask.most_tokens or ask.output_tokens)
        short_of = self._fleet.planes.short_of
        short = 0
        for kind in roster.kinds:
            short |= kind.plane & short_of[free_kv_level_for(needed_tokens / kind.kv_tokens)]
        return short

    def _long(
        self, ask: Ask, roster: Roster, free: int, holders: list[tuple[int, int]], stores: int
    ) -> tuple[int, list[tuple[int, int]]]:
        """Take workers out that would have to compute a long prompt and should not."""
        kept = free
        if strained := free & self._fleet.planes.strained:
            spared = _with_at_most(self._long_prompt_tokens, ask.prompt_tokens, holders)
            kept = free ^ (strained ^ (strained & spared)) or free
        if ask.prompt_tokens > self._long_context_tokens:
            long_context = 0
            for kind in roster.kinds:
                if kind.long_context:
                    long_context |= kind.plane
            near = _with_at_most(self._long_context_tokens, ask.prompt_tokens, holders)
            kept = kept & (near | long_context) or free & long_context or kept
        lending = kept | stores
        return kept, [(cached, plane & lending) for cached, plane in holders if plane & lending]


def _with_at_most(uncached: int, prompt_tokens: int, holders: list[tuple[int, int]]) -> int:
    """The plane of those that would have to compute so many tokens of a prompt at most."""
    plane = 0
    for cached, holding in holders:
        if prompt_tokens - cached <= uncached:
            plane |= holding
    return plane
