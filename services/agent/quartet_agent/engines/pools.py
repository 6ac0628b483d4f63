"""An engine's KV memory as others than the engine see it: for transfers, and for the virtual VRAM pool."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct

from quartet_agent.kv.mover import Buffer
from quartet_bus.messages import ColdPrefix, PageManifest


class BlocksFenced(Exception):
    """KV under ``transfer`` is not, or no longer, what the caller believes; ``reason`` says how."""

    def __init__(self, transfer: str, reason: str) -> None:
        super().__init__(f"transfer {transfer}: {reason}")
        self.transfer = transfer
        self.reason = reason


class Exportable(NamedTuple):
    """How many blocks of an outgoing transfer can be read now, and whether these are all that there will be."""

    blocks: int
    whole: bool


class KvPool(Protocol):
    """An engine's KV memory, as transfers need it: blocks of ``block_tokens``; a prompt's last is often shorter."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        ...

    @property
    def stands_in(self) -> bool:
        """Whether blocks are smaller than the KV that they stand for: its link is then charged for the whole."""
        ...

    def reserve(self, transfer: str, tokens: int, epoch: int) -> bool:
        """Called for RESERVE: keep room for ``tokens``; False when there is none."""
        ...

    def write(self, transfer: str, epoch: int, first_block: int, blocks: Sequence[Buffer]) -> None:
        """Called for each chunk received. Raises ``BlocksFenced`` for another epoch, place or size than reserved."""
        ...

    def commit(self, transfer: str, epoch: int) -> None:
        """Called for COMMIT, once all blocks are there: a DECODE job may read them now. Raises ``BlocksFenced``."""
        ...

    async def ready(self, transfer: str) -> None:
        """Called for MOVE, before ``exportable``: until blocks can be read. Raises ``BlocksFenced`` if they never can.

        Of a PREFILL job they can at once; pages may have to be copied first.
        """
        ...

    def exportable(self, transfer: str) -> Exportable:
        """Called while a transfer is sent: what ``export`` would give. Raises ``BlocksFenced`` when that is nothing any
        more, and will be nothing: the PREFILL job was cancelled, failed, or its KV released.

        A count may fall, when the engine takes blocks away and computes them again, to the same.
        """
        ...

    def export(self, transfer: str, first_block: int = 0) -> Iterator[Buffer]:
        """Called for MOVE: the ``exportable`` blocks of a PREFILL job from ``first_block`` on, in order.

        Raises ``BlocksFenced``, also in mid-way. What it gave stays as it is, whatever becomes of the job.
        """
        ...

    def release(self, transfer: str) -> None:
        """Called at RELEASE, expiry or cancel: free what is kept under ``transfer``; nothing there is nothing done."""
        ...


class PoolFill(Struct, frozen=True):
    """The blocks of an engine's KV: ``empty``, ``idle`` (cached, used by nobody), and ``referenced``."""

    total_blocks: int
    empty_blocks: int
    idle_blocks: int

    @property
    def referenced_blocks(self) -> int:
        """Blocks that sequences, leases or pins hold."""
        return self.total_blocks - self.empty_blocks - self.idle_blocks


class PoolCounts(Struct, frozen=True):
    """Blocks since the engine's start: kept of page-outs that came, dropped of ones that left, found of the former."""

    in_blocks: int = 0
    out_blocks: int = 0
    hit_blocks: int = 0
    hit_tokens: int = 0


class PagePool(Protocol):
    """An engine's prefix cache, as the virtual VRAM pool needs it. Transfers of pages go through its ``KvPool``."""

    def fill(self) -> PoolFill:
        """Called at most four times a second: how full it is."""
        ...

    def counts(self) -> PoolCounts:
        """Called as ``fill``."""
        ...

    def coldest(self, limit: int, least_tokens: int) -> list[ColdPrefix]:
        """Called while too few blocks are empty: up to ``limit`` prefixes of ``least_tokens`` or more that are wholly
        cached and whose last block is idle, the longest unused first. None of them is a part of another one."""
        ...

    def drain_reuse(self) -> tuple[list[float], list[float]]:
        """Called once before each report: for how long prefixes had been idle when they were used again, and when they
        were evicted (milliseconds), since the last call. Empty lists from an engine that cannot tell."""
        ...

    def pin_pages(self, transfer: str, prefix: int) -> PageManifest | None:
        """Called for PAGE: keep the blocks of ``prefix`` as ``export`` reads them, until ``release`` or ``drop_pages``.

        None when it is not cached (any more), or its last block is in use.
        """
        ...

    def held(self, manifest: PageManifest) -> int:
        """Called for HELD: how many leading tokens of a page are cached here; what is counts as just kept, since a page
        that is nearly all here is not moved. 0 from an engine that cannot tell."""
        ...

    def keep_pages(self, transfer: str, manifest: PageManifest) -> int:
        """Called for COMMIT of a page-out that came: put the blocks of the committed lease into the prefix cache, idle.

        Blocks that are not what ``manifest`` says, and all behind the first such, are freed. Returns how many tokens
        are in the cache by it. The lease is over in any case. Raises ``BlocksFenced`` when there is none.
        """
        ...

    def drop_pages(self, transfer: str) -> int:
        """Called when a page-out has arrived elsewhere: end its pin, and evict its blocks, but none that was used since
        it was pinned, or that something cached stands behind. Returns how many blocks were evicted; 0 without a pin."""
        ...
