"""What an agent and an engine's connector say to each other: msgpack structs in frames, over a Unix stream socket.

    frame = length u32 little-endian | one of the structs below, as a map with its type under "t"

The engine's side listens; one agent is served at a time, and whoever comes later takes its place. The engine's first
word is ``Welcome``, with the arena's memory as a file descriptor beside it (SCM_RIGHTS); of another ``protocol`` than
its own the agent hangs up. All that an agent has pinned, been granted or asked for ends with its connection.
"""

import struct
from collections.abc import Iterator
from typing import Final

import msgspec
from msgspec import Struct

from quartet_connector.layout import PageLayout

MAX_FRAME_BYTES: Final = 64 << 20
_LENGTH: Final = struct.Struct("<I")


class BadFrame(ValueError):
    """Bytes that are no frame of this protocol; the text says why."""


class Stored(Struct, tag_field="t", tag="stored", array_like=False):
    """A page is in the arena from now on. ``root`` is (salt, adapter) of a chain's first block, else None."""

    id: int
    parent: int
    tokens: bytes
    root: tuple[str, str] | None = None


class Removed(Struct, tag_field="t", tag="removed"):
    """Pages are in the arena no more."""

    ids: list[int]


class Welcome(Struct, tag_field="t", tag="welcome"):
    """What this engine's pages are like. ``off`` says why there are none, "" when there are.

    ``life`` is another one whenever the engine is: its cache and arena are then new, too.
    """

    protocol: int
    life: str
    layout: PageLayout | None
    slots: int = 0
    off: str = ""


class Fill(Struct, tag_field="t", tag="fill"):
    """How full it is, in blocks; and since its start: pages saved from the cache, loaded into it, evicted from the
    arena, that came from others and were kept, that were dropped from the cache; and loads that failed."""

    total: int = 0
    empty: int = 0
    idle: int = 0
    slots: int = 0
    pages: int = 0
    saved: int = 0
    loaded: int = 0
    evicted: int = 0
    kept: int = 0
    dropped: int = 0
    hit_kept: int = 0
    failed_loads: int = 0


class Cold(Struct, array_like=True):
    """A prefix that nobody has used for ``idle_ms``: the ids of its blocks, and how often it was taken up."""

    ids: list[int]
    tokens: int
    idle_ms: float
    uses: int


class Coldest(Struct, tag_field="t", tag="coldest"):
    """Prefixes that are wholly cached, the coldest first. ``returns_ms``: how long prefixes had been idle that were
    used since the last one."""

    prefixes: list[Cold]
    returns_ms: list[float] = []


class Granted(Struct, tag_field="t", tag="granted"):
    """Slots that are the agent's to write."""

    slots: list[int]


class Pinned(Struct, tag_field="t", tag="pinned"):
    """The pages of a ``Pin`` are in the arena, in these slots, and stay there until ``Release`` or ``Drop``."""

    transfer: str
    slots: list[int]


class NotPinned(Struct, tag_field="t", tag="not_pinned"):
    """Nothing is kept of a ``Pin``; ``reason`` says why."""

    transfer: str
    reason: str


class Kept(Struct, tag_field="t", tag="kept"):
    """What came of a ``Keep``: the first ``pages`` of its pages are in the arena. ``refused`` says what is wrong with
    the next one, "" when all are."""

    transfer: str
    pages: int
    refused: str = ""


class Dropped(Struct, tag_field="t", tag="dropped"):
    """What came of a ``Drop``: blocks that were evicted from the engine's cache, and pages from the arena."""

    transfer: str
    blocks: int
    pages: int


EngineWord = Welcome | Stored | Removed | Fill | Coldest | Granted | Pinned | NotPinned | Kept | Dropped


class Ask(Struct, tag_field="t", tag="ask"):
    """Tell ``Coldest``, of ``limit`` prefixes at most, as soon as the engine steps."""

    limit: int


class Want(Struct, tag_field="t", tag="want"):
    """Grant slots until the agent has ``slots`` of them, as far as pages that nobody pins can make room."""

    slots: int


class Pin(Struct, tag_field="t", tag="pin"):
    """Have the pages ``ids`` of a chain, from its first block on, in the arena, and keep them. ``idle``: but not if
    its last block is in use."""

    transfer: str
    ids: list[int]
    idle: bool = False


class Keep(Struct, tag_field="t", tag="keep"):
    """Granted slots were written with a chain's pages, from its first block on."""

    transfer: str
    slots: list[int]


class Return(Struct, tag_field="t", tag="return"):
    """Granted slots come back unused."""

    slots: list[int]


class Release(Struct, tag_field="t", tag="release"):
    """A ``Pin`` ends; its pages stay as long as there is room."""

    transfer: str


class Drop(Struct, tag_field="t", tag="drop"):
    """A ``Pin`` ends, and what it kept goes from cache and arena, but nothing that was used since, or has more behind
    it."""

    transfer: str


AgentWord = Ask | Want | Pin | Keep | Return | Release | Drop

_encode = msgspec.msgpack.Encoder().encode
engine_word = msgspec.msgpack.Decoder(EngineWord).decode
agent_word = msgspec.msgpack.Decoder(AgentWord).decode


def frame(word: EngineWord | AgentWord) -> bytes:
    """``word`` as it is sent."""
    body = _encode(word)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a stream into the bodies of its frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies that are whole by ``data``. Raises ``BadFrame`` for one that is larger than any may be."""
        buffer = self._buffer
        buffer += data
        while len(buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(buffer)
            if size > MAX_FRAME_BYTES:
                raise BadFrame(f"a frame of {size} bytes; the largest has {MAX_FRAME_BYTES}")
            if len(buffer) < _LENGTH.size + size:
                return
            body = bytes(buffer[_LENGTH.size : _LENGTH.size + size])
            del buffer[: _LENGTH.size + size]
            yield body
