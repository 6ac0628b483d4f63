"""What a KV block holds, in place of tensors: a content id, and the bytes that it stands for on a wire.

The content id of a block is XXH3-64 of its token ids (little-endian u32), seeded with the content id of the block
before it; the first block is seeded with a root made from the salt. So the id says what was computed at that place,
behind what, for whom: equal ids, equal KV. It is also the key of the prefix cache. (A 64-bit hash: among a million
blocks the chance that any two differ and collide is about 3e-8.)

On the wire a block is 64 bytes a token, SHAKE-128 of its content id: real bytes that cost real sockets something, and
in which one flipped bit, a block of another prompt, or one of an older epoch is noticed.
"""

from hashlib import blake2b, shake_128
from typing import Final

from xxhash import xxh3_64_intdigest

WIRE_BYTES_PER_TOKEN: Final = 64
TOKEN_BYTES: Final = 4


def root(salt: bytes) -> int:
    """The seed of a chain's first block: other salts, other chains."""
    return int.from_bytes(blake2b(salt, digest_size=8).digest(), "little") if salt else 0


def chain(data: bytes, parent: int, block_bytes: int) -> list[int]:
    """Content ids of the full blocks in ``data`` (token ids as bytes) that follow the block whose id is ``parent``."""
    ids = []
    for start in range(0, len(data) - block_bytes + 1, block_bytes):
        parent = xxh3_64_intdigest(data[start : start + block_bytes], parent)
        ids.append(parent)
    return ids


def after(data: bytes, parent: int) -> int:
    """The content id of one block, full or not, that holds ``data`` behind ``parent``."""
    return xxh3_64_intdigest(data, parent)


def payload(content: int, tokens: int) -> bytes:
    """The wire bytes of a block that holds ``tokens`` tokens whose content id is ``content``."""
    return shake_128(content.to_bytes(8, "little")).digest(tokens * WIRE_BYTES_PER_TOKEN)


def digest(data: bytes) -> int:
    """What a pool remembers of the bytes written into a block."""
    return xxh3_64_intdigest(data)
