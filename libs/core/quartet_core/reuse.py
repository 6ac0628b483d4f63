"""Reuse: for how long prefixes stay unused until they are used again, and what that says about one that is idle.

Prefixes that came back tell how long they had been away; prefixes that were evicted tell only that they had not come
back so far. Both are counted by log-binned idle time, and what follows is the product-limit estimate over the bins
(Kaplan and Meier, 1958): the chance to come back within a bin is the share, of those that were still idle when it
began, that did. Counts decay, so that the estimate follows the traffic.
"""

from collections.abc import Iterable, Sequence
from typing import Final

BINS: Final = 32
"""Half octaves from 64 ms on; the last one has no end (some 50 minutes and more)."""

_FIRST_MS: Final = 64.0


def bin_of(idle_ms: float) -> int:
    """The bin of an idle time; the first one also has all that is shorter."""
    bin_, end_ms = 0, _FIRST_MS * 2**0.5
    while idle_ms >= end_ms and bin_ < BINS - 1:
        bin_ += 1
        end_ms *= 2**0.5
    return bin_


def bins_of(idle_ms: Iterable[float]) -> tuple[int, ...]:
    """How many of these idle times are in each bin; () for none at all."""
    counts = [0] * BINS
    for each_ms in idle_ms:
        counts[bin_of(each_ms)] += 1
    return tuple(counts) if any(counts) else ()


class ReuseGaps:
    """Idle times of a model's prefixes, from all workers together.

    ``prior_ms`` is the mean idle time assumed before anything was seen, with the weight of ``prior`` prefixes in every
    bin; counts halve every ``half_life_s``.
    """

    __slots__ = ("_half_life_s", "_losses", "_prior", "_prior_ms", "_returns", "_seen_s")

    def __init__(self, *, half_life_s: float = 600.0, prior: float = 2.0, prior_ms: float = 60_000.0) -> None:
        if half_life_s <= 0 or prior <= 0 or prior_ms <= 0:
            raise ValueError("half_life_s, prior and prior_ms must be above zero")
        self._half_life_s = half_life_s
        self._prior = prior
        self._prior_ms = prior_ms
        self._returns = [0.0] * BINS
        self._losses = [0.0] * BINS
        self._seen_s = 0.0

    def see(self, returns: Sequence[int], losses: Sequence[int], now_s: float) -> None:
        """Take counts by bin, as ``bins_of`` makes them; what is beyond the last bin is passed over."""
        faded = 0.5 ** (max(now_s - self._seen_s, 0.0) / self._half_life_s)
        self._seen_s = max(self._seen_s, now_s)
        for counts, more in ((self._returns, returns), (self._losses, losses)):
            for index in range(BINS):
                counts[index] *= faded
            for index, count in enumerate(more[:BINS]):
                counts[index] += count

    def returns_within(self, idle_ms: float, horizon_ms: float) -> float:
        """The chance that a prefix idle for ``idle_ms`` is used within the next ``horizon_ms``."""
        if horizon_ms <= 0:
            return 0.0
        at_risk = self._at_risk()
        end_ms = idle_ms + horizon_ms
        stays = 1.0
        bin_ = bin_of(idle_ms)
        begin_ms = _FIRST_MS * 2 ** (bin_ / 2) if bin_ else 0.0
        while bin_ < BINS and begin_ms < end_ms:
            length_ms = _FIRST_MS * 2 ** ((bin_ + 1) / 2) - begin_ms
            within_ms = min(end_ms, begin_ms + length_ms) - max(idle_ms, begin_ms)
            if bin_ == BINS - 1:  # without an end: its hazard is taken for that of its first half octave
                within_ms = end_ms - max(idle_ms, begin_ms)
            # before enough was seen, the hazard is that of an exponential with the prior's mean
            expected = self._prior * (1.0 - 2.0 ** (-length_ms / self._prior_ms))
            chance = (self._returns[bin_] + expected) / (at_risk[bin_] + self._prior)
            stays *= (1.0 - min(chance, 1.0 - 1e-9)) ** (within_ms / length_ms)
            begin_ms += length_ms
            bin_ += 1
        return 1.0 - stays

    def _at_risk(self) -> list[float]:
        """By bin: how many prefixes were still idle at its begin, and seen through it or back within it."""
        at_risk = [0.0] * BINS
        beyond = 0.0
        for index in range(BINS - 1, -1, -1):
            # one that was evicted within a bin was seen for about half of it (the actuarial correction)
            at_risk[index] = beyond + self._returns[index] + 0.5 * self._losses[index]
            beyond += self._returns[index] + self._losses[index]
        return at_risk
