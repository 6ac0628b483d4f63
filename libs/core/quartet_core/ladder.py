"""The prefix ladder: a prompt's identity at some 60 to 110 depths, instead of at every block.

Rungs stand 8 to the octave, and no two further apart than 32 blocks of 64 tokens: 1 block, then
min(max(r + 1, floor(r·2^(1/8))), r + 32). So a match is rounded down by at most 1/8 of its depth, and never by more
than 2,048 tokens, while 128k tokens need 110 hashes instead of 2,048. Without the cap a long session's last turns would
be lost between two rungs (``docs/decisions/0006-ladder-steps-are-capped.md``).

A rung's hash is XXH3-64 of the prompt's first ``rung · 256`` bytes: 64 little-endian u32 token ids, or, in text mode,
256 bytes of UTF-8 standing for 64 tokens. Any client can compute it. With a salt (a tenant, an adapter) the hash
is seeded with the first 8 bytes of the salt's BLAKE2b: other salts, other keys, and no choice of tokens leads from
one salt's prompts into another's.
"""

import binascii
import struct
import sys
from array import array
from base64 import b64decode, b64encode
from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

import msgspec
from xxhash import xxh3_64

BLOCK_TOKENS: Final = 64
BLOCK_TEXT_BYTES: Final = 256
_TOKEN_BYTES: Final = 4
_BLOCK_BYTES: Final = BLOCK_TOKENS * _TOKEN_BYTES
assert _BLOCK_BYTES == BLOCK_TEXT_BYTES  # one arithmetic serves both modes

MAX_BLOCKS: Final = 1 << 16
RUNGS_PER_OCTAVE: Final = 8
MAX_STEP_BLOCKS: Final = 32
"""How far apart two rungs are at most, in blocks: 2,048 tokens."""


def _rung_depths() -> tuple[int, ...]:
    depths = [1]
    while (following := _next_rung(depths[-1])) <= MAX_BLOCKS:
        depths.append(following)
    return tuple(depths)


def _next_rung(blocks: int) -> int:
    return min(max(blocks + 1, int(blocks * 2 ** (1 / RUNGS_PER_OCTAVE))), blocks + MAX_STEP_BLOCKS)


RUNGS: Final[tuple[int, ...]] = _rung_depths()
"""The depth of each rung in blocks. Prompts are not looked at beyond the last one (some 4 million tokens)."""

_RUNG_BYTES: Final = tuple(blocks * _BLOCK_BYTES for blocks in RUNGS)
_RUNG_SPANS: Final = tuple(zip((0, *_RUNG_BYTES[:-1]), _RUNG_BYTES, strict=True))


class Sketch(msgspec.Struct, frozen=True):
    """The rung hashes of a prompt, shallowest first, and its length in tokens (in text mode, an estimate)."""

    rungs: tuple[int, ...]
    tokens: int


def covered_tokens(rung_index: int) -> int:
    """How many tokens of a prompt the rung at ``rung_index`` covers; 0 for -1, "no rung at all"."""
    return RUNGS[rung_index] * BLOCK_TOKENS if rung_index >= 0 else 0


def rungs_within(tokens: int) -> int:
    """How many rungs a prompt of ``tokens`` tokens has: those whose blocks it fills."""
    return bisect_right(RUNGS, tokens // BLOCK_TOKENS)


def sketch_tokens(token_ids: "Sequence[int] | array[int] | bytes", *, salt: bytes = b"") -> Sketch:
    """The sketch of a prompt given as token ids, or as their little-endian u32 bytes.

    Bytes and ``array('I')`` are hashed where they lie. Any other sequence is first converted, which takes several
    times as long as the hashing. Raises ``ValueError`` for an id outside u32 or bytes that are not whole ids.
    """
    data = token_bytes(token_ids)
    return Sketch(_hash_rungs(data, salt), len(data) // _TOKEN_BYTES)


def sketch_text(data: bytes, *, salt: bytes = b"") -> Sketch:
    """The sketch of a prompt given as UTF-8 text; 256 bytes count as 64 tokens."""
    return Sketch(_hash_rungs(memoryview(data), salt), len(data) * BLOCK_TOKENS // BLOCK_TEXT_BYTES)


def token_bytes(token_ids: "Sequence[int] | array[int] | bytes") -> memoryview:
    """Token ids as little-endian u32 bytes, without a copy where they are that already. Raises ``ValueError``."""
    if isinstance(token_ids, bytes | bytearray | memoryview):
        view = memoryview(token_ids).cast("B")
        if len(view) % _TOKEN_BYTES:
            raise ValueError(f"{len(view)} bytes are not whole token ids of {_TOKEN_BYTES} bytes")
        return view
    if not (isinstance(token_ids, array) and token_ids.typecode == "I"):
        try:
            token_ids = array("I", token_ids)
        except (OverflowError, TypeError) as error:
            raise ValueError(f"token ids are integers from 0 to 2^32 - 1: {error}") from error
    if sys.byteorder == "big":
        token_ids = array("I", token_ids)
        token_ids.byteswap()
    return memoryview(token_ids).cast("B")


def _seed(salt: bytes) -> int:
    return int.from_bytes(blake2b(salt).digest()[:8], "little") if salt else 0


def _hash_rungs(data: memoryview, salt: bytes) -> tuple[int, ...]:
    state = xxh3_64(seed=_seed(salt))
    update, digest = state.update, state.intdigest
    hashes = []
    for start, end in _RUNG_SPANS[: bisect_right(_RUNG_BYTES, len(data))]:
        update(data[start:end])
        hashes.append(digest())
    return tuple(hashes)


class Ladder:
    """Climbs the same ladder a piece at a time, for those who learn a prompt in blocks of another size.

    An agent that follows engine events of 16-token blocks keeps a ladder for each open end, and ``fork``\\ s it
    where two prompts part. A ladder takes some 0.7 kB.
    """

    __slots__ = ("_length", "_rung", "_state")

    def __init__(self, *, salt: bytes = b"") -> None:
        self._state = xxh3_64(seed=_seed(salt))
        self._length = 0
        self._rung = 0

    @property
    def tokens(self) -> int:
        """How many whole tokens were taken in (in text mode: the estimate)."""
        return self._length // _TOKEN_BYTES

    @property
    def rungs(self) -> int:
        """How many rungs are completed; the next one to come has this index."""
        return self._rung

    def extend(self, data: bytes | bytearray | memoryview) -> list[tuple[int, int]]:
        """Take in the bytes that follow; return (rung index, hash) of each rung completed by them."""
        view = memoryview(data).cast("B")
        completed = []
        start = 0
        while self._rung < len(RUNGS):
            end = start + _RUNG_BYTES[self._rung] - self._length
            if end > len(view):
                self._state.update(view[start:])
                break
            self._state.update(view[start:end])
            self._length += end - start
            completed.append((self._rung, self._state.intdigest()))
            self._rung += 1
            start = end
        self._length += len(view) - start
        return completed

    def fork(self) -> "Ladder":
        """A second ladder that stands where this one does, and goes on by itself."""
        other = Ladder()
        other._state = self._state.copy()
        other._length = self._length
        other._rung = self._rung
        return other


def encode_sketch(sketch: Sketch) -> str:
    """The sketch as a header value: base64 of little-endian u64s, the token count before the hashes."""
    return b64encode(struct.pack(f"<{1 + len(sketch.rungs)}Q", sketch.tokens, *sketch.rungs)).decode()


def decode_sketch(text: str) -> Sketch:
    """The sketch in a header value. Raises ``ValueError``, saying what is wrong, for a value that is not one."""
    if len(text) > _MAX_ENCODED_CHARS:
        raise ValueError(f"a sketch has at most {_MAX_ENCODED_CHARS} characters, not {len(text)}")
    try:
        data = b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"a sketch is base64: {error}") from error
    if not data or len(data) % 8:
        raise ValueError(f"a sketch is one or more 8-byte numbers, not {len(data)} bytes")
    tokens, *rungs = struct.unpack(f"<{len(data) // 8}Q", data)
    if len(rungs) != rungs_within(tokens):
        raise ValueError(f"a sketch of {tokens} tokens has {rungs_within(tokens)} rungs, not {len(rungs)}")
    return Sketch(tuple(rungs), tokens)


_MAX_ENCODED_CHARS: Final = -(-(1 + len(RUNGS)) * 8 // 3) * 4
