"""The policies that can be compared: core's own, and chance as the one that knows nothing."""

from random import Random
from types import MappingProxyType
from typing import ClassVar, Final

from quartet_core.plan import Ask, Candidates, Decision
from quartet_core.planes import slots
from quartet_core.policy.base import Policy, View
from quartet_core.policy.block_cost import BlockCost
from quartet_core.policy.decision_matrix import DecisionMatrix
from quartet_core.policy.finish_time import FinishTime
from quartet_core.policy.least_loaded import LeastLoaded
from quartet_core.policy.prefix_aware import PrefixAware
from quartet_core.policy.round_robin import RoundRobin
from quartet_core.routing import PolicyOf
from quartet_sim.simulation.variants import VARIANTS


class RandomChoice(Policy):
    """Any worker that may do all of a request, each as likely; seeded by the view's ``begin``."""

    name: ClassVar[str] = "random"

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self._random = Random(view.begin)

    def choose(self, ask: Ask, candidates: Candidates) -> Decision:
        """One of the candidates."""
        slot = self._random.choice(list(slots(candidates.whole)))
        return self.decided(self.whole_plan(ask, slot, self.cached_at(slot, candidates), 0.0), candidates)


POLICIES: Final = MappingProxyType[str, PolicyOf](
    {
        policy.name: policy
        for policy in (
            FinishTime, DecisionMatrix, RoundRobin, LeastLoaded, PrefixAware, BlockCost, RandomChoice,
        )
    }
)  # fmt: skip
"""By name, ours first."""

KNOWN: Final = MappingProxyType[str, PolicyOf]({**POLICIES, **VARIANTS})
"""And the variants that studies look at."""

OURS: Final = FinishTime.name
BASELINES: Final = tuple(name for name in POLICIES if name != OURS)
