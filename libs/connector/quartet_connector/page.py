"""A page: the KV of one block with what it is of, as it lies in an arena's slot and as it crosses to another one.

    magic "QKVP" | version u8, flags u8, root bytes u16 | layout u64 | id u64 | parent u64 | tokens u32 | KV bytes u32
    | token ids u32 each
    | root, of a chain's first block: salt bytes u16, salt, adapter | zeros
    | the KV: of every layer in order, of every rank in order

Little-endian; header and root take ``header_bytes``, which both ends know from the layout. A prompt's last block is
often not full: it has no KV here, is its header alone, and is computed where it is wanted.
"""

import struct
from typing import Final, NamedTuple

from quartet_connector.contents import TOKEN_BYTES, Root, next_id, root_id

VERSION: Final = 1
MAX_ROOT_BYTES: Final = 1024
_HEAD: Final = struct.Struct("<4sBBHQQQII")
_MAGIC: Final = b"QKVP"
_ALIGNED: Final = 64
_TAIL: Final = 1
_LENGTH: Final = struct.Struct("<H")

Buffer = bytes | bytearray | memoryview


class PageRefused(ValueError):
    """Bytes that are no page for this arena; the text says why."""


class Head(NamedTuple):
    """What a page says of itself. ``root`` is None behind a chain's first block. ``tail``: not full, and without KV."""

    layout: int
    id: int
    parent: int
    tokens: bytes
    root: Root | None
    tail: bool


def header_bytes(block_tokens: int) -> int:
    """The room that a page's header takes, aligned so that its KV is."""
    raw = _HEAD.size + block_tokens * TOKEN_BYTES + MAX_ROOT_BYTES
    return -(-raw // _ALIGNED) * _ALIGNED


def can_root(root: Root) -> bool:
    """Whether a page has room for it."""
    return _LENGTH.size + sum(len(part.encode()) for part in root) <= MAX_ROOT_BYTES


def encode(layout: int, parent: int, tokens: bytes, root: Root | None, kv_bytes: int, block_tokens: int) -> bytes:
    """A header. ``kv_bytes`` 0 is for a tail."""
    said = _root(root) if root is not None else b""
    head = _HEAD.pack(
        _MAGIC, VERSION, 0 if kv_bytes else _TAIL, len(said), layout, next_id(parent, tokens), parent,
        len(tokens) // TOKEN_BYTES, kv_bytes,
    )  # fmt: skip
    return (head + tokens + said).ljust(header_bytes(block_tokens), b"\0")


def decode(page: Buffer, layout: int, block_tokens: int, kv_bytes: int) -> Head:
    """Read a page's header, and check all of it. Raises ``PageRefused``, naming what is wrong."""
    size = header_bytes(block_tokens)
    if len(page) < size:
        raise PageRefused(f"{len(page)} bytes, where a page's header alone has {size}")
    magic, version, flags, root_size, of, id_, parent, count, kv = _HEAD.unpack_from(page)
    if magic != _MAGIC or version != VERSION:
        raise PageRefused(f"no page of version {VERSION}: it begins with {bytes(page[:5])!r}")
    if of != layout:
        raise PageRefused(f"layout {of:016x} against {layout:016x}")
    tail = bool(flags & _TAIL)
    if count != block_tokens and not tail:
        raise PageRefused(f"{count} tokens in a block of {block_tokens}")
    if kv != (0 if tail else kv_bytes) or len(page) != size + kv:
        raise PageRefused(f"{len(page) - size} bytes of KV, said to be {kv}, where a block has {kv_bytes}")
    if count > block_tokens or root_size > MAX_ROOT_BYTES:
        raise PageRefused(f"{count} tokens, and {root_size} bytes of root")
    begin = _HEAD.size
    tokens = bytes(page[begin : begin + count * TOKEN_BYTES])
    begin += len(tokens)
    root = _read_root(bytes(page[begin : begin + root_size])) if root_size else None
    if next_id(parent, tokens) != id_ or (root is not None and root_id(root) != parent):
        raise PageRefused("its id is not that of its tokens")
    return Head(of, id_, parent, tokens, root, tail)


def _root(root: Root) -> bytes:
    salt = root.salt.encode()
    return _LENGTH.pack(len(salt)) + salt + root.adapter.encode()


def _read_root(said: bytes) -> Root:
    begin = _LENGTH.size
    end = begin + (_LENGTH.unpack_from(said)[0] if len(said) >= begin else 0)
    if len(said) < max(begin, end):
        raise PageRefused("a root that is cut off")
    return Root(said[begin:end].decode("utf-8", "replace"), said[end:].decode("utf-8", "replace"))
