"""Load: what a worker's state means for the next request, and the workers of a kind ordered by it.

Two numbers decide between workers of one kind: how long until one can start (*wait*), and how dear a token is there,
to the request and to the others (*burden*). Both follow from the believed state alone, so they are computed when the
state changes, not when a request comes. Quantized to 64 levels each they put the workers into cells; a decision walks
the cells' staircase: from the shortest wait on, only ever to a lower burden. All other cells are dominated.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Final

from quartet_core.fleet import Kind
from quartet_core.ledger import Belief
from quartet_core.word import queue_bounds_ms, queue_level

_LEVELS: Final = 64
_LEAST_WAIT_MS: Final = tuple(queue_bounds_ms(level)[0] for level in range(_LEVELS))
_BURDEN_FLOOR: Final = 0.02
_FEW: Final = 8
"""So many workers are put in order by themselves sooner than they are found among the cells of all."""
_BURDEN_STEPS: Final = 6.0  # per octave: one level is 12 %, 64 levels reach 0.02 to 32 times the target


class Load:
    """One worker's load, in the terms of the objective (section 4a of the design).

    ``wait_ms``: half an iteration and the queued prefill, times drift. ``step_ms``: one step of the running batch.
    ``tpot_ms``: time per token for one sequence more. ``crowd``: batch × mean 1/TPOT-target, what a millisecond of
    prefill costs the others. ``harm``: what one decoding sequence more costs them. ``room``: tokens of an iteration
    left for prefill. ``context``: mean context of its sequences, in tokens. Made of a belief at one moment.
    """

    __slots__ = (
        "batch", "burden_level", "context", "crowd", "drift", "harm", "kind", "phi", "queue_ms", "queued_tokens",
        "reserved_ms", "room", "step_ms", "tpot_ms", "wait_level", "wait_ms",
    )  # fmt: skip

    def __init__(self, kind: Kind, belief: Belief, drift: float, kappa: float) -> None:
        profile = kind.profile
        batch = belief.batch
        step = profile.step_ms_at(batch, belief.context) if batch else 0.0
        following = profile.step_ms_at(batch + 1.0, belief.context)
        free_time = 1.0 - belief.phi
        self.kind = kind
        self.batch = batch
        self.context = belief.context
        self.drift = drift
        self.phi = belief.phi
        self.queue_ms = belief.queue_ms
        self.reserved_ms = belief.reserved_ms
        self.queued_tokens = belief.queue_ms / profile.b_ms_per_token
        self.room = max(kind.chunk_tokens - batch, 1.0)
        self.step_ms = step
        self.wait_ms = 0.5 * step + drift * (belief.queue_ms + belief.reserved_ms)
        self.tpot_ms = drift * following / free_time
        self.crowd = batch * belief.urgency
        self.harm = batch * (following - step) / free_time * belief.urgency
        self.wait_level = queue_level(self.wait_ms)
        # The request's own TPOT target is taken for the others' mean: it shifts all workers of the kind alike.
        burden = self.tpot_ms * belief.urgency + kappa * self.harm
        self.burden_level = min(_LEVELS - 1, max(0, round(_BURDEN_STEPS * math.log2(burden / _BURDEN_FLOOR))))


class Cells:
    """The workers of one kind by (wait level, burden level)."""

    __slots__ = ("_lowest", "_of_burden", "_rows", "count", "lightest")

    def __init__(self) -> None:
        # Wait levels that have workers, lowest first: (wait level, its least burden level, its row), the row being
        # (burden level, plane), lightest first. Walking them is the inner loop of every decision.
        self._rows: list[tuple[int, int, list[tuple[int, int]]]] = []
        self._of_burden = [0] * _LEVELS  # per burden level: the plane of its workers, whatever their wait
        self._lowest = _LEVELS  # the least burden level of anybody
        self.lightest = 0
        """The plane of the workers with the least burden, whatever their wait; empty if there are none."""
        self.count = 0
        """How many cells are occupied."""

    def put(self, slot: int, wait_level: int, burden_level: int) -> None:
        """Add a worker that is in no cell."""
        bit = 1 << slot
        self._of_burden[burden_level] |= bit
        self._lowest = min(self._lowest, burden_level)
        self.lightest = self._of_burden[self._lowest]
        place = bisect_left(self._rows, (wait_level,))
        if place == len(self._rows) or self._rows[place][0] != wait_level:
            self._rows.insert(place, (wait_level, burden_level, []))
        row = self._rows[place][2]
        at = bisect_left(row, (burden_level,))
        if at < len(row) and row[at][0] == burden_level:
            row[at] = burden_level, row[at][1] | bit
            return
        row.insert(at, (burden_level, bit))
        self._rows[place] = wait_level, row[0][0], row
        self.count += 1

    def take(self, slot: int, wait_level: int, burden_level: int) -> None:
        """Remove a worker from the cell it is in."""
        bit = 1 << slot
        self._of_burden[burden_level] ^= bit
        while self._lowest < _LEVELS and not self._of_burden[self._lowest]:
            self._lowest += 1
        self.lightest = self._of_burden[self._lowest] if self._lowest < _LEVELS else 0
        place = bisect_left(self._rows, (wait_level,))
        row = self._rows[place][2]
        at = bisect_left(row, (burden_level,))
        plane = row[at][1] ^ bit
        if plane:
            row[at] = burden_level, plane
            return
        del row[at]
        self.count -= 1
        if row:
            self._rows[place] = wait_level, row[0][0], row
        else:
            del self._rows[place]

    def staircase(self, mask: int, *, beside: int = 0, within_ms: float = math.inf) -> Iterator[tuple[float, int]]:
        """The cells of ``mask`` that no other dominates, shortest wait first, burden falling: (the least wait in ms
        that its level stands for, plane).

        Workers in ``beside`` dominate too, and are not given. No level that stands for more than ``within_ms`` is
        looked at. A cell is looked up when it is asked for.
        """
        everybody = mask | beside
        below, lowest = _LEVELS, self._lowest
        beyond = bisect_right(_LEAST_WAIT_MS, within_ms)
        for wait_level, least, row in self._rows:
            if least >= below:
                continue
            if wait_level >= beyond:
                break
            for burden_level, plane in row:
                if burden_level >= below:
                    break
                if plane & everybody:
                    below = burden_level
                    if part := plane & mask:
                        yield _LEAST_WAIT_MS[wait_level], part
                    break
            if below <= lowest:
                break

    def by_burden(self, mask: int) -> Iterator[int]:
        """The planes of ``mask`` by rising burden, whatever their wait: for work that does not queue for prefill."""
        for whole in self._of_burden:
            if plane := whole & mask:
                yield plane


class LoadBoard:
    """The load of every worker, kept in step with the believed state."""

    __slots__ = ("_cells", "kappa", "loads")

    def __init__(self, kappa: float) -> None:
        self.kappa = kappa
        self.loads: dict[int, Load] = {}
        self._cells: dict[int, Cells] = {}

    def update(self, slot: int, kind: Kind, belief: Belief, drift: float) -> Load:
        """Take a new belief about a worker; return its load."""
        load = Load(kind, belief, drift, self.kappa)
        before = self.loads.get(slot)
        self.loads[slot] = load
        cells = self.cells(kind)
        if before is not None:
            if before.wait_level == load.wait_level and before.burden_level == load.burden_level:
                return load
            cells.take(slot, before.wait_level, before.burden_level)
        cells.put(slot, load.wait_level, load.burden_level)
        return load

    def drop(self, slot: int) -> None:
        """A worker is gone."""
        load = self.loads.pop(slot, None)
        if load is not None:
            self.cells(load.kind).take(slot, load.wait_level, load.burden_level)

    def cells(self, kind: Kind) -> Cells:
        """The cells of a kind."""
        cells = self._cells.get(kind.index)
        if cells is None:
            cells = self._cells[kind.index] = Cells()
        return cells

    def staircase(
        self, kind: Kind, mask: int, *, beside: int = 0, within_ms: float = math.inf
    ) -> Iterable[tuple[float, int]]:
        """``Cells.staircase`` of a kind; of a few workers without a walk through the cells of all others, and of a
        single one without a look at anything: to weigh it is quicker than to find out whether it is dominated.
        ``mask`` is not empty."""
        if not mask & (mask - 1):
            return ((0.0, mask),)
        everybody = mask | beside
        if everybody.bit_count() > _FEW:
            return self.cells(kind).staircase(mask, beside=beside, within_ms=within_ms)
        return self._few(everybody, mask)

    def _few(self, everybody: int, mask: int) -> list[tuple[float, int]]:
        cells: dict[int, int] = {}
        while everybody:
            slot = everybody.bit_length() - 1
            load = self.loads[slot]
            place = load.wait_level * _LEVELS + load.burden_level
            cells[place] = cells.get(place, 0) | 1 << slot
            everybody ^= 1 << slot
        stairs = []
        below = _LEVELS
        for place in sorted(cells):
            burden_level = place % _LEVELS
            if burden_level < below:
                below = burden_level
                if part := cells[place] & mask:
                    stairs.append((_LEAST_WAIT_MS[place // _LEVELS], part))
        return stairs

    @property
    def groups(self) -> int:
        """Occupied cells of all kinds: how many groups of equal workers the fleet falls into."""
        return sum(cells.count for cells in self._cells.values())
