"""The bytes of a transfer over TCP, without any I/O. Little-endian.

    sender    hello: magic "QKV1", epoch u32, length of the transfer's name u16, pad u16, secret 16 bytes; the name
    receiver  answer: code u8, 0 = go on; anything else ends the transfer
    sender    chunks: first block u32, number of blocks u32, payload bytes u32, pad u32, checksum u64; the payload
              a chunk with no blocks says that this was all
    receiver  answer

The blocks of a chunk are equally long. The checksum is XXH3-64 of the payload, seeded with the index of the first
block, so that a chunk in the wrong place is as wrong as a damaged one.
"""

import struct
from collections.abc import Sequence
from typing import Final

from xxhash import xxh3_64_intdigest

from quartet_agent.kv.mover import MoveError, MoveReason

MAGIC: Final = b"QKV1"
SECRET_BYTES: Final = 16
MAX_NAME_BYTES: Final = 256
MAX_CHUNK_BYTES: Final = 64 * 1024 * 1024

HELLO: Final = struct.Struct(f"<4sIHxx{SECRET_BYTES}s")
CHUNK: Final = struct.Struct("<IIIxxxxQ")
ANSWER: Final = struct.Struct("<B")

_REASONS: Final = tuple(MoveReason)
_GO_ON: Final = ANSWER.pack(0)
LAST_CHUNK: Final = CHUNK.pack(0, 0, 0, 0)


def encode_hello(transfer: str, epoch: int, secret: bytes) -> bytes:
    """The sender's first words. Raises ``ValueError`` for a name or a secret of the wrong length."""
    name = transfer.encode()
    if not 0 < len(name) <= MAX_NAME_BYTES:
        raise ValueError(f"a transfer's name has 1 to {MAX_NAME_BYTES} bytes, not {len(name)}")
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a lease's secret has {SECRET_BYTES} bytes, not {len(secret)}")
    return HELLO.pack(MAGIC, epoch, len(name), secret) + name


def decode_hello(header: bytes) -> tuple[int, int, bytes]:
    """(epoch, length of the name that follows, secret). Raises ``MoveError`` (protocol)."""
    magic, epoch, length, secret = HELLO.unpack(header)
    if magic != MAGIC or not 0 < length <= MAX_NAME_BYTES:
        raise MoveError(MoveReason.PROTOCOL, "not a transfer")
    return epoch, length, secret


def encode_answer(reason: MoveReason | None) -> bytes:
    """The receiver's word: go on (or: complete), or why not."""
    return _GO_ON if reason is None else ANSWER.pack(1 + _REASONS.index(reason))


def check_answer(answer: bytes) -> None:
    """Return if the receiver said yes; raise its ``MoveError`` if it said no."""
    (code,) = ANSWER.unpack(answer)
    if code:
        known = code <= len(_REASONS)
        raise MoveError(_REASONS[code - 1] if known else MoveReason.PROTOCOL, "the receiver refused")


def encode_chunk(first_block: int, blocks: Sequence[bytes]) -> tuple[bytes, bytes]:
    """(header, payload) of a chunk of equally long blocks."""
    payload = b"".join(blocks)
    checksum = xxh3_64_intdigest(payload, first_block)
    return CHUNK.pack(first_block, len(blocks), len(payload), checksum), payload


class ChunkHeader:
    """What a chunk says of itself, checked as far as it can be without the payload."""

    __slots__ = ("_checksum", "blocks", "first_block", "payload_bytes")

    def __init__(self, header: bytes) -> None:
        """Raises ``MoveError`` (range) for sizes that no chunk may have, before anything is read for it."""
        self.first_block, self.blocks, self.payload_bytes, self._checksum = CHUNK.unpack(header)
        if self.blocks == 0:
            return
        if self.payload_bytes > MAX_CHUNK_BYTES or self.payload_bytes < self.blocks or self.payload_bytes % self.blocks:
            raise MoveError(MoveReason.RANGE, f"{self.blocks} blocks in {self.payload_bytes} bytes")

    @property
    def last(self) -> bool:
        """Whether this says that all was sent."""
        return bool(self.blocks == 0)

    def split(self, payload: bytes) -> list[memoryview]:
        """The blocks in ``payload``, uncopied. Raises ``MoveError`` (checksum)."""
        if xxh3_64_intdigest(payload, self.first_block) != self._checksum:
            raise MoveError(MoveReason.CHECKSUM, f"chunk at block {self.first_block}")
        size = self.payload_bytes // self.blocks
        view = memoryview(payload)
        return [view[start : start + size] for start in range(0, self.payload_bytes, size)]
