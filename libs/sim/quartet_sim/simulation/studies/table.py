"""Tables of a study, as Markdown."""

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from quartet_sim.simulation.compare import spread

Told = Callable[[int, str], None]
"""Is told how many runs there are, and which one is done."""


class Table(Struct, frozen=True):
    """``columns`` name the cells of each of ``rows``; ``note`` says what is in them, and how it was made."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def markdown(tables: Iterable[Table]) -> str:
    """The tables one under the other."""
    parts = []
    for table in tables:
        lines = [f"**{table.title}**", ""]
        lines.append(f"| {' | '.join(table.columns)} |")
        lines.append(f"| {' | '.join(['---'] + ['---:'] * (len(table.columns) - 1))} |")
        lines += [f"| {' | '.join(row)} |" for row in table.rows]
        if table.note:
            lines += ["", table.note]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def mean_and_reach(values: Sequence[float], digits: int) -> str:
    """The mean of ``values``, ± how far the farthest is from it."""
    over = spread(values)
    text = f"{over.mean:,.{digits}f}"
    if len(values) > 1:
        text += f" ± {max(over.most - over.mean, over.mean - over.least):,.{digits}f}"
    return text
