"""Contention: does a worker slow down when its neighbour NIC, below the same root complex, is busy?

A window of readings, each how slow the worker was (drift) and how busy the NIC, is looked at for rank correlation:
Spearman's, because drift has outliers. Both series are sluggish, so neighbouring readings say much the same; the
number of independent ones is taken as n(1 - ab)/(1 + ab), a and b the series' lag-1 autocorrelations (Bayley and
Hammersley 1946, as Pyper and Peterman 1998 give it for tests of correlation), and t follows from that number. An alarm
needs t *and* a slowdown that a router could see, several times in a row. A correlation is no cause: the
worker's own transfers make its NIC busy, too. What to look at next is in ``docs/telemetry.md``.
"""

import math
from collections import deque
from collections.abc import Sequence

from msgspec import Struct

from quartet_core.strain import Latch


class ContentionLimits(Struct, frozen=True):
    """When a root complex counts as congested.

    ``window`` readings are kept, and looked at every ``stride`` of them once ``least`` are there. A reading is busy
    from ``busy_share`` of the NIC's line rate on, quiet up to ``quiet_share``, and either kind must occur
    ``least_each`` times; with fewer than ``least_independent`` independent readings nothing is concluded. By chance
    ``t_raise`` 5 is passed once in some 800 looks with that many, and in 70,000 with 30 (Student's t, one-sided), and
    ``raise_looks`` of them must follow each other. ``slowdown_raise`` is one level of drift in the word. The rest is
    judged, and tested against noise in ``tests/unit/core/test_contention.py``.
    """

    window: int = 300
    least: int = 40
    least_each: int = 10
    least_independent: float = 8.0
    stride: int = 5
    busy_share: float = 0.3
    quiet_share: float = 0.1
    t_raise: float = 5.0
    t_clear: float = 2.0
    slowdown_raise: float = 1.15
    slowdown_clear: float = 1.05
    raise_looks: int = 3
    clear_looks: int = 6


class Finding(Struct, frozen=True):
    """What the last look found. ``drift_busy`` and ``drift_quiet`` are means; ``independent`` is how many of the
    window's readings say something of their own."""

    correlation: float
    t: float
    independent: float
    drift_busy: float
    drift_quiet: float

    @property
    def slowdown(self) -> float:
        """How many times slower the worker was while the NIC was busy."""
        return self.drift_busy / self.drift_quiet


class Contention:
    """One worker and one NIC beside it."""

    __slots__ = ("_drifts", "_latch", "_limits", "_shares", "_since_look", "finding")

    def __init__(self, limits: ContentionLimits) -> None:
        self._limits = limits
        self._drifts: deque[float] = deque(maxlen=limits.window)
        self._shares: deque[float] = deque(maxlen=limits.window)
        self._latch = Latch(limits.raise_looks, limits.clear_looks)
        self._since_look = 0
        self.finding: Finding | None = None
        """None until the window says anything: too few readings, or the NIC was never busy, or never quiet."""

    @property
    def alarm(self) -> bool:
        """Whether the worker suffers from its neighbour."""
        return self._latch.raised

    def feed(self, drift: float, nic_share: float) -> bool:
        """Take a reading of a worker that had work; return whether the alarm changed. Not-a-numbers are no readings.

        While nothing can be told because the NIC is busy all the time, an alarm stays; when it is quiet, it ends.
        """
        if not (math.isfinite(drift) and math.isfinite(nic_share) and drift > 0.0):
            return False
        self._drifts.append(drift)
        self._shares.append(nic_share)
        self._since_look += 1
        if self._since_look < self._limits.stride:
            return False
        self._since_look = 0
        return self._look()

    def _look(self) -> bool:
        limits = self._limits
        busy = [drift for drift, share in zip(self._drifts, self._shares, strict=True) if share >= limits.busy_share]
        quiet = [drift for drift, share in zip(self._drifts, self._shares, strict=True) if share <= limits.quiet_share]
        if len(self._drifts) < limits.least or min(len(busy), len(quiet)) < limits.least_each:
            self.finding = None
            return self._latch.feed(high=False, low=len(busy) < limits.least_each)
        correlation, t, independent = rank_correlation(list(self._drifts), list(self._shares))
        found = Finding(correlation, t, independent, sum(busy) / len(busy), sum(quiet) / len(quiet))
        self.finding = found
        enough = independent >= limits.least_independent
        return self._latch.feed(
            high=enough and found.t >= limits.t_raise and found.slowdown >= limits.slowdown_raise,
            low=found.t < limits.t_clear or found.slowdown < limits.slowdown_clear,
        )


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float]:
    """(Spearman's correlation of two series of one length, its t, the number of independent readings behind it); zeros
    when either series is constant or there are fewer than three."""
    n = len(first)
    ones, others = _centred_ranks(first), _centred_ranks(second)
    spread = math.sqrt(_dot(ones, ones) * _dot(others, others))
    if n < 3 or spread == 0.0:
        return 0.0, 0.0, 0.0
    r = _dot(ones, others) / spread
    sluggish = max(0.0, _lag_one(ones) * _lag_one(others))
    independent = max(3.0, n * (1.0 - sluggish) / (1.0 + sluggish))
    t = r * math.sqrt((independent - 2.0) / max(1e-12, 1.0 - r * r))
    return r, t, independent


def _centred_ranks(values: Sequence[float]) -> list[float]:
    """Ranks less their mean; equal values share theirs."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    begin = 0
    while begin < len(order):
        end = begin + 1
        while end < len(order) and values[order[end]] == values[order[begin]]:
            end += 1
        shared = (begin + end - 1) / 2 - (len(order) - 1) / 2
        for place in order[begin:end]:
            ranks[place] = shared
        begin = end
    return ranks


def _dot(ones: Sequence[float], others: Sequence[float]) -> float:
    return math.fsum(one * other for one, other in zip(ones, others, strict=True))


def _lag_one(centred: Sequence[float]) -> float:
    return _dot(centred[1:], centred[:-1]) / _dot(centred, centred)
