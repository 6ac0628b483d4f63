"""KV events as engines publish them over ZMQ, decoded: which blocks were cached, evicted, or all dropped.

vLLM and SGLang send the same msgpack: a batch ``[time, events, data-parallel rank]``, whose events are maps with a
``type`` key, or, from older vLLM, arrays that begin with it. Optional fields are left out where they are default, and
fields that we do not know are passed over, so that one decoder reads them all.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
from msgspec import Raw, Struct

BlockHash = int | bytes
"""An engine's own name of a block: of its tokens, all those before it, and what else keeps it apart."""


class MalformedEvents(ValueError):
    """A payload that is no batch of KV events; the text says why."""


class Stored(NamedTuple):
    """Blocks were cached, one behind the other, the first behind ``parent`` (None: at the beginning of a prompt).

    ``keys`` has, per block, what besides tokens is in its hash: a salt, an adapter, an image.
    """

    hashes: Sequence[BlockHash]
    parent: BlockHash | None
    token_ids: Sequence[int]
    block_tokens: int
    medium: str
    adapter: str
    salt: str
    keys: Sequence[Sequence[object] | None]
    group: int
    attention: str


class Removed(NamedTuple):
    """Blocks were evicted from ``medium``."""

    hashes: Sequence[BlockHash]
    medium: str
    group: int


class Cleared(NamedTuple):
    """The whole cache was dropped."""


KvEvent = Stored | Removed | Cleared

DEFAULT_MEDIUM: Final = "GPU"


class Batch(NamedTuple):
    """What one scheduler step did to the cache. ``unknown`` counts events that say nothing to us."""

    events: list[KvEvent]
    rank: int
    unknown: int


class _StoredMap(Struct, tag_field="type", tag="BlockStored"):
    block_hashes: list[int | bytes]
    token_ids: list[int]
    block_size: int
    parent_block_hash: int | bytes | None = None
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[object] | None] | None = None
    cache_salt: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _RemovedMap(Struct, tag_field="type", tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


class _ClearedMap(Struct, tag_field="type", tag="AllBlocksCleared"):
    pass


class _StoredArray(Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None


class _RemovedArray(Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None = None


class _ClearedArray(Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class _Named(Struct):
    type: str


_batch = msgspec.msgpack.Decoder(tuple[Raw, ...])
_events = msgspec.msgpack.Decoder(list[Raw])
_rank = msgspec.msgpack.Decoder(int | None)
_map = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap)
_array = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_named = msgspec.msgpack.Decoder(_Named)
_head = msgspec.msgpack.Decoder(list[object])
_KNOWN: Final = frozenset(("BlockStored", "BlockRemoved", "AllBlocksCleared"))


def decode(payload: bytes) -> Batch:
    """The batch in ``payload``; events that say nothing to us are counted. Raises ``MalformedEvents``."""
    try:
        parts = _batch.decode(payload)
        if len(parts) < 2:
            raise MalformedEvents(f"a batch has a time and events, not {len(parts)} parts")
        raw_events = _events.decode(parts[1])
        rank = (_rank.decode(parts[2]) or 0) if len(parts) > 2 else 0
        events: list[KvEvent] = []
        unknown = 0
        for raw in raw_events:
            event = _event(raw)
            if event is None:
                unknown += 1
            else:
                events.append(event)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedEvents(str(error)) from None
    return Batch(events, rank, unknown)


def _event(raw: Raw) -> KvEvent | None:
    first = memoryview(raw)[0]
    is_map = first >> 4 == 0x8 or first in (0xDE, 0xDF)
    try:
        found = _map.decode(raw) if is_map else _array.decode(raw)
    except msgspec.ValidationError:
        if _type_of(raw, is_map=is_map) in _KNOWN:
            raise
        return None
    if isinstance(found, _StoredMap):
        return _stored(found, found.extra_keys, found.cache_salt, found.group_idx, found.kv_cache_spec_kind)
    if isinstance(found, _StoredArray):
        return _stored(found, None, None, None, None)
    if isinstance(found, _RemovedMap):
        return Removed(found.block_hashes, found.medium or DEFAULT_MEDIUM, found.group_idx or 0)
    if isinstance(found, _RemovedArray):
        return Removed(found.block_hashes, found.medium or DEFAULT_MEDIUM, 0)
    return Cleared()


def _type_of(raw: Raw, *, is_map: bool) -> str:
    """What an event that could not be read calls itself. Raises ``msgspec.ValidationError`` when it does not."""
    if is_map:
        return _named.decode(raw).type
    head = _head.decode(raw)
    return str(head[0]) if head else ""


def _stored(
    found: _StoredMap | _StoredArray,
    keys: Sequence[Sequence[object] | None] | None,
    salt: str | None,
    group: int | None,
    attention: str | None,
) -> Stored | None:
    blocks, tokens = len(found.block_hashes), len(found.token_ids)
    if found.block_size < 1 or tokens != blocks * found.block_size or (keys is not None and len(keys) != blocks):
        return None  # of a group that keeps a part of its blocks only: which tokens are whose cannot be told
    return Stored(
        found.block_hashes,
        found.parent_block_hash,
        found.token_ids,
        found.block_size,
        found.medium or DEFAULT_MEDIUM,
        found.lora_name or "",
        salt or "",
        keys or [None] * blocks,
        group or 0,
        attention or "",
    )
