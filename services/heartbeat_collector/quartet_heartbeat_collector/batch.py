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
Positions = NDArray[np.intp]

FIRST_WORKER = WORKERS_OFFSET // 8
ROW_WORDS = MAX_DATAGRAM_BYTES // 8 + 1
"""Words of a row that any datagram fits into; the last one makes a longer datagram noticeable."""

_PROTOCOL = np.uint64(MAGIC | VERSION << 16)
_PROTOCOL_MASK = np.uint64(0xFFFFFF)
_MAGIC = np.uint64(MAGIC)
_MAGIC_MASK = np.uint64(0xFFFF)
_COUNT_SHIFT, _COUNT_MASK = np.uint64(24), np.uint64(0xFF)
_INCARNATION_SHIFT = np.uint64(32)


class BeatBatch:
    """The well-formed datagrams of one receive call, in the order of their arrival, as columns.

    ``rows``, ``nodes``, ``incarnations``, ``sequences``, ``emits_ns`` and ``counts`` have one element a datagram. They
    are views of the receiver's buffers: a batch is good until the next receive call. ``malformed`` counts what was not
    a beat, by reason. ``received`` is the number of all datagrams. ``tagged`` is False for beats that never were
    datagrams, whose tags there is no sense in checking.
    """

    __slots__ = (
        "counts",
        "emits_ns",
        "incarnations",
        "malformed",
        "nodes",
        "received",
        "rows",
        "sequences",
        "tagged",
    )

    def __init__(self, rows: Words, malformed: Mapping[Reason, int], received: int, tagged: bool) -> None:
        self.rows = rows
        self.malformed = malformed
        self.received = received
        self.tagged = tagged
        first = rows[:, 0]
        self.counts = (first >> _COUNT_SHIFT) & _COUNT_MASK
        self.incarnations = first >> _INCARNATION_SHIFT
        self.nodes = rows[:, 1]
        self.sequences = rows[:, 2]
        self.emits_ns = rows[:, 3]

    def datagram(self, position: int) -> memoryview:
        """The bytes of the datagram at ``position`` of the columns."""
        words = FIRST_WORKER + int(self.counts[position])
        return self.rows[position, :words].data.cast("B")


def decode(rows: Words, lengths: NDArray[np.uint32]) -> BeatBatch:
    """The batch of ``lengths.size`` datagrams, each at the start of its row; ``lengths`` are in bytes."""
    received = lengths.size
    first = rows[:received, 0]
    counts = (first >> _COUNT_SHIFT) & _COUNT_MASK
    right_size = lengths == WORKERS_OFFSET + WORKER.size * counts
    good = right_size & ((first & _PROTOCOL_MASK) == _PROTOCOL)
    malformed: dict[Reason, int] = {}
    rows = rows[:received]
    if not good.all():
        # In the order in which ``quartet_core.heartbeat.decode`` looks, so that both count the same reasons.
        too_short = lengths < WORKERS_OFFSET
        no_magic = ~too_short & ((first & _MAGIC_MASK) != _MAGIC)
        no_version = ~too_short & ~no_magic & ((first & _PROTOCOL_MASK) != _PROTOCOL)
        wrong_length = too_short | (~no_magic & ~no_version & ~right_size)
        for reason, which in (
            (Reason.MAGIC, no_magic),
            (Reason.VERSION, no_version),
            (Reason.LENGTH, wrong_length),
        ):
            if number := int(np.count_nonzero(which)):
                malformed[reason] = number
        rows = rows[good]
    return BeatBatch(rows, malformed, received, tagged=True)


def from_beats(beats: Sequence[Beat]) -> BeatBatch:
    """The batch of beats that came in some other way than as datagrams (a fleet in one process)."""
    widest = max((len(beat.workers) for beat in beats), default=0)
    rows = np.zeros((len(beats), FIRST_WORKER + widest), dtype="<u8")
    for row, beat in zip(rows, beats, strict=True):
        workers = [worker.ordinal | worker.incarnation << 16 | worker.word << 32 for worker in beat.workers]
        first = MAGIC | VERSION << 16 | len(workers) << 24 | beat.incarnation << 32
        row[: FIRST_WORKER + len(workers)] = [first, beat.node, beat.sequence, beat.emit_ns, 0, *workers]
    return BeatBatch(rows, {}, len(beats), tagged=False)
