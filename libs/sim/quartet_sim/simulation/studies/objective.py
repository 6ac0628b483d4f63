"""The objective: does J hold up, and what would be better? Made on the first half of each trace, to choose by."""

from collections.abc import Mapping, Sequence
from typing import Final

from quartet_sim.simulation import compare
from quartet_sim.simulation.compare import Case
from quartet_sim.simulation.spec import Settings
from quartet_sim.simulation.studies.grounds import FLEETS, LARGE, SMALL, TRAIN, workload
from quartet_sim.simulation.studies.table import Table, Told, mean_and_reach

SEEDS: Final = (1, 2)
_NO_FILTER: Final = 1 << 30

RULES: Final[Mapping[str, tuple[str, Settings]]] = {
    "as configured by default": ("finish-time", Settings()),
    "long-prompt filter at 4,096": ("finish-time", Settings(long_context_tokens=4096)),
    "no long-prompt filter": ("finish-time", Settings(long_context_tokens=_NO_FILTER)),
    "no filter, no split": ("finish-time", Settings(long_context_tokens=_NO_FILTER, split=False)),
    "no filter, no split, no hold": ("finish-time", Settings(long_context_tokens=_NO_FILTER, split=False, hold=False)),
    "no filter, no split, κ = 0 (worst ratio)": (
        "finish-time", Settings(long_context_tokens=_NO_FILTER, split=False, kappa=0.0),
    ),
    "no filter, no split, κ = 0.3": ("finish-time", Settings(long_context_tokens=_NO_FILTER, split=False, kappa=0.3)),
    "no filter, split if J is less": ("finish-time", Settings(long_context_tokens=_NO_FILTER, split_margin=1.0)),
    "no filter, no split, sum of ratios": ("sum", Settings(long_context_tokens=_NO_FILTER, split=False)),
    "no filter, no split, sum of squares": ("squares", Settings(long_context_tokens=_NO_FILTER, split=False)),
    "no filter, squares, split if < 0.7": ("squares-clear-split", Settings(long_context_tokens=_NO_FILTER)),
    "block-cost, no filter": ("block-cost", Settings(long_context_tokens=_NO_FILTER)),
}  # fmt: skip

GROUNDS: Final[Mapping[tuple[str, str, str], float]] = {
    ("4 H100 + 12 L40S", SMALL, "azure-conv"): 230.0,
    ("4 H100 + 12 L40S", SMALL, "azure-code"): 110.0,
    ("4 H100 + 12 L40S", SMALL, "mooncake"): 9.5,
    ("4 H100 + 12 L40S", LARGE, "azure-conv"): 10.0,
}
"""Loads at or a little above the knee, where objectives differ."""


def study(jobs: int, told: Told) -> Sequence[Table]:
    """Rules against each other, on the train half."""
    cases = [
        Case(
            name=f"{fleet}, {model}: {trace}, {rule}",
            fleet=FLEETS[fleet, model],
            workload=workload(trace, model, rate, TRAIN),
            policy=policy,
            seed=seed,
            settings=settings,
        )
        for rule, (policy, settings) in RULES.items()
        for (fleet, model, trace), rate in GROUNDS.items()
        for seed in SEEDS
    ]
    outcomes = compare.run_all(cases, jobs, lambda case, _: told(len(cases), case.name))
    groups = compare.by_name(cases, outcomes)
    columns = ["rule"]
    for fleet, model, trace in GROUNDS:
        columns += [f"{fleet}, {model.removeprefix('llama-3.1-')}, {trace}", "worst s"]
    rows = []
    for rule, (policy, _) in RULES.items():
        row = [rule]
        for fleet, model, trace in GROUNDS:
            found = groups[f"{fleet}, {model}: {trace}, {rule}", policy]
            row.append(mean_and_reach([100 * o.within_slo for o in found], 1))
            row.append(f"{max(o.worst_wait_ms for o in found) / 1e3:.0f}")
        rows.append(tuple(row))
    rates = ", ".join(f"{rate:g}" for rate in GROUNDS.values())
    return [
        Table(
            "Objectives: requests within both targets, %",
            tuple(columns),
            tuple(rows),
            f"Requests/s: {rates}. First half of each trace; seeds {', '.join(map(str, SEEDS))}: mean ± the farthest.",
        )
    ]
