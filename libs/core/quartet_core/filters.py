"""Hard filters: which workers may be thought of at all for a request, before any policy weighs them.

Filters that say "must" (model, alive, accepting, not tried yet, context length, or embeddings where they are asked)
may leave nobody; filters that say "should" (not suspect, enough free KV, long prompts to long-context classes and not
to workers at a limit) never take the last candidate.
"""

from quartet_core.affinity import AffinityTable
from quartet_core.fleet import Fleet
from quartet_core.ladder import covered_tokens
from quartet_core.plan import Ask, Candidates, Reason
from quartet_core.word import BATCH, QUEUE, free_kv_level_for

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
        self._long_prompt_tokens = long_prompt_tokens
        self._long_context_tokens = long_context_tokens
        self._least_long_tokens = min(long_prompt_tokens, long_context_tokens)
        self._queues = fleet.planes.levels(QUEUE.name)
        self._batches = fleet.planes.levels(BATCH.name)

    def candidates(self, ask: Ask) -> Candidates | Reason:
        """The workers left for ``ask``, or the reason why there are none."""
        fleet = self._fleet
        serving = fleet.serving.get(ask.model)
        if serving is None:
            return Reason.UNKNOWN_MODEL
        alive = serving & (fleet.up | fleet.suspect | fleet.frozen)
        if not alive:
            return Reason.NO_WORKER
        prompt_tokens = ask.prompt_tokens
        whole_tokens = prompt_tokens + ask.max_tokens
        needed_tokens = prompt_tokens + (ask.most_tokens or ask.output_tokens)
        less_free_kv = fleet.planes.less_free_kv
        # A worker with nothing to do is not full, whatever its last step said: only work makes it say anything new.
        idle = self._queues[0] & self._batches[0]
        fits = roomy = long_context = 0
        embeds, offered = ask.embeds, False
        for kind in fleet.kinds_of[ask.model]:
            plane = kind.plane & alive
            if embeds:
                if EMBEDDINGS not in kind.facts.capabilities:
                    continue
                offered = True  # maybe by the dead alone
            elif not plane or whole_tokens > kind.max_context or whole_tokens > kind.kv_tokens:
                continue
            fits |= plane
            # Workers below the level that surely has room.
            short = less_free_kv[free_kv_level_for(min(needed_tokens / kind.kv_tokens, 1.0))]
            short ^= short & idle
            roomy |= plane ^ (plane & short)  # not ``& ~short``: CPython takes thrice as long with a negative number
            if kind.long_context:
                long_context |= kind.plane
        if not fits:
            return Reason.TOO_LONG if not embeds else Reason.NO_WORKER if offered else Reason.NO_EMBEDDINGS
        working = fits & fleet.accepting & fleet.open
        accepting = working & ~ask.excluded if ask.excluded else working
        if not accepting:
            return Reason.ALL_BUSY if fits & ~ask.excluded else Reason.NO_WORKER
        healthy = accepting & fleet.up or accepting
        free = healthy & roomy or healthy
        # Stores compute nothing, so what makes a worker unfit does not count: they are up, or they are not.
        stores = 0
        if ask.plans_fetch and (stores := fleet.stores.get(ask.model, 0)):
            stores &= fleet.up & fleet.open & fleet.accepting & ~ask.excluded
        holders = [
            (min(covered_tokens(rung), prompt_tokens - 1), plane)
            for rung, plane in self._affinity.deepest(
                ask.sketch, free & fleet.prefills | stores, max_probes=_MAX_PROBES, grain=_GRAIN
            )
        ]
        left = free
        if prompt_tokens > self._least_long_tokens:
            left, holders = self._long(ask, free, holders, long_context, stores)
        return Candidates(
            whole=left & fleet.prefills & fleet.decodes,
            prefill=left & fleet.prefills,
            decode=accepting & roomy & fleet.up & fleet.decodes,
            holders=holders,
            left=(
                serving.bit_count(), alive.bit_count(), fits.bit_count(), accepting.bit_count(), healthy.bit_count(),
                free.bit_count(), left.bit_count(),
            ),
        )  # fmt: skip

    def _long(
        self, ask: Ask, free: int, holders: list[tuple[int, int]], long_context: int, stores: int
    ) -> tuple[int, list[tuple[int, int]]]:
        """Take workers out that would have to compute a long prompt and should not."""
        kept = free
        if strained := free & self._fleet.strained:
            spared = _with_at_most(self._long_prompt_tokens, ask.prompt_tokens, holders)
            kept = free ^ (strained ^ (strained & spared)) or free
        if ask.prompt_tokens > self._long_context_tokens:
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
