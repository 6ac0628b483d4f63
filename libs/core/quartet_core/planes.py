"""Fleet planes: the quantized state of every worker, one bit per worker and fact.

A *plane* is an integer whose bit ``i`` says whether a fact holds for the worker in slot ``i``. A question to the
whole fleet is then a few ANDs, and its cost grows with the number of levels, not with the number of workers.
"""

import struct
from collections.abc import Iterator
from typing import Final

from quartet_core.word import FIELDS, FREE_KV, STATE_MASK

_CHUNK_BITS: Final = 64


class FleetPlanes:
    """One plane for every level of every state field.

    Invariant: for each field, every occupied slot has its bit in exactly one level's plane.
    """

    __slots__ = ("_fields", "_levels", "_words", "less_free_kv", "occupied")

    def __init__(self) -> None:
        self.occupied = 0
        """The plane of the slots that have a word."""
        self._words: dict[int, int] = {}
        self._levels: dict[str, list[int]] = {field.name: [0] * field.levels for field in FIELDS}
        # One tuple per field: a lookup of attributes per field and update would cost more than the update.
        self._fields = tuple((field.mask, field.shift, self._levels[field.name]) for field in FIELDS)
        self.less_free_kv = [0] * (FREE_KV.levels + 1)
        """Per level of free KV: the plane of the workers that are below it. Every decision asks for one of these."""

    def set(self, slot: int, word: int) -> bool:
        """Take ``word`` as the state of ``slot``; return whether any decision could change by it.

        Liveness bits are ignored. Raises ``ValueError`` for a negative slot.
        """
        word &= STATE_MASK
        before = self._words.get(slot)
        if before == word:
            return False
        bit = 1 << slot
        if before is None:
            self.occupied |= bit
            for mask, shift, planes in self._fields:
                planes[(word & mask) >> shift] |= bit
            self._move_free_kv(bit, FREE_KV.of(word), FREE_KV.levels)
        else:
            changed = before ^ word
            for mask, shift, planes in self._fields:
                if changed & mask:
                    planes[(before & mask) >> shift] ^= bit
                    planes[(word & mask) >> shift] |= bit
            if changed & FREE_KV.mask:
                self._move_free_kv(bit, FREE_KV.of(before), FREE_KV.of(word))
        self._words[slot] = word
        return True

    def drop(self, slot: int) -> None:
        """Forget ``slot``. Dropping an empty slot does nothing."""
        word = self._words.pop(slot, None)
        if word is None:
            return
        bit = 1 << slot
        self.occupied ^= bit
        for mask, shift, planes in self._fields:
            planes[(word & mask) >> shift] ^= bit
        self._move_free_kv(bit, FREE_KV.of(word), FREE_KV.levels)

    def _move_free_kv(self, bit: int, before: int, after: int) -> None:
        """A worker's free KV went from one level to another; ``FREE_KV.levels`` stands for no worker."""
        for level in range(min(before, after) + 1, max(before, after) + 1):
            self.less_free_kv[level] ^= bit

    def word(self, slot: int) -> int | None:
        """The state bits of ``slot``, or None if it is empty."""
        return self._words.get(slot)

    def level(self, name: str, level: int) -> int:
        """The plane of the workers whose field ``name`` is at ``level`` exactly; empty for a level that is none."""
        planes = self._levels[name]
        return planes[level] if 0 <= level < len(planes) else 0

    def levels(self, name: str) -> list[int]:
        """The planes of all levels of field ``name``, lowest first. To be read only."""
        return self._levels[name]

    def at_most(self, name: str, level: int) -> int:
        """The plane of the workers whose field ``name`` is at ``level`` or below."""
        plane = 0
        for lower in self._levels[name][: max(0, level + 1)]:
            plane |= lower
        return plane

    def split(self, name: str, plane: int) -> list[tuple[int, int]]:
        """``plane`` cut by the levels of field ``name``: (level, part) for each part that is not empty, lowest first.

        Splitting by one field after another is how workers fall into groups that no policy can tell apart.
        """
        return [(level, part) for level, whole in enumerate(self._levels[name]) if (part := whole & plane)]

    def __len__(self) -> int:
        return len(self._words)


def slots(plane: int) -> Iterator[int]:
    """The slots of ``plane``, lowest first.

    In chunks, since taking single bits off an integer of 10,000 bits copies all of it each time.
    """
    chunks = -(-plane.bit_length() // _CHUNK_BITS)
    for index, chunk in enumerate(struct.unpack(f"<{chunks}Q", plane.to_bytes(chunks * 8, "little"))):
        base = index * _CHUNK_BITS - 1
        while chunk:
            lowest = chunk & -chunk
            yield base + lowest.bit_length()
            chunk ^= lowest


def count(plane: int) -> int:
    """How many slots are in ``plane``."""
    return plane.bit_count()
