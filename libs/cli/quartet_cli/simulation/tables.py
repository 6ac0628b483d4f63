"""The tables of a comparison, on a screen."""

from collections.abc import Callable, Mapping, Sequence

from rich.console import Console

from quartet_cli.console import table
from quartet_sim.simulation.compare import spread
from quartet_sim.simulation.figures import Outcome, PartFigures
from quartet_sim.simulation.knee import Knee


def show(console: Console, groups: Mapping[str, Sequence[Outcome]]) -> None:
    """Policies beside each other; each figure the mean over seeds, and ± the larger distance of any seed from it."""
    seeds = len(next(iter(groups.values())))
    made = table(
        "Policies",
        ("policy",),
        ("within SLO %", "goodput /s", "TTFT p50 / p99 ms", "TPOT p50 / p99 ms", "E2E p50 / p99 s", "worst wait s",
         "$/M good", "$/M", "kJ/M good", "kJ/M", "hit %", "unserved"),
        caption=f"Means of {seeds} seed{'s' * (seeds != 1)}, ± the largest distance from it. $/M: fleet price over"
        " output tokens; good: of answers within their targets. kJ/M: an upper bound. Unserved: refused, failed or not"
        " finished.",
    )  # fmt: skip
    for policy, outcomes in groups.items():
        made.add_row(
            policy,
            with_spread(outcomes, lambda o: 100 * o.within_slo, 1),
            with_spread(outcomes, lambda o: o.goodput_per_s, 2),
            _two(outcomes, lambda o: o.ttft_ms.p50, lambda o: o.ttft_ms.p99, 0),
            _two(outcomes, lambda o: o.tpot_ms.p50, lambda o: o.tpot_ms.p99, 1),
            _two(outcomes, lambda o: o.e2e_ms.p50 / 1e3, lambda o: o.e2e_ms.p99 / 1e3, 1),
            f"{_mean(outcomes, lambda o: o.worst_wait_ms / 1e3):.1f}",
            with_spread(outcomes, lambda o: o.usd_per_million_good, 2),
            f"{_mean(outcomes, lambda o: o.usd_per_million):.2f}",
            f"{_mean(outcomes, lambda o: o.j_per_million_good / 1e3):,.0f}",
            f"{_mean(outcomes, lambda o: o.j_per_million / 1e3):,.0f}",
            f"{_mean(outcomes, lambda o: 100 * o.hit_rate):.1f}",
            f"{_mean(outcomes, lambda o: o.refused + o.failed + o.unfinished):.0f}",
        )
    console.print(made)
    _show_classes(console, groups)
    _show_parts(console, "Within targets by SLO class, model and prompt length, %", groups)


def show_knees(console: Console, knees: Mapping[str, Sequence[Sequence[Knee]]]) -> None:
    """By policy: for each seed, a knee for each share."""
    shares = [knee.share for knee in next(iter(knees.values()))[0]]
    made = table(
        "Knees: the highest rate with so many requests within their targets",
        ("policy",),
        tuple(column for s in shares for column in (f"{100 * s:g} %: req/s", "$/M good", "worst wait s")),
        caption="Means of the seeds, ± the largest distance from it. 0: not even a 64th of the given rate.",
    )
    for policy, of_seeds in knees.items():
        row = [policy]
        for place in range(len(shares)):
            found = [seed[place] for seed in of_seeds]
            rates = spread([knee.rate_per_s for knee in found])
            outcomes = [knee.outcome for knee in found if knee.outcome is not None]
            row.append(f"{rates.mean:.2f} ± {max(rates.most - rates.mean, rates.mean - rates.least):.2f}")
            row.append(f"{_mean(outcomes, lambda o: o.usd_per_million_good):.2f}" if outcomes else "-")
            row.append(f"{_mean(outcomes, lambda o: o.worst_wait_ms / 1e3):.1f}" if outcomes else "-")
        made.add_row(*row)
    console.print(made)


def with_spread(outcomes: Sequence[Outcome], figure: Callable[[Outcome], float], digits: int) -> str:
    """The mean over seeds, and how far the farthest is from it."""
    over = spread([figure(outcome) for outcome in outcomes])
    if len(outcomes) == 1:
        return f"{over.mean:.{digits}f}"
    return f"{over.mean:.{digits}f} ± {max(over.most - over.mean, over.mean - over.least):.{digits}f}"


def _show_classes(console: Console, groups: Mapping[str, Sequence[Outcome]]) -> None:
    made = table(
        "Hardware classes",
        ("policy", "class", "model"),
        (
            "GPUs",
            "busy %",
            "of it prefill %",
            "requests",
            "output tokens",
            "hit %",
            "peak KV %",
            "preempted",
            "$",
            "kJ",
        ),
    )
    for policy, outcomes in groups.items():
        for place, first in enumerate(outcomes[0].classes):
            these = [outcome.classes[place] for outcome in outcomes if place < len(outcome.classes)]
            count = len(these)
            made.add_row(
                policy if not place else "",
                first.hardware,
                first.model,
                str(first.gpus),
                f"{100 * sum(c.utilisation for c in these) / count:.0f}",
                f"{100 * sum(c.prefill_share for c in these) / count:.0f}",
                f"{sum(c.requests for c in these) / count:,.0f}",
                f"{sum(c.output_tokens for c in these) / count:,.0f}",
                f"{100 * sum(c.hit_rate for c in these) / count:.1f}",
                f"{100 * max(c.peak_kv_share for c in these):.0f}",
                f"{sum(c.preemptions for c in these) / count:.0f}",
                f"{sum(c.usd for c in these) / count:.2f}",
                f"{sum(c.energy_j for c in these) / count / 1e3:,.0f}",
            )
    console.print(made)


def _show_parts(console: Console, title: str, groups: Mapping[str, Sequence[Outcome]]) -> None:
    def parts(outcome: Outcome) -> list[PartFigures]:
        models = outcome.by_model if len(outcome.by_model) > 1 else ()
        return [*outcome.by_slo, *models, *outcome.by_prompt]

    names = [part.name for part in parts(next(iter(groups.values()))[0])]
    made = table(title, ("policy",), tuple(names))
    for policy, outcomes in groups.items():
        row = [policy]
        for name in names:
            found = [part for outcome in outcomes for part in parts(outcome) if part.name == name]
            row.append(f"{100 * sum(part.within_slo for part in found) / len(found):.1f}" if found else "-")
        made.add_row(*row)
    console.print(made)


def _mean(outcomes: Sequence[Outcome], figure: Callable[[Outcome], float]) -> float:
    return sum(figure(outcome) for outcome in outcomes) / len(outcomes)


def _two(
    outcomes: Sequence[Outcome], one: Callable[[Outcome], float], other: Callable[[Outcome], float], digits: int
) -> str:
    return f"{_mean(outcomes, one):,.{digits}f} / {_mean(outcomes, other):,.{digits}f}"
