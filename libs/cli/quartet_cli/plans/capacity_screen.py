"""A capacity plan on a screen: the mix, how it was confirmed, what binds, and the next best."""

from collections import Counter

from rich.console import Console
from rich.table import Table

from quartet_cli.console import table
from quartet_cli.plans.capacity_answer import CapacityAnswer
from quartet_sim.capacity.mix import Mix
from quartet_sim.capacity.rounds import Round


def show(console: Console, answer: CapacityAnswer) -> None:
    """Print all of ``answer``."""
    console.print(_demand(answer))
    if answer.rounds:
        console.print(_rounds(answer))
        console.print(f"Ended: {answer.ended}.\n", soft_wrap=True)
    if answer.mix is None:
        console.print("No mix will do.", style="bold")
        for relief in answer.obstacles:
            price = "" if relief.price_per_hour is None else f": ${relief.price_per_hour:.2f}/h"
            console.print(f"  {relief.text}{price}", soft_wrap=True)
        return
    console.print(_mix(answer, answer.mix))
    console.print("What binds", style="bold")
    for relief in answer.binding:
        price = "" if relief.price_per_hour is None else f"${relief.price_per_hour:.2f}/h "
        console.print(f"  {price}{relief.text}", soft_wrap=True)
    if not answer.binding:
        console.print(
            "  the cards themselves: without stock and budget, or with targets a quarter looser, it is no cheaper"
        )
    for line in _held_by(answer, answer.mix):
        console.print(f"  {line}", soft_wrap=True)
    if answer.alternatives:
        console.print("\nNext best by the program (not simulated)", style="bold")
        for mix in answer.alternatives:
            console.print(f"  ${mix.price_per_hour:.2f}/h  {mix.text}")


def _demand(answer: CapacityAnswer) -> Table:
    names = list(dict.fromkeys(name for bucket in answer.buckets for name in bucket.per_worker))
    peaks = ", ".join(f"{model} x{peak:.2f}" for model, peak in answer.demand.peak_over_mean.items())
    made = table(
        f"{answer.demand.requests} requests in {answer.demand.span_s:.0f} s",
        ("bucket",),
        ("mean/s", "peak/s", *(f"one worker/s\n{name}" for name in names)),
        caption=f"peak over mean: {peaks}; one worker: at its largest batch within the targets; (late): share in time",
    )
    for bucket in answer.buckets:
        cells = [f"{bucket.mean_per_s:.2f}", f"{bucket.rate_per_s:.2f}"]
        for name in names:
            if name not in bucket.per_worker:
                cells.append("")
                continue
            within = bucket.within[name]
            late = "" if within == 1 else f" ({within:.0%})"
            cells.append(f"{bucket.per_worker[name]:.2f}{late}")
        made.add_row(bucket.name, *cells)
    return made


def _rounds(answer: CapacityAnswer) -> Table:
    made = table(
        f"Rounds: {answer.within:.0%} of each model's requests must be in time",
        ("round", "workers"),
        ("planned at", "$/h", "within SLO", "TTFT p90\nms", "TPOT p90\nms", "verdict"),
    )
    for each in answer.rounds:
        outcome = each.outcome
        made.add_row(
            each.kind,
            each.mix.text,
            ", ".join(f"{share:.0%}" for share in each.utilisation.values()),
            f"{each.mix.price_per_hour:.2f}",
            f"{outcome.within_slo:.1%}",
            f"{outcome.ttft_ms.p90:,.0f}",
            f"{outcome.tpot_ms.p90:.1f}",
            "passes" if each.passed else f"misses {', '.join(each.short)}",
        )
    return made


def _mix(answer: CapacityAnswer, mix: Mix) -> Table:
    how = "confirmed by simulation" if answer.confirmed else "by the program alone, not simulated"
    made = table(
        f"Cheapest mix found, {how}: ${mix.price_per_hour:.2f}/h, ${answer.usd_per_million:.3f} per M output tokens",
        ("class", "model", "weights"),
        ("workers", "cards", "$/h", "planned\nuse", "busy", "prefix\nhits", "kJ per M\ntokens"),
    )
    last = _passed(answer.rounds, mix)
    for team in mix.teams:
        option = team.option
        figures = None
        if last is not None:
            figures = next(
                (
                    each
                    for each in last.outcome.classes
                    if (each.hardware, each.model) == (option.hardware, option.model)
                ),
                None,
            )
        cells = ["", "", ""]
        if figures is not None:
            tokens = figures.output_tokens / 1e6
            cells = [
                f"{figures.utilisation:.0%}",
                f"{figures.hit_rate:.0%}",
                f"{figures.energy_j / 1e3 / tokens:,.0f}" if tokens else "",
            ]
        made.add_row(
            option.hardware,
            option.model,
            f"{option.precision}, TP {option.tp}",
            str(team.count),
            str(team.count * option.tp),
            f"{team.count * option.price_per_hour:.2f}",
            f"{team.used:.0%}",
            *cells,
        )
    return made


def _passed(rounds: list[Round], mix: Mix) -> Round | None:
    return next((each for each in rounds if each.mix == mix), None)


def _held_by(answer: CapacityAnswer, mix: Mix) -> list[str]:
    """What keeps decode batches from being larger, on each option of the mix."""
    lines: list[str] = []
    for name in dict.fromkeys(team.option.name for team in mix.teams):
        reasons = Counter(bucket.held_by[name].split(": ")[1] for bucket in answer.buckets if name in bucket.held_by)
        told = ", ".join(f"{reason} ({count} buckets)" for reason, count in reasons.most_common())
        lines.append(f"decode batches on {name} are held by {told}")
    return lines
