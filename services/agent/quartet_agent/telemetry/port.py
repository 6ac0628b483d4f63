"""What telemetry needs of whatever reads the host: a thread at NVML in production, the engines' own state simulated."""

from typing import Protocol

from msgspec import Struct

from quartet_core.readings import HostReading


class Taken(Struct, frozen=True):
    """The newest reading. ``reading`` is None when there is none since the last one taken.

    ``at_s`` is when it was made, on the clock of whoever made it; ``age_ms`` how long ago that is, of the last one if
    there is no new one. ``degraded`` says why something is missing or late, "" when nothing is.
    """

    reading: HostReading | None
    at_s: float = 0.0
    age_ms: float = 0.0
    degraded: str = ""


class ReadingsPort(Protocol):
    """Readings of one host."""

    @property
    def source(self) -> str:
        """Where its numbers come from: "nvml", "simulated"."""
        ...

    def start(self) -> None:
        """Called once, before the first ``take``."""
        ...

    def take(self) -> Taken:
        """Called once an interval, from the event loop: never waits."""
        ...

    def stop(self) -> None:
        """Called once; whatever is stuck is left behind."""
        ...
