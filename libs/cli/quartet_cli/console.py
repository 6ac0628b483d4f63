"""Tables as this command prints them."""

from rich import box
from rich.console import Console
from rich.table import Table

_WIDTH_IN_A_PIPE = 160


def console() -> Console:
    """Standard output. A pipe has no width of its own, and must not cut what a screen would show."""
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=_WIDTH_IN_A_PIPE)


def table(title: str, left: tuple[str, ...], right: tuple[str, ...] = (), *, caption: str = "") -> Table:
    """An empty table with texts on the ``left`` and numbers on the ``right``."""
    made = Table(
        title=title,
        caption=caption or None,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        caption_style="",
        padding=(0, 1),
        pad_edge=False,
    )
    for name in left:
        made.add_column(name)
    for name in right:
        made.add_column(name, justify="right")
    return made
