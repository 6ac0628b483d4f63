"""Studies."""

from collections.abc import Callable, Mapping, Sequence

Told = Callable[[int, str], None]

STUDIES: Mapping[str, Callable[[int, Told], Sequence[object]]] = {}


def markdown(tables: Sequence[object]) -> str:
    """Tables."""
    return "\n".join(map(str, tables))
