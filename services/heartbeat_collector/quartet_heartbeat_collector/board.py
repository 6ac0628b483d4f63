"""The latest beat of every node, as one table: whole batches are compared with it at once.

Of the beats of a node in one batch only the newest matters, and of the newest only what differs from the last one. Both
are found for all nodes together; Python looks at what changed, node by node, and at nothing else. With 1,000 workers
beating 2,000 times a second that is the difference between a tenth of a core and ten cores.
"""

from collections import Counter
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quartet_core.heartbeat import Reason
from quartet_core.word import EPOCH, STATE_MASK, STEPS
from quartet_heartbeat_collector.batch import BeatBatch, Positions, Words, every
from quartet_heartbeat_collector.roster import Node
from quartet_heartbeat_collector.sequences import Flags, Sequences

# An entry of the table is a worker's 8 bytes: ordinal in bits 0-7, a pad, incarnation in 16-31, word in 32-63.
_WORD_SHIFT = 32
_LOOK = np.uint64(0xFFFF00FF | (STATE_MASK | EPOCH.mask) << _WORD_SHIFT)
"""What a change must be in to be looked at at once: anything but padding and the step counter."""
_STEPS = np.uint64(STEPS.mask << _WORD_SHIFT)
_STEPS_SHIFT, _STEPS_MAX = np.uint64(STEPS.shift + _WORD_SHIFT), np.uint64(STEPS.levels - 1)
_INCARNATION_SHIFT, _U16, _ORDINAL = np.uint64(16), np.uint64(0xFFFF), np.uint64(0xFF)
_NOTHING = (1 << 64) - 1
"""No worker: all that a node never said. A real entry can hardly be it (ordinal 255 with every bit of its word set)."""

_FIRST_SLOTS = 16


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


class FleetBoard:
    """The table, and the counts of everything that came in.

    ``received`` = ``taken`` + ``superseded`` + all of ``dropped``: taken is the newest beat of a node in a batch,
    superseded an older one beside it. ``lost`` counts gaps in the nodes' sequences (``quartet_..._collector.sequences``
    says what counts as replay, jump and gap).
    """

    def __init__(self, beat_ns: int = 500_000) -> None:
        self.received = 0
        self.taken = 0
        self.superseded = 0
        self.lost = 0
        self.dropped: Counter[str] = Counter(dict.fromkeys([*Reason, *Drop], 0))
        self.sequences = Sequences(_FIRST_SLOTS, beat_ns)
        self._nodes: list[Node | None] = []
        self._slot_of: dict[str, int] = {}
        self._free: list[int] = []
        self._keyed = False
        # Sorted hashes and their slots, to find the slots of a whole batch by one binary search; the last one again at
        # the end, for whatever is larger than all.
        self._hashes: Words = np.empty(0, dtype=np.uint64)
        self._slots: Positions = np.empty(0, dtype=np.intp)
        self._slot_hashes: Words = np.empty(0, dtype=np.uint64)
        self._incarnations = np.zeros(_FIRST_SLOTS, dtype=np.uint32)
        self._rows = np.full((_FIRST_SLOTS, 1), _NOTHING, dtype=np.uint64)
        self._moved = np.zeros((_FIRST_SLOTS, 1), dtype=np.uint64)
        # What nodes are told only when somebody asks, and the last sequence that they were told.
        self._emits_ns = np.zeros(_FIRST_SLOTS, dtype=np.uint64)
        self._heard_ns = np.zeros(_FIRST_SLOTS, dtype=np.int64)
        self._told = np.full(_FIRST_SLOTS, -1, dtype=np.int64)

    def admit(self, node: Node, now_ns: int, *, fresh: bool) -> None:
        """Beats of ``node`` count from now on, for its present incarnation; ``fresh`` if its sequences start over.

        All its workers will be looked at with its next beat, whether they change or not.
        """
        slot = self._slot_of.get(node.name)
        if slot is None:
            slot = self._free.pop() if self._free else len(self._nodes)
            if slot == len(self._nodes):
                self._nodes.append(None)
            if slot >= len(self._told):
                self._grow(2 * len(self._told), self._rows.shape[1])
            self._nodes[slot] = node
            self._slot_of[node.name] = slot
            self._index()
        self._keyed = self._keyed or node.tags is not None
        if fresh:
            self.sequences.begin(slot, now_ns, forgeable=node.tags is None)
            self._told[slot] = -1
        self._incarnations[slot] = node.incarnation
        self._rows[slot] = _NOTHING
        self._moved[slot] = 0

    def forget(self, name: str) -> None:
        """Beats of the node ``name`` are unknown from now on."""
        slot = self._slot_of.pop(name, None)
        if slot is not None:
            self._nodes[slot] = None
            self._free.append(slot)
            self._index()

    def take(self, batch: BeatBatch, now_ns: int) -> list[Entry]:
        """Keep what is newest of ``batch``, received at ``now_ns``, and return what it changed.

        ``now_ns`` is the collector's monotonic clock. Nodes in the entries are told their newest beat; the others when
        ``tell`` is called.
        """
        self.received += batch.received
        for reason, number in batch.malformed.items():
            self.dropped[reason] += number
        if not batch.nodes.size:
            return []
        slots, position = self._admissible(batch, now_ns)
        if not slots.size:
            return []
        newest = self._newest_of_each(slots, position, batch)
        arrived = np.bincount(slots, minlength=newest.size)
        if batch.tagged and self._keyed:
            newest = self._genuine(batch, newest, arrived, slots, position)
            heard = (newest >= 0).nonzero()[0]
        else:
            heard = arrived.nonzero()[0]
        self.taken += heard.size
        self.superseded += slots.size - heard.size
        if not heard.size:
            return []
        chosen = newest[heard]
        self.sequences.take(heard, batch.sequences[chosen], arrived, now_ns)
        self._emits_ns[heard] = batch.emits_ns[chosen]
        self._heard_ns[heard] = now_ns
        return self._keep(batch, heard, chosen)

    def tell(self) -> list[Node]:
        """Tell nodes their newest beat; return those heard since the last call, longest unheard first."""
        last = self.sequences.last
        heard = (last != self._told).nonzero()[0]
        heard = heard[np.argsort(self._heard_ns[heard], kind="stable")]
        self._told[heard] = last[heard]
        told = []
        columns = (heard, last[heard], self._emits_ns[heard], self._heard_ns[heard])
        for slot, sequence, emit_ns, heard_ns in zip(*(column.tolist() for column in columns), strict=True):
            node = self._nodes[slot]
            if node is not None:
                node.sequence = sequence
                node.emit_ns = emit_ns
                node.heard_ns = heard_ns
                told.append(node)
        return told

    def steps(self) -> list[tuple[Node, int, int, int]]:
        """Workers whose step counter moved since the last call, as (node, ordinal, incarnation, counter)."""
        at, column = (self._moved & _STEPS).nonzero()
        self._moved[:] = 0
        entries = self._rows[at, column]
        fields = (at, entries & _ORDINAL, entries >> _INCARNATION_SHIFT & _U16, entries >> _STEPS_SHIFT & _STEPS_MAX)
        moved = zip(*(field.tolist() for field in fields), strict=True)
        nodes = self._nodes
        return [(node, *rest) for slot, *rest in moved if (node := nodes[slot]) is not None]

    def _admissible(self, batch: BeatBatch, now_ns: int) -> tuple[Positions, Positions | None]:
        """Slots and positions of the beats in ``batch`` that are announced, new and no jump; the others are counted.

        Positions are None when they are all.
        """
        if not self._hashes.size:
            self.dropped[Drop.UNKNOWN_NODE] += batch.nodes.size
            return np.empty(0, dtype=np.intp), None
        slots = self._slots[self._hashes.searchsorted(batch.nodes)]
        known = self._slot_hashes[slots] == batch.nodes
        announced = known & (self._incarnations[slots] == batch.incarnations)
        good = announced & self.sequences.good(slots, batch.sequences)
        if every(good):
            return slots, None
        self.settle(now_ns)  # what was out of reach then may not be now
        good = announced & self.sequences.good(slots, batch.sequences)
        self._count_refused(batch, slots, known, announced, good, now_ns)
        position = good.nonzero()[0]
        return slots[position], position

    def _count_refused(
        self, batch: BeatBatch, slots: Positions, known: Flags, announced: Flags, good: Flags, now_ns: int
    ) -> None:
        refused = announced & ~good
        replays, jumps = self.sequences.refuse(slots[refused], batch.sequences[refused], now_ns)
        self.dropped[Drop.UNKNOWN_NODE] += int(np.count_nonzero(~known))
        self.dropped[Drop.INCARNATION] += int(np.count_nonzero(known & ~announced))
        self.dropped[Drop.REPLAY] += replays
        self.dropped[Drop.JUMP] += jumps

    def settle(self, now_ns: int) -> None:
        """Count what was lost, and how far ahead nodes may be from now on."""
        for slot, missing in self.sequences.settle(now_ns):
            node = self._nodes[slot]
            if node is not None:
                node.lost += missing
                self.lost += missing

    def _newest_of_each(self, slots: Positions, position: Positions | None, batch: BeatBatch) -> Positions:
        """For each slot the position in ``batch`` of its newest beat; whatever for slots without one."""
        sequences = batch.sequences if position is None else batch.sequences[position]
        last = np.empty(len(self._told), dtype=np.intp)
        last[slots] = np.arange(slots.size)  # of several the last one stays
        if np.count_nonzero(sequences > sequences[last[slots]]):
            # A network reordered them: sorted by sequence, the last one of each is the newest.
            order = np.argsort(sequences, kind="stable")
            last[slots[order]] = order
        if position is None:
            return last
        newest = np.empty_like(last)
        newest[slots] = position[last[slots]]
        return newest

    def _genuine(
        self, batch: BeatBatch, newest: Positions, arrived: Positions, slots: Positions, position: Positions | None
    ) -> Positions:
        """As ``newest``, of the beats that somebody with the node's key has made; -1 for slots without one.

        Beats that a genuine newer one supersedes are not checked: they decide nothing, and checking costs more than
        all the rest.
        """
        genuine = np.full(len(newest), -1, dtype=np.intp)
        present = arrived.nonzero()[0]
        chosen = newest[present]
        genuine[present] = chosen
        for slot, datagram in zip(present.tolist(), batch.datagrams(chosen), strict=True):
            node = self._nodes[slot]
            if node is None or node.tags is None or node.tags.genuine(datagram):
                continue
            genuine[slot] = -1
            candidates = (slots == slot).nonzero()[0]
            if position is not None:
                candidates = position[candidates]
            for candidate in candidates[np.argsort(batch.sequences[candidates], kind="stable")[::-1]].tolist():
                if node.tags.genuine(batch.datagram(candidate)):
                    genuine[slot] = candidate
                    break
                self.dropped[Reason.TAG] += 1
                self.superseded -= 1
        return genuine

    def _keep(self, batch: BeatBatch, heard: Positions, chosen: Positions) -> list[Entry]:
        """Put the workers of the chosen beats into the table; return the entries that changed."""
        width = self._rows.shape[1]
        counts = batch.counts[chosen]
        whole = every(counts == width)
        if not whole and (widest := int(counts.max())) > width:
            self._grow(len(self._told), widest)
            width = widest
        rows = batch.workers(chosen, width)
        if not whole:
            rows = _only_their_own(rows, counts, width)
        # Where everybody was heard, the table itself is at hand instead of a copy of it.
        here = slice(heard.size) if heard.size == len(self._nodes) else heard
        differs = rows ^ self._rows[here]
        if not np.count_nonzero(differs):
            return []
        self._rows[here] = rows
        self._moved[here] |= differs
        differs &= _LOOK
        if not np.count_nonzero(differs):
            return []
        at, column = differs.nonzero()
        return self._entries(heard[at], rows[at, column])

    def _entries(self, slots: Positions, values: Words) -> list[Entry]:
        entries = []
        for slot, sequence, value in zip(
            slots.tolist(), self.sequences.last[slots].tolist(), values.tolist(), strict=True
        ):
            node = self._nodes[slot]
            if node is not None and value != _NOTHING:
                node.sequence = sequence
                entries.append(Entry(node, value & 0xFF, value >> 16 & 0xFFFF, value >> _WORD_SHIFT))
        return entries

    def _index(self) -> None:
        known = [(node.hash, slot) for slot, node in enumerate(self._nodes) if node is not None]
        known.sort()
        self._hashes = np.array([hash_ for hash_, _ in known], dtype=np.uint64)
        self._slots = np.array([slot for _, slot in known + known[-1:]], dtype=np.intp)
        self._slot_hashes = np.zeros(len(self._nodes), dtype=np.uint64)
        self._slot_hashes[self._slots[:-1]] = self._hashes

    def _grow(self, slots: int, width: int) -> None:
        more = slots - len(self._told)
        wider = ((0, more), (0, width - self._rows.shape[1]))
        self.sequences.grow(slots)
        self._incarnations = np.pad(self._incarnations, (0, more))
        self._emits_ns = np.pad(self._emits_ns, (0, more))
        self._heard_ns = np.pad(self._heard_ns, (0, more))
        self._told = np.pad(self._told, (0, more), constant_values=-1)
        self._rows = np.pad(self._rows, wider, constant_values=_NOTHING)
        self._moved = np.pad(self._moved, wider)


def _only_their_own(rows: Words, counts: NDArray[np.uint8], width: int) -> Words:
    """``rows`` as a table of ``width`` columns: behind a datagram's end stands what a longer one left there."""
    own = np.full((len(rows), width), _NOTHING, dtype=np.uint64)
    own[:, : rows.shape[1]] = rows
    own[np.arange(width) >= counts[:, np.newaxis]] = _NOTHING
    return own
