"""The mover of the virtual fleet: blocks go from agent to agent within one process, in no time at all or over links.

Without ``links`` what a transfer costs is charged by the sending agent, on the loop's clock. With them each chunk takes
its time on the link to its receiver, which all transfers there share (``quartet_sim.sharing``).
"""

import asyncio
from collections.abc import Callable, Hashable, Mapping
from contextlib import aclosing

from quartet_agent.kv import wire
from quartet_agent.kv.mover import Blocks, MoveError, MoveReason, Sent, Sink, chunks
from quartet_sim.sharing import SharedLink


class MemoryNetwork:
    """What the agents of one process share: who takes transfers at which address, and over which link."""

    def __init__(self, links: Mapping[str, "TimedLink"] | None = None) -> None:
        self._sinks: dict[str, Sink] = {}
        self._links = links or {}

    def attach(self, address: str, sink: Sink) -> None:
        """From now on ``sink`` takes what is sent to ``address``."""
        self._sinks[address] = sink

    def detach(self, address: str, sink: Sink) -> None:
        """``sink`` takes nothing any more; whoever was attached to ``address`` since then goes on."""
        if self._sinks.get(address) is sink:
            del self._sinks[address]

    def find(self, address: str) -> Sink | None:
        """Who takes transfers at ``address``."""
        return self._sinks.get(address)

    async def cross(self, address: str, size_bytes: int) -> None:
        """Take the time that the link to ``address`` needs; at least a turn of the loop."""
        link = self._links.get(address)
        if link is None:
            await asyncio.sleep(0)
        else:
            await link.cross(size_bytes)


class TimedLink:
    """A ``SharedLink`` on the running loop's clock. ``now_ms`` is that clock."""

    def __init__(self, shared: SharedLink, now_ms: Callable[[], float]) -> None:
        self._shared = shared
        self._now_ms = now_ms
        self._waiting: dict[Hashable, asyncio.Future[None]] = {}
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None

    def left_bytes(self, name: Hashable) -> float:
        """What of the crossing ``name`` is not over yet; 0 when none of that name is under way."""
        return self._shared.left_bytes(name, self._now_ms())

    async def cross(self, size_bytes: int, name: Hashable = None) -> None:
        """Until ``size_bytes`` are over. ``name``, of at most one crossing at a time, is for whoever asks meanwhile."""
        self._number += 1
        number = self._number if name is None else name
        self._waiting[number] = asyncio.get_running_loop().create_future()
        self._shared.begin(number, size_bytes, self._now_ms())
        self._look()
        try:
            await self._waiting[number]
        finally:
            del self._waiting[number]
            self._shared.withdraw(number, self._now_ms())
            self._look()

    def _look(self) -> None:
        now_ms = self._now_ms()
        for number in self._shared.finished(now_ms):
            waits = self._waiting.get(number)
            if waits is not None and not waits.done():
                waits.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        next_ms = self._shared.next_ms()
        if next_ms is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, next_ms - now_ms) / 1e3, self._look)


class MemoryMover:
    """A ``Mover`` on a ``MemoryNetwork``; ``address`` is any name that is unique there."""

    def __init__(self, network: MemoryNetwork, address: str) -> None:
        self._network = network
        self._address = address
        self._sink: Sink | None = None

    async def serve(self, sink: Sink) -> str:
        """As ``Mover.serve``."""
        self._sink = sink
        self._network.attach(self._address, sink)
        return self._address

    async def send(
        self, address: str, secret: bytes, transfer: str, epoch: int, blocks: Blocks, chunk_bytes: int
    ) -> Sent:
        """As ``Mover.send``; the bytes returned are the blocks' alone."""
        sink = self._network.find(address)
        if sink is None:
            raise MoveError(MoveReason.CONNECTION, f"nobody listens on {address}", opened=False)
        intake = sink.open(transfer, epoch, secret)
        sent_bytes = 0
        async with aclosing(chunks(blocks, chunk_bytes)) as parts:
            async for first_block, group in parts:
                if not group:
                    continue
                header = wire.ChunkHeader(wire.encode_chunk(first_block, group))
                await self._network.cross(address, header.payload_bytes)
                if self._network.find(address) is not sink:
                    raise MoveError(MoveReason.CONNECTION, f"{address} went away")
                header.compare(group)
                intake.take(first_block, group)
                sent_bytes += header.payload_bytes
        intake.complete()
        return Sent(sent_bytes)

    async def close(self) -> None:
        """As ``Mover.close``. An agent that was started again may listen at this address by now."""
        if self._sink is not None:
            self._network.detach(self._address, self._sink)
