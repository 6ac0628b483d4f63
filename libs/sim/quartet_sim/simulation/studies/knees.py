"""Knees of our policy and of the best of the others, and what they say about balancing blindly."""

from collections.abc import Mapping, Sequence
from typing import Final

from quartet_sim.simulation import compare, knee
from quartet_sim.simulation.compare import Case
from quartet_sim.simulation.knee import Knee, Sought
from quartet_sim.simulation.policies import OURS
from quartet_sim.simulation.spec import Settings
from quartet_sim.simulation.studies.grounds import FLEETS, LOADS, SMALL, workload
from quartet_sim.simulation.studies.policies import UNFILTERED
from quartet_sim.simulation.studies.table import Table, Told, mean_and_reach

SEEDS: Final = (21, 22)
SHARES: Final = (0.9, 0.97)
RULES: Final[Mapping[str, tuple[str, Settings]]] = {
    "finish-time, no filter": (OURS, UNFILTERED),
    "finish-time, as configured": (OURS, Settings()),
    "block-cost": ("block-cost", UNFILTERED),
    "round-robin": ("round-robin", UNFILTERED),
}
"""Ours, the first of which the others are held against; the best baseline of the ``policies`` study, which sees load
and cache but no hardware; and one that sees nothing."""

FIRST: Final = next(iter(RULES))

PLACES: Final = (
    ("8 H100", SMALL, "mooncake"),
    ("4 H100 + 12 L40S", SMALL, "azure-code"),
    ("4 H100 + 12 L40S", SMALL, "mooncake"),
)

_Found = Mapping[tuple[str, str, str, str], list[list[Knee]]]
"""By fleet, model, trace and rule: for each seed, a knee for each share."""


def study(jobs: int, told: Told) -> Sequence[Table]:
    """Knees, what a blind balancer loses, and who waits at the knee."""
    keys = [(*place, rule) for place in PLACES for rule in RULES]
    sought = [
        Sought(
            Case(
                name=" ".join(key),
                fleet=FLEETS[key[0], key[1]],
                workload=workload(key[2], key[1], LOADS[key[0], key[1], key[2]]),
                policy=RULES[key[3]][0],
                seed=seed,
                settings=RULES[key[3]][1],
            ),
            SHARES,
        )
        for key in keys
        for seed in SEEDS
    ]
    in_order: list[list[Knee]] = [[] for _ in sought]
    for place, knees in compare.each(knee.find, sought, jobs, None):
        in_order[place] = knees
        told(len(sought), sought[place].case.name)
    found = {key: in_order[place * len(SEEDS) : (place + 1) * len(SEEDS)] for place, key in enumerate(keys)}
    return [_knees(found), _blind(found), _buckets(found)]


def _knees(found: _Found) -> Table:
    rows = []
    for place in PLACES:
        for policy in RULES:
            row = [place[0], place[2], policy]
            for number in range(len(SHARES)):
                knees = [of_seed[number] for of_seed in found[*place, policy]]
                outcomes = [each.outcome for each in knees if each.outcome is not None]
                row.append(mean_and_reach([each.rate_per_s for each in knees], 2))
                row.append(f"{sum(o.usd_per_million_good for o in outcomes) / len(outcomes):.2f}" if outcomes else "-")
                row.append(f"{max(o.worst_wait_ms for o in outcomes) / 1e3:.0f}" if outcomes else "-")
            rows.append(tuple(row))
    return Table(
        "Knees, llama-3.1-8b",
        ("fleet", "trace", "policy", "90 %: req/s", "$/M good", "worst s", "97 %: req/s", "$/M good", "worst s"),
        tuple(rows),
        f"The highest rate with so many of all requests within both targets, to 3 %. Second half of each trace; seeds"
        f" {', '.join(map(str, SEEDS))}: mean ± the farthest.",
    )


def _blind(found: _Found) -> Table:
    rows = []
    for place in PLACES:
        ours = _rates(found[*place, FIRST])
        row = [place[0], place[2]]
        for policy in list(RULES)[1:]:
            others = _rates(found[*place, policy])
            row.append(" / ".join(f"{100 * (1 - o / max(us, 1e-9)):+.0f}" for us, o in zip(ours, others, strict=True)))
        rows.append(tuple(row))
    return Table(
        f"How much less than {FIRST} each carries, in %, at 90 / 97 %",
        ("fleet", "trace", *list(RULES)[1:]),
        tuple(rows),
        "Positive: the other policy's knee is so much below ours; negative: above. From the table before.",
    )


def _rates(of_seeds: list[list[Knee]]) -> list[float]:
    return [sum(seed[number].rate_per_s for seed in of_seeds) / len(of_seeds) for number in range(len(SHARES))]


def _buckets(found: _Found) -> Table:
    names = ("under 1k", "1k to 4k", "4k to 16k", "16k to 64k", "over 64k")
    rows = []
    for place in PLACES:
        for policy in (FIRST, "block-cost"):
            outcomes = [seed[0].outcome for seed in found[*place, policy]]
            row = [place[0], place[2], policy]
            for name in names:
                parts = [p for o in outcomes if o is not None for p in o.by_prompt if p.name == name]
                if parts:
                    within = 100 * sum(p.within_slo * p.requests for p in parts) / sum(p.requests for p in parts)
                    row.append(f"{within:.0f} / {max(p.ttft_ms.most for p in parts) / 1e3:.0f}")
                else:
                    row.append("-")
            rows.append(tuple(row))
    return Table(
        "Who waits at the 90 % knee: within targets, % / longest wait for a first token, s, by prompt length",
        ("fleet", "trace", "policy", *names),
        tuple(rows),
        "Each policy at its own knee, so at other rates: see the first table.",
    )
