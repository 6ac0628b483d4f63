"""Affinity as the agent says it: which rows of the filter its workers' cached prefixes turn on and off."""

from array import array
from collections.abc import Callable
from sys import byteorder

from quartet_agent.worker import HostedWorker
from quartet_bus.messages import AffinityUpdate
from quartet_core.affinity import AffinityCounters


class AffinityAuthor:
    """Counts one worker's cached rungs and says what changed. ``publish`` takes the update."""

    def __init__(
        self, worker: HostedWorker, rows: int, hashes: int, publish: Callable[[str, AffinityUpdate], None]
    ) -> None:
        self._worker = worker
        self._rows = rows
        self._hashes = hashes
        self._publish = publish
        self._counters = AffinityCounters(rows, hashes)
        self._number = 0

    def tick(self) -> None:
        """Say what the engine cached and evicted since the last tick, if any row changed by it."""
        cached, evicted = self._worker.adapter.drain_rungs()
        if not cached and not evicted:
            return
        # Rows that turn both ways within a tick end up where they were: only the net change travels.
        changed: dict[int, bool] = {}
        for rung in cached:
            changed.update(dict.fromkeys(self._counters.add(rung), True))
        for rung in evicted:
            for row in self._counters.remove(rung):
                if changed.pop(row, None) is None:
                    changed[row] = False
        if changed:
            on = [row for row, is_on in changed.items() if is_on]
            off = [row for row, is_on in changed.items() if not is_on]
            self._say(on, off, full=False)

    def say_all(self) -> None:
        """Say every row that is on: at start, and when somebody missed an update."""
        self.tick()
        self._say(self._counters.full(), [], full=True)

    def _say(self, on: list[int], off: list[int], *, full: bool) -> None:
        self._number += 1
        worker = self._worker
        update = AffinityUpdate(
            worker.id,
            worker.incarnation,
            self._number,
            self._rows,
            self._hashes,
            pack_rows(on),
            pack_rows(off),
            full,
        )
        self._publish(worker.id, update)


def pack_rows(rows: list[int]) -> bytes:
    """Row numbers as little-endian u32."""
    packed = array("I", rows)
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
