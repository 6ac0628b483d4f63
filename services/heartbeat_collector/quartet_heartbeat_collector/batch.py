"""Datagrams that were received together, decoded together: one numpy operation a field, not one a datagram.

The byte layout is ``proto/heartbeat.md``: every field is naturally aligned and a datagram is whole 8-byte words, so a
received buffer *is* a table of little-endian words. Word 0 holds magic, version, worker count and agent incarnation;
1 node, 2 sequence, 3 emit time, 4 tag; then one word a worker.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from quartet_core.heartbeat import MAGIC, MAX_DATAGRAM_BYTES, VERSION, WORKER, WORKERS_OFFSET, Beat, Reason

Words = NDArray[np.uint64]
Numbers = NDArray[np.int64]
Positions = NDArray[np.intp]

FIRST_WORKER = WORKERS_OFFSET // 8
ROW_WORDS = MAX_DATAGRAM_BYTES // 8 + 1
"""Words of a row that any datagram fits into; the last one makes a longer datagram noticeable."""

_COLUMNS = 4
_PROTOCOL = np.uint64(MAGIC | VERSION << 16)
_PROTOCOL_MASK = np.uint64(0xFFFFFF)
_MAGIC = np.uint64(MAGIC)
_MAGIC_MASK = np.uint64(0xFFFF)
_LENGTHS = WORKERS_OFFSET + WORKER.size * np.arange(256, dtype=np.uint32)
"""The length of a datagram by its worker count."""


class BeatBatch:
    """The well-formed datagrams of one receive call, in the order of their arrival, as columns.

    ``nodes``, ``incarnations``, ``sequences``, ``emits_ns`` and ``counts`` have one element a datagram and are the
    batch's own; worker entries are read from the receiver's buffers, so a batch is good until the next receive call.
    Sequences are signed: what a node can reach lies far below 2^63, and what is negative no node can.
    ``malformed`` counts what was not a beat, by reason. ``received`` is the number of all datagrams. ``tagged`` is
    False for beats that never were datagrams, whose tags there is no sense in checking.
    """

    __slots__ = (
        "_rows",
        "_where",
        "counts",
        "emits_ns",
        "incarnations",
        "malformed",
        "nodes",
        "received",
        "sequences",
        "tagged",
    )

    def __init__(
        self, rows: Words, columns: Words, where: Positions | None, malformed: Mapping[Reason, int], *, tagged: bool
    ) -> None:
        """``where`` are the rows that hold well-formed datagrams, None for all of them."""
        self._rows = rows
        self._where = where
        self.malformed = malformed
        self.received = len(rows)
        self.tagged = tagged
        self.counts = _counts(columns)
        self.incarnations = columns[0].view("<u4")[1::2]
        self.nodes = columns[1]
        self.sequences = columns[2].view("<i8")
        self.emits_ns = columns[3]

    def datagram(self, position: int) -> memoryview:
        """The bytes of the datagram at ``position`` of the columns."""
        row = position if self._where is None else int(self._where[position])
        return self._rows[row, : FIRST_WORKER + int(self.counts[position])].data.cast("B")

    def datagrams(self, positions: Positions) -> list[bytes]:
        """Copies of the datagrams at ``positions``; for many of them far quicker than ``datagram`` for each."""
        rows = positions if self._where is None else self._where[positions]
        counts = self.counts[positions]
        width = FIRST_WORKER + int(counts.max())
        together = self._rows[:, :width][rows].tobytes()
        sizes = (WORKERS_OFFSET + WORKER.size * counts.astype(np.intp)).tolist()
        return [together[at * 8 * width : at * 8 * width + size] for at, size in enumerate(sizes)]

    def workers(self, positions: Positions, width: int) -> Words:
        """The first ``width`` worker entries of the datagrams at ``positions``, one row each.

        Behind a datagram's own entries stands anything.
        """
        rows = positions if self._where is None else self._where[positions]
        return self._rows[:, FIRST_WORKER : FIRST_WORKER + width][rows]


def decode(rows: Words, lengths: NDArray[np.uint32]) -> BeatBatch:
    """The batch of ``lengths.size`` datagrams, each at the start of its row; ``lengths`` are in bytes."""
    rows = rows[: lengths.size]
    # Rows lie 2 kB apart: their headers are brought together once, and everything below runs on whole cache lines.
    columns = rows[:, :_COLUMNS].T.copy()
    first = columns[0]
    right_size = lengths == _LENGTHS[_counts(columns)]
    good = right_size & ((first & _PROTOCOL_MASK) == _PROTOCOL)
    if every(good):
        return BeatBatch(rows, columns, None, {}, tagged=True)
    where = good.nonzero()[0]
    malformed = _reasons(first, lengths, right_size)
    return BeatBatch(rows, columns.take(where, axis=1), where, malformed, tagged=True)


def every(flags: NDArray[np.bool_]) -> bool:
    """As ``flags.all()``, in a third of its time: on arrays of some hundred elements that is how all is spent."""
    return bool(np.count_nonzero(flags) == flags.size)


def _counts(columns: Words) -> NDArray[np.uint8]:
    """The worker counts, where they lie: the fourth byte of each datagram's first word."""
    counts: NDArray[np.uint8] = columns[0].view(np.uint8)[3::8]
    return counts


def _reasons(first: Words, lengths: NDArray[np.uint32], right_size: NDArray[np.bool_]) -> dict[Reason, int]:
    """Why datagrams are none, counted; in the order in which ``quartet_core.heartbeat.decode`` looks."""
    too_short = lengths < WORKERS_OFFSET
    no_magic = ~too_short & ((first & _MAGIC_MASK) != _MAGIC)
    no_version = ~too_short & ~no_magic & ((first & _PROTOCOL_MASK) != _PROTOCOL)
    wrong_length = too_short | (~no_magic & ~no_version & ~right_size)
    counted = (
        (Reason.MAGIC, int(np.count_nonzero(no_magic))),
        (Reason.VERSION, int(np.count_nonzero(no_version))),
        (Reason.LENGTH, int(np.count_nonzero(wrong_length))),
    )
    return {reason: number for reason, number in counted if number}


def from_beats(beats: Sequence[Beat]) -> BeatBatch:
    """The batch of beats that came in some other way than as datagrams (a fleet in one process)."""
    widest = max((len(beat.workers) for beat in beats), default=0)
    rows = np.zeros((len(beats), FIRST_WORKER + widest), dtype="<u8")
    for row, beat in zip(rows, beats, strict=True):
        workers = [worker.ordinal | worker.incarnation << 16 | worker.word << 32 for worker in beat.workers]
        first = MAGIC | VERSION << 16 | len(workers) << 24 | beat.incarnation << 32
        row[: FIRST_WORKER + len(workers)] = [first, beat.node, beat.sequence, beat.emit_ns, 0, *workers]
    columns = rows[:, :_COLUMNS].T.copy()
    return BeatBatch(rows, columns, None, {}, tagged=False)
