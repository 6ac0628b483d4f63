"""Fitting the two curves of a profile to rows: the prefill polynomial and the table of decode steps.

Everything minimises *relative* error: 3 ms off matters at 20 ms and not at 2 s, and short prompts are most prompts.
"""

from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quartet_sim.measured import PrefillRow, StepRow

Floats = NDArray[np.float64]


class Prefill(NamedTuple):
    """Coefficients of ``a + b*n + c*n**2`` in ms, and the relative error of each row."""

    a_ms: float
    b_ms_per_token: float
    c_ms_per_token2: float
    errors: list[float]


class StepTable(NamedTuple):
    """Decode steps in ms over ``batches`` x ``contexts``, and the slope that fills what no row says."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    ms: tuple[tuple[float, ...], ...]
    ms_per_kv_token: float


def fit_prefill(rows: Sequence[PrefillRow], c_given: float | None = None) -> Prefill:
    """Non-negative least squares of relative error; ``c_given`` keeps c where rows are too short to tell it."""
    tokens = np.array([row.tokens * row.prompts for row in rows], dtype=np.float64)
    squares = np.array([row.tokens**2 * row.prompts for row in rows], dtype=np.float64)
    ms = np.array([row.ms for row in rows], dtype=np.float64)
    ones = np.ones_like(ms)
    if c_given is None:
        a, b, c = _least_relative(np.stack([ones, tokens, squares], axis=1), ms)
    else:
        c = c_given
        # the known part goes to the other side, the weights stay those of the whole time
        a, b = _least_relative(np.stack([ones, tokens], axis=1), ms - c * squares, scale=ms)
    errors = np.abs((a + b * tokens + c * squares) / ms - 1.0)
    return Prefill(a, b, c, [float(error) for error in errors])


def kv_slope(rows: Sequence[StepRow]) -> float:
    """Milliseconds per token of KV read in a step: the last term of ``floor + batch + batch*context``."""
    batch = np.array([row.batch for row in rows], dtype=np.float64)
    context = np.array([row.context for row in rows], dtype=np.float64)
    ms = np.array([row.ms for row in rows], dtype=np.float64)
    return _least_relative(np.stack([np.ones_like(ms), batch, batch * context], axis=1), ms)[2]


def step_table(rows: Iterable[StepRow], contexts: Sequence[int], ms_per_kv_token: float, *, pooled: bool) -> StepTable:
    """The table of ``rows``, whole and rising.

    A cell is its row (the median, where there are several); a cell without one is the nearest row of the same batch,
    moved along the context by ``ms_per_kv_token``. ``pooled`` makes every cell the median of all rows of its batch,
    moved likewise: for engines timed with so little KV that its cost drowns in noise. At last each cell is raised to
    its smaller neighbours, since more work does not take less time and timer noise says otherwise.
    """
    by_batch: dict[int, list[StepRow]] = {}
    for row in rows:
        by_batch.setdefault(row.batch, []).append(row)
    batches = tuple(sorted(by_batch))
    table = np.zeros((len(batches), len(contexts)))
    for i, batch in enumerate(batches):
        known = by_batch[batch]
        for j, context in enumerate(contexts):
            nearest = min(abs(row.context - context) for row in known)
            used = known if pooled else [row for row in known if abs(row.context - context) == nearest]
            table[i, j] = median(row.ms + ms_per_kv_token * batch * (context - row.context) for row in used)
    table = np.maximum.accumulate(np.maximum.accumulate(table, axis=0), axis=1)
    ms = tuple(tuple(float(cell) for cell in line) for line in table)
    return StepTable(batches, tuple(contexts), ms, ms_per_kv_token)


def _least_relative(columns: Floats, ms: Floats, scale: Floats | None = None) -> list[float]:
    """Non-negative weights of ``columns`` with the least sum of squared relative errors.

    With three columns at most, trying every subset of them is exact and simpler than an active-set method.
    """
    weight = ms if scale is None else scale
    scaled = columns / weight[:, None]
    target = ms / weight
    count = columns.shape[1]
    best: list[float] = [0.0] * count
    least = float(target @ target)
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            solution = np.linalg.lstsq(scaled[:, chosen], target, rcond=None)[0]
            if (solution < 0).any():
                continue
            miss = scaled[:, chosen] @ solution - target
            if float(miss @ miss) < least:
                least = float(miss @ miss)
                best = [0.0] * count
                for column, value in zip(chosen, solution, strict=True):
                    best[column] = float(value)
    return best
