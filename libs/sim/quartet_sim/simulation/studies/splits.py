"""Splits: what sending KV while its prompt is computed is worth, and by how much a split should have to pay.

The first table is of fleets of halves, where every request is split whatever it costs, so that the transfer's part of
the time to first token is all that differs. The second is of fleets that may split or not, on the half of the traces
on which rules are chosen.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import structs

from quartet_sim.simulation import compare
from quartet_sim.simulation.compare import Case
from quartet_sim.simulation.figures import Outcome
from quartet_sim.simulation.policies import OURS
from quartet_sim.simulation.spec import FleetSpec, Settings, parse_fleet
from quartet_sim.simulation.studies.grounds import FLEETS, LARGE, SMALL, TRAIN, workload
from quartet_sim.simulation.studies.table import Table, Told, mean_and_reach

SEEDS: Final = (51, 52)
_BASE: Final = Settings(long_context_tokens=1 << 30)

HALVES: Final[Mapping[str, tuple[FleetSpec, str, float]]] = {
    "8b, 4 + 4 H100": (parse_fleet("4xH100_SXM5:llama-3.1-8b@prefill,4xH100_SXM5:llama-3.1-8b@decode"), SMALL, 4.0),
    "70b, 4 + 4 H100": (
        parse_fleet("1xH100_SXM5x4:llama-3.1-70b@prefill,1xH100_SXM5x4:llama-3.1-70b@decode"), LARGE, 0.5,
    ),
}  # fmt: skip
"""Fleet, model and Mooncake requests a second: long prompts, and prefill workers that are less than half busy. The
halves are on hosts of their own, so every transfer takes the link between hosts."""

LINKS: Final[Mapping[str, Settings]] = {
    "RoCE, 46.6 GB/s": _BASE,
    "TCP, 9 GB/s": structs.replace(_BASE, link="TCP", nic_gb_per_s=9.0),
}

RULES: Final[Mapping[str, Settings]] = {
    "no split": structs.replace(_BASE, split=False),
    "split if J is less, no overlap": structs.replace(_BASE, overlap=False, split_margin=1.0),
    "split if J is less": structs.replace(_BASE, split_margin=1.0),
    "split if J < 0.9": structs.replace(_BASE, split_margin=0.9),
    "split if J < 0.8": structs.replace(_BASE, split_margin=0.8),
    "split if J < 0.7, no overlap": structs.replace(_BASE, overlap=False, split_margin=0.7),
    "split if J < 0.7": structs.replace(_BASE, split_margin=0.7),
    "split if J < 0.5": structs.replace(_BASE, split_margin=0.5),
}

GROUNDS: Final[Mapping[tuple[str, str, str], float]] = {
    ("8 H100", SMALL, "azure-conv"): 250.0,
    ("8 H100", SMALL, "azure-code"): 150.0,
    ("4 H100 + 12 L40S", SMALL, "azure-conv"): 230.0,
    ("4 H100 + 12 L40S", SMALL, "azure-code"): 110.0,
    ("4 H100 + 12 L40S", SMALL, "mooncake"): 9.5,
    ("8 H100", LARGE, "azure-conv"): 16.0,
    ("4 H100 + 12 L40S", LARGE, "azure-conv"): 10.0,
}


def study(jobs: int, told: Told) -> Sequence[Table]:
    """Both tables."""
    halves, rules = _halves(), _rules()
    cases = [*halves, *rules]
    outcomes = compare.run_all(cases, jobs, lambda case, _: told(len(cases), case.name))
    return [
        _overlap_table(compare.by_name(halves, outcomes[: len(halves)])),
        _margin_table(compare.by_name(rules, outcomes[len(halves) :])),
    ]


def _halves() -> list[Case]:
    return [
        Case(
            name=f"{name}, {link}, {'with' if overlap else 'no'} overlap",
            fleet=fleet,
            workload=workload("mooncake", model, rate, TRAIN),
            policy=OURS,
            seed=seed,
            settings=structs.replace(settings, overlap=overlap),
        )
        for name, (fleet, model, rate) in HALVES.items()
        for link, settings in LINKS.items()
        for overlap in (False, True)
        for seed in SEEDS
    ]


def _rules() -> list[Case]:
    return [
        Case(
            name=f"{fleet}, {model}: {trace}, {rule}",
            fleet=FLEETS[fleet, model],
            workload=workload(trace, model, rate, TRAIN),
            policy=OURS,
            seed=seed,
            settings=settings,
        )
        for rule, settings in RULES.items()
        for (fleet, model, trace), rate in GROUNDS.items()
        for seed in SEEDS
    ]


def _overlap_table(groups: Mapping[tuple[str, str], Sequence[Outcome]]) -> Table:
    rows = []
    for name in HALVES:
        for link in LINKS:
            row = [f"{name}, {link}"]
            means: list[float] = []
            for overlap in ("no", "with"):
                found = groups[f"{name}, {link}, {overlap} overlap", OURS]
                means.append(sum(outcome.ttft_ms.mean for outcome in found) / len(found))
                row += [mean_and_reach([getattr(o.ttft_ms, of) for o in found], 0) for of in ("p50", "p90", "mean")]
            rows.append((*row, f"{100 * (means[1] / means[0] - 1):+.1f}"))
    rates = ", ".join(f"{rate:g}" for _, _, rate in HALVES.values())
    return Table(
        "Every request split: time to first token in ms, sent after the prefill and while it computes",
        ("halves, link", "after: p50", "p90", "mean", "while: p50", "p90", "mean", "mean, %"),
        tuple(rows),
        f"Mooncake, first half, requests/s: {rates}; seeds {', '.join(map(str, SEEDS))}: mean ± the farthest.",
    )


def _margin_table(groups: Mapping[tuple[str, str], Sequence[Outcome]]) -> Table:
    columns = ["rule"]
    for fleet, model, trace in GROUNDS:
        columns += [f"{fleet}, {model.removeprefix('llama-3.1-')}, {trace}", "split %"]
    rows = []
    for rule in RULES:
        row = [rule]
        for fleet, model, trace in GROUNDS:
            found = groups[f"{fleet}, {model}: {trace}, {rule}", OURS]
            row.append(mean_and_reach([100 * outcome.within_slo for outcome in found], 1))
            row.append(f"{100 * sum(o.splits for o in found) / sum(o.requests for o in found):.0f}")
        rows.append(tuple(row))
    rates = ", ".join(f"{rate:g}" for rate in GROUNDS.values())
    return Table(
        "Splits that must pay: requests within both targets, %",
        tuple(columns),
        tuple(rows),
        f"finish-time, no long-prompt filter. Requests/s: {rates}. First half of each trace; seeds"
        f" {', '.join(map(str, SEEDS))}: mean ± the farthest.",
    )
