"""A partition on a screen: stages, what binds, other choices, moves, and settings to paste."""

from itertools import groupby

from rich.console import Console
from rich.table import Table

from quartet_cli.console import table
from quartet_cli.plans.answers import PartitionAnswer
from quartet_sim.partition.binding import Alternative
from quartet_sim.partition.moves import Move, MovePlan
from quartet_sim.partition.placement import Placement


def show(console: Console, answer: PartitionAnswer) -> None:
    """Print all of ``answer``."""
    found = answer.placement
    console.print(_stages(found))
    console.print(_summary(found))
    console.print("\nWhat binds", style="bold")
    for each in answer.binding:
        gain = f"  {each.gain_pct:+.0f} %  " if each.gain_pct else "  "
        console.print(f"{gain}{each.text}", soft_wrap=True)
    console.print()
    console.print(_alternatives(answer.alternatives))
    if answer.moves is not None and answer.current is not None:
        _show_moves(console, answer.moves, answer.current, found)
    for engine, text in answer.settings.items():
        console.print(f"\nSettings for {engine}", style="bold")
        console.print(text, markup=False, soft_wrap=True, end="")
    if answer.engine.refuses:
        console.print(f"\nWhat {answer.engine.name} cannot do, and the plan leaves out", style="bold")
        for refusal in answer.engine.refuses:
            console.print(f"  {refusal}", markup=False, soft_wrap=True)
    for note in answer.engine.notes:
        console.print(f"Note: {note}", markup=False, soft_wrap=True)


def _stages(found: Placement) -> Table:
    made = table(
        f"{found.model} in {len(found.stages)} stage{'s' if len(found.stages) > 1 else ''}",
        ("cards", "class", "layers", "precision", "way in"),
        ("GB a card\nweights", "\nKV", "\nother", "\nof", "prefill\nms", "step\nms", "link\nms/step", "a request\nms"),
    )
    for stage in found.stages:
        memory, times = stage.memory, stage.times
        ends = (" + embedding" if stage.embedding else "") + (" + head" if stage.head else "")
        made.add_row(
            ", ".join(stage.gpus),
            stage.hardware,
            f"{stage.first_layer}-{stage.end_layer - 1}{ends}",
            stage.precision,
            stage.way_in.path if stage.way_in else "",
            f"{memory.weights / 1e9:.1f}",
            f"{memory.kv / 1e9:.1f}",
            f"{(memory.activations + memory.runtime) / 1e9:.1f}",
            f"{memory.limit / 1e9:.1f}",
            f"{times.prefill_ms:.0f}",
            f"{times.step_ms:.1f}",
            f"{times.link_step_ms:.2f}",
            f"{times.request_ms:.0f}",
        )
    return made


def _summary(found: Placement) -> str:
    work = found.workload
    return (
        f"{found.rate_per_s:.2f} requests/s ({found.tokens_per_s:.0f} tokens/s) of {work.prompt_tokens} + "
        f"{work.output_tokens} tokens, {work.concurrency} at a time; TTFT {found.ttft_ms:.0f} ms when idle, TPOT "
        f"{found.tpot_ms:.1f} ms;\nroom for {found.kv_tokens:,} tokens of KV; quality lost "
        f"{found.loss_hundredths / 100:.2f} %. Times are computed (quartet plan accuracy)."
    )


def _alternatives(others: list[Alternative]) -> Table:
    made = table("Other choices", ("choice",), ("requests/s", "TTFT, ms", "TPOT, ms", "quality lost", "stages"))
    for other in others:
        if not other.stages:
            made.add_row(other.choice, "does not fit")
            continue
        made.add_row(
            other.choice,
            f"{other.rate_per_s:.2f}",
            f"{other.ttft_ms:.0f}",
            f"{other.tpot_ms:.1f}",
            f"{other.loss_hundredths / 100:.2f} %",
            str(other.stages),
        )
    return made


def _show_moves(console: Console, plan: MovePlan, current: Placement, found: Placement) -> None:
    fits = "" if current.fits else ", which its cards no longer hold"
    console.print("\nFrom the placement that is now", style="bold")
    console.print(
        f"It would do {current.rate_per_s:.2f} requests/s of this workload{fits}; the plan {found.rate_per_s:.2f}."
    )
    if not plan.moves:
        console.print("Nothing moves.")
        return
    made = table("", ("step", "what", "from", "to", "precision", "by"), ("GB sent", "GB loaded", "ms"))
    for number, run in enumerate(_runs(plan), 1):
        first = run[0]
        made.add_row(
            f"{number}. {first.kind}",
            _pieces(run),
            ", ".join(first.source) or "host memory",
            ", ".join(first.target) or "host memory",
            first.precision,
            first.path,
            f"{sum(move.sent_bytes for move in run) / 1e9:.2f}",
            f"{sum(move.store_bytes for move in run) / 1e9:.2f}",
            f"{sum(move.ms for move in run):.0f}",
        )
    console.print(made)
    fullest, peak = max(plan.peak_bytes.items(), key=lambda item: item[1] / plan.limit_bytes[item[0]])
    console.print(
        f"{plan.stays} pieces stay; {plan.sent_bytes / 1e9:.1f} GB over links, {plan.store_bytes / 1e9:.1f} GB from "
        f"the store, {plan.ms / 1e3:.1f} s one after the other. The fullest card is {fullest}, never above "
        f"{peak / 1e9:.1f} of {plan.limit_bytes[fullest] / 1e9:.1f} GB.",
        soft_wrap=True,
    )
    console.print(
        "Neither engine moves layers while it serves. Use it to place weights before a restart, and to know its cost."
    )


def _runs(plan: MovePlan) -> list[list[Move]]:
    """Steps that follow each other from the same cards to the same cards."""
    return [
        list(run) for _, run in groupby(plan.moves, lambda move: (move.kind, move.source, move.target, move.precision))
    ]


def _pieces(run: list[Move]) -> str:
    layers = sorted(int(move.piece.split()[1]) for move in run if move.piece.startswith("layer "))
    names = [move.piece for move in run if not move.piece.startswith("layer ")]
    parts: list[str] = []
    for _, group in groupby(enumerate(layers), lambda item: item[1] - item[0]):
        numbers = [number for _, number in group]
        parts.append(f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0]))
    if parts:
        names.insert(0, f"layer{'s' if len(layers) > 1 else ''} {', '.join(parts)}")
    return " + ".join(names)
