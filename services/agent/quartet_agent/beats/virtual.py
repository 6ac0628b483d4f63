"""Beats of the virtual fleet: a timer on the loop that hands each beat to whoever plays the network."""

import asyncio
from collections.abc import Callable, Sequence

from quartet_core.heartbeat import Beat, BeatWorker, node_hash


class VirtualBeats:
    """A ``BeatPort`` that calls ``deliver`` with a beat every ``interval_s`` on the running loop's clock."""

    def __init__(self, deliver: Callable[[Beat], None], interval_s: float = 0.0005) -> None:
        self._deliver = deliver
        self._interval_s = interval_s
        self._node = 0
        self._incarnation = 0
        self._sequence = 0
        self._workers: tuple[BeatWorker, ...] = ()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def sequence(self) -> int:
        """As ``BeatPort.sequence``."""
        return self._sequence

    @property
    def trouble(self) -> int:
        """As ``BeatPort.trouble``: none, ever."""
        return 0

    @property
    def skipped(self) -> int:
        """As ``BeatPort.skipped``: none, ever."""
        return 0

    @property
    def realtime(self) -> bool:
        """As ``BeatPort.realtime``: its clock waits for it."""
        return True

    def start(self, node: str, incarnation: int) -> None:
        """As ``BeatPort.start``; needs a running loop."""
        self._node = node_hash(node)
        self._incarnation = incarnation
        loop = asyncio.get_running_loop()
        self._schedule(loop, loop.time() + self._interval_s)

    def publish(self, workers: Sequence[BeatWorker]) -> None:
        """As ``BeatPort.publish``."""
        self._workers = tuple(workers)

    def tick(self) -> None:
        """As ``BeatPort.tick``: the loop that would be judged is the one that beats."""

    def stop(self) -> None:
        """As ``BeatPort.stop``."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self, loop: asyncio.AbstractEventLoop, when_s: float) -> None:
        self._timer = loop.call_at(when_s, self._beat, loop, when_s)

    def _beat(self, loop: asyncio.AbstractEventLoop, when_s: float) -> None:
        self._sequence += 1
        self._schedule(loop, max(when_s + self._interval_s, loop.time()))
        self._deliver(Beat(self._node, self._incarnation, self._sequence, int(loop.time() * 1e9), self._workers))
