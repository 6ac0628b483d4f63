"""Phases that follow each other: bursts of long prompts, then long answers. Does the work move by itself?"""

from collections.abc import Sequence
from typing import Final

from quartet_sim.simulation import compare
from quartet_sim.simulation.compare import Case
from quartet_sim.simulation.figures import Outcome
from quartet_sim.simulation.policies import OURS
from quartet_sim.simulation.studies.grounds import FLEETS, SMALL
from quartet_sim.simulation.studies.table import Table, Told
from quartet_sim.simulation.workload import Part, Workload

SEEDS: Final = (31, 32)
POLICIES: Final = (OURS, "decision-matrix", "least-loaded", "block-cost")
PHASE_S: Final = 60.0
FLEET: Final = ("4 H100 + 12 L40S", SMALL)

WORKLOAD: Final = Workload(
    parts=(
        # 60 s of code completion (prompts of thousands of tokens, answers of tens), as it came, in bursts
        Part(trace="azure-code", start_s=820.0, length_s=820.0, speed=820.0 / PHASE_S),
        # 60 s of reasoning (prompts of a hundred tokens, answers of a thousand and more)
        Part(
            trace="servegen:deepseek-r1", start_s=3600.0, length_s=PHASE_S, rate_per_s=12.0, after_s=PHASE_S,
            most_tokens=8192,
        ),
    )
)  # fmt: skip


def study(jobs: int, told: Told) -> Sequence[Table]:
    """What each class did in each phase, and how the requests fared."""
    cases = [
        Case(name=policy, fleet=FLEETS[FLEET], workload=WORKLOAD, policy=policy, seed=seed)
        for policy in POLICIES
        for seed in SEEDS
    ]
    outcomes = compare.run_all(cases, jobs, lambda case, _: told(len(cases), case.name))
    groups = compare.by_name(cases, outcomes)
    rows = []
    for policy in POLICIES:
        found = groups[policy, policy]
        for place, hardware in enumerate(("H100_SXM5", "L40S_PCIE")):
            row = [policy if not place else "", hardware]
            for begin_s in (0.0, PHASE_S):
                busy, prefill, running = _in_phase(found, hardware, begin_s)
                row += [f"{100 * busy:.0f}", f"{100 * prefill:.0f}", f"{running:.0f}"]
            row.append(f"{100 * sum(o.within_slo for o in found) / len(found):.1f}" if not place else "")
            rows.append(tuple(row))
    return [
        Table(
            f"Phases on {FLEET[0]}: {PHASE_S:g} s of code completion, then {PHASE_S:g} s of reasoning",
            (
                "policy", "class", "code: busy %", "prefill % of it", "decoding",
                "reasoning: busy %", "prefill % of it", "decoding", "within %",
            ),
            tuple(rows),
            "Decoding: sequences in the decode batches of all the class's workers, in the mean. Means of seeds"
            f" {', '.join(map(str, SEEDS))}.",
        )
    ]  # fmt: skip


def _in_phase(outcomes: Sequence[Outcome], hardware: str, begin_s: float) -> tuple[float, float, float]:
    """(busy share, prefill's share of it, sequences that decode) of a class in one phase."""
    samples = [
        sample
        for outcome in outcomes
        for sample in outcome.series
        if sample.hardware == hardware and begin_s < sample.at_s <= begin_s + PHASE_S
    ]
    busy = sum(sample.utilisation for sample in samples)
    prefill = sum(sample.utilisation * sample.prefill_share for sample in samples)
    running = sum(sample.running for sample in samples)
    count = max(len(samples), 1)
    return busy / count, prefill / busy if busy else 0.0, running / count
