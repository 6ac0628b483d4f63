"""What each part of the control plane is worth: one taken away at a time, and the view made older."""

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import structs

from quartet_sim.simulation import compare
from quartet_sim.simulation.compare import Case
from quartet_sim.simulation.figures import Outcome
from quartet_sim.simulation.policies import OURS
from quartet_sim.simulation.spec import FleetSpec, Settings
from quartet_sim.simulation.studies.grounds import FLEETS, LOADS, SMALL, workload
from quartet_sim.simulation.studies.table import Table, Told, mean_and_reach

SEEDS: Final = (41, 42)
FLEET: Final = "4 H100 + 12 L40S"
TRACES: Final = ("azure-code", "mooncake")

PARTS: Final[Mapping[str, Settings]] = {
    "everything": Settings(),
    "without hold": Settings(hold=False),
    "without ledger": Settings(ledger=False, hold=False),
    "without affinity": Settings(affinity=False),
    "without split": Settings(split=False),
    "split if J is less": Settings(split_margin=1.0),
    "without overlap": Settings(overlap=False),
    "with the long-prompt filter at 4,096": Settings(long_context_tokens=4096),
    "without the long-prompt filter": Settings(long_context_tokens=1 << 30),
}
AGES_MS: Final = (0.5, 50.0, 1_000.0, 10_000.0)


def study(jobs: int, told: Told) -> Sequence[Table]:
    """Parts taken away; the age of the view, with the ledger and without; drift, on a fleet with slow workers."""
    plain = FLEETS[FLEET, SMALL]
    slow = _with_slow(plain)
    wanted: dict[str, tuple[FleetSpec, Settings]] = {name: (plain, each) for name, each in PARTS.items()}
    for age_ms in AGES_MS:
        wanted[f"{age_ms:g} ms"] = plain, Settings(view_age_ms=age_ms)
        wanted[f"{age_ms:g} ms, no ledger"] = plain, Settings(view_age_ms=age_ms, ledger=False, hold=False)
    wanted["drift known"] = slow, Settings()
    wanted["drift not known"] = slow, Settings(drift=False)
    cases = [
        Case(
            name=f"{name}: {trace}",
            fleet=fleet,
            workload=workload(trace, SMALL, LOADS[FLEET, SMALL, trace]),
            policy=OURS,
            seed=seed,
            settings=settings,
        )
        for name, (fleet, settings) in wanted.items()
        for trace in TRACES
        for seed in SEEDS
    ]
    outcomes = compare.run_all(cases, jobs, lambda case, _: told(len(cases), case.name))
    groups = compare.by_name(cases, outcomes)
    rates = ", ".join(f"{trace} {LOADS[FLEET, SMALL, trace]:g}" for trace in TRACES)
    note = (
        f"{FLEET}, {SMALL}, finish-time; requests/s: {rates}; second half of each trace; seeds"
        f" {', '.join(map(str, SEEDS))}: mean ± the farthest."
    )
    ages = [name for age_ms in AGES_MS for name in (f"{age_ms:g} ms", f"{age_ms:g} ms, no ledger")]
    return [
        _table("Parts taken away", list(PARTS), groups, note),
        _table("Age of the view", ages, groups, note),
        _table(
            "Three of sixteen workers (two H100, one L40S) at half speed",
            ["drift known", "drift not known"],
            groups,
            note,
        ),
    ]


def _table(title: str, names: list[str], groups: dict[tuple[str, str], list[Outcome]], note: str) -> Table:
    rows = []
    for name in names:
        row = [name]
        for trace in TRACES:
            found = groups[f"{name}: {trace}", OURS]
            row.append(mean_and_reach([100 * o.within_slo for o in found], 1))
            row.append(f"{sum(o.ttft_ms.p99 for o in found) / len(found) / 1e3:.1f}")
            row.append(f"{100 * sum(o.hit_rate for o in found) / len(found):.1f}")
        rows.append(tuple(row))
    columns = ["setting"]
    for trace in TRACES:
        columns += [f"{trace}: within %", "TTFT p99 s", "hit %"]
    return Table(title, tuple(columns), tuple(rows), note)


def _with_slow(fleet: FleetSpec) -> FleetSpec:
    """Two H100 and one L40S of it at half their speed."""
    quick, cheap = fleet.groups
    return FleetSpec(
        (
            structs.replace(quick, count=quick.count - 2),
            structs.replace(quick, count=2, slowdown=2.0),
            structs.replace(cheap, count=cheap.count - 1),
            structs.replace(cheap, count=1, slowdown=2.0),
        )
    )
