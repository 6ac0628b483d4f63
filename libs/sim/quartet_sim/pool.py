"""The KV pool of one engine: its blocks, what is leased to incoming transfers, and what is pinned for outgoing ones.

An incoming transfer: ``reserve`` → ``write`` each block → ``commit`` → a decode job adopts the blocks. An outgoing one:
a prefill job pins its prompt's blocks, ``export`` reads them; what its ended chunks computed can be read before, as it
grows. ``release`` frees either side, at any time, once or more
often. Every call of a writer carries the epoch of its lease: after a new reservation or a release, the late writer
with an old one is fenced. Leases expire by the agent's clock, not by this one: it calls ``release``.

Pages of the virtual VRAM pool go the same ways: ``pin_page`` → ``export`` → ``drop_page`` (or ``release``, and nothing
has happened), and ``reserve`` → ``write`` → ``commit`` → ``keep_page``.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct

from quartet_core.block_cache import BlockCache
from quartet_core.block_pages import BlockPages, Page
from quartet_sim import content


class Fenced(Exception):
    """A call about a transfer that is not, or no longer, what the caller believes; ``reason`` says how."""

    def __init__(self, transfer: str, epoch: int, reason: str) -> None:
        super().__init__(f"transfer {transfer}, epoch {epoch}: {reason}")
        self.transfer = transfer
        self.epoch = epoch
        self.reason = reason


class Lease(Struct):
    """Blocks promised to an incoming transfer of ``tokens`` tokens. ``digests`` are of the bytes written, or None."""

    transfer: str
    epoch: int
    tokens: int
    blocks: list[int]
    digests: list[int | None]
    committed: bool = False


class Pin(Struct):
    """Blocks that hold a computed prompt of ``tokens`` tokens, kept for an outgoing transfer; ``page`` of idle ones."""

    transfer: str
    tokens: int
    blocks: list[int]
    page: bool = False


class Growing(Struct):
    """Blocks of a prompt of ``tokens`` tokens that is being computed: ``ready`` of them have their KV. Not kept: they
    are the prefill's own until it pins them."""

    tokens: int
    blocks: list[int]
    ready: int


class Exportable(NamedTuple):
    """How many blocks of an outgoing transfer can be read now, and whether these are all that there will be."""

    blocks: int
    whole: bool


class Adopted(Struct):
    """A lease's blocks, now a job's. Its KV is as it should be only when ``verified`` is the number of blocks.

    ``dropped`` blocks were freed instead, because they are of no use.
    """

    blocks: list[int]
    verified: int
    dropped: int = 0


class KvPool:
    """Blocks of ``block_tokens`` tokens, leases and pins. ``blocks`` is where sequences take theirs."""

    __slots__ = ("_growing", "_leases", "_pins", "block_tokens", "blocks", "pages")

    def __init__(self, total_blocks: int, block_tokens: int) -> None:
        self.blocks = BlockCache(total_blocks)
        self.pages = BlockPages(self.blocks)
        self.block_tokens = block_tokens
        self._leases: dict[str, Lease] = {}
        self._pins: dict[str, Pin] = {}
        self._growing: dict[str, Growing] = {}

    def blocks_for(self, tokens: int) -> int:
        """How many blocks ``tokens`` tokens take."""
        return -(-tokens // self.block_tokens)

    def lease(self, transfer: str) -> Lease | None:
        """The incoming transfer's lease, to look at."""
        return self._leases.get(transfer)

    def pinned(self, transfer: str) -> Pin | None:
        """The outgoing transfer's pin, to look at."""
        return self._pins.get(transfer)

    def leases(self) -> list[Lease]:
        """All leases not yet adopted or released, oldest first."""
        return list(self._leases.values())

    def pins(self) -> list[Pin]:
        """All pins not yet released, oldest first."""
        return list(self._pins.values())

    def reserve(self, transfer: str, tokens: int, epoch: int) -> bool:
        """Lease blocks for ``tokens`` tokens; False when there is no room without taking blocks from somebody.

        Asking again with the same epoch and size changes nothing; a higher epoch frees the old lease first, whatever
        became of it. Raises ``Fenced`` for a lower epoch, or for another size under the same one.
        """
        if tokens < 1:
            raise ValueError("a lease is for at least one token")
        held = self._leases.get(transfer)
        if held is not None:
            if epoch < held.epoch or (epoch == held.epoch and tokens != held.tokens):
                raise Fenced(transfer, epoch, f"leased with epoch {held.epoch} for {held.tokens} tokens")
            if epoch == held.epoch:
                return True
            del self._leases[transfer]
            self.blocks.release(held.blocks)
        blocks = self.blocks.allocate(self.blocks_for(tokens))
        if blocks is None:
            return False
        self._leases[transfer] = Lease(transfer, epoch, tokens, blocks, [None] * len(blocks))
        return True

    def write(self, transfer: str, epoch: int, block_index: int, payload: bytes) -> None:
        """Take the bytes of one block of the transfer; writing one twice replaces it.

        Raises ``Fenced`` for another epoch, a lease that is gone or committed, or a block that is outside of it or of
        another size: ranges come from the lease alone.
        """
        lease = self._held(transfer, epoch)
        if lease.committed:
            raise Fenced(transfer, epoch, "already committed")
        if not 0 <= block_index < len(lease.blocks):
            raise Fenced(transfer, epoch, f"block {block_index} is outside of a lease of {len(lease.blocks)}")
        size = self._tokens_in(lease.tokens, block_index) * content.WIRE_BYTES_PER_TOKEN
        if len(payload) != size:
            raise Fenced(transfer, epoch, f"block {block_index} has {size} bytes, not {len(payload)}")
        lease.digests[block_index] = content.digest(payload)

    def commit(self, transfer: str, epoch: int) -> None:
        """Make the blocks readable for a decode job; no more writes. Raises ``Fenced`` as ``write`` does.

        A block that was never written is found out when a job adopts the lease, not here. Twice is once.
        """
        self._held(transfer, epoch).committed = True

    def release(self, transfer: str) -> bool:
        """Free what the transfer leases or pins here; False when that is nothing (any more)."""
        lease = self._leases.pop(transfer, None)
        if lease is not None:
            self.blocks.release(lease.blocks)
        self._growing.pop(transfer, None)
        pin = self._pins.pop(transfer, None)
        if pin is not None:
            self._unpin(pin)
        return lease is not None or pin is not None

    def _unpin(self, pin: Pin) -> None:
        if pin.page:
            self.pages.unpin(pin.transfer)
        else:
            self.blocks.release(pin.blocks)

    def pin(self, transfer: str, tokens: int, blocks: list[int]) -> None:
        """Keep ``blocks``, whose references pass from the caller to the pin. A pin of the same name is freed first."""
        self._growing.pop(transfer, None)
        old = self._pins.pop(transfer, None)
        if old is not None:
            self._unpin(old)
        self._pins[transfer] = Pin(transfer, tokens, blocks)

    def pin_page(self, transfer: str, prefix: int) -> Page | None:
        """Keep the idle prefix whose last block's content is ``prefix``; None when there is none, or the name is taken.

        A prefix is idle while nobody refers to its last block and nothing is cached behind it.
        """
        if transfer in self._pins:
            return None
        pinned = self.pages.pin(transfer, prefix)
        if pinned is None:
            return None
        page, blocks = pinned
        self._pins[transfer] = Pin(transfer, len(blocks) * self.block_tokens, blocks, page=True)
        return page

    def drop_page(self, transfer: str) -> int:
        """The page is elsewhere: end its pin and evict what nobody used since; returns how many blocks. 0 without."""
        pin = self._pins.get(transfer)
        if pin is None or not pin.page:
            return 0
        del self._pins[transfer]
        return self.pages.drop(transfer)

    def keep_page(self, transfer: str, page: Page) -> int:
        """End the committed lease of a page that came: its blocks are cached and idle, as far as they are right.

        Returns how many leading blocks of ``page`` are cached now. Raises ``Fenced`` (and leaves the lease) when it is
        missing or not committed.
        """
        lease = self._committed(transfer)
        del self._leases[transfer]
        right, full = 0, min(lease.tokens // self.block_tokens, len(page.contents))
        while right < full and lease.digests[right] == content.digest(
            content.payload(page.contents[right], self.block_tokens)
        ):
            right += 1
        self.pages.keep(lease.blocks, right, page)
        return right

    def grow(self, transfer: str, tokens: int, blocks: list[int], ready: int) -> None:
        """A prefill for ``transfer`` goes on: the first ``ready`` of its ``blocks`` have their KV now.

        That may be fewer than before, when it lost its blocks and computes them again: to the same content.
        """
        self._growing[transfer] = Growing(tokens, blocks, ready)

    def stop_growing(self, transfer: str) -> None:
        """Nothing more comes of that prefill, and what it had is gone, unless it was pinned."""
        self._growing.pop(transfer, None)

    def exportable(self, transfer: str) -> Exportable:
        """What ``export`` would give now. Raises ``Fenced`` when nothing is computed or pinned under this name."""
        pin = self._pins.get(transfer)
        if pin is not None:
            return Exportable(len(pin.blocks), True)
        growing = self._growing.get(transfer)
        if growing is None:
            raise Fenced(transfer, 0, "nothing is pinned")
        return Exportable(growing.ready, False)

    def export(self, transfer: str, first_block: int = 0) -> Iterator[bytes]:
        """The wire bytes of what is ``exportable`` from ``first_block`` on, from what was really computed in each.

        Raises ``Fenced`` when nothing is computed or pinned under this name, also in mid-way when that goes.
        """
        return self._export(transfer, range(first_block, self.exportable(transfer).blocks))

    def _export(self, transfer: str, indices: range) -> Iterator[bytes]:
        begun = self._pins.get(transfer)
        for index in indices:
            # what was being computed may have been pinned meanwhile; a pin is never replaced by another unnoticed
            source = self._pins.get(transfer) or self._growing.get(transfer)
            if source is None or (begun is not None and source is not begun):
                raise Fenced(transfer, 0, "released while it was read")
            if isinstance(source, Growing) and index >= source.ready:
                return
            yield content.payload(self.blocks.content(source.blocks[index]), self._tokens_in(source.tokens, index))

    def adopt(self, transfer: str, tokens: int, contents: Sequence[int]) -> Adopted:
        """End the lease and hand its blocks over, each compared with the content it should have.

        Raises ``Fenced`` (and leaves the lease) when it is missing, not committed, or of another size.
        """
        lease = self._committed(transfer)
        if lease.tokens != tokens or len(contents) != len(lease.blocks):
            raise Fenced(transfer, lease.epoch, f"leased for {lease.tokens} tokens, not {tokens}")
        del self._leases[transfer]
        verified = 0
        for index, written in enumerate(lease.digests):
            if written is not None:
                expected = content.payload(contents[index], self._tokens_in(tokens, index))
                verified += written == content.digest(expected)
        return Adopted(lease.blocks, verified)

    def adopt_prefix(self, transfer: str, contents: Sequence[int]) -> Adopted:
        """End the lease and hand over its full blocks up to the first that is not what ``contents`` say; free the rest.

        Raises ``Fenced`` (and leaves the lease) when it is missing or not committed.
        """
        lease = self._committed(transfer)
        del self._leases[transfer]
        full = min(lease.tokens // self.block_tokens, len(contents))
        right = 0
        while right < full and lease.digests[right] == content.digest(
            content.payload(contents[right], self.block_tokens)
        ):
            right += 1
        self.blocks.release(lease.blocks[right:])
        return Adopted(lease.blocks[:right], right, len(lease.blocks) - right)

    def _committed(self, transfer: str) -> Lease:
        lease = self._leases.get(transfer)
        if lease is None:
            raise Fenced(transfer, 0, "no lease")
        if not lease.committed:
            raise Fenced(transfer, lease.epoch, "not committed")
        return lease

    def _held(self, transfer: str, epoch: int) -> Lease:
        lease = self._leases.get(transfer)
        if lease is None:
            raise Fenced(transfer, epoch, "no lease")
        if lease.epoch != epoch:
            raise Fenced(transfer, epoch, f"the lease has epoch {lease.epoch}")
        return lease

    def _tokens_in(self, tokens: int, block_index: int) -> int:
        return min(self.block_tokens, tokens - block_index * self.block_tokens)
