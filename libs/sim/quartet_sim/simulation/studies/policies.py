"""Every policy on every fleet, at a load that the better ones carry with some 95 % of requests within targets."""

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import structs

from quartet_sim.simulation import compare
from quartet_sim.simulation.compare import Case
from quartet_sim.simulation.figures import Outcome
from quartet_sim.simulation.policies import BASELINES, OURS
from quartet_sim.simulation.spec import Settings
from quartet_sim.simulation.studies.grounds import FLEETS, LOADS, workload
from quartet_sim.simulation.studies.table import Table, Told, mean_and_reach

SEEDS: Final = (11, 12)

UNFILTERED: Final = Settings(long_context_tokens=1 << 30)
"""Without the filter that keeps long uncached prompts to long-context classes: it is ours, not the other policies'."""

ROWS: Final[Mapping[str, tuple[str, Settings]]] = {
    "finish-time, as configured by default": (OURS, Settings()),
    "finish-time, long-prompt filter at 4,096": (OURS, Settings(long_context_tokens=4096)),
    "finish-time, no long-prompt filter": (OURS, UNFILTERED),
    "finish-time, no filter, split if J is less": (OURS, structs.replace(UNFILTERED, split_margin=1.0)),
    "finish-time, no filter, no split": (OURS, structs.replace(UNFILTERED, split=False)),
    "squares-clear-split, no filter": ("squares-clear-split", UNFILTERED),
    **{name: (name, UNFILTERED) for name in BASELINES},
}


def study(jobs: int, told: Told) -> Sequence[Table]:
    """One table a fleet and model: rows are policies, columns the traces."""
    cases = [
        Case(
            name=f"{fleet}, {model}: {trace}, {row}",
            fleet=FLEETS[fleet, model],
            workload=workload(trace, model, rate),
            policy=policy,
            seed=seed,
            settings=settings,
        )
        for (fleet, model, trace), rate in LOADS.items()
        for row, (policy, settings) in ROWS.items()
        for seed in SEEDS
    ]
    outcomes = compare.run_all(cases, jobs, lambda case, _: told(len(cases), case.name))
    groups = compare.by_name(cases, outcomes)
    return [_table(fleet, model, groups) for fleet, model in FLEETS]


def _table(fleet: str, model: str, groups: dict[tuple[str, str], list[Outcome]]) -> Table:
    traces = [trace for (here, of, trace) in LOADS if (here, of) == (fleet, model)]
    columns = ["policy"]
    for trace in traces:
        columns += [f"{trace}: within %", "goodput/s", "$/M good", "kJ/M good", "TTFT p99 / worst s"]
    rows = []
    for name, (policy, _) in ROWS.items():
        row = [name]
        for trace in traces:
            found = groups[f"{fleet}, {model}: {trace}, {name}", policy]
            row += [
                mean_and_reach([100 * o.within_slo for o in found], 1),
                mean_and_reach([o.goodput_per_s for o in found], 2),
                mean_and_reach([o.usd_per_million_good for o in found], 2),
                f"{sum(o.j_per_million_good for o in found) / len(found) / 1e3:,.0f}",
                f"{sum(o.ttft_ms.p99 for o in found) / len(found) / 1e3:.1f}"
                f" / {max(o.worst_wait_ms for o in found) / 1e3:.1f}",
            ]
        rows.append(tuple(row))
    rates = ", ".join(f"{trace} {LOADS[fleet, model, trace]:g}" for trace in traces)
    return Table(
        f"{fleet}, {model}",
        tuple(columns),
        tuple(rows),
        f"Requests/s offered: {rates}. From the second half of each trace; seeds {', '.join(map(str, SEEDS))}: mean ±"
        " the farthest seed. Worst: the longest wait for a first token in any of them.",
    )
