"""What a stage takes by its number of layers, for every kind of group that a search may use.

Layers are alike, so time is a line in their number, and memory ends it.
"""

from collections.abc import Mapping, Sequence
from math import inf

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from quartet_sim.partition.machines import Pool, hop
from quartet_sim.partition.question import Question
from quartet_sim.partition.timing import Cards, stage_memory, stage_times

Floats = NDArray[np.float64]

Group = tuple[int, int]
"""(pool, TP degree)."""

LOSS_FIRST = 1e8
"""One hundredth of a percent of quality in one layer outweighs any time of a request, in ms."""


class _Line(Struct, frozen=True):
    """By number of layers, in ms, infinite beyond what fits: a request's share of the stage, and one's passage."""

    request: Floats
    passage: Floats
    each_ms: float


class Lines:
    """The lines of ``groups``, for one precision per class and one microbatch."""

    def __init__(self, question: Question, assignment: Mapping[str, str], groups: Sequence[Group], batch: int) -> None:
        self._question = question
        self._assignment = assignment
        self._groups = groups
        self._batch = batch
        self._layers = question.shape.layers
        self._lines: dict[tuple[str, int, bool, bool], _Line] = {}
        self._hops: dict[tuple[Group, Group], tuple[float, float]] = {}
        self._square: dict[tuple[str, int, bool, bool, str], Floats] = {}
        index = np.arange(self._layers + 1)
        self._difference = np.maximum(index[:, None] - index[None, :], 0)  # 0 stands for "no layers": infinite

    def precision(self, pool: int) -> str:
        """What the layers on pool number ``pool`` are kept in."""
        return self._assignment[self._question.pools[pool].hardware.name]

    def _cards(self, group: Group) -> Cards:
        pool, tp = group
        return Cards(
            hardware=self._question.pools[pool].hardware,
            tp=tp,
            precision=self._question.table.precisions[self.precision(pool)],
        )

    def _line(self, group: Group, *, first: bool, last: bool) -> _Line:
        pool, tp = group
        key = (self._question.pools[pool].hardware.name, tp, first, last)
        known = self._lines.get(key)
        if known is not None:
            return known
        q, cards = self._question, self._cards(group)
        kv = q.limits.kv_bytes_per_element

        def of(layers: int) -> tuple[float, float]:
            times = stage_times(
                q.shape, cards, q.work, layers, self._batch, first=first, last=last, way_in=None,
                kv_bytes_per_element=kv,
            )  # fmt: skip
            return times.request_ms, times.prefill_ms + q.work.output_tokens * times.step_ms

        one, two = of(1), of(2)
        counts = np.arange(self._layers + 1, dtype=np.float64)
        request = one[0] + (counts - 1) * (two[0] - one[0])
        passage = one[1] + (counts - 1) * (two[1] - one[1])
        most = self._most_layers(cards, first=first, last=last)
        for line in (request, passage):
            line[0] = inf
            line[most + 1 :] = inf
        made = _Line(request, passage, two[0] - one[0])
        self._lines[key] = made
        return made

    def _most_layers(self, cards: Cards, *, first: bool, last: bool) -> int:
        """How many layers the cards hold; more layers never take less memory."""
        q = self._question
        low, high = 0, self._layers
        while low < high:
            middle = (low + high + 1) // 2
            memory = stage_memory(
                q.shape, cards, q.work, middle, first=first, last=last,
                kv_bytes_per_element=q.limits.kv_bytes_per_element, utilisation=q.limits.utilisation,
            )  # fmt: skip
            low, high = (middle, high) if memory.fits else (low, middle - 1)
        return low

    def matrix(self, group: Group, *, first: bool, last: bool, kind: str) -> Floats:
        """The line laid out as [layers placed after][layers placed before]."""
        pool, tp = group
        key = (self._question.pools[pool].hardware.name, tp, first, last, kind)
        known = self._square.get(key)
        if known is None:
            line = self._line(group, first=first, last=last)
            values = line.request
            if kind == "cost":
                loss = self._question.table.loss(self._question.shape.model, self.precision(pool))
                counts = np.arange(self._layers + 1, dtype=np.float64)
                values = line.passage + counts * ((loss.loss_hundredths if loss else 0) * LOSS_FIRST)
            known = self._square[key] = values[self._difference]
        return known

    def way(self, before: Group, group: Group) -> tuple[float, float]:
        """What the link between two stages adds to a request's share of the second, and to its passage."""
        if self._question.limits.links_free:
            return 0.0, 0.0
        known = self._hops.get((before, group))
        if known is None:
            q = self._question
            link = hop(q.pools[before[0]].place(before[1]), q.pools[group[0]].place(group[1]))
            times = stage_times(
                q.shape, self._cards(group), q.work, 1, self._batch, first=False, last=False, way_in=link,
                kv_bytes_per_element=q.limits.kv_bytes_per_element,
            )  # fmt: skip
            output = q.work.output_tokens
            known = (
                times.link_prefill_ms + output / self._batch * times.link_step_ms,
                times.link_prefill_ms + output * times.link_step_ms,
            )
            self._hops[before, group] = known
        return known

    def speed(self, pool: Pool) -> float:
        """No card of the pool places more layers per ms of the slowest stage than this, in any TP group."""
        number = self._question.pools.index(pool)
        rates = [
            1 / (self._line(group, first=False, last=False).each_ms * group[1])
            for group in self._groups
            if group[0] == number
        ]
        return max(rates, default=0.0)

    def times_above(self, bound_ms: float) -> Floats:
        """All that a stage can take, beyond ``bound_ms``, in order."""
        found: list[Floats] = []
        for first in (False, True):
            for last in (False, True):
                for group in self._groups:
                    request = self._line(group, first=first, last=last).request
                    ways = {0.0} if first else {self.way(before, group)[0] for before in self._groups}
                    found.extend(request + way for way in ways)
        times = np.unique(np.concatenate(found))
        return times[np.isfinite(times) & (times > bound_ms)]
