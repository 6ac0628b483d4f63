"""Affinity: which workers probably hold which rungs, as a counting Bloom filter cut in bit slices.

An agent counts, per row of the filter, how many of its cached rungs fall there; only the rows that turn on or off
travel. A router keeps, per row, one integer with a bit for each worker: ANDing the few rows of a rung gives *all*
workers that hold it, at once. There are no false negatives; a false holder costs a recomputed prefix, never an error.

Rows are Python integers, not slices of one byte table: a lookup at 1,000 workers takes 0.9 us instead of 3.6 us. The
price is 20 MiB instead of 16 (CPython 3.11, 2^17 rows, k = 4). A row has its full width from its first bit on: rows
that grew with the fleet, a digit at a time, left twice their size behind in the allocator (``router_memory`` bench).
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Final

from quartet_core.ladder import MAX_STEP_BLOCKS, RUNGS, Sketch

DEFAULT_ROWS: Final = 1 << 17
DEFAULT_K: Final = 4
DEFAULT_AFFINITY_BYTES: Final = 256 * 1024 * 1024
DEFAULT_MAX_PROBES: Final = 24

_FIRST_DIGITS: Final = 34
"""Width of a row at first: room for 1,019 slots, and a whole number of the allocator's steps. Then it doubles."""

_SURE_AMONG: Final = 8
"""Of so few workers, none seems by chance to hold a rung: the rung above need not be looked at."""

_CROWD: Final = 8
"""More workers than this with one prefix are a crowd: they share a system prompt, and so will the next prompt's crowd.
To begin the search where the last one ended saves looks, each of them at memory that nobody has touched lately."""

_MOST_CROWDS: Final = 1024

_INT_BYTES: Final = 24 + 16  # header of an int, and what the allocator's 16-byte steps may add
_DIGIT_BYTES: Final = 4
_DIGIT_BITS: Final = 30
_POINTER_BYTES: Final = 8


class AffinityFull(Exception):
    """A slot for which the table has no room within its ``affinity_bytes``."""

    def __init__(self, slot: int, capacity: int, affinity_bytes: int) -> None:
        super().__init__(f"slot {slot}: affinity_bytes {affinity_bytes} is room for {capacity} worker slots")
        self.slot = slot
        self.capacity = capacity
        self.affinity_bytes = affinity_bytes


class SlotDirty(Exception):
    """A slot that still has rows of a worker that was forgotten; usable after ``sweep`` or by ``replace``."""

    def __init__(self, slot: int) -> None:
        super().__init__(f"slot {slot} is not swept yet")
        self.slot = slot


def rows_of(rung_hash: int, rows: int, k: int) -> tuple[int, ...]:
    """The ``k`` rows of a rung in a filter of ``rows`` rows (a power of two), all different.

    Double hashing (Kirsch and Mitzenmacher, "Less hashing, same performance", 2006) on the two halves of the hash;
    the step is odd, so no row comes twice.
    """
    step = rung_hash >> 32 | 1
    mask = rows - 1
    return tuple([(rung_hash + i * step) & mask for i in range(k)])


def slots_within(affinity_bytes: int, rows: int) -> int:
    """How many worker slots a table of ``rows`` rows has room for in ``affinity_bytes`` with all its bits in use."""
    per_row = affinity_bytes // rows - _POINTER_BYTES - _INT_BYTES
    return max(0, per_row // _DIGIT_BYTES * _DIGIT_BITS)


@cache
def _rungs_apart(rungs: int, grain: int) -> Sequence[int]:
    """Of the first ``rungs`` rungs, those at least 1/``grain`` of the deepest one or the longest step of the ladder
    apart, whichever is less, and the first; 0: all."""
    if grain == 0 or rungs < 2:
        return range(rungs)
    indices = [rungs - 1]
    apart = min(RUNGS[rungs - 1] / grain, MAX_STEP_BLOCKS)
    for index in range(rungs - 2, 0, -1):
        if RUNGS[indices[-1]] - RUNGS[index] >= apart:
            indices.append(index)
    return (0, *reversed(indices))


def _check_shape(rows: int, k: int) -> None:
    if rows < 1 or rows & (rows - 1):
        raise ValueError(f"affinity rows are a power of two, not {rows}")
    if rows > 1 << 32:
        raise ValueError(f"affinity rows are at most 2^32, not {rows}")
    if not 1 <= k <= rows:
        raise ValueError(f"rows per rung are 1 to {rows}, not {k}")


class AffinityCounters:
    """The agent's side: how many cached rungs of one worker fall on each row.

    The caller removes only what it has added, once for each time. A counter that reached its top stays there: its row
    may then be on for too long, until ``clear``, but is never off too early.
    """

    __slots__ = ("_counts", "_k", "_rows", "_top", "ignored_removes")

    def __init__(self, rows: int = DEFAULT_ROWS, k: int = DEFAULT_K, *, counter_bits: int = 16) -> None:
        """``counter_bits`` is 8 or 16: ``rows`` counters take one or two bytes each. Raises ``ValueError``."""
        _check_shape(rows, k)
        if counter_bits not in (8, 16):
            raise ValueError(f"counters have 8 or 16 bits, not {counter_bits}")
        self._counts = array("B" if counter_bits == 8 else "H", bytes(rows * counter_bits // 8))
        self._rows = rows
        self._k = k
        self._top = (1 << counter_bits) - 1
        self.ignored_removes = 0
        """Removes of rungs that were certainly not there; each is an accounting error of the caller's."""

    def add(self, rung_hash: int) -> list[int]:
        """Count one more holder's reason for this rung; return the rows that turned on."""
        counts, top = self._counts, self._top
        turned_on = []
        for row in rows_of(rung_hash, self._rows, self._k):
            count = counts[row]
            if count == 0:
                turned_on.append(row)
            if count < top:
                counts[row] = count + 1
        return turned_on

    def remove(self, rung_hash: int) -> list[int]:
        """Undo one ``add`` of this rung; return the rows that turned off. What is not there is not taken away."""
        counts, top = self._counts, self._top
        rows = rows_of(rung_hash, self._rows, self._k)
        if not all(counts[row] for row in rows):
            self.ignored_removes += 1
            return []
        turned_off = []
        for row in rows:
            count = counts[row]
            if count < top:
                counts[row] = count - 1
                if count == 1:
                    turned_off.append(row)
        return turned_off

    def full(self) -> list[int]:
        """All rows that are on, lowest first: what a router that missed something asks for."""
        return [row for row, count in enumerate(self._counts) if count]

    def clear(self) -> list[int]:
        """Forget everything (the engine dropped its cache); return the rows that turned off."""
        turned_off = self.full()
        self._counts = array(self._counts.typecode, bytes(len(self._counts) * self._counts.itemsize))
        return turned_off


class AffinityTable:
    """The router's side: per row, the plane of the workers on whose filter it is on.

    A worker that died is forgotten at once, by a mask; its bits are swept later, in slices, and until then its slot
    is *dirty* and not to be given to another worker.
    """

    __slots__ = (
        "_affinity_bytes",
        "_applying",
        "_crowds",
        "_cursor",
        "_k",
        "_pending",
        "_planes",
        "_rows",
        "_sweeping",
        "_top",
        "_touched",
        "_width",
        "capacity",
        "dirty",
    )

    def __init__(
        self, rows: int = DEFAULT_ROWS, k: int = DEFAULT_K, *, affinity_bytes: int = DEFAULT_AFFINITY_BYTES
    ) -> None:
        """``affinity_bytes`` bounds the table with all bits in use, and so ``capacity``, the number of slots.

        Memory is taken as slots come into use. Raises ``ValueError`` for a shape that is none.
        """
        _check_shape(rows, k)
        self._rows = rows
        self._k = k
        self._width = 0  # slots that a row has room for
        self._top = 0  # the bit above them, always on, which keeps every row at its full width
        self._planes = [0] * rows
        self._affinity_bytes = affinity_bytes
        self.capacity = slots_within(affinity_bytes, rows)
        if self.capacity == 0:
            raise ValueError(f"affinity_bytes {affinity_bytes} has no room for {rows} rows")
        self.dirty = 0
        """The plane of slots that hold nothing, as far as answers go, and are not to be reused yet."""
        self._touched = 0  # slots that may have bits in the table
        self._sweeping = 0  # dirty slots that the pass under way takes out
        self._cursor = 0  # the row that the pass has come to
        self._pending: dict[int, set[int]] = {}  # rows that a dirty slot gets once it is swept
        self._crowds: dict[int, int] = {}  # first rung → the deepest that the many workers with that prompt hold
        self._applying = 0  # dirty slots that are swept, and are getting their pending rows

    def turn_on(self, slot: int, rows: Iterable[int]) -> None:
        """Rows turned on for the worker in ``slot``.

        Raises ``ValueError`` for a row that is none, ``AffinityFull``, or ``SlotDirty``; then nothing has changed.
        """
        rows = self._checked(slot, rows)
        if self.dirty >> slot & 1:
            if slot not in self._pending:
                raise SlotDirty(slot)
            self._pending[slot].update(rows)
            return
        self._put(slot, rows)

    def turn_off(self, slot: int, rows: Iterable[int]) -> None:
        """Rows turned off for the worker in ``slot``. Raises as ``turn_on`` does."""
        rows = self._checked(slot, rows)
        if self.dirty >> slot & 1:
            if slot not in self._pending:
                raise SlotDirty(slot)
            self._pending[slot].difference_update(rows)
        planes, bit = self._planes, 1 << slot
        for row in rows:
            if planes[row] & bit:
                planes[row] ^= bit

    def replace(self, slot: int, rows: Iterable[int]) -> bool:
        """``rows`` are all that is on for the worker in ``slot``; return whether answers follow that already.

        A slot without bits of old has them at once. Any other is masked, and gets its rows when ``sweep`` has been
        over the table: to clear a column at once would hold up every decision for ten milliseconds.
        Raises ``ValueError`` or ``AffinityFull``.
        """
        rows = self._checked(slot, rows)
        self.forget(slot)
        if not self.dirty >> slot & 1:
            self._put(slot, rows)
            return True
        self._pending[slot] = set(rows)
        return False

    def forget(self, slot: int) -> None:
        """The worker in ``slot`` is gone: from now on it holds nothing. Its slot is dirty until swept."""
        bit = 1 << slot
        self._pending.pop(slot, None)
        if self._applying & bit:
            self._applying ^= bit
            self.dirty ^= bit
        if self._touched & bit:
            self.dirty |= bit

    def sweep(self, max_rows: int) -> bool:
        """Clean at most ``max_rows`` rows; return whether nothing is left to do.

        All slots that are dirty when a pass begins are cleaned in that one pass. A row takes about 0.1 us with 1,000
        workers and 0.3 us with 10,000. Raises ``ValueError`` for fewer rows than one: it would never end.
        """
        if max_rows < 1:
            raise ValueError(f"a sweep cleans at least one row, not {max_rows}")
        if self._applying:
            self._apply_pending(max_rows)
            return not self.dirty
        if not self._sweeping:
            self._sweeping = self.dirty
            self._cursor = 0
        if not self._sweeping:
            return True
        # ANDing with a negative number takes twice as long as with the plane of all that stays.
        keep = self._touched & ~self._sweeping | self._top
        end = min(self._cursor + max_rows, self._rows)
        self._planes[self._cursor : end] = [plane & keep for plane in self._planes[self._cursor : end]]
        self._cursor = end
        if end == self._rows:
            self._end_pass()
        return not self.dirty

    def holders(self, rung_hash: int) -> int:
        """The plane of the workers that hold this rung: all who do, and now and then one who does not."""
        plane = self._touched & ~self.dirty
        for row in rows_of(rung_hash, self._rows, self._k):
            plane &= self._planes[row]
        return plane

    def deepest(
        self, sketch: Sketch, mask: int, *, max_probes: int = DEFAULT_MAX_PROBES, grain: int = 0
    ) -> list[tuple[int, int]]:
        """The workers of ``mask`` by the deepest rung each holds: (rung index, plane), deepest first.

        Each worker is in one group at most; one that holds no rung is in none. A rung counts only where the worker
        also holds the shallower rungs looked at, the one just above among them: by chance a worker seems one rung
        deeper than it is as often as the filter's false-positive rate says, and more than one hardly ever. After
        ``max_probes`` rungs, workers not placed yet are told at one they were found to hold: rounded down, never up.
        With a ``grain``, only rungs at least 1/``grain`` of the prompt apart are looked at, or, where that is less, the
        ladder's longest step apart.
        """
        looked_at = _rungs_apart(len(sketch.rungs), grain)
        rungs, row_mask, planes = sketch.rungs, self._rows - 1, self._planes
        more_rows = range(self._k - 1)

        def among(plane: int, index: int) -> int:
            """Those of ``plane`` that hold the rung looked at as number ``index``."""
            # rows_of and holders in one, since this is the inner loop of every decision. A row is a cache miss or
            # two, and a small plane is mostly empty after the first.
            rung = rungs[looked_at[index]]
            row = rung & row_mask
            plane &= planes[row]
            if plane:
                # Reduced to the filter's size at once, to stay within the integers that CPython adds quickly.
                step = rung >> 32 & row_mask | 1
                for _ in more_rows:
                    row = row + step & row_mask
                    plane &= planes[row]
                    if not plane:
                        break
            return plane

        left = mask & self._touched
        if self.dirty:
            left &= ~self.dirty
        if not rungs or not (left := among(left, 0)):
            return []
        probes_left = max_probes - 1
        crowd = bisect_right(looked_at, self._crowds.get(rungs[0], -1)) - 1
        groups: list[tuple[int, int]] = []
        # Rungs known to be held, deepest last. Each plane has all workers of ``left`` that hold its rung and the ones
        # before it, which is why a plane, once left has no part in it, shows that nobody is left there or beyond.
        held = [(0, left)]
        beyond = len(looked_at)  # no worker of ``left`` holds this rung
        while left:
            while not (found := held[-1][1] & left):
                beyond = held.pop()[0]
            low = held[-1][0]
            while beyond - low > 1 and probes_left > 0:
                # Few hold more than the crowd does, so first just beyond its end, then there; else halfway.
                if low <= crowd < beyond - 1:
                    middle = crowd + 1
                else:
                    middle = crowd if low < crowd < beyond else (low + beyond) >> 1
                probes_left -= 1
                if deeper := among(found, middle):
                    low, found = middle, deeper
                    held.append((low, found))
                else:
                    beyond = middle
            if low and held[-2][0] != low - 1 and held[-2][1].bit_count() > _SURE_AMONG and probes_left > 0:
                probes_left -= 1
                sure = among(found, low - 1)
                if not sure:
                    # Nobody holds the rung above: by chance alone some seemed to hold this one.
                    beyond = held.pop()[0]
                    continue
                found = sure
            groups.append((looked_at[low], found))
            if found.bit_count() > _CROWD and low != crowd:
                self._learn_crowd(rungs[0], looked_at[low])
            left ^= found
            beyond = low
        return groups

    def _learn_crowd(self, first_rung: int, end: int) -> None:
        if len(self._crowds) >= _MOST_CROWDS:
            self._crowds.clear()
        self._crowds[first_rung] = end

    def _checked(self, slot: int, rows: Iterable[int]) -> list[int]:
        if slot >= self.capacity:
            raise AffinityFull(slot, self.capacity, self._affinity_bytes)
        if slot < 0:
            raise ValueError(f"slots are numbered from 0, not {slot}")
        checked = list(rows)
        if checked and not (min(checked) >= 0 and max(checked) < self._rows):
            raise ValueError(f"rows are 0 to {self._rows - 1}; slot {slot} has {min(checked)} to {max(checked)}")
        return checked

    def _put(self, slot: int, rows: list[int]) -> None:
        if slot >= self._width:
            self._widen(slot)
        planes, bit = self._planes, 1 << slot
        for row in rows:
            planes[row] |= bit
        self._touched |= bit

    def _widen(self, slot: int) -> None:
        """Make room for ``slot`` in every row. Takes some 10 ms, once for each doubling of the fleet."""
        digits = _FIRST_DIGITS
        while digits * _DIGIT_BITS - 1 <= slot:
            digits = 2 * digits - 2  # stays a whole number of the allocator's steps
        self._width = min(digits * _DIGIT_BITS - 1, self.capacity)
        top, self._top = self._top, 1 << self._width
        if top:
            self._planes = [plane ^ top | self._top for plane in self._planes]
        else:
            self._planes = [self._top] * self._rows

    def _end_pass(self) -> None:
        self._touched &= ~self._sweeping
        for slot in self._pending:
            self._applying |= self._sweeping & 1 << slot
        self.dirty &= ~self._sweeping | self._applying
        self._sweeping = 0

    def _apply_pending(self, max_rows: int) -> None:
        slot = self._applying.bit_length() - 1
        waiting = self._pending[slot]
        self._put(slot, [waiting.pop() for _ in range(min(max_rows, len(waiting)))])
        if not waiting:
            del self._pending[slot]
            self._applying ^= 1 << slot
            self.dirty ^= 1 << slot
