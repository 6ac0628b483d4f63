"""What the agent needs of whatever sends its beats: a child process in production, a timer in the virtual fleet."""

from collections.abc import Sequence
from typing import Protocol

from quartet_core.heartbeat import BeatWorker


class BeatPort(Protocol):
    """Sends the newest words of all workers, again and again, by itself."""

    @property
    def sequence(self) -> int:
        """The last sequence begun. A word published before this was read is part of beat ``sequence + 1``."""
        ...

    @property
    def trouble(self) -> int:
        """How often a beat could not be sent, or the sender had to be started again, so far."""
        ...

    @property
    def skipped(self) -> int:
        """Slots that had passed before anyone could beat in them, so far; none is made up for."""
        ...

    @property
    def realtime(self) -> bool:
        """Whether beats go before everything on the host that is not realtime."""
        ...

    def start(self, node: str, incarnation: int) -> None:
        """Called once, before anything else: begin to beat for ``node``. No words yet is a beat without workers."""
        ...

    def publish(self, workers: Sequence[BeatWorker]) -> None:
        """Called whenever a word changed, with all workers; the next beat says them."""
        ...

    def tick(self) -> None:
        """Called every 50 ms by the agent's loop: as long as it is, the agent is alive and beats may say so."""
        ...

    def stop(self) -> None:
        """Beat no more. Stopping twice does nothing."""
        ...
