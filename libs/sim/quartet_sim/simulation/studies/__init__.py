"""The studies behind docs/simulation.md: each makes its tables again with one command.

Loads and rules were chosen on the first half of each trace (``grounds.TRAIN``); every table about how good a policy is
comes from the second half (``grounds.TEST``), which nothing was tuned on.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from quartet_sim.simulation.studies import ablations, knees, objective, phases, policies, splits
from quartet_sim.simulation.studies.table import Table, Told, markdown

Study = Callable[[int, Told], Sequence[Table]]
"""Runs on so many processes, tells of each run that is done, and gives its tables."""

STUDIES: Final[Mapping[str, Study]] = MappingProxyType(
    {
        "policies": policies.study,
        "knees": knees.study,
        "objective": objective.study,
        "phases": phases.study,
        "ablations": ablations.study,
        "splits": splits.study,
    }
)

__all__ = ["STUDIES", "Study", "Table", "Told", "markdown"]
