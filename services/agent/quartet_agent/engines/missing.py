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
        self._answered = False
        self._looks = 0
        self.now: tuple[str, ...] = ()
        """What is missing: the worker is degraded while there is anything."""

    def born(self) -> None:
        """Another life of the engine began: it has answered nothing yet."""
        self._answered, self._looks = False, 0

    def answered(self) -> None:
        """It has answered a request."""
        self._answered = True

    def look(self, reading: Reading, **about: Any) -> None:
        """Its metrics were read; ``about`` is said with the alarm."""
        self._looks += self._answered
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
