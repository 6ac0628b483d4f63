"""The word board: keeps what the beats say in step with what the workers do.

Whoever changes a worker's state touches it; whoever says something that refers to that state asks ``next_beat`` first,
which writes what was touched. So an event names the first beat that includes it, and a ledger can tell whether a word
already counts what the event says.
"""

from collections.abc import Sequence

from quartet_agent.beats.port import BeatPort
from quartet_agent.worker import HostedWorker
from quartet_core.heartbeat import BeatWorker


class WordBoard:
    """The words of this node's workers."""

    def __init__(self, port: BeatPort, workers: Sequence[HostedWorker]) -> None:
        self._port = port
        self._workers = workers
        self._said = [BeatWorker(worker.ordinal, worker.incarnation, 0) for worker in workers]
        self._touched: dict[int, None] = {}
        self.accepting = False
        """Whether the agent takes work at all: false before it is ready, and from the moment it stops."""
        self.epoch = 0
        """The inventory's, mirrored in every word."""

    def touch(self, worker: HostedWorker) -> None:
        """The state of ``worker`` changed; its word is written before anybody refers to it."""
        self._touched[worker.ordinal] = None

    def touch_all(self) -> None:
        """Everything may have changed: time passed, or the board's own flags did."""
        for worker in self._workers:
            self._touched[worker.ordinal] = None

    def write(self) -> None:
        """Write the words of the workers touched since the last time."""
        if not self._touched:
            return
        changed = False
        for ordinal in self._touched:
            worker = self._workers[ordinal]
            word = worker.word(accepting=self.accepting, epoch=self.epoch)
            said = self._said[ordinal]
            if said.word != word or said.incarnation != worker.incarnation:
                self._said[ordinal] = BeatWorker(ordinal, worker.incarnation, word)
                changed = True
        self._touched.clear()
        if changed:
            self._port.publish(self._said)

    def next_beat(self) -> int:
        """Write what was touched; return the sequence of the first beat that says it."""
        self.write()
        return self._port.sequence + 1
