"""The latest beat of every node, as one table: whole batches are compared with it at once.

Of the beats of a node in one batch only the newest matters, and of the newest only what differs from the last one. Both
are found for all nodes together; Python looks at what changed, node by node, and at nothing else. With 1,000 workers
beating 2,000 times a second that is the difference between a tenth of a core and ten cores.
"""

import hmac
from collections import Counter
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from quartet_core.heartbeat import TAG_OFFSET, WORKERS_OFFSET, Reason, beat_tag
from quartet_core.word import EPOCH, STATE_MASK, STEPS
from quartet_heartbeat_collector.batch import FIRST_WORKER, BeatBatch, Positions, Words
from quartet_heartbeat_collector.roster import Node

# An entry of the table is a worker's 8 bytes: ordinal in bits 0-7, a pad, incarnation in 16-31, word in 32-63.
_WORD_SHIFT = 32
_LOOK = np.uint64(0xFFFF00FF | (STATE_MASK | EPOCH.mask) << _WORD_SHIFT)
"""What a change must be in to be looked at at once: anything but padding and the step counter."""
_STEPS = np.uint64(STEPS.mask << _WORD_SHIFT)
_NOTHING = (1 << 64) - 1
"""No worker: all that a node never said. A real entry can hardly be it (ordinal 255 with every bit of its word set)."""

_FIRST_SLOTS = 16

_FIRST_MOST = np.uint64(1 << 40)
"""The highest sequence that a node may be heard with first: 17 years of 2,000 beats a second.

Of a node that was never heard nothing better is known. All sequences stay far below 2^63, so that nothing here wraps.
"""

_LEAD_NS = 5_000_000_000
"""How far ahead of the last beat taken a node's next one may be, counted in beats of that much time, at any moment."""

_FASTEST = 2
"""Times its configured rate at which a node is believed to have beaten while nothing of it was taken."""


class Drop(StrEnum):
    """Why a well-formed datagram changed nothing; with ``quartet_core.heartbeat.Reason`` the labels of the counter."""

    UNKNOWN_NODE = "unknown_node"
    INCARNATION = "incarnation"
    REPLAY = "replay"
    JUMP = "jump"


class Entry(NamedTuple):
    """What the newest beat of ``node`` says of one worker."""

    node: Node
    ordinal: int
    incarnation: int
    word: int


class Heard(NamedTuple):
    """What a batch brought: ``nodes`` with a newer beat than before, and the ``entries`` in it that changed."""

    nodes: list[Node]
    entries: list[Entry]


class FleetBoard:
    """The table, and the counts of everything that came in.

    ``received`` = ``taken`` + ``superseded`` + all of ``dropped``: taken is the newest beat of a node in a batch,
    superseded an older one beside it. ``lost`` counts gaps in the nodes' sequences.

    A beat is a replay if its sequence is not above the last one taken of the incarnation, and a jump if it is further
    above than the node can have come: 5 s of beats, and less after a jump, until twice the rate of beats that
    ``beat_ns`` apart have made up for it. So one forged beat silences a node that has no key for 5 s, not for ever.
    This is the only such rule: what passes it counts, for verdicts too.
    """

    def __init__(self, beat_ns: int = 500_000) -> None:
        self.received = 0
        self.taken = 0
        self.superseded = 0
        self.lost = 0
        self.dropped: Counter[str] = Counter(dict.fromkeys([*Reason, *Drop], 0))
        self._lead = np.uint64(max(1, _LEAD_NS // beat_ns))
        self._fastest_ns = max(1, beat_ns // _FASTEST)
        self._nodes: list[Node | None] = []
        self._slot_of: dict[str, int] = {}
        self._free: list[int] = []
        self._keyed = False
        # Sorted hashes and their slots, to find the slots of a whole batch by one binary search.
        self._hashes: Words = np.empty(0, dtype=np.uint64)
        self._slots: Positions = np.empty(0, dtype=np.intp)
        self._incarnations = np.zeros(_FIRST_SLOTS, dtype=np.uint64)
        self._next = np.zeros(_FIRST_SLOTS, dtype=np.uint64)  # the lowest sequence that is new; 0: none heard yet
        self._most = np.full(_FIRST_SLOTS, _FIRST_MOST)  # the highest sequence that was no jump at ``_taken_ns``
        self._taken_ns = np.zeros(_FIRST_SLOTS, dtype=np.int64)
        self._rows = np.full((_FIRST_SLOTS, 1), _NOTHING, dtype=np.uint64)
        self._stepped = np.zeros((_FIRST_SLOTS, 1), dtype=np.bool_)

    def admit(self, node: Node, *, fresh: bool) -> None:
        """Beats of ``node`` count from now on, for its present incarnation; ``fresh`` if its sequences start over.

        All its workers will be looked at with its next beat, whether they change or not.
        """
        slot = self._slot_of.get(node.name)
        if slot is None:
            slot = self._free.pop() if self._free else len(self._nodes)
            if slot == len(self._nodes):
                self._nodes.append(None)
            if slot >= len(self._next):
                self._grow(2 * len(self._next), self._rows.shape[1])
            self._nodes[slot] = node
            self._slot_of[node.name] = slot
            self._index()
        self._keyed = self._keyed or bool(node.keys)
        if fresh:
            self._next[slot] = 0
            self._most[slot] = _FIRST_MOST
            self._taken_ns[slot] = 0
        self._incarnations[slot] = node.incarnation
        self._rows[slot] = _NOTHING
        self._stepped[slot] = False

    def forget(self, name: str) -> None:
        """Beats of the node ``name`` are unknown from now on."""
        slot = self._slot_of.pop(name, None)
        if slot is not None:
            self._nodes[slot] = None
            self._free.append(slot)
            self._index()

    def take(self, batch: BeatBatch, now_ns: int) -> Heard:
        """Keep what is newest of ``batch``, received at ``now_ns``, and return what it changed.

        Nodes are told their newest beat. ``now_ns`` is the collector's monotonic clock.
        """
        self.received += batch.received
        for reason, number in batch.malformed.items():
            self.dropped[reason] += number
        most = self._most + (np.maximum(now_ns - self._taken_ns, 0) // self._fastest_ns).astype(np.uint64)
        slots, position = self._admissible(batch, most)
        if not position.size:
            return Heard([], [])
        sequences = batch.sequences[position]
        best = np.zeros(len(self._next), dtype=np.uint64)
        np.maximum.at(best, slots, sequences)
        winners = (sequences == best[slots]).nonzero()[0]
        newest = np.full(len(self._next), -1, dtype=np.intp)
        newest[slots[winners]] = position[winners]
        if batch.tagged and self._keyed:
            self._check_tags(batch, newest, slots, position)
        heard = (newest >= 0).nonzero()[0]
        chosen = newest[heard]
        self.taken += heard.size
        self.superseded += position.size - heard.size
        if not heard.size:
            return Heard([], [])
        self._most[heard] = np.minimum(most[heard], batch.sequences[chosen] + self._lead)
        self._taken_ns[heard] = now_ns
        self._count_gaps(batch, heard, chosen, slots)
        return self._keep(batch, heard, chosen)

    def steps(self) -> list[Entry]:
        """Workers whose step counter moved since the last call, with their newest words."""
        if not self._stepped.any():
            return []
        at, column = np.nonzero(self._stepped)
        moved = self._entries(at, self._rows[at, column])
        self._stepped[:] = False
        return moved

    def _admissible(self, batch: BeatBatch, most: Words) -> tuple[Positions, Positions]:
        """Slots and positions of the beats in ``batch`` that are announced, new and no jump; the others are counted.

        ``most`` is the highest sequence of each slot that is no jump.
        """
        number = batch.nodes.size
        if not number or not self._hashes.size:
            self.dropped[Drop.UNKNOWN_NODE] += number
            return np.empty(0, dtype=np.intp), np.empty(0, dtype=np.intp)
        found = np.searchsorted(self._hashes, batch.nodes)
        found[found == self._hashes.size] = 0
        known = self._hashes[found] == batch.nodes
        slots = self._slots[found]
        announced = self._incarnations[slots] == batch.incarnations
        new = batch.sequences >= self._next[slots]
        near = batch.sequences <= most[slots]
        good = known & announced & new & near
        position = good.nonzero()[0]
        if position.size != number:
            unknown = number - int(np.count_nonzero(known))
            other = int(np.count_nonzero(known & ~announced))
            self.dropped[Drop.UNKNOWN_NODE] += unknown
            self.dropped[Drop.INCARNATION] += other
            jumps = int(np.count_nonzero(known & announced & ~near))
            self.dropped[Drop.JUMP] += jumps
            self.dropped[Drop.REPLAY] += number - unknown - other - jumps - position.size
            slots = slots[position]
        return slots, position

    def _check_tags(self, batch: BeatBatch, newest: Positions, slots: Positions, position: Positions) -> None:
        """Replace each newest beat that nobody with the node's key has made by the newest one that somebody has.

        Beats that a genuine newer one supersedes are not checked: they decide nothing, and checking costs more than
        all the rest.
        """
        for slot in (newest >= 0).nonzero()[0].tolist():
            node = self._nodes[slot]
            if node is None or not node.keys or _is_genuine(batch, int(newest[slot]), node.keys):
                continue
            candidates = position[slots == slot]
            newest[slot] = -1
            for candidate in candidates[np.argsort(batch.sequences[candidates], kind="stable")[::-1]].tolist():
                if _is_genuine(batch, candidate, node.keys):
                    newest[slot] = candidate
                    break
                self.dropped[Reason.TAG] += 1
                self.superseded -= 1

    def _count_gaps(self, batch: BeatBatch, heard: Positions, chosen: Positions, slots: Positions) -> None:
        arrived = np.bincount(slots, minlength=len(self._next))[heard]
        expected = self._next[heard]
        sequences = batch.sequences[chosen]
        # Copies in a batch count as arrivals, so that a duplicated beat may hide a lost one: never below zero.
        gaps = (sequences - expected).astype(np.int64) + 1 - arrived
        self._next[heard] = sequences + np.uint64(1)
        if not gaps.any():
            return
        for at in ((expected > 0) & (gaps > 0)).nonzero()[0].tolist():
            node = self._nodes[int(heard[at])]
            if node is not None:
                node.lost += int(gaps[at])
                self.lost += int(gaps[at])

    def _keep(self, batch: BeatBatch, heard: Positions, chosen: Positions) -> Heard:
        nodes = self._update_nodes(heard, batch.sequences[chosen].tolist(), batch.emits_ns[chosen].tolist())
        counts = batch.counts[chosen]
        widest = int(counts.max())
        if widest > self._rows.shape[1]:
            self._grow(len(self._next), widest)
        width = self._rows.shape[1]
        offered = min(width, batch.rows.shape[1] - FIRST_WORKER)
        rows = np.full((heard.size, width), _NOTHING, dtype=np.uint64)
        rows[:, :offered] = batch.rows[chosen, FIRST_WORKER : FIRST_WORKER + offered]
        if int(counts.min()) < width:
            # Behind a datagram's end its row holds what a longer one left there.
            rows[np.arange(width, dtype=np.uint64) >= counts[:, np.newaxis]] = _NOTHING
        differs = rows ^ self._rows[heard]
        if not differs.any():
            return Heard(nodes, [])
        self._rows[heard] = rows
        self._stepped[heard] |= (differs & _STEPS) != 0
        at, column = np.nonzero(differs & _LOOK)
        return Heard(nodes, self._entries(heard[at], rows[at, column]))

    def _update_nodes(self, heard: Positions, sequences: list[int], emits_ns: list[int]) -> list[Node]:
        nodes = []
        for slot, sequence, emit_ns in zip(heard.tolist(), sequences, emits_ns, strict=True):
            node = self._nodes[slot]
            if node is not None:
                node.sequence = sequence
                node.emit_ns = emit_ns
                nodes.append(node)
        return nodes

    def _entries(self, slots: Positions, values: Words) -> list[Entry]:
        entries = []
        for slot, value in zip(slots.tolist(), values.tolist(), strict=True):
            node = self._nodes[slot]
            if node is not None and value != _NOTHING:
                entries.append(Entry(node, value & 0xFF, value >> 16 & 0xFFFF, value >> _WORD_SHIFT))
        return entries

    def _index(self) -> None:
        known = [(node.hash, slot) for slot, node in enumerate(self._nodes) if node is not None]
        known.sort()
        self._hashes = np.array([hash_ for hash_, _ in known], dtype=np.uint64)
        self._slots = np.array([slot for _, slot in known], dtype=np.intp)

    def _grow(self, slots: int, width: int) -> None:
        more = slots - len(self._next)
        wider = ((0, more), (0, width - self._rows.shape[1]))
        self._incarnations = np.pad(self._incarnations, (0, more))
        self._next = np.pad(self._next, (0, more))
        self._most = np.pad(self._most, (0, more), constant_values=_FIRST_MOST)
        self._taken_ns = np.pad(self._taken_ns, (0, more))
        self._rows = np.pad(self._rows, wider, constant_values=_NOTHING)
        self._stepped = np.pad(self._stepped, wider)


def _is_genuine(batch: BeatBatch, position: int, keys: tuple[bytes, ...]) -> bool:
    """Whether one of ``keys`` made the tag of a datagram."""
    datagram = batch.datagram(position)
    carried = bytes(datagram[TAG_OFFSET:WORKERS_OFFSET])
    return any(hmac.compare_digest(beat_tag(datagram, key), carried) for key in keys)
