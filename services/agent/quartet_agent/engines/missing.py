"""What an engine's metrics should say and do not: one alarm when it begins, one word when it is over."""

from collections.abc import Callable
from typing import Any

from quartet_agent.engines.dialect import Dialect
from quartet_agent.engines.reading import Reading

Say = Callable[..., Any]
"""A method of a logger."""


class MissingMetrics:
    """The required quantities that one engine's metrics lack. ``alarm`` and ``relief`` say it to operators.

    Metrics of a lazy dialect (``Dialect.lazy``) begin with the engine's first request, so that they lack nothing until
    ``patience`` looks after its first answer.
    """

    def __init__(self, dialect: Dialect, patience: int, alarm: Say, relief: Say) -> None:
        self._dialect = dialect
        self._patience = patience
        self._alarm = alarm
        self._relief = relief
        self._looks = 0  # since the first answer
        self.now: tuple[str, ...] = ()
        """What is missing: the worker is degraded while there is anything."""

    def born(self) -> None:
        """Another life of the engine began."""
        self._looks = 0

    def look(self, reading: Reading, *, answered: bool, **about: Any) -> None:
        """Its metrics were read. ``answered``: it has answered a request in this life. ``about`` is said with the
        alarm."""
        self._looks += answered
        if self._dialect.lazy and self._looks < self._patience:
            return
        if reading.missing == self.now:
            return
        self.now = reading.missing
        if self.now:
            self._alarm(
                "engine metrics missing: the worker is degraded",
                missing=self.now,
                engine=self._dialect.name,
                generation=reading.generation,
                **about,
            )
        else:
            self._relief("engine metrics are whole again", **about)
