"""Says how full the KV of this node's workers is, and which prefixes could leave where too little is empty."""

from collections.abc import Callable, Iterable

from quartet_agent.engines.pools import PagePool
from quartet_agent.worker import HostedWorker
from quartet_bus.config.schema import KvSection
from quartet_bus.messages import KvPressure, PoolState
from quartet_core.paging import Watermarks
from quartet_core.pairing import STORE
from quartet_core.reuse import bins_of

INTERVAL_S = 0.25
"""How often it is looked at, and said while a worker is pressed."""

_CALM = 4
"""Of so many looks at workers that are not pressed one is said: destinations must be known before they are needed."""

_COLDEST = 32
"""Prefixes named at most: some four seconds of paging at a few a second."""


class PressureAuthor:
    """The word of one agent on ``kv.pressure``."""

    def __init__(
        self, node: str, incarnation: int, workers: Iterable[HostedWorker], config: KvSection,
        publish: Callable[[KvPressure], None],
    ) -> None:  # fmt: skip
        self._node = node
        self._incarnation = incarnation
        self._workers = list(workers)  # an engine behind HTTP has pages once its connector is heard
        self._marks = {worker.id: Watermarks(config.page_low, config.page_high) for worker in self._workers}
        self._least_tokens = config.page_min_tokens
        self._publish = publish
        self._looks = 0

    def tick(self) -> None:
        """Look, and say it if there is anything to say."""
        due = self._looks % _CALM == 0
        self._looks += 1
        before = [mark.pressed for mark in self._marks.values()]
        for worker in self._workers:
            pages = worker.adapter.pages
            if pages is not None and worker.up and worker.role != STORE:
                fill = pages.fill()
                self._marks[worker.id].look(fill.empty_blocks, fill.total_blocks)
        now = [mark.pressed for mark in self._marks.values()]
        if due or any(now) or now != before:
            states = tuple(
                self._state(worker, pages) for worker in self._workers
                if worker.up and (pages := worker.adapter.pages) is not None
            )  # fmt: skip
            self._publish(KvPressure(self._node, self._incarnation, states))

    def _state(self, worker: HostedWorker, pages: PagePool) -> PoolState:
        fill, counts, pressed = pages.fill(), pages.counts(), self._marks[worker.id].pressed
        returned_ms, lost_ms = pages.drain_reuse()
        return PoolState(
            worker=worker.id,
            incarnation=worker.incarnation,
            total_blocks=fill.total_blocks,
            empty_blocks=fill.empty_blocks,
            idle_blocks=fill.idle_blocks,
            pressed=pressed,
            cold=tuple(pages.coldest(_COLDEST, self._least_tokens)) if pressed else (),
            returns=bins_of(returned_ms),
            losses=bins_of(lost_ms),
            in_blocks=counts.in_blocks,
            out_blocks=counts.out_blocks,
            hit_blocks=counts.hit_blocks,
            hit_tokens=counts.hit_tokens,
        )
