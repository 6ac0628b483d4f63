"""The heartbeat datagram: what a node says about all its workers, some 2,000 times a second.

Little-endian, every field naturally aligned, so that a structured array can be laid over a received buffer. The byte
table is in ``proto/heartbeat.md``; the constants here are its only copy in code.

The tag is BLAKE2s keyed with the node's key, over everything but the tag itself. Replay, unknown nodes and unannounced
incarnations are not this module's to see: they need memory, which the collector has.
"""

import hmac
import struct
from collections.abc import Iterable, Sequence
from enum import StrEnum
from hashlib import blake2b, blake2s
from typing import Final

import msgspec

MAGIC: Final = int.from_bytes(b"QB", "little")
VERSION: Final = 1

HEADER: Final = struct.Struct("<HBBIQQQ")
"""magic u16, version u8, worker count u8, agent incarnation u32, node u64, sequence u64, emit time u64 (ns)."""

TAG_OFFSET: Final = HEADER.size
TAG_BYTES: Final = 8
WORKERS_OFFSET: Final = TAG_OFFSET + TAG_BYTES

WORKER: Final = struct.Struct("<BxHI")
"""ordinal u8, pad u8, worker incarnation u16, state word u32."""

MAX_WORKERS: Final = 255
MAX_DATAGRAM_BYTES: Final = WORKERS_OFFSET + MAX_WORKERS * WORKER.size
MAX_KEY_BYTES: Final = 32

_NO_TAG: Final = bytes(TAG_BYTES)


class BeatWorker(msgspec.Struct, frozen=True):
    """One worker in a beat. ``ordinal`` 0-255, ``incarnation`` 0-65535, ``word`` as in ``quartet_core.word``."""

    ordinal: int
    incarnation: int
    word: int


class Beat(msgspec.Struct, frozen=True):
    """One datagram. ``node`` is ``node_hash`` of its name; ``emit_ns`` is on the sender's clock, for it alone."""

    node: int
    incarnation: int
    sequence: int
    emit_ns: int
    workers: tuple[BeatWorker, ...]


class Reason(StrEnum):
    """Why a datagram was dropped; the value is the label of the drop counter."""

    MAGIC = "magic"
    VERSION = "version"
    LENGTH = "length"
    TAG = "tag"


class MalformedBeat(Exception):
    """A datagram that is not a beat, or not one that a holder of the node's key has made."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def node_hash(name: str) -> int:
    """The 64-bit id of a node on the wire: the first 8 bytes of BLAKE2b of its name, read as little-endian."""
    return int.from_bytes(blake2b(name.encode()).digest()[:8], "little")


def node_key(master: bytes, node: str) -> bytes:
    """The 32-byte key of ``node``: BLAKE2s of its name, keyed with the fleet's master key (1 to 32 bytes).

    A node that leaks its key can speak for itself only. Raises ``ValueError`` for a master key of any other length:
    an empty one would make every key public.
    """
    _check_key(master)
    return blake2s(node.encode(), key=master).digest()


def beat_tag(datagram: bytes | bytearray | memoryview, key: bytes) -> bytes:
    """The tag that ``datagram`` must carry under the node key ``key``, whatever tag it carries now."""
    _check_key(key)
    view = memoryview(datagram)
    digest = blake2s(view[:TAG_OFFSET], digest_size=TAG_BYTES, key=key)
    digest.update(view[WORKERS_OFFSET:])
    return digest.digest()


def encode(beat: Beat, key: bytes | None = None) -> bytes:
    """The datagram of ``beat``, tagged when there is a node key. Raises ``ValueError`` for a value that has no room."""
    writer = BeatWriter(beat.node, beat.incarnation, key)
    return bytes(writer.write(beat.sequence, beat.emit_ns, beat.workers))


def decode(datagram: bytes | bytearray | memoryview, keys: Sequence[bytes] = ()) -> Beat:
    """The beat in ``datagram``; raises ``MalformedBeat``, and nothing else, for anything that is not one.

    ``keys`` are the node keys valid now (two while the master key is being changed): one of them must have made the
    tag. Without keys, tags are not looked at. Which node a datagram claims to be from, so that its keys can be
    chosen, is told by ``claimed_node``.
    """
    size = len(datagram)
    if size < WORKERS_OFFSET:
        raise MalformedBeat(Reason.LENGTH, f"{size} bytes; the header alone has {WORKERS_OFFSET}")
    magic, version, count, incarnation, node, sequence, emit_ns = HEADER.unpack_from(datagram)
    if magic != MAGIC:
        raise MalformedBeat(Reason.MAGIC, f"{magic:#06x} instead of {MAGIC:#06x}")
    if version != VERSION:
        raise MalformedBeat(Reason.VERSION, f"{version} instead of {VERSION}")
    expected = WORKERS_OFFSET + count * WORKER.size
    if size != expected:
        raise MalformedBeat(Reason.LENGTH, f"{size} bytes; with {count} workers it would be {expected}")
    view = memoryview(datagram)
    if keys and not TagCheck(keys).genuine(view):
        raise MalformedBeat(Reason.TAG, "made with none of the node's valid keys")
    workers = tuple(BeatWorker(*worker) for worker in WORKER.iter_unpack(view[WORKERS_OFFSET:]))
    return Beat(node, incarnation, sequence, emit_ns, workers)


def claimed_node(datagram: bytes | bytearray | memoryview) -> int | None:
    """The node hash that ``datagram`` carries, unverified; None if it is too short to carry one."""
    if len(datagram) < WORKERS_OFFSET:
        return None
    node: int = HEADER.unpack_from(datagram)[4]
    return node


class TagCheck:
    """Looks at the tags of one node's datagrams; ``keys`` are its keys valid now.

    For whoever looks at many: the keyed hash states are computed once and copied, which halves the time of
    ``beat_tag``, and the key that was right last time is tried first.
    """

    __slots__ = ("_keyed",)

    def __init__(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            _check_key(key)
        self._keyed = [blake2s(digest_size=TAG_BYTES, key=key) for key in keys]

    def genuine(self, datagram: bytes | bytearray | memoryview) -> bool:
        """Whether one of the keys made the tag of ``datagram``."""
        tag = datagram[TAG_OFFSET:WORKERS_OFFSET]
        before, behind = datagram[:TAG_OFFSET], datagram[WORKERS_OFFSET:]
        for keyed in self._keyed:
            digest = keyed.copy()
            digest.update(before)
            digest.update(behind)
            if hmac.compare_digest(digest.digest(), tag):
                if keyed is not self._keyed[0]:
                    self._keyed.remove(keyed)
                    self._keyed.insert(0, keyed)
                return True
        return False


class BeatWriter:
    """Writes one node's beats into one buffer, for the child process that does nothing else.

    What does not change between beats is computed once: the keyed hash state is copied, not built anew.
    """

    __slots__ = ("_buffer", "_count", "_end", "_incarnation", "_keyed", "_node", "_view")

    def __init__(self, node: int, incarnation: int, key: bytes | None = None) -> None:
        if key is not None:
            _check_key(key)
        self._node = node
        self._incarnation = incarnation
        self._keyed = None if key is None else blake2s(digest_size=TAG_BYTES, key=key)
        self._buffer = bytearray(MAX_DATAGRAM_BYTES)
        self._view = memoryview(self._buffer)
        self._count = 0
        self._end = WORKERS_OFFSET

    def write(self, sequence: int, emit_ns: int, workers: Iterable[BeatWorker] | None) -> memoryview:
        """The datagram of these workers, None for those of the last call. The view is good until the next call; the tag
        is zero without a key.

        Raises ``ValueError`` for more than 255 workers, or a value that has no room in its field.
        """
        buffer = self._buffer
        try:
            if workers is not None:
                self._take(workers)
            count, end = self._count, self._end
            HEADER.pack_into(buffer, 0, MAGIC, VERSION, count, self._incarnation, self._node, sequence, emit_ns)
        except struct.error as error:
            raise ValueError(f"beat {sequence} has no room for a value: {error}") from error
        view = self._view
        tag = _NO_TAG
        if self._keyed is not None:
            digest = self._keyed.copy()
            digest.update(view[:TAG_OFFSET])
            digest.update(view[WORKERS_OFFSET:end])
            tag = digest.digest()
        buffer[TAG_OFFSET:WORKERS_OFFSET] = tag
        return view[:end]

    def _take(self, workers: Iterable[BeatWorker]) -> None:
        end = WORKERS_OFFSET
        for worker in workers:
            WORKER.pack_into(self._buffer, end, worker.ordinal, worker.incarnation, worker.word)
            end += WORKER.size
        self._count, self._end = (end - WORKERS_OFFSET) // WORKER.size, end


def _check_key(key: bytes) -> None:
    if not 1 <= len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"a key has 1 to {MAX_KEY_BYTES} bytes, not {len(key)}")
