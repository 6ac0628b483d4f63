"""Which beats of a node are new, and which are further ahead than the node can have come: for whole batches at once.

A beat is a *replay* if its sequence is not above the last one taken of the incarnation, and a *jump* if it is further
above than the node can have come: 5 s of beats, and less after a jump, until twice the rate of configured beats has
made up for it. These are the only such rules: what passes counts, for verdicts too.

Without keys anybody may forge a beat that passes and leaves the node behind: its own beats are replays then. So a node
that nobody needs a key to speak for is taken up again where it is, once everything heard of it was refused for 50 ms
and has been rising all that time at a rate that a node can have. A node with keys is never: what is refused of it was
recorded by somebody, and whoever could make newer beats would need no such trick.
"""

import numpy as np
from numpy.typing import NDArray

from quartet_heartbeat_collector.batch import Numbers, Positions

FIRST_MOST = 1 << 40
"""The highest sequence that a node may be heard with first: 17 years of 2,000 beats a second.

Of a node that was never heard nothing better is known. All sequences stay far below 2^63, so that nothing here wraps.
"""

_LEAD_NS = 5_000_000_000
"""How far ahead of the last beat taken a node's next one may be, counted in beats of that much time, at any moment."""

_FASTEST = 2
"""Times its configured rate at which a node is believed to have beaten while nothing of it was taken."""

RESUME_NS = 50_000_000
"""For so long a node's beats must have been refused, and rising, until it is taken up where it is."""

_ANCHOR_NS = 50_000_000
"""Lines are looked at at least so often, in the time in which anything is heard."""

_RESUME_SIGHTINGS = 3
_RESUME_SLACK = 64
"""Beats by which a refused node may outrun ``_FASTEST``: what waits in buffers arrives at once."""

Flags = NDArray[np.bool_]


class _Trial:
    """A node of which everything was refused since ``since_ns``, with sequences from ``first`` up to ``last``."""

    __slots__ = ("first", "last", "last_ns", "sightings", "since_ns")

    def __init__(self, sequence: int, now_ns: int) -> None:
        self.first = self.last = sequence
        self.since_ns = self.last_ns = now_ns
        self.sightings = 1


class Sequences:
    """The sequences of all slots of a board, ``slots`` of them to begin with; beats come ``beat_ns`` apart.

    ``resumed`` counts nodes that were taken up where they were, because something else had passed for them.
    """

    def __init__(self, slots: int, beat_ns: int) -> None:
        self.resumed = 0
        self._lead = max(1, _LEAD_NS // beat_ns)
        self._fastest_ns = max(1, beat_ns // _FASTEST)
        self._pause_ns = max(RESUME_NS, _RESUME_SIGHTINGS * beat_ns)
        # The last sequence taken (-1: none yet), and the highest that is no jump, as of the last ``settle``.
        self._bounds = np.full((2, slots), -1, dtype=np.int64)
        # The highest rises with time: it is the line plus the time, in fastest beats.
        self._line = np.zeros(slots, dtype=np.int64)
        self._anchored = np.full(slots, -1, dtype=np.int64)  # what was taken when the line was last looked at
        # What was taken at the last ``settle``, and the beats that arrived since: their difference is what was lost.
        self._counted = np.full(slots, -1, dtype=np.int64)
        self._arrived = np.zeros(slots, dtype=np.int64)
        self._forgeable = np.zeros(slots, dtype=np.bool_)
        self._taken_ns = 0
        self._trials: dict[int, _Trial] = {}
        self._unheard: set[int] = set()  # begun, and nothing taken yet

    @property
    def last(self) -> Numbers:
        """The last sequence taken in each slot, -1 for none."""
        last: Numbers = self._bounds[0]
        return last

    def grow(self, slots: int) -> None:
        """Make room for ``slots`` slots altogether."""
        more = (0, slots - len(self._line))
        self._bounds = np.pad(self._bounds, ((0, 0), more), constant_values=-1)
        self._counted = np.pad(self._counted, more, constant_values=-1)
        self._anchored = np.pad(self._anchored, more, constant_values=-1)
        self._line, self._arrived = np.pad(self._line, more), np.pad(self._arrived, more)
        self._forgeable = np.pad(self._forgeable, more)

    def begin(self, slot: int, now_ns: int, *, forgeable: bool) -> None:
        """Nothing was heard in ``slot`` yet; ``forgeable`` if anybody may speak for its node."""
        self._bounds[:, slot] = -1, FIRST_MOST
        self._line[slot] = FIRST_MOST - now_ns // self._fastest_ns
        self._counted[slot], self._anchored[slot], self._arrived[slot] = -1, -1, 0
        self._forgeable[slot] = forgeable
        self._unheard.add(slot)
        self._trials.pop(slot, None)

    def good(self, slots: Positions, sequences: Numbers) -> Flags:
        """Which of these are new and no jump, as of the last ``settle``."""
        lowest, highest = self._bounds
        good: Flags = (sequences > lowest[slots]) & (sequences <= highest[slots])
        return good

    def refuse(self, slots: Positions, sequences: Numbers, now_ns: int) -> tuple[int, int]:
        """Take note of beats that are not ``good``; return how many are replays, and how many jumps."""
        jumps = int(np.count_nonzero((sequences > self.last[slots]) | (sequences < 0)))
        if self._forgeable[slots].any():
            for slot in np.unique(slots[self._forgeable[slots]]).tolist():
                self._try(slot, int(sequences[slots == slot].max()), now_ns)
        return slots.size - jumps, jumps

    def take(self, slots: Positions, newest: Numbers, arrived: Numbers, now_ns: int) -> None:
        """Take the ``newest`` sequence of each of ``slots``; ``arrived`` is how many beats came, for all slots."""
        if now_ns - self._taken_ns > _ANCHOR_NS:
            # We were paused, or all were silent: lines of before are as of then, not as of now.
            self._anchor()
        self._taken_ns = now_ns
        self._bounds[0, slots] = newest
        self._arrived += arrived
        if self._unheard:
            for slot in self._unheard.intersection(slots.tolist()):
                self._unheard.discard(slot)
                self._go_on_from(slot, int(self._bounds[0, slot]), now_ns)
        if self._trials:
            for slot in slots.tolist():
                self._trials.pop(slot, None)

    def settle(self, now_ns: int) -> list[tuple[int, int]]:
        """Bring bounds up to ``now_ns``; return (slot, beats) for what is missing among the beats since the last call.

        Copies count as arrivals, so that a duplicated beat may hide a lost one. Of what a node said before the batch
        that it was first heard in, nothing is missing.
        """
        self._anchor()
        last = self._bounds[0]
        self._bounds[1] = self._line + now_ns // self._fastest_ns
        missing = last - self._counted - self._arrived
        self._counted[:] = last
        self._arrived[:] = 0
        at = (missing > 0).nonzero()[0]
        return list(zip(at.tolist(), missing[at].tolist(), strict=True))

    def _anchor(self) -> None:
        """Lower the lines of nodes that were heard to their lead above what was taken, as of the last batch.

        A line never rises by a beat, so that beats which jump do not add up.
        """
        last = self._bounds[0]
        lead = last + (self._lead - self._taken_ns // self._fastest_ns)
        self._line = np.where(last > self._anchored, np.minimum(self._line, lead), self._line)
        self._anchored[:] = last

    def _try(self, slot: int, sequence: int, now_ns: int) -> None:
        """Is the node in ``slot`` beating on behind what passed for it?"""
        if not 0 <= sequence <= FIRST_MOST:
            return
        trial = self._trials.get(slot)
        if trial is None or not self._goes_on(trial, sequence, now_ns):
            self._trials[slot] = _Trial(sequence, now_ns)
            return
        trial.last, trial.last_ns = sequence, now_ns
        trial.sightings += 1
        if now_ns - trial.since_ns >= RESUME_NS and trial.sightings >= _RESUME_SIGHTINGS:
            del self._trials[slot]
            self.resumed += 1
            self._go_on_from(slot, sequence, now_ns)

    def _go_on_from(self, slot: int, sequence: int, now_ns: int) -> None:
        """Whatever was before: the last beat taken in ``slot`` is this one."""
        self._bounds[:, slot] = sequence, sequence + self._lead
        self._line[slot] = sequence + self._lead - now_ns // self._fastest_ns
        self._counted[slot], self._anchored[slot], self._arrived[slot] = sequence, sequence, 0

    def _goes_on(self, trial: _Trial, sequence: int, now_ns: int) -> bool:
        """Whether a node that was refused before could be the one with this ``sequence`` now."""
        reach = trial.first + _RESUME_SLACK + (now_ns - trial.since_ns) // self._fastest_ns
        return trial.last < sequence <= reach and now_ns - trial.last_ns <= self._pause_ns
