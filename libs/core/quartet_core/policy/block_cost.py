"""Block cost: prefill blocks still to compute, less the cached overlap, plus the blocks that decode.

The cost of KV-aware routers in the field (prefill blocks − overlap + decode blocks): it sees load and cache, but one
block costs the same on every card.
"""

from typing import ClassVar

from quartet_core.plan import Ask, Candidates, Decision
from quartet_core.planes import slots
from quartet_core.policy.base import Policy

BLOCK_TOKENS = 64


class BlockCost(Policy):
    """Least blocks wins; equals take turns."""

    name: ClassVar[str] = "block-cost"

    def choose(self, ask: Ask, candidates: Candidates) -> Decision:
        """A worker with the lowest cost in blocks."""
        best = float("inf")
        equals = 0
        for slot in slots(candidates.whole):
            load = self.view.board.loads[slot]
            uncached = ask.prompt_tokens - self.cached_at(slot, candidates)
            blocks = (load.queued_tokens + uncached + load.batch * load.context) // BLOCK_TOKENS
            if blocks < best:
                best, equals = blocks, 0
            if blocks == best:
                equals |= 1 << slot
        slot = self.spread(equals, 0)
        return self.decided(self.whole_plan(ask, slot, self.cached_at(slot, candidates), best), candidates)
