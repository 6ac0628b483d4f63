"""The resident set: models whose weights are in this node's memory, and those on their way.

In simulated mode a model's weights take their bytes over the node's load rate to arrive, one model after the other, as
they would from one disk.
"""

from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable, Iterable

from quartet_bus.messages import PrefetchCommand, PrefetchVerb

LOAD_GB_PER_S = 2.0
"""Weights from local NVMe: an 8B in BF16 was seen to take 18 to 33 s on an L40S, engine work included; its 16 GB alone
take 8 s at this planning rate."""

_BYTES_PER_GB = 1e9
MAX_RESIDENT = 256
MAX_QUEUED = 64


class ResidentSet:
    """What is loaded. ``pinned`` models are those of running engines, which no command releases.

    ``changed`` is called when a model came or went.
    """

    def __init__(
        self,
        loop: AbstractEventLoop,
        pinned: Iterable[str],
        changed: Callable[[], None],
        *,
        gb_per_s: float = LOAD_GB_PER_S,
    ) -> None:
        self._loop = loop
        self._pinned = tuple(dict.fromkeys(pinned))
        self._changed = changed
        self._gb_per_s = gb_per_s
        self._loaded: dict[str, None] = {}
        self._queue: dict[str, int] = {}
        self._timer: TimerHandle | None = None
        self._timer_model = ""
        self.refused = 0
        """Commands for which there was no room."""

    @property
    def models(self) -> tuple[str, ...]:
        """Every model in memory: those of engines first, then the loaded ones, oldest first."""
        return (*self._pinned, *(model for model in self._loaded if model not in self._pinned))

    @property
    def loading(self) -> tuple[str, ...]:
        """Models on their way, the one that is being read first."""
        return tuple(self._queue)

    def command(self, command: PrefetchCommand) -> None:
        """Do what a predictor asks: load or warm (here the same), or release."""
        model = command.model
        if command.verb is PrefetchVerb.RELEASE:
            self._release(model)
        elif model not in self._loaded and model not in self._pinned and model not in self._queue:
            if len(self._queue) >= MAX_QUEUED or len(self._loaded) + len(self._queue) >= MAX_RESIDENT:
                self.refused += 1
                return
            self._queue[model] = command.weight_bytes
            self._load_next()

    def close(self) -> None:
        """Load nothing more."""
        self._queue.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _release(self, model: str) -> None:
        if self._queue.pop(model, None) is not None and self._timer is not None and self._timer_model == model:
            self._timer.cancel()
            self._timer = None
            self._load_next()
        if model in self._loaded:
            del self._loaded[model]
            self._changed()

    def _load_next(self) -> None:
        if self._timer is None and self._queue:
            self._timer_model, weight_bytes = next(iter(self._queue.items()))
            load_s = max(0, weight_bytes) / (self._gb_per_s * _BYTES_PER_GB)
            self._timer = self._loop.call_later(load_s, self._arrived, self._timer_model)

    def _arrived(self, model: str) -> None:
        self._timer = None
        del self._queue[model]
        self._loaded[model] = None
        self._changed()
        self._load_next()
