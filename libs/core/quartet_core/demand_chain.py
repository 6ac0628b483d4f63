"""When will a model be asked for again? A Markov chain over (demand level, idle age), and first passage in it.

A model that has been idle for ``d`` seconds at demand level ``l`` is in state ``(l, age(d))``. Two things can happen:
a request arrives (the chain is absorbed: the model was needed), or it does not, and then the next state follows from
the clock alone, because idle time grows and the level, a quantized EWMA, decays as ``e^(−t/tau)``. So the only thing to
learn per state is the rate of absorption, arrivals over time spent there, and "needed before now + T" is

    P(T) = 1 − exp(−∫ rate(state(t)) dt)  over the T seconds ahead,

a sum over the few states that the walk without an arrival would cross: no matrix, no iteration. It is the hazard form
p = (F(d+T) − F(d)) / (1 − F(d)) of the gap distribution F, with F piecewise exponential and conditioned on the level.

Counts are smoothed twice (Gamma prior = Laplace smoothing for rates): a model's state towards the same state pooled
over all models, and the pooled state towards a rate that only knows how long the idling has lasted.
"""

import math
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from quartet_core.demand_rates import FAST_S

AGE_EDGES_S: Final = tuple(round(2.0 * 2 ** (i / 2), 3) for i in range(36))
"""Idle ages: two per octave from 2 s to 4.3 days; the first state is below 2 s, the last beyond."""

LEVEL_EDGES_PER_S: Final = (1 / 600, 4 / 600, 16 / 600, 64 / 600, 256 / 600)
"""Demand levels: of the 10-minute EWMA, a factor of four apart, from one request in ten minutes up."""

AGES: Final = len(AGE_EDGES_S) + 1
LEVELS: Final = len(LEVEL_EDGES_PER_S) + 1
STATES: Final = AGES * LEVELS

_POOL_PRIOR_EVENTS: Final = 1.0
_OWN_PRIOR_EVENTS: Final = 2.0
_OWN_FORGETS_EVENTS: Final = 64.0
_POOL_FORGETS_EVENTS: Final = 4096.0


def state_of(level: int, age: int) -> int:
    """The number of a state, for tables and for the wire."""
    return level * AGES + age


def level_of(rate_per_s: float) -> int:
    """The demand level of a 10-minute EWMA."""
    return bisect_right(LEVEL_EDGES_PER_S, rate_per_s)


def age_of(idle_s: float) -> int:
    """The idle age of ``idle_s`` seconds without a request."""
    return bisect_right(AGE_EDGES_S, idle_s)


_POOL_PRIOR_S: Final = tuple(
    _POOL_PRIOR_EVENTS * max(edge_s, 1.0) / math.log(2) for edge_s in (*AGE_EDGES_S, AGE_EDGES_S[-1])
)
"""By age, the seconds that go with the prior's event: for who knows nothing, what has lasted ``d`` seconds is as likely
as not to last another ``d``."""


class Exposure:
    """Arrivals in and seconds spent in every state: the transition counts of one chain.

    A state with more than ``forget_events`` arrivals is halved, so that a chain follows a model whose ways change.
    """

    __slots__ = ("_forget_events", "arrivals", "seconds")

    def __init__(self, forget_events: float) -> None:
        self._forget_events = forget_events
        # doubles, not objects: a thousand models have a chain each
        self.arrivals = array("d", bytes(8 * STATES))
        self.seconds = array("d", bytes(8 * STATES))

    @classmethod
    def pooled(cls) -> "Exposure":
        """One for all models together, which forgets late."""
        return cls(_POOL_FORGETS_EVENTS)

    def arrived(self, state: int) -> None:
        """The walk in ``state`` ended by a request."""
        self.arrivals[state] += 1.0
        if self.arrivals[state] > self._forget_events:
            self.arrivals[state] *= 0.5
            self.seconds[state] *= 0.5


class DemandChain:
    """One model's chain. ``pool`` is the exposure that all models share; this chain feeds it too."""

    __slots__ = ("_age", "_at_s", "_last_s", "_level", "_own", "_pool", "_rate")

    def __init__(self, pool: Exposure, now_s: float) -> None:
        self._pool = pool
        self._own = Exposure(_OWN_FORGETS_EVENTS)
        self._last_s = now_s  # of the last request; until there is one, of the start of the watch
        self._at_s = now_s  # up to here the time spent is accounted for
        self._rate = 0.0  # the EWMA right after the last request
        self._level = 0
        self._age = 0

    def idle_s(self, now_s: float) -> float:
        """How long nobody has asked."""
        return max(0.0, now_s - self._last_s)

    def state(self, now_s: float) -> int:
        """Where the chain is."""
        idle_s = self.idle_s(now_s)
        return state_of(level_of(self._rate * math.exp(-idle_s / FAST_S)), age_of(idle_s))

    def arrived(self, now_s: float, rate_per_s: float) -> None:
        """A request came; ``rate_per_s`` is the 10-minute EWMA with it."""
        self.advance(now_s)
        state = state_of(self._level, self._age)
        self._own.arrived(state)
        self._pool.arrived(state)
        self._last_s = max(now_s, self._last_s)
        self._at_s = self._last_s
        self._rate = rate_per_s
        self._level = level_of(rate_per_s)
        self._age = 0

    def advance(self, now_s: float) -> None:
        """Account for the time up to ``now_s`` in which nothing came. Cheap; called on every tick."""
        while self._at_s < now_s:
            until_s, next_age, next_level = self._next_edge(self._at_s - self._last_s, self._age, self._level)
            edge_s = self._last_s + until_s
            end_s = max(self._at_s, min(edge_s, now_s))
            state = state_of(self._level, self._age)
            self._own.seconds[state] += end_s - self._at_s
            self._pool.seconds[state] += end_s - self._at_s
            self._at_s = end_s
            if edge_s > now_s:
                return
            self._age, self._level = next_age, next_level

    def first_passage(self, now_s: float, horizons_s: Sequence[float]) -> list[float]:
        """The chance of a request within each horizon; ``horizons_s`` must rise. Not falling in the horizon."""
        idle_s = self.idle_s(now_s)
        level, age = divmod(self.state(now_s), AGES)
        hazard = 0.0
        position_s = idle_s
        found: list[float] = []
        for horizon_s in horizons_s:
            end_s = idle_s + horizon_s
            while True:
                until_s, next_age, next_level = self._next_edge(position_s, age, level)
                rate = self._rate_of(state_of(level, age), age)
                if until_s >= end_s:
                    hazard += rate * max(0.0, end_s - position_s)
                    position_s = end_s
                    break
                hazard += rate * max(0.0, until_s - position_s)
                position_s, age, level = until_s, next_age, next_level
            found.append(-math.expm1(-hazard))
        return found

    def _next_edge(self, idle_s: float, age: int, level: int) -> tuple[float, int, int]:
        """Idle seconds at which the walk leaves its state, and the age and level it then has; ``inf`` in the last."""
        age_edge_s = AGE_EDGES_S[age] if age < AGES - 1 else math.inf
        level_edge_s = math.inf
        if level > 0:  # rate · e^(−t/tau) falls through the level's lower edge
            level_edge_s = max(idle_s, FAST_S * math.log(self._rate / LEVEL_EDGES_PER_S[level - 1]))
        if age_edge_s <= level_edge_s:
            return age_edge_s, age + 1, level
        return level_edge_s, age, level - 1

    def _rate_of(self, state: int, age: int) -> float:
        """Arrivals per second in ``state``, smoothed."""
        pool, own = self._pool, self._own
        pooled = (pool.arrivals[state] + _POOL_PRIOR_EVENTS) / (pool.seconds[state] + _POOL_PRIOR_S[age])
        return (own.arrivals[state] + _OWN_PRIOR_EVENTS) / (own.seconds[state] + _OWN_PRIOR_EVENTS / pooled)
