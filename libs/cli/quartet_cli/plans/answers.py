"""What ``quartet plan partition`` answers, as one object: its JSON, and what the screen shows."""

from msgspec import Struct

from quartet_sim.partition.binding import Alternative, Binding
from quartet_sim.partition.engines import EngineRules
from quartet_sim.partition.moves import MovePlan
from quartet_sim.partition.placement import Placement


class PartitionAnswer(Struct, frozen=True, kw_only=True):
    """A placement and all that is told about it. ``settings`` are texts by engine.

    With ``--from``, ``current`` is the placement that is now, under the workload asked about, and ``moves`` lead from
    it to ``placement``.
    """

    placement: Placement
    binding: list[Binding]
    alternatives: list[Alternative]
    settings: dict[str, str]
    engine: EngineRules
    current: Placement | None = None
    moves: MovePlan | None = None


class NoPlacement(Struct, frozen=True, kw_only=True):
    """Nothing fits, and why."""

    obstacles: list[Binding]
    placement: None = None


class WrongCurrent(ValueError):
    """The placement of ``--from`` cannot be gone on from: ``reason``."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"--from: {reason}")
        self.reason = reason
