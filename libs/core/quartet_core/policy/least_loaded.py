"""Least loaded: the fewest requests, running, queued and sent. Blind to hardware, prompt length and cache."""

from typing import ClassVar

from quartet_core.plan import Ask, Candidates, Decision
from quartet_core.policy.base import Policy


class LeastLoaded(Policy):
    """Fewest requests wins; equals take turns."""

    name: ClassVar[str] = "least-loaded"

    def choose(self, ask: Ask, candidates: Candidates) -> Decision:
        """A worker with the smallest believed batch."""
        slot, requests = self.fewest_requests(candidates.whole)
        return self.decided(self.whole_plan(ask, slot, self.cached_at(slot, candidates), requests), candidates)
