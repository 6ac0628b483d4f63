"""What a mover is: the contract of everything that carries KV blocks from one agent to another.

A transfer is received under a lease that the receiving agent gave out (``quartet_agent.kv.arrivals``). The lease's
secret opens it once; which blocks may be written comes from the lease alone, never from the sender. Whoever makes a
mover has it pass ``tests/contract/mover_contract.py``.
"""

from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol


class MoveReason(StrEnum):
    """Why a transfer did not arrive; also the label of its counter."""

    LEASE = "lease"
    """No such lease, or not its secret. The two are not told apart: that would help whoever is guessing."""
    FENCED = "fenced"
    """The lease ended, or its blocks were given to a later epoch."""
    BUSY = "busy"
    """The receiver takes no more transfers at the moment."""
    CHECKSUM = "checksum"
    """A chunk is not what its sender summed up."""
    RANGE = "range"
    """A chunk lies outside the lease, is out of order, or is larger than any chunk may be."""
    INCOMPLETE = "incomplete"
    """The sender said that it was done before all blocks of the lease were there."""
    PROTOCOL = "protocol"
    """The other side does not speak this protocol."""
    CONNECTION = "connection"
    """The connection could not be made, or broke."""
    TIMEOUT = "timeout"
    """The other side was silent for too long."""


class MoveError(Exception):
    """A transfer did not arrive. ``reason`` says why, ``detail`` is for people.

    ``opened`` is whether the lease was: if not, it can still be sent another way.
    """

    def __init__(self, reason: MoveReason, detail: str = "", *, opened: bool = True) -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail
        self.opened = opened


Buffer = bytes | bytearray | memoryview
"""A block's bytes. The memory behind a view stays as it is until the send is over."""


Blocks = Iterable[Buffer] | AsyncIterable[Iterable[Buffer]]
"""What a send is of: blocks that are all there, or batches of them as they come to be. An empty batch is a sign of life
while nothing is to be had. It is begun anew for every try that comes as far as the lease, so it can be begun twice."""


class Sent(NamedTuple):
    """What a send came to: bytes that crossed, and the link class that they really took ("": whatever is there)."""

    wire_bytes: int
    link: str = ""


class Intake(Protocol):
    """One transfer that is being received: the open side of a lease."""

    def take(self, first_block: int, blocks: Sequence[Buffer]) -> None:
        """Called for each chunk, in order, once its checksum was found right; the views are good for this call only.

        Raises ``MoveError``.
        """
        ...

    def complete(self) -> None:
        """Called when the sender says that this was all. Raises ``MoveError`` (incomplete, fenced)."""
        ...


class Sink(Protocol):
    """Who decides what may be written here."""

    def open(self, transfer: str, epoch: int, secret: bytes) -> Intake:
        """Called before the first byte of a transfer is accepted. Raises ``MoveError`` (lease, fenced)."""
        ...


class Mover(Protocol):
    """Carries blocks. One per agent; several sends may run at once."""

    async def serve(self, sink: Sink) -> str:
        """Called once at start: take transfers for ``sink``; return the address that peers send to."""
        ...

    async def send(
        self, address: str, secret: bytes, transfer: str, epoch: int, blocks: Blocks, chunk_bytes: int
    ) -> Sent:
        """Send ``blocks`` in order, and return what it came to, once the receiver has confirmed all of them.

        What comes in batches is sent as it comes; between two of them, or signs of life, there may be a second.

        Raises ``MoveError``. Cancelling the call ends the transfer; the receiver notices, and keeps its lease.
        """
        ...

    async def close(self) -> None:
        """Take no more transfers and break those under way. Closing twice does nothing."""
        ...


async def chunks(blocks: Blocks, chunk_bytes: int) -> AsyncGenerator[tuple[int, list[Buffer]]]:
    """(index of the first block, blocks) of each chunk: equal blocks, ``chunk_bytes`` together at most.

    A single block larger than that is a chunk of its own. A block of another size (a prompt's last) begins a chunk, and
    so does a batch: no block waits for those of the next. An empty batch is a chunk without blocks.
    """
    if not isinstance(blocks, AsyncIterable):
        for chunk in _cut(blocks, 0, chunk_bytes):
            yield chunk
        return
    first = 0
    async for batch in blocks:
        sent = first
        for chunk in _cut(batch, first, chunk_bytes):
            first = chunk[0] + len(chunk[1])
            yield chunk
        if first == sent:
            yield first, []


def _cut(blocks: Iterable[Buffer], first: int, chunk_bytes: int) -> Iterator[tuple[int, list[Buffer]]]:
    gathered: list[Buffer] = []
    size = 0
    for index, block in enumerate(blocks, first):
        if gathered and (size + len(block) > chunk_bytes or len(block) != len(gathered[0])):
            yield first, gathered
            first, gathered, size = index, [], 0
        gathered.append(block)
        size += len(block)
    if gathered:
        yield first, gathered
