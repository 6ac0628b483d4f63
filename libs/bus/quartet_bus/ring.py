"""A ring of records in shared memory: one writer, any number of readers, no locks on the way (``proto/ring.md``).

The collector writes what it says on ``fleet.delta``; a router on the same host reads it without a broker in between.
The file is a plain mmap, so readers may come, go and be slow without the writer ever waiting for one: a reader that was
overtaken notices, goes on with the oldest record still there, and knows how many it lost.

Python has no memory fences. Every shared number is therefore an aligned 8-byte word stored at once, each record carries
its sequence before and behind its payload, and a CRC over the payload decides in the end.
"""

import contextlib
import fcntl
import mmap
import os
import zlib
from types import TracebackType

from quartet_bus.ring_file import (
    HEADER_BYTES,
    MAGIC,
    SMALLEST_BYTES,
    VERSION,
    W_CLOSED,
    W_DATA,
    W_DATA_BYTES,
    W_HEAD,
    W_INCARNATION,
    W_MAGIC,
    W_PID,
    W_TAIL,
    W_VERSION,
    RecordTooLarge,
    RingError,
    RingInUse,
    RingUnusable,
    allocate,
    checked_size,
    create,
)

__all__ = ["RecordTooLarge", "RingError", "RingInUse", "RingReader", "RingUnusable", "RingWriter"]

FRAME_BYTES = 24
"""What a record takes beside its payload (rounded up to 8 bytes): two sequences, length and CRC."""

_PAD = (1 << 64) - 1
_U32 = (1 << 32) - 1

# A reader that sees nothing new asks the file system for a successor this often, in polls: a stat costs some 2 us.
_LOOK_EVERY = 16
# A torn record is given this many polls (a store that another core does not see yet takes nanoseconds, not polls).
_TORN_POLLS = 16


class RingWriter:
    """Creates the ring at ``path`` and appends records to it, until ``close`` removes it.

    ``size_bytes`` is the room for records, rounded up to whole words (at least 4 KiB); ``incarnation`` tells readers
    one writer from the next. A file left by a writer that died is replaced.

    Raises ``RingInUse`` when a living writer has the path, ``RingUnusable`` when it cannot be created there.
    """

    def __init__(self, path: str, size_bytes: int, incarnation: int) -> None:
        self.path = path
        self.records = 0
        self._data_bytes = -(-max(size_bytes, SMALLEST_BYTES) // 8) * 8
        self.limit_bytes = self._data_bytes // 4 - FRAME_BYTES
        self._head = self._tail = 0
        self._fd = create(path)
        try:
            allocate(self._fd, HEADER_BYTES + self._data_bytes)
            self._map = mmap.mmap(self._fd, HEADER_BYTES + self._data_bytes)
        except OSError as error:
            os.unlink(path)
            os.close(self._fd)
            raise RingUnusable(path, f"no room for {self._data_bytes} bytes: {error.strerror}") from error
        self._bytes = memoryview(self._map)
        self._words = self._bytes.cast("Q")
        self._words[W_VERSION] = VERSION
        self._words[W_DATA_BYTES] = self._data_bytes
        self._words[W_PID] = os.getpid()
        self._words[W_INCARNATION] = incarnation
        self._words[W_MAGIC] = MAGIC  # last: before it a reader takes the file for unfinished
        self._closed = False

    def append(self, payload: bytes) -> int:
        """Write one record and return its sequence, from 1. Raises ``RecordTooLarge``; never waits."""
        length = len(payload)
        if length > self.limit_bytes:
            raise RecordTooLarge(self.path, length, self.limit_bytes)
        words = self._words
        size = FRAME_BYTES + (length + 7) // 8 * 8
        offset = self._head % self._data_bytes
        rest = self._data_bytes - offset
        skipped = 0 if size <= rest else rest
        self._make_room(skipped + size)
        if skipped:
            words[W_DATA + offset // 8] = _PAD
            offset = 0
        first = W_DATA + offset // 8
        sequence = self.records + 1
        words[first] = sequence
        words[first + 1] = length | zlib.crc32(payload, sequence & _U32) << 32
        start = HEADER_BYTES + offset + 16
        self._bytes[start : start + length] = payload
        words[first + size // 8 - 1] = sequence
        self._head += skipped + size
        self.records = sequence
        words[W_HEAD] = self._head
        return sequence

    def _make_room(self, wanted_bytes: int) -> None:
        """Give up the oldest records until ``wanted_bytes`` fit, and say so before a byte of them is overwritten."""
        tail, limit = self._tail, self._head + wanted_bytes - self._data_bytes
        if tail >= limit:
            return
        while tail < limit:
            offset = tail % self._data_bytes
            first = W_DATA + offset // 8
            if self._words[first] == _PAD:
                tail += self._data_bytes - offset
            else:
                tail += FRAME_BYTES + ((self._words[first + 1] & _U32) + 7) // 8 * 8
        self._tail = self._words[W_TAIL] = tail

    def close(self) -> None:
        """Say goodbye to readers and remove the file. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        self._words[W_CLOSED] = 1
        # Somebody may have removed or replaced the path by hand; only our own file is ours to unlink.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.lstat(self.path), os.fstat(self._fd)):
                os.unlink(self.path)
        self._words.release()
        self._bytes.release()
        self._map.close()
        os.close(self._fd)

    def __enter__(self) -> "RingWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class RingReader:
    """Reads the ring at ``path``: from the next record on, or with ``from_oldest`` from the oldest still there.

    The ring need not exist yet, and its writer may be replaced at any time: ``poll`` finds the new file by itself.
    ``lost`` counts records that were overwritten before they were read (or torn for good), ``reopened`` the successors
    found, ``incarnation`` and ``writer_pid`` say whose ring is read now (0 when there is none). ``problem`` is the
    reason why a file that is there cannot be read, else None.
    """

    def __init__(self, path: str, *, from_oldest: bool = False) -> None:
        self.path = path
        self.lost = 0
        self.reopened = 0
        self.incarnation = 0
        self.writer_pid = 0
        self.problem: RingUnusable | None = None
        self._from_oldest = from_oldest
        self._seen_one = False
        self._idle = 0
        self._torn = 0
        self._position = 0
        self._expected = 0
        self._ended = False
        self._fd = -1
        self._map: mmap.mmap
        self._bytes = memoryview(b"")
        self._words = self._bytes.cast("Q")
        self._data_bytes = 0
        self._attach()

    @property
    def attached(self) -> bool:
        """Whether a ring is open right now."""
        return self._fd >= 0

    def poll(self) -> list[bytes]:
        """All records written since the last poll, oldest first; empty when there are none, or no ring.

        Costs one load when nothing happened. Never raises and never waits.
        """
        records: list[bytes] = []
        if self._fd < 0:
            self._idle += 1
            if self._ended or self._idle % _LOOK_EVERY or not self._attach():
                return records
        head = self._words[W_HEAD]
        if self._position >= head:
            self._look_for_successor()
            return records
        self._idle = 0
        while self._position < head:
            tail = self._words[W_TAIL]
            if self._position < tail:
                self._position = tail
            record = self._take()
            if record is not None:
                records.append(record)
                self._torn = 0
            elif self._position >= self._words[W_TAIL]:
                self._wait_for_torn(head)
                break
        return records

    def writer_alive(self) -> bool:
        """Whether the writer of the ring that is open holds its lock still."""
        if self._fd < 0:
            return False
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        """Let go of the file for good: a closed reader polls nothing. Closing twice does nothing."""
        self._ended = True
        self._detach()

    def __enter__(self) -> "RingReader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _take(self) -> bytes | None:
        """The record at the position, stepping over it; None when it is torn, or was overwritten meanwhile."""
        offset = self._position % self._data_bytes
        first = W_DATA + offset // 8
        sequence = self._words[first]
        if sequence == _PAD:
            if self._words[W_TAIL] > self._position:
                return None
            self._position += self._data_bytes - offset
            offset, first = 0, W_DATA
            sequence = self._words[first]
        frame = self._words[first + 1]
        length = frame & _U32
        size = FRAME_BYTES + (length + 7) // 8 * 8
        if offset + size > self._data_bytes:
            return None
        start = HEADER_BYTES + offset + 16
        payload = bytes(self._bytes[start : start + length])
        if self._words[first + size // 8 - 1] != sequence or self._words[W_TAIL] > self._position:
            return None
        if zlib.crc32(payload, sequence & _U32) != frame >> 32:
            return None
        if self._expected:
            self.lost += sequence - self._expected
        self._expected = sequence + 1
        self._position += size
        return payload

    def _wait_for_torn(self, head: int) -> None:
        """Come back to a record whose stores are not all visible yet; after many polls give up on what is there."""
        self._torn += 1
        if self._torn >= _TORN_POLLS:
            self._position, self._torn = head, 0

    def _look_for_successor(self) -> None:
        """Nothing new: has the writer left, or has another taken its place?"""
        self._idle += 1
        closed = self._words[W_CLOSED]
        if not closed and self._idle % _LOOK_EVERY:
            return
        try:
            same = os.path.samestat(os.lstat(self.path), os.fstat(self._fd))
        except OSError:
            same = False
        # Between the last look at the head and its end the writer may have written still.
        if (closed or not same) and self._position >= self._words[W_HEAD]:
            self._detach()
            self._attach()

    def _attach(self) -> bool:
        """Open whatever ring is at the path now; False (and perhaps a ``problem``) when there is none to read."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            self.problem = None
            return False
        except OSError as error:
            self.problem = RingUnusable(self.path, f"cannot be opened: {error.strerror}")
            return False
        try:
            size = checked_size(self.path, fd)
            self._map = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        except (RingUnusable, OSError) as error:
            os.close(fd)
            self.problem = error if isinstance(error, RingUnusable) else RingUnusable(self.path, str(error))
            return False
        self._fd = fd
        self._bytes = memoryview(self._map)
        self._words = self._bytes.cast("Q")
        words = self._words
        if words[W_MAGIC] != MAGIC or words[W_VERSION] != VERSION or words[W_DATA_BYTES] != size - HEADER_BYTES:
            found = f"magic {words[W_MAGIC]:#x}, version {words[W_VERSION]}, {words[W_DATA_BYTES]} bytes"
            self._detach()
            self.problem = RingUnusable(self.path, f"not a ring of version {VERSION} ({found})")
            return False
        self.problem = None
        self._data_bytes = words[W_DATA_BYTES]
        self.incarnation, self.writer_pid = words[W_INCARNATION], words[W_PID]
        self._torn = self._expected = 0
        # A successor is read from its start: all it wrote is new to us.
        if self._from_oldest or self._seen_one:
            self._position, self._expected = words[W_TAIL], 1 if self._seen_one else 0
        else:
            self._position = words[W_HEAD]
        self.reopened += self._seen_one
        self._seen_one = True
        return True

    def _detach(self) -> None:
        self._words.release()
        self._bytes.release()
        if self._fd >= 0:
            self._map.close()
            os.close(self._fd)
            self._fd = -1
        self.incarnation = self.writer_pid = 0
