"""Which prefixes an engine has cached, in rungs of the ladder: by its KV events where it has any, else by its traffic.

Events name tokens. A prompt that a router sketches as text has rungs that no event can name, so text prompts are known
by traffic whatever the engine.
"""

import asyncio
from collections import Counter
from collections.abc import Callable

from quartet_agent.engines import bodies
from quartet_agent.engines.base import Work
from quartet_agent.engines.events import EventLine, Source
from quartet_core.block_mirror import BlockMirror
from quartet_core.ladder import Sketch, sketch_text, sketch_tokens
from quartet_core.openai import Inference
from quartet_core.salt import salt_of
from quartet_core.traffic_cache import TrafficCache


class CachedPrefixes:
    """Those of one engine. ``moved`` is called whenever its events show that it works."""

    def __init__(self, capacity_tokens: int, moved: Callable[[], None]) -> None:
        self._moved = moved
        self._traffic = TrafficCache(capacity_tokens)
        self._lines: list[EventLine] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._left: tuple[list[int], list[int]] = ([], [])  # of lines that have ended, and was not drained yet
        self.beside: BlockMirror | None = None
        """What is not in the engine's cache, and found by its requests all the same."""

    @property
    def exact(self) -> bool:
        """Whether the engine's own events are followed."""
        return bool(self._lines)

    @property
    def problems(self) -> list[str]:
        """Why events are not heard that should be."""
        return [line.problem for line in self._lines if line.problem]

    def begin(self, sources: tuple[Source, ...], capacity_tokens: int) -> None:
        """A life of the engine begins, with an empty cache; it publishes its events at ``sources``."""
        self.end()
        if capacity_tokens:
            self._traffic.resize(capacity_tokens)
        loop = asyncio.get_running_loop()
        for source in sources:
            line = EventLine(source, ladder_salt, self._moved)
            self._lines.append(line)
            self._tasks.append(loop.create_task(line.run()))

    def end(self) -> None:
        """The engine is gone, and its cache with it."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        for line in self._lines:
            line.mirror.clear()
            became, ended = line.mirror.drain()
            self._left = (self._left[0] + became, self._left[1] + ended)
        self._lines.clear()
        self._traffic.clear()

    def read(self, work: Work) -> None:
        """The engine has read a prompt: its rungs are cached, where no event will say so."""
        if work.inference.prompt_ids is None or not self._lines:
            self._traffic.read(_sketch(work.inference, work.salt))

    def drain(self) -> tuple[list[int], list[int]]:
        """Rungs that became cached and that no longer are, since the last call."""
        became, ended = self._left
        self._left = ([], [])
        beside = [self.beside.drain()] if self.beside is not None else []
        for more, fewer in (self._traffic.drain(), *beside, *(line.mirror.drain() for line in self._lines)):
            became, ended = became + more, ended + fewer
        return became, ended

    def figures(self) -> dict[str, int]:
        """What came of all publishers together."""
        figures: Counter[str] = Counter()
        for line in self._lines:
            figures.update(line.figures())
        if self._lines:
            figures["block_tokens"] = max(line.mirror.block_tokens for line in self._lines)
        return dict(figures)


def ladder_salt(cache_salt: str, adapter: str) -> bytes | None:
    """The ladder's salt of blocks that the engine keeps apart so; None when no router asks for them."""
    if cache_salt:
        return bodies.salt_of_cache(cache_salt)
    return salt_of("", adapter, isolated=False, adapter=bool(adapter))


def _sketch(inference: Inference, salt: bytes) -> Sketch:
    """A prompt's sketch as a router makes it."""
    if inference.prompt_ids is not None:
        return sketch_tokens(inference.prompt_ids, salt=salt)
    return sketch_text(inference.prompt_text, salt=salt)
