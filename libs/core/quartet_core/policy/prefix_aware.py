"""Prefix aware: the longest cached prefix wins while load is balanced, else the fewest requests do.

The rule of cache-aware routers in the field; it is blind to hardware and to what a request weighs.
"""

from typing import ClassVar

from quartet_core.plan import Ask, Candidates, Decision
from quartet_core.planes import slots
from quartet_core.policy.base import Policy

MATCH = 0.5
"""Share of the prompt that must be cached for affinity to count."""
IMBALANCE_REQUESTS = 32
IMBALANCE_RATIO = 1.1
"""Load is uneven when the fullest worker exceeds the emptiest by so many requests and so many times."""


class PrefixAware(Policy):
    """Longest match from ``MATCH`` of the prompt on, unless requests are spread too unevenly."""

    name: ClassVar[str] = "prefix-aware"

    def choose(self, ask: Ask, candidates: Candidates) -> Decision:
        """The least loaded of the longest holders, or of all."""
        plane = candidates.whole
        if not self._uneven(plane):
            for cached, holders in candidates.holders:
                if cached >= MATCH * ask.prompt_tokens and holders & plane:
                    plane &= holders
                    break
        slot, requests = self.fewest_requests(plane)
        return self.decided(self.whole_plan(ask, slot, self.cached_at(slot, candidates), requests), candidates)

    def _uneven(self, plane: int) -> bool:
        batches = [self.view.board.loads[slot].batch for slot in slots(plane)]
        most, fewest = max(batches), min(batches)
        return most - fewest > IMBALANCE_REQUESTS and most > IMBALANCE_RATIO * fewest
