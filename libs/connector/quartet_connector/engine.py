"""What pages need of an engine, whichever it is: its prefix cache, its requests, and copies within its steps."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from quartet_connector.contents import Root


class EngineBlocks(Protocol):
    """An engine's prefix cache. Called from the scheduler's thread alone."""

    @property
    def total(self) -> int:
        """Blocks that it has."""
        ...

    def fill(self) -> tuple[int, int]:
        """How many are empty, and how many cached and used by nobody."""
        ...

    def find(self, hash_: bytes) -> int | None:
        """The number of the cached block that the engine calls so."""
        ...

    def users(self, block: int) -> int:
        """How many use a block, each ``hold`` among them."""
        ...

    def hold(self, blocks: Sequence[int]) -> None:
        """Keep blocks from being evicted."""
        ...

    def let_go(self, blocks: Sequence[int]) -> None:
        """Take back a ``hold``; the first of them are the last to be evicted."""
        ...

    def evict(self, block: int) -> None:
        """Drop an idle block's content: it is empty, and the next one that is given out."""
        ...

    def next_evicted(self, limit: int) -> list[bytes]:
        """The engine's names of what stands among the next ``limit`` blocks that it gives out."""
        ...


class Request(NamedTuple):
    """A request as a scheduler has it. ``hashes`` are the engine's names of its full blocks; ``root`` None: its KV
    depends on more than tokens, so that it takes no part."""

    id: str
    root: Root | None
    tokens: Sequence[int]
    hashes: Sequence[bytes]


class Copies(NamedTuple):
    """What a step copies: (block, slot) of pages to load before its forward pass, and to save after it."""

    job: int
    loads: list[tuple[int, int]]
    saves: list[tuple[int, int]]
