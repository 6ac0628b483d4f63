"""Content ids: one 64-bit name for a full block behind all blocks before it, the same on every engine and agent.

A chain begins with what keeps prompts apart that must share nothing, a ``Root``; each block's id is a BLAKE2b of 8
bytes of the id before it and its tokens (little-endian u32). Ids find pages; whether a page is the right one is told by
its tokens, which it carries, so that equal ids of unlike prompts do no harm.
"""

import struct
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

TOKEN_BYTES: Final = 4
_ID: Final = struct.Struct("<Q")
_LENGTH: Final = struct.Struct("<I")


class Root(NamedTuple):
    """What a prompt's first block is behind: the request's cache salt, and its adapter as name, NUL, path."""

    salt: str = ""
    adapter: str = ""


def root_id(root: Root) -> int:
    """The id that the first block of a chain stands behind."""
    parts = [part.encode() for part in root]
    return _hash(b"".join(_LENGTH.pack(len(part)) + part for part in parts), b"root")


def next_id(parent: int, tokens: bytes) -> int:
    """The id of a block of ``tokens`` behind the block ``parent``."""
    return _hash(_ID.pack(parent) + tokens, b"block")


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as a block carries them. Raises ``struct.error`` for an id outside u32."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def blocks_of(data: bytes, block_tokens: int) -> list[bytes]:
    """The full blocks of a prompt given as ``token_bytes``."""
    size = block_tokens * TOKEN_BYTES
    return [data[start : start + size] for start in range(0, len(data) - size + 1, size)]


def chain(root: Root, blocks: Iterable[bytes]) -> list[int]:
    """The ids of a prompt's full blocks."""
    ids, parent = [], root_id(root)
    for tokens in blocks:
        parent = next_id(parent, tokens)
        ids.append(parent)
    return ids


def _hash(data: bytes, person: bytes) -> int:
    (found,) = _ID.unpack(blake2b(data, digest_size=8, person=person).digest())
    return int(found) or 1  # 0 stands for no block
