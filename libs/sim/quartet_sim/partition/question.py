"""What is asked of the search: a model, machines, a workload, and what must be kept."""

import msgspec
from msgspec import Struct

from quartet_sim.partition.engines import EngineRules
from quartet_sim.partition.machines import Pool
from quartet_sim.partition.placement import Limits
from quartet_sim.partition.precision import PrecisionTable, assignments
from quartet_sim.partition.shape import Shape
from quartet_sim.partition.timing import Workload

MOST_STATES = 60_000
"""Bounds the search; a few minutes' worth."""

_TPS = (1, 2, 4, 8)


class TooManyWays(ValueError):
    """The machines allow more states than `MOST_STATES`."""

    def __init__(self, states: int) -> None:
        super().__init__(
            f"{states:,} ways to use the cards, at most {MOST_STATES:,}: "
            "give fewer nodes or cards, or --engine vllm, which needs one TP degree"
        )
        self.states = states


class Question(Struct, frozen=True, kw_only=True):
    """What is looked for. Only ``precisions`` may be used, and aggressive ones only on classes in ``aggressive_on``."""

    shape: Shape
    pools: tuple[Pool, ...]
    work: Workload
    table: PrecisionTable
    rules: EngineRules
    limits: Limits
    precisions: tuple[str, ...]
    aggressive_on: frozenset[str]

    def assignments(self) -> list[dict[str, str]]:
        """Precisions per class, those without a known loss left out."""
        allowed = tuple(
            name
            for name in self.precisions
            if name in self.rules.precisions and self.table.loss(self.shape.model, name) is not None
        )
        mixed = self.rules.mixed_precision
        classes = {pool.hardware.name: pool.hardware for pool in self.pools}
        return assignments(classes, self.table, allowed, mixed=mixed, aggressive_on=self.aggressive_on)

    def degrees(self) -> list[tuple[int, ...]]:
        """TP degrees that may be used together."""
        most = max(pool.gpus for pool in self.pools)
        possible = tuple(tp for tp in _TPS if tp <= most and self.shape.divides_by(tp))
        return [(tp,) for tp in possible] if self.rules.uniform_tp else [possible]

    def most_stages(self, tps: tuple[int, ...]) -> int:
        """No pipeline of groups of ``tps`` cards has more stages."""
        groups = sum(pool.gpus // min(tps) for pool in self.pools)
        return min(groups, self.limits.most_stages, self.shape.layers)

    def without(self, hardware: str) -> "Question | None":
        """The same on the other classes' cards; None when there are no others."""
        left = tuple(pool for pool in self.pools if pool.hardware.name != hardware)
        return msgspec.structs.replace(self, pools=left) if left else None
