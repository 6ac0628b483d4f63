"""Fleet planes: the quantized state of every worker, one bit per worker and fact.

A *plane* is an integer whose bit ``i`` says whether a fact holds for the worker in slot ``i``. A question to the
whole fleet is then a few ANDs, and its cost grows with the number of levels, not with the number of workers.
"""

import struct
from collections.abc import Iterator
from typing import Final

from quartet_core.word import (
    ACCEPTING,
    BATCH,
    CONGESTED,
    DRIFT,
    DRIFT_UNUSABLE_LEVEL,
    FAULT,
    FIELDS,
    FREE_KV,
    PRESSED,
    QUEUE,
    STATE_MASK,
    THROTTLED,
)

_CHUNK_BITS: Final = 64
_WORK: Final = QUEUE.mask | BATCH.mask
_SOUNDNESS: Final = ACCEPTING.mask | FAULT.mask | DRIFT.mask
_STRAINS: Final = THROTTLED.mask | CONGESTED.mask | PRESSED.mask


class FleetPlanes:
    """One plane for every level of every state field, and one for each question that every decision asks.

    Invariant: for each field, every occupied slot has its bit in exactly one level's plane. The answers are kept in
    step with the words, since words change one at a time and questions are about all of them.
    """

    __slots__ = ("_fields", "_levels", "_words", "occupied", "short_of", "sound", "strained")

    def __init__(self) -> None:
        self.occupied = 0
        """The plane of the slots that have a word."""
        self._words: dict[int, int] = {}
        self._levels: dict[str, list[int]] = {field.name: [0] * field.levels for field in FIELDS}
        # One tuple per field: a lookup of attributes per field and update would cost more than the update.
        self._fields = tuple((field.mask, field.shift, self._levels[field.name]) for field in FIELDS)
        self.short_of = [0] * (FREE_KV.levels + 1)
        """Per level of free KV: the plane of the workers that are below it and have any work. A worker with nothing to
        do is not full, whatever its last step said: only work makes it say anything new."""
        self.sound = 0
        """The plane of the workers that take work: accepting, no engine fault, not so slow that no plan survives."""
        self.strained = 0
        """The plane of the workers at a limit: heat or power, PCIe, memory."""

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
            changed, room = STATE_MASK, FREE_KV.levels
        else:
            changed, room = before ^ word, _room_level(before)
            for mask, shift, planes in self._fields:
                if changed & mask:
                    planes[(before & mask) >> shift] ^= bit
                    planes[(word & mask) >> shift] |= bit
        self._move_room(bit, room, _room_level(word))
        if changed & _SOUNDNESS:
            self.sound = self.sound | bit if _is_sound(word) else self.sound & ~bit
        if changed & _STRAINS:
            self.strained = self.strained | bit if word & _STRAINS else self.strained & ~bit
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
        self._move_room(bit, _room_level(word), FREE_KV.levels)
        self.sound &= ~bit
        self.strained &= ~bit

    def _move_room(self, bit: int, before: int, after: int) -> None:
        """A worker's level of free KV changed; ``FREE_KV.levels`` stands for one without work, or for none."""
        if before != after:
            for level in range(min(before, after) + 1, max(before, after) + 1):
                self.short_of[level] ^= bit

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


def _room_level(word: int) -> int:
    return FREE_KV.of(word) if word & _WORK else FREE_KV.levels


def _is_sound(word: int) -> bool:
    return word & (ACCEPTING.mask | FAULT.mask) == ACCEPTING.mask and DRIFT.of(word) != DRIFT_UNUSABLE_LEVEL


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
