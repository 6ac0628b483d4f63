"""Whose commands count: of all coordinators that ever spoke, the one with the highest (term, id)."""


class Terms:
    """Remembers the highest (term, coordinator) seen, and fences all lower ones."""

    __slots__ = ("_highest",)

    def __init__(self) -> None:
        self._highest: tuple[int, str] = (0, "")

    @property
    def highest(self) -> int:
        """The highest term obeyed so far."""
        return self._highest[0]

    def admit(self, term: int, coordinator: str) -> bool:
        """Whether a command of this coordinator counts. One that is higher replaces all before it."""
        if (term, coordinator) < self._highest:
            return False
        self._highest = (term, coordinator)
        return True
