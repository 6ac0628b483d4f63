"""Pages of an engine whose connector is ours: the line to it, what is in its arena, and the pool that transfers use."""

import asyncio
from collections.abc import Callable

from msgspec.structs import replace

from quartet_agent.engines.base import Life
from quartet_agent.engines.page_line import PageLine
from quartet_agent.engines.page_pool import ServedPages
from quartet_connector.words import EngineWord, Removed, Stored, Welcome
from quartet_core import kv_events
from quartet_core.block_mirror import BlockMirror, SaltOf
from quartet_core.pairing import EXPORT, IMPORT, PAGE, RESERVE

MEDIUM = "PAGES"

_MOVES = (EXPORT, IMPORT, RESERVE)


class EnginePages:
    """Of one engine. ``changed`` is called when there are pages, or none any more; ``nudge`` as ``ServedPages``.

    ``paging``: they belong to the virtual VRAM pool.
    """

    def __init__(
        self, path: str, salt_of: SaltOf, changed: Callable[[], None], nudge: Callable[[], None], *, paging: bool
    ) -> None:
        self.pool: ServedPages | None = None
        """The pool, while there is a line."""
        self.mirror = BlockMirror(salt_of)
        """What is in the arena, for affinity: a request that comes here finds it."""
        self._ids: set[int] = set()
        self._paging = paging
        self._changed = changed
        self._nudge = nudge
        self._line = PageLine(path, self._on_welcome, self._on_word, self._on_lost)

    @property
    def problem(self) -> str:
        """Why there are no pages, "" when there are."""
        return self._line.problem

    async def run(self) -> None:
        """Follow the connector until cancelled."""
        await self._line.run()

    def seen_in(self, life: Life) -> Life:
        """An engine's ``life``, as its pages make it."""
        if self.pool is None:
            return replace(life, capabilities=(), kv_bytes_per_token=0, kv_layout="")
        layout = self.pool.layout
        return replace(
            life,
            capabilities=(*_MOVES, PAGE) if self._paging else _MOVES,
            kv_bytes_per_token=layout.kv_bytes // layout.block_tokens,
            kv_layout=f"{layout.fingerprint:016x}",
        )

    def figures(self) -> dict[str, int]:
        """What an operator is shown; {} without a line."""
        return self.pool.figures if self.pool is not None else {}

    def _on_welcome(self, welcome: Welcome, memory: memoryview) -> None:
        self._end()
        assert welcome.layout is not None  # the line looks
        loop = asyncio.get_running_loop()
        self.pool = ServedPages(welcome.layout, welcome.slots, memory, loop, self._line.say, self._nudge, self._ids)
        self._changed()

    def _on_word(self, word: EngineWord) -> None:
        match word:
            case Stored():
                self._ids.add(word.id)
                self.mirror.apply(_stored(word))
            case Removed(ids):
                self._ids.difference_update(ids)
                self.mirror.apply(kv_events.Removed(ids, MEDIUM, 0))
            case _ if self.pool is not None:
                self.pool.hear(word)

    def _on_lost(self) -> None:
        self._end()
        self._changed()

    def _end(self) -> None:
        if self.pool is not None:
            self.pool.end()
            self.pool = None
        self._ids.clear()
        self.mirror.clear()


def _stored(word: Stored) -> kv_events.Stored:
    salt, adapter = word.root or ("", "")
    return kv_events.Stored(
        hashes=[word.id],
        parent=None if word.root is not None else word.parent,
        token_ids=word.tokens,
        block_tokens=len(word.tokens) // 4,
        medium=MEDIUM,
        adapter=adapter.partition("\0")[0],
        salt=salt,
        keys=[None],
        group=0,
        attention="",
    )
