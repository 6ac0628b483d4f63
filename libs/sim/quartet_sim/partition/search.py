"""The best cut, exactly: dynamic programming over layers and cards.

For each choice of a precision per class, a TP degree (or several, where the engine allows) and a number of stages, a
state is the cards used so far and the group that holds the last stage; its table says, for every number of layers
placed, the least that the slowest stage so far can take. One numpy operation extends a table by a stage. Among cuts
whose slowest stage is equally fast the one with the least quality lost is taken, then the one whose request passes
soonest. Every cut that the rules allow is covered: pruning only drops what a bound shows to be worse than a cut already
found. (``test_partition_search.py`` compares with all of them.)
"""

from collections.abc import Iterator, Mapping, Sequence
from math import inf

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from quartet_sim.partition.lines import LOSS_FIRST, Floats, Group, Lines
from quartet_sim.partition.placement import Cut, Placement, place
from quartet_sim.partition.question import MOST_STATES, Question, TooManyWays

Places = NDArray[np.int64]

_TOLERANCE = 1e-9


def best(question: Question) -> Placement | None:
    """The placement with the highest rate, then the least loss, then the soonest request; None when nothing fits.

    Raises `TooManyWays`.
    """
    found: Placement | None = None
    for assignment in question.assignments():
        for tps in question.degrees():
            for stages in range(1, question.most_stages(tps) + 1):
                bound_ms = inf if found is None else 1e3 / found.rate_per_s * (1 + _TOLERANCE)
                cuts = _Table(question, assignment, tps, stages, bound_ms).best()
                if cuts is None:
                    continue
                made = place(question.shape, question.pools, cuts, question.work, question.table, question.limits)
                if found is None or _better(made, found):
                    found = made
    return found


def _better(made: Placement, than: Placement) -> bool:
    if abs(made.rate_per_s - than.rate_per_s) > _TOLERANCE * than.rate_per_s:
        return made.rate_per_s > than.rate_per_s
    return (made.loss_hundredths, _passage_ms(made)) < (than.loss_hundredths, _passage_ms(than))


def _passage_ms(placement: Placement) -> float:
    output = placement.workload.output_tokens
    return placement.ttft_ms + output * sum(s.times.step_ms + s.times.link_step_ms for s in placement.stages)


_State = tuple[tuple[int, ...], Group]  # (cards used of each pool, group of the last stage)


class _Step(Struct, frozen=True):
    """One way to add a stage: from a state (None before the first stage) and its table to the state ``to``.

    ``way`` is what the link adds: to the slowest measure, and to one request's passage.
    """

    origin: _State | None
    table: Floats
    to: _State
    way: tuple[float, float]

    @property
    def group(self) -> Group:
        """The new stage's."""
        return self.to[1]


class _Reached(Struct):
    """A state of `_Table._least_loss`: the least cost for each number of layers, and where each came from.

    ``ways[which[n]]`` is the step that placed the last of ``n`` layers: its origin, and how many it found placed.
    """

    cost: Floats
    ways: list[tuple[_State | None, Places]]
    which: Places


class _Table:
    """The search for one precision per class, one set of TP degrees and one number of stages."""

    def __init__(
        self, question: Question, assignment: Mapping[str, str], tps: tuple[int, ...], stages: int, bound_ms: float
    ) -> None:
        self._q = question
        self._stages = stages
        self._bound_ms = bound_ms
        self._layers = question.shape.layers
        self._groups: list[Group] = [
            (number, tp) for number, pool in enumerate(question.pools) for tp in tps if tp <= pool.gpus
        ]
        self._lines = Lines(question, assignment, self._groups, question.work.microbatch(stages))
        self._speeds = [self._lines.speed(pool) for pool in question.pools]
        self._check_size()

    def best(self) -> list[Cut] | None:
        """The best cuts, or None when none is within memory, quality and bound."""
        speed = sum(pool.gpus * each for pool, each in zip(self._q.pools, self._speeds, strict=True))
        if not speed or self._layers / speed > self._bound_ms:
            return None
        slowest_ms = self._slowest()
        if slowest_ms > self._bound_ms:
            return None
        allowed = self._q.limits.budget_hundredths * self._layers
        cuts, lost = self._least_loss(slowest_ms)
        if lost <= allowed:
            return cuts
        # The fastest cut costs too much quality: the next best time at which one does not, among all that stages take.
        times = self._lines.times_above(slowest_ms)
        low, high = 0, len(times)
        while low < high:
            middle = (low + high) // 2
            if self._least_loss(float(times[middle]))[1] <= allowed:
                high = middle
            else:
                low = middle + 1
        return None if low == len(times) else self._least_loss(float(times[low]))[0]

    def _slowest(self) -> float:
        """The least time of the slowest stage, whatever quality it costs."""
        tables: dict[_State, Floats] = {}
        for stage in range(1, self._stages + 1):
            ends = {"first": stage == 1, "last": stage == self._stages}
            grown: dict[_State, Floats] = {}
            for step in self._steps(tables, first=stage == 1):
                square = self._lines.matrix(step.group, **ends, kind="request")
                made = np.maximum(step.table[None, :], square + step.way[0]).min(axis=1)
                self._prune(made, step.to)
                known = grown.get(step.to)
                grown[step.to] = made if known is None else np.minimum(known, made)
            tables = {state: table for state, table in grown.items() if np.isfinite(table).any()}
        return min((float(table[self._layers]) for table in tables.values()), default=inf)

    def _least_loss(self, bound_ms: float) -> tuple[list[Cut], float]:
        """Of all cuts with no stage slower than ``bound_ms``, the one with least loss, then soonest passage.

        With its loss in hundredths of a percent times layers; infinite when there is none.
        """
        bound_ms *= 1 + _TOLERANCE
        history: list[dict[_State, _Reached]] = []
        tables: dict[_State, Floats] = {}
        everywhere = np.arange(self._layers + 1)
        for stage in range(1, self._stages + 1):
            ends = {"first": stage == 1, "last": stage == self._stages}
            grown: dict[_State, _Reached] = {}
            for step in self._steps(tables, first=stage == 1):
                slow = self._lines.matrix(step.group, **ends, kind="request") + step.way[0] > bound_ms
                costs = step.table[None, :] + self._lines.matrix(step.group, **ends, kind="cost") + step.way[1]
                costs[slow] = inf
                source = costs.argmin(axis=1)
                made = costs[everywhere, source]
                known = grown.get(step.to)
                if known is None:
                    grown[step.to] = _Reached(made, [(step.origin, source)], np.zeros_like(source))
                    continue
                nearer = made < known.cost
                known.ways.append((step.origin, source))
                known.which[nearer] = len(known.ways) - 1
                known.cost[nearer] = made[nearer]
            history.append({state: reached for state, reached in grown.items() if np.isfinite(reached.cost).any()})
            tables = {state: reached.cost for state, reached in history[-1].items()}
        end = min(tables, key=lambda state: float(tables[state][self._layers]), default=None)
        if end is None or tables[end][self._layers] == inf:
            return [], inf
        return self._traced(history, end), float(tables[end][self._layers]) // LOSS_FIRST

    def _traced(self, history: Sequence[Mapping[_State, _Reached]], end: _State) -> list[Cut]:
        """The cuts that lead to ``end`` with all layers placed."""
        cuts: list[Cut] = []
        position = self._layers
        state: _State | None = end
        for stages in reversed(history):
            assert state is not None  # only the first stage has no origin, and it is the last here
            reached = stages[state]
            origin, source = reached.ways[int(reached.which[position])]
            pool, tp = state[1]
            placed = int(source[position])
            cuts.append(Cut(pool, tp, self._lines.precision(pool), position - placed))
            state, position = origin, placed
        return cuts[::-1]

    def _steps(self, tables: Mapping[_State, Floats], *, first: bool) -> Iterator[_Step]:
        """Every way to add a stage to those in ``tables``, or to begin."""
        if first:
            start = np.full(self._layers + 1, inf)
            start[0] = 0.0
            nothing = (0,) * len(self._q.pools)
            for group in self._groups:
                if self._in_turn(nothing, group):
                    yield _Step(None, start, (_used(nothing, group), group), (0.0, 0.0))
            return
        for state, table in tables.items():
            used, before = state
            for group in self._groups:
                if self._may_follow(used, before, group):
                    yield _Step(state, table, (_used(used, group), group), self._lines.way(before, group))

    def _may_follow(self, used: tuple[int, ...], before: Group, group: Group) -> bool:
        pools = self._q.pools
        pool, tp = group
        if used[pool] + tp > pools[pool].gpus or not self._in_turn(used, group):
            return False
        node = pools[pool].node.name
        if self._q.rules.whole_nodes_in_line and pools[before[0]].node.name != node:
            return not any(used[i] for i, other in enumerate(pools) if other.node.name == node)
        return True

    def _in_turn(self, used: tuple[int, ...], group: Group) -> bool:
        """Of nodes that are alike, the first unused one is as good as any other."""
        pools = self._q.pools
        pool = group[0]
        if used[pool] or len(pools[pool].node.cards) > 1:
            return True
        return all(used[i] or not pools[i].alike(pools[pool]) for i in range(pool))

    def _prune(self, table: Floats, state: _State) -> None:
        """Forget what cannot become a cut within the bound, however the other cards are used."""
        bound_ms = self._bound_ms
        if bound_ms == inf:
            return
        left = sum(
            (pool.gpus - used) * speed for pool, used, speed in zip(self._q.pools, state[0], self._speeds, strict=True)
        )
        needed = self._layers - int(min(self._layers, left * bound_ms * (1 + _TOLERANCE) + 1))
        table[:needed] = inf
        table[table > bound_ms * (1 + _TOLERANCE)] = inf

    def _check_size(self) -> None:
        states = len(self._groups)
        for pool in self._q.pools:
            states *= pool.gpus + 1
        if states > MOST_STATES:
            raise TooManyWays(states)


def _used(used: tuple[int, ...], group: Group) -> tuple[int, ...]:
    pool, tp = group
    return (*used[:pool], used[pool] + tp, *used[pool + 1 :])
