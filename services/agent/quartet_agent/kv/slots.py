"""Movers that write into the receiver's memory: shared memory on one host, RDMA between two.

The conversation is that of ``wire``, over TCP; payloads go past it, into *slots* that the receiver offers once the
secret was right. A chunk goes into a free slot, its header says which, and the receiver's answer frees it.

A sender whose lease has ended may still be writing: one process's copy into another (CMA) asks nobody. So slots are a
transfer's own, and go to another one, or back to the system, when their sender hung up: that it does after its last
write.
"""

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from quartet_agent.kv import sockets, wire
from quartet_agent.kv.door import Door
from quartet_agent.kv.mover import Blocks, Buffer, MoveError, MoveReason, Sent, Sink, chunks
from quartet_agent.kv.tcp import connected

_SLOTS = 3
"""Of a transfer: one is written while one is read and one is on its way."""

_KEPT = 2
"""Landings kept for the next transfer."""

_SILENCE_TIMEOUT_S = 5.0
_MAX_INTAKES = 16


class Landing(Protocol):
    """The slots of one transfer, on the receiver's side."""

    @property
    def description(self) -> bytes:
        """What a sender needs to reach them."""
        ...

    def view(self, slot: int, size: int) -> memoryview:
        """What was written into a slot."""
        ...

    def close(self) -> None:
        """Called once: nobody reads them any more, and nobody writes."""
        ...


class Reach(Protocol):
    """The same slots, from the sender's side."""

    async def put(self, slot: int, blocks: Sequence[Buffer]) -> None:
        """Write ``blocks`` one after the other; they are there when it returns. Raises ``OSError``, ``MoveError``.

        However it ends, cancelled as well: nothing of it is written afterwards.
        """
        ...

    def close(self) -> None:
        """Called once, when nothing more is put."""
        ...


class SlotMemory(Protocol):
    """A way of reaching another process's memory."""

    kind: str
    """Its name in addresses and configuration."""
    link: str
    """The link class that it takes, "" where that is the library's choice."""

    def place(self) -> str:
        """What tells whether a peer can reach this process: equal places can. "" for: everybody can."""
        ...

    def land(self, slots: int, slot_bytes: int) -> Landing:
        """Make slots for one transfer. Raises ``OSError`` when there is no memory for them."""
        ...

    def reach(self, description: bytes, slots: int, slot_bytes: int) -> Reach:
        """Get hold of another's slots. Raises ``OSError`` when they cannot be reached."""
        ...

    def close(self) -> None:
        """Called once, at the end."""
        ...


class SlotMover:
    """A ``Mover`` through ``memory``. ``listen`` and the limits are as ``TcpMover`` has them."""

    def __init__(
        self,
        memory: SlotMemory,
        listen: str,
        *,
        silence_timeout_s: float = _SILENCE_TIMEOUT_S,
        max_intakes: int = _MAX_INTAKES,
        checksums: bool = True,
    ) -> None:
        self.kind = memory.kind
        self._memory = memory
        self._silence_timeout_s = silence_timeout_s
        self._checksums = checksums
        self._door = Door(listen, self._receive, max_intakes=max_intakes)
        self._kept: list[tuple[int, Landing]] = []
        self._closed = False

    @property
    def intakes(self) -> int:
        """Connections from senders that are open."""
        return self._door.intakes

    @property
    def place(self) -> str:
        """As ``SlotMemory.place``."""
        return self._memory.place()

    async def serve(self, sink: Sink) -> str:
        """As ``Mover.serve``. Raises ``OSError`` when the address cannot be listened on."""
        return await self._door.open(sink)

    async def close(self) -> None:
        """As ``Mover.close``."""
        await self._door.close()
        self._closed = True
        while self._kept:
            self._kept.pop()[1].close()
        self._memory.close()

    async def send(
        self, address: str, secret: bytes, transfer: str, epoch: int, blocks: Blocks, chunk_bytes: int
    ) -> Sent:
        """As ``Mover.send``."""
        chunk_bytes = min(chunk_bytes, wire.MAX_CHUNK_BYTES)
        hello = wire.encode_hello(transfer, epoch, secret, chunk_bytes)
        with await connected(address, hello, self._silence_timeout_s) as sock, contextlib.ExitStack() as stack:
            try:
                slots, slot_bytes, described = await self._offer(sock)
                reach = self._memory.reach(described, slots, slot_bytes)
                stack.callback(reach.close)
                wire_bytes = await self._send(sock, reach, slots, blocks, min(chunk_bytes, slot_bytes))
            except TimeoutError:
                raise MoveError(MoveReason.TIMEOUT, f"{address} is silent") from None
            except OSError as error:
                raise MoveError(MoveReason.CONNECTION, f"{address}: {error}") from error
            return Sent(len(hello) + wire_bytes, self._memory.link)

    async def _offer(self, sock: socket.socket) -> tuple[int, int, bytes]:
        word = await sockets.received(sock, wire.OFFER.size, self._silence_timeout_s)
        slots, slot_bytes, length = wire.OFFER.unpack(word)
        if not 0 < slots <= _SLOTS or not 0 < slot_bytes <= wire.MAX_CHUNK_BYTES or length > wire.MAX_DESCRIPTION_BYTES:
            raise MoveError(MoveReason.PROTOCOL, "an offer that makes no sense")
        return slots, slot_bytes, bytes(await sockets.received(sock, length, self._silence_timeout_s))

    async def _send(self, sock: socket.socket, reach: Reach, slots: int, blocks: Blocks, chunk_bytes: int) -> int:
        sent_bytes = len(wire.LAST_CHUNK)
        free = deque(range(slots))
        used: deque[int] = deque()
        async with contextlib.aclosing(chunks(blocks, chunk_bytes)) as parts:
            async for first_block, group in parts:
                if not group:
                    await sockets.send_all(sock, [wire.STILL_HERE], self._silence_timeout_s)
                    continue
                if sum(map(len, group)) > chunk_bytes:
                    raise MoveError(
                        MoveReason.RANGE, f"a block of {len(group[0])} bytes where slots have {chunk_bytes}"
                    )
                if not free:
                    await self._answered(sock)
                    free.append(used.popleft())
                slot = free.popleft()
                await reach.put(slot, group)
                header = wire.encode_chunk(first_block, group, slot=slot, checksums=self._checksums)
                await sockets.send_all(sock, [header], self._silence_timeout_s)
                used.append(slot)
                sent_bytes += len(header) + sum(map(len, group))
        await sockets.send_all(sock, [wire.LAST_CHUNK], self._silence_timeout_s)
        for _ in range(len(used) + 1):
            await self._answered(sock)
        return sent_bytes

    async def _answered(self, sock: socket.socket) -> None:
        wire.check_answer(await sockets.received(sock, wire.ANSWER.size, self._silence_timeout_s))

    async def _receive(self, sock: socket.socket, sink: Sink, later: contextlib.ExitStack) -> None:
        silence_s = self._silence_timeout_s
        hello = wire.Hello(await sockets.received(sock, wire.HELLO.size, silence_s))
        transfer = wire.decode_name(await sockets.received(sock, hello.name_bytes, silence_s))
        try:
            landing = self._land(hello.chunk_bytes)
        except OSError as error:
            raise MoveError(MoveReason.BUSY, f"no memory: {error}") from error  # before the lease is used up
        # not before: the sender may be writing when we find that its lease has ended
        later.callback(self._leave, landing, hello.chunk_bytes)
        intake = sink.open(transfer, hello.epoch, hello.secret)
        offer = wire.OFFER.pack(_SLOTS, hello.chunk_bytes, len(landing.description)) + landing.description
        await sockets.send_all(sock, [wire.encode_answer(None), offer], silence_s)
        while True:
            header = wire.ChunkHeader(await sockets.received(sock, wire.CHUNK.size, silence_s))
            if header.last:
                intake.complete()
                return
            if header.waits:
                continue
            if header.slot >= _SLOTS or header.payload_bytes > hello.chunk_bytes:
                raise MoveError(MoveReason.RANGE, f"{header.payload_bytes} bytes in slot {header.slot}")
            payload = landing.view(header.slot, header.payload_bytes)
            intake.take(header.first_block, header.split(payload, checksums=self._checksums))
            del payload
            await sockets.send_all(sock, [wire.encode_answer(None)], silence_s)
            await asyncio.sleep(0)  # with everything at hand nothing above ever waits

    def _land(self, slot_bytes: int) -> Landing:
        """Slots for one transfer: fresh pages cost more than all else about them, so a few landings are kept."""
        for index, (size, landing) in enumerate(self._kept):
            if size == slot_bytes:
                del self._kept[index]
                return landing
        return self._memory.land(_SLOTS, slot_bytes)

    def _leave(self, landing: Landing, slot_bytes: int) -> None:
        if self._closed or len(self._kept) == _KEPT:
            landing.close()
        else:
            self._kept.append((slot_bytes, landing))
