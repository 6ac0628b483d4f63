"""The mover of the virtual fleet: blocks go from agent to agent within one process, in no time at all.

What a transfer costs is charged by the sending agent, on the loop's clock, as for any other mover.
"""

from collections.abc import Iterable

from quartet_agent.kv.mover import Buffer, MoveError, MoveReason, Sent, Sink, chunks


class MemoryNetwork:
    """What the agents of one process share: who takes transfers at which address."""

    def __init__(self) -> None:
        self._sinks: dict[str, Sink] = {}

    def attach(self, address: str, sink: Sink) -> None:
        """From now on ``sink`` takes what is sent to ``address``."""
        self._sinks[address] = sink

    def detach(self, address: str) -> None:
        """Nobody takes what is sent to ``address`` any more."""
        self._sinks.pop(address, None)

    def find(self, address: str) -> Sink:
        """Who takes transfers at ``address``. Raises ``MoveError`` (connection)."""
        sink = self._sinks.get(address)
        if sink is None:
            raise MoveError(MoveReason.CONNECTION, f"nobody listens on {address}", opened=False)
        return sink


class MemoryMover:
    """A ``Mover`` on a ``MemoryNetwork``; ``address`` is any name that is unique there."""

    def __init__(self, network: MemoryNetwork, address: str) -> None:
        self._network = network
        self._address = address

    async def serve(self, sink: Sink) -> str:
        """As ``Mover.serve``."""
        self._network.attach(self._address, sink)
        return self._address

    async def send(
        self, address: str, secret: bytes, transfer: str, epoch: int, blocks: Iterable[Buffer], chunk_bytes: int
    ) -> Sent:
        """As ``Mover.send``; the bytes returned are the blocks' alone."""
        intake = self._network.find(address).open(transfer, epoch, secret)
        sent_bytes = 0
        for first_block, group in chunks(blocks, chunk_bytes):
            intake.take(first_block, group)
            sent_bytes += sum(map(len, group))
        intake.complete()
        return Sent(sent_bytes)

    async def close(self) -> None:
        """As ``Mover.close``."""
        self._network.detach(self._address)
