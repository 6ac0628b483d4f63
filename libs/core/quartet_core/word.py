"""The state word: all that a router needs to know about a worker just now, in 32 bits.

A word travels and is kept as a plain ``int``; this module says what its bits mean. Bits 0-23 are *state*: a change in
them may change a decision. Bits 24-31 are *liveness* (engine steps, inventory epoch) and are read by collectors alone.

Each continuous quantity has a scale: ``x_level`` maps a measured value to a level, ``x_value`` gives the value that a
level stands for, and ``level(value(l)) == l`` for every level. Scales are monotone, clamp what lies outside them, and
take a value that is not a number for the worst level, so that a broken sensor can never make a worker attractive.
"""

import math
from bisect import bisect_left, bisect_right
from itertools import pairwise
from typing import Final

import msgspec


class Field(msgspec.Struct, frozen=True):
    """One field of the word: ``bits`` bits, the lowest of them at ``shift``."""

    name: str
    shift: int
    bits: int

    @property
    def levels(self) -> int:
        """How many levels the field has; they are numbered from 0."""
        return 1 << self.bits

    @property
    def mask(self) -> int:
        """The field's bits, in their place in the word."""
        return ((1 << self.bits) - 1) << self.shift

    def of(self, word: int) -> int:
        """The level of this field in ``word``."""
        return word >> self.shift & (1 << self.bits) - 1

    def put(self, word: int, level: int) -> int:
        """``word`` with this field at ``level``. Raises ``ValueError`` if the field has no such level."""
        if not 0 <= level < self.levels:
            raise ValueError(f"{self.name} has levels 0 to {self.levels - 1}, not {level}")
        return word & ~self.mask | level << self.shift


FREE_KV: Final = Field("free_kv", 0, 4)
QUEUE: Final = Field("queue", 4, 6)
BATCH: Final = Field("batch", 10, 6)
DRIFT: Final = Field("drift", 16, 3)
ACCEPTING: Final = Field("accepting", 19, 1)
THROTTLED: Final = Field("throttled", 20, 1)
CONGESTED: Final = Field("congested", 21, 1)
PRESSED: Final = Field("pressed", 22, 1)
FAULT: Final = Field("fault", 23, 1)
STEPS: Final = Field("steps", 24, 4)
EPOCH: Final = Field("epoch", 28, 4)

FIELDS: Final[tuple[Field, ...]] = (
    FREE_KV,
    QUEUE,
    BATCH,
    DRIFT,
    ACCEPTING,
    THROTTLED,
    CONGESTED,
    PRESSED,
    FAULT,
)
"""The state fields, lowest bits first; together they are exactly ``STATE_MASK``."""

STATE_MASK: Final = 0xFFFFFF
"""The bits that enter planes and deltas."""

WORD_MASK: Final = 0xFFFFFFFF


def pack(
    *,
    free_kv: int,
    queue: int,
    batch: int,
    drift: int,
    accepting: bool,
    throttled: bool = False,
    congested: bool = False,
    pressed: bool = False,
    fault: bool = False,
    steps: int = 0,
    epoch: int = 0,
) -> int:
    """The word with these *levels* (not values: see the ``_level`` functions).

    ``steps`` and ``epoch`` are running counters, of which the word keeps the value modulo 16.
    Raises ``ValueError``, naming the field, for a level that does not exist.
    """
    word = FREE_KV.put(0, free_kv)
    word = QUEUE.put(word, queue)
    word = BATCH.put(word, batch)
    word = DRIFT.put(word, drift)
    word |= accepting << ACCEPTING.shift
    word |= throttled << THROTTLED.shift
    word |= congested << CONGESTED.shift
    word |= pressed << PRESSED.shift
    word |= fault << FAULT.shift
    word |= (steps & 15) << STEPS.shift
    return word | (epoch & 15) << EPOCH.shift


def steps_of(word: int) -> int:
    """The engine's step counter, modulo 16: it moves whenever the engine does."""
    return STEPS.of(word)


def epoch_of(word: int) -> int:
    """The inventory epoch, modulo 16: it moves when the node's inventory changed."""
    return EPOCH.of(word)


# Free KV: the share of KV blocks that nobody uses. Finer near empty, where one step decides whether a prompt fits.
# The top level means "all of it", so that a prompt as large as the memory still finds an idle worker.
_FREE_KV: Final = (0.0, 0.01, 0.02, 0.03, 0.05, 0.07, 0.10, 0.14, 0.19, 0.25, 0.33, 0.42, 0.53, 0.66, 0.82, 1.0)


def free_kv_level(fraction: float) -> int:
    """The level of a free share of KV memory, 0.0 to 1.0."""
    return bisect_right(_FREE_KV, fraction) - 1 if fraction > 0.0 else 0


def free_kv_level_for(fraction: float) -> int:
    """The lowest level that stands for at least ``fraction``: who is there surely has so much. Above 1.0 the top one,
    which stands for all of it."""
    return bisect_left(_FREE_KV, fraction, 0, FREE_KV.levels - 1)


def free_kv_fraction(level: int) -> float:
    """The least free share that ``level`` stands for: memory is never overestimated."""
    return _FREE_KV[level]


# Queue: q(l) = s·(e^(c·l) − 1), linear near zero and logarithmic above, through q(63) = top. With s = 2 ms and a top
# of 180 s a step is 0.4 ms at the bottom and 20 % at the top. A value goes to the level nearest on that curve.
# Rounded to the microsecond, so that every platform's libm yields the same table.
_QUEUE_SCALE_MS: Final = 2.0
_QUEUE_TOP_MS: Final = 180_000.0


def _queue_point_ms(position: float) -> float:
    curvature = math.log1p(_QUEUE_TOP_MS / _QUEUE_SCALE_MS) / (QUEUE.levels - 1)
    return round(_QUEUE_SCALE_MS * math.expm1(curvature * position), 3)


_QUEUE_MS: Final = tuple(_queue_point_ms(level) for level in range(QUEUE.levels))
_QUEUE_BOUNDS_MS: Final = tuple(_queue_point_ms(level - 0.5) for level in range(1, QUEUE.levels))


def queue_level(ms: float) -> int:
    """The level of ``ms`` of predicted prefill work in a queue. Below 0.2 ms it is 0: nothing waits."""
    return bisect_right(_QUEUE_BOUNDS_MS, ms)


def queue_ms(level: int) -> float:
    """The work, in ms, that ``level`` stands for: the middle of its range, 0 for level 0."""
    return _QUEUE_MS[level]


def queue_bounds_ms(level: int) -> tuple[float, float]:
    """The range [low, high) of ``level`` in ms; the top level has no end (``math.inf``)."""
    low = _QUEUE_BOUNDS_MS[level - 1] if level else 0.0
    return low, _QUEUE_BOUNDS_MS[level] if level < QUEUE.levels - 1 else math.inf


# Batch: exact below 32, then 31 steps of 11.8 % to 1,024. Sixteen linear levels would cost up to 22 % of goodput.
_BATCH_EXACT: Final = 32
_BATCH_TOP: Final = 1024


def _batch_low(level: int) -> int:
    if level <= _BATCH_EXACT:
        return level
    octaves = math.log2(_BATCH_TOP / _BATCH_EXACT) / (BATCH.levels - 1 - _BATCH_EXACT)
    return round(_BATCH_EXACT * 2 ** (octaves * (level - _BATCH_EXACT)))


_BATCH_LOWS: Final = tuple(_batch_low(level) for level in range(BATCH.levels))
_BATCH_SIZES: Final = (
    *((low + following - 1) // 2 for low, following in pairwise(_BATCH_LOWS)),
    _BATCH_TOP,
)


def batch_level(n: int) -> int:
    """The level of ``n`` running sequences."""
    return bisect_right(_BATCH_LOWS, n) - 1 if n > 0 else 0


def batch_size(level: int) -> int:
    """The number of running sequences that ``level`` stands for: the middle of its range."""
    return _BATCH_SIZES[level]


def batch_bounds(level: int) -> tuple[int, int | None]:
    """The range [low, high) of ``level`` in sequences; ``high`` is None at the top level, which has no end."""
    return _BATCH_LOWS[level], _BATCH_LOWS[level + 1] if level < BATCH.levels - 1 else None


# Drift: observed over predicted time. Finer near 1, where almost every worker lives; past x6 a worker is unusable.
# Between two levels the border is their geometric mean, since drift multiplies.
_DRIFT: Final = (1.0, 1.15, 1.35, 1.7, 2.3, 3.3, 5.0, math.inf)
_DRIFT_UNUSABLE: Final = 6.0
_DRIFT_BOUNDS: Final = (
    *(round(math.sqrt(low * high), 6) for low, high in pairwise(_DRIFT[:-1])),
    _DRIFT_UNUSABLE,
)

DRIFT_UNUSABLE_LEVEL: Final = DRIFT.levels - 1


def drift_level(ratio: float) -> int:
    """The level of a drift ratio (1.0 = as fast as the profile says). Workers faster than their profile are at 0."""
    return bisect_right(_DRIFT_BOUNDS, ratio)


def drift_ratio(level: int) -> float:
    """The factor that ``level`` stands for; ``math.inf`` at level 7, which no plan survives."""
    return _DRIFT[level]
