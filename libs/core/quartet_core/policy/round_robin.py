"""Round robin: each worker in turn, blind to hardware, load and cache. The baseline of every comparison."""

from typing import ClassVar

from quartet_core.plan import Ask, Candidates, Decision
from quartet_core.policy.base import Policy


class RoundRobin(Policy):
    """Every worker that may do all of a request, in the order of its slots; each model has a turn of its own."""

    name: ClassVar[str] = "round-robin"

    def choose(self, ask: Ask, candidates: Candidates) -> Decision:
        """The next worker after the last one chosen for this model."""
        kind = self.worker((candidates.whole & -candidates.whole).bit_length() - 1).kind
        turn = min(k.index for k in self.view.fleet.kinds if k.model == kind.model)
        slot = self.spread(candidates.whole, turn)
        return self.decided(self.whole_plan(ask, slot, self.cached_at(slot, candidates), 0.0), candidates)
