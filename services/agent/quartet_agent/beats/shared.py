"""The words of one node in memory shared between the agent and its beating child.

An anonymous file (memfd), so that nothing is left behind whoever dies first. All cells are native 8-byte words at
aligned offsets, each written by one side only, and CPython stores such a cell in one move:

    0  sequence last begun        child          4  number of workers    agent
    1  beats sent                 child          5  slots skipped        child
    2  sends that failed          child          6  number of orders     agent
    3  agent's last tick, ns      agent          7  1 if realtime        child
    8+ one cell a worker          agent             ordinal | incarnation << 16 | word << 32

An order (another key, other targets) is a line on the child's standard input; the line is written first, then counted.

The agent writes a word, then reads the sequence; the child writes the sequence, then reads the words. A processor may
let a read overtake an earlier write of other memory, but only for as long as its store buffer takes to drain, some
nanoseconds; between the two, either side runs a hundred times that in bytecode.
"""

import mmap
import os
from collections.abc import Sequence
from typing import Final

from quartet_core.heartbeat import MAX_WORKERS, BeatWorker

_SEQUENCE, _SENT, _FAILED, _TICK, _COUNT, _SKIPPED, _ORDERS, _REALTIME = range(8)
_FIRST_WORKER: Final = 8
_CELLS: Final = _FIRST_WORKER + MAX_WORKERS + 1


class SharedWords:
    """Either side's view of the shared cells."""

    def __init__(self, fd: int) -> None:
        """Map the file behind ``fd``, which stays open and the caller's."""
        self._map = mmap.mmap(fd, _CELLS * 8)
        self._cells = memoryview(self._map).cast("Q")

    @staticmethod
    def create() -> int:
        """A descriptor of fresh, zeroed cells. The caller closes it."""
        fd = os.memfd_create("quartet-beats")
        os.ftruncate(fd, _CELLS * 8)
        return fd

    @property
    def sequence(self) -> int:
        """The sequence of the last beat begun."""
        return self._cells[_SEQUENCE]

    @property
    def sent(self) -> int:
        """Datagrams handed to the kernel."""
        return self._cells[_SENT]

    @property
    def failed(self) -> int:
        """Datagrams that the kernel did not take."""
        return self._cells[_FAILED]

    @property
    def tick_ns(self) -> int:
        """When the agent's loop was last seen to run, on the host's monotonic clock."""
        return self._cells[_TICK]

    @property
    def skipped(self) -> int:
        """Slots that had passed before the child could beat in them."""
        return self._cells[_SKIPPED]

    @property
    def realtime(self) -> bool:
        """Whether the child goes before everything that is not realtime."""
        return bool(self._cells[_REALTIME])

    def write_realtime(self, realtime: bool) -> None:
        """How the child is scheduled."""
        self._cells[_REALTIME] = realtime

    @property
    def orders(self) -> int:
        """Orders given so far."""
        return self._cells[_ORDERS]

    def count_order(self) -> None:
        """One more order waits to be read."""
        self._cells[_ORDERS] += 1

    def write_tick(self, now_ns: int) -> None:
        """The agent's loop runs."""
        self._cells[_TICK] = now_ns

    def write(self, workers: Sequence[BeatWorker]) -> None:
        """Take these workers' words. Raises ``ValueError`` for more workers than a beat can carry."""
        if len(workers) > MAX_WORKERS:
            raise ValueError(f"a beat carries at most {MAX_WORKERS} workers, not {len(workers)}")
        cells = self._cells
        for index, worker in enumerate(workers, _FIRST_WORKER):
            cells[index] = worker.ordinal | worker.incarnation << 16 | worker.word << 32
        cells[_COUNT] = len(workers)

    def begin(self) -> int:
        """Take the next sequence number, before the words are read."""
        sequence = self._cells[_SEQUENCE] + 1
        self._cells[_SEQUENCE] = sequence
        return sequence

    def raw(self) -> bytes:
        """The cells of all workers, to see cheaply whether any changed."""
        return self._cells[_FIRST_WORKER : _FIRST_WORKER + self._cells[_COUNT]].tobytes()

    def workers(self) -> list[BeatWorker]:
        """What the agent says of its workers now."""
        return [
            BeatWorker(cell & 0xFF, cell >> 16 & 0xFFFF, cell >> 32)
            for cell in self._cells[_FIRST_WORKER : _FIRST_WORKER + self._cells[_COUNT]]
        ]

    def count(self, sent: int, failed: int) -> None:
        """Add to what was sent, and to what was not."""
        self._cells[_SENT] += sent
        self._cells[_FAILED] += failed

    def count_skipped(self, slots: int) -> None:
        """Add slots in which nobody beat."""
        self._cells[_SKIPPED] += slots

    def close(self) -> None:
        """Unmap."""
        self._cells.release()
        self._map.close()
