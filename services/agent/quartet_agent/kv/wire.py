"""The bytes of a transfer, without any I/O. Little-endian.

    sender    hello: magic "QKV3", epoch u32, length of the transfer's name u16, pad u16, secret 16 bytes, chunk bytes
              u32; the name
    receiver  answer: code u8, 0 = go on; anything else ends the transfer
    sender    chunks: first block u32, number of blocks u32, payload bytes u32, slot u32, checksum u64; the payload
              a chunk with no blocks says that this was all; with slot 1, that more is being computed
    receiver  answer

Where payloads go through memory that both sides reach (``quartet_agent.kv.slots``), the first answer is followed by an
offer (slots u32, bytes of each u32, length u32; a description of that length), payloads are not on this connection, and
the receiver answers each chunk, which frees its slot.

The blocks of a chunk are equally long. The checksum is XXH3-64 of the payload, seeded with the index of the first
block, so that a chunk in the wrong place is as wrong as a damaged one. 0 stands for none: ``[kv] checksums = false``.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Final

from xxhash import xxh3_64, xxh3_64_intdigest

from quartet_agent.kv.mover import Buffer, MoveError, MoveReason

MAGIC: Final = b"QKV3"
SECRET_BYTES: Final = 16
MAX_NAME_BYTES: Final = 256
MAX_CHUNK_BYTES: Final = 64 * 1024 * 1024

HELLO: Final = struct.Struct(f"<4sIHxx{SECRET_BYTES}sI")
CHUNK: Final = struct.Struct("<IIIIQ")
ANSWER: Final = struct.Struct("<B")

_REASONS: Final = tuple(MoveReason)
_GO_ON: Final = ANSWER.pack(0)
LAST_CHUNK: Final = CHUNK.pack(0, 0, 0, 0, 0)
STILL_HERE: Final = CHUNK.pack(0, 0, 0, 1, 0)
"""What a sender says while it waits for more to send, so that the receiver does not take it for dead."""
OFFER: Final = struct.Struct("<III")
MAX_DESCRIPTION_BYTES: Final = 64 * 1024


def encode_hello(transfer: str, epoch: int, secret: bytes, chunk_bytes: int) -> bytes:
    """The sender's first words. Raises ``ValueError`` for a name, a secret or chunks of the wrong size."""
    name = transfer.encode()
    if not 0 < len(name) <= MAX_NAME_BYTES:
        raise ValueError(f"a transfer's name has 1 to {MAX_NAME_BYTES} bytes, not {len(name)}")
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a lease's secret has {SECRET_BYTES} bytes, not {len(secret)}")
    if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
        raise ValueError(f"a chunk has 1 to {MAX_CHUNK_BYTES} bytes, not {chunk_bytes}")
    return HELLO.pack(MAGIC, epoch, len(name), secret, chunk_bytes) + name


class Hello:
    """A sender's first words, but for the name, of which they say how long it is."""

    __slots__ = ("chunk_bytes", "epoch", "name_bytes", "secret")

    def __init__(self, header: bytes | bytearray) -> None:
        """Raises ``MoveError`` (protocol)."""
        magic, self.epoch, self.name_bytes, self.secret, self.chunk_bytes = HELLO.unpack(header)
        if magic != MAGIC or not 0 < self.name_bytes <= MAX_NAME_BYTES or not 0 < self.chunk_bytes <= MAX_CHUNK_BYTES:
            raise MoveError(MoveReason.PROTOCOL, "not a transfer")


def decode_name(name: bytes | bytearray) -> str:
    """The transfer's name. Raises ``MoveError`` (protocol)."""
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise MoveError(MoveReason.PROTOCOL, "the transfer's name is not text") from None


def encode_answer(reason: MoveReason | None) -> bytes:
    """The receiver's word: go on (or: complete), or why not."""
    return _GO_ON if reason is None else ANSWER.pack(1 + _REASONS.index(reason))


def check_answer(answer: bytes | bytearray, *, opened: bool = True) -> None:
    """Return if the receiver said yes; raise its ``MoveError`` if it said no. ``opened`` as there."""
    (code,) = ANSWER.unpack(answer)
    if code:
        known = code <= len(_REASONS)
        reason = _REASONS[code - 1] if known else MoveReason.PROTOCOL
        raise MoveError(reason, "the receiver refused", opened=opened)


def checksum(first_block: int, blocks: Iterable[Buffer]) -> int:
    """Of a chunk's blocks, as they follow each other; never 0, which stands for none."""
    digest = xxh3_64(seed=first_block)
    for block in blocks:
        digest.update(block)
    return digest.intdigest() or 1


def encode_chunk(first_block: int, blocks: Sequence[Buffer], *, slot: int = 0, checksums: bool = True) -> bytes:
    """The header of a chunk of equally long blocks."""
    total = checksum(first_block, blocks) if checksums else 0
    return CHUNK.pack(first_block, len(blocks), sum(map(len, blocks)), slot, total)


class ChunkHeader:
    """What a chunk says of itself, checked as far as it can be without the payload."""

    __slots__ = ("_checksum", "blocks", "first_block", "payload_bytes", "slot")

    def __init__(self, header: bytes | bytearray) -> None:
        """Raises ``MoveError`` (range) for sizes that no chunk may have, before anything is read for it."""
        self.first_block, self.blocks, self.payload_bytes, self.slot, self._checksum = CHUNK.unpack(header)
        if self.blocks == 0:
            return
        if self.payload_bytes > MAX_CHUNK_BYTES or self.payload_bytes < self.blocks or self.payload_bytes % self.blocks:
            raise MoveError(MoveReason.RANGE, f"{self.blocks} blocks in {self.payload_bytes} bytes")

    @property
    def last(self) -> bool:
        """Whether this says that all was sent."""
        return bool(self.blocks == 0 and self.slot == 0)

    @property
    def waits(self) -> bool:
        """Whether this says that there is nothing to send just now."""
        return bool(self.blocks == 0 and self.slot != 0)

    def compare(self, blocks: Iterable[Buffer]) -> None:
        """Raises ``MoveError`` (checksum) unless these are the blocks."""
        # not by `checksum`: whoever sends may have another idea of it
        digest = xxh3_64(seed=self.first_block)
        for block in blocks:
            digest.update(block)
        if (digest.intdigest() or 1) != self._checksum:
            raise MoveError(MoveReason.CHECKSUM, f"chunk at block {self.first_block}")

    def split(self, payload: memoryview, *, checksums: bool = True) -> list[memoryview]:
        """The blocks in ``payload``, uncopied. Raises ``MoveError`` (checksum)."""
        if checksums and (xxh3_64_intdigest(payload, self.first_block) or 1) != self._checksum:
            raise MoveError(MoveReason.CHECKSUM, f"chunk at block {self.first_block}")
        size = self.payload_bytes // self.blocks
        return [payload[start : start + size] for start in range(0, self.payload_bytes, size)]
