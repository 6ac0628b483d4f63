"""Which mover carries a transfer: chosen for each pair of agents, by what both have and where they stand.

An agent's address names all its movers, ``tcp=10.0.0.1:7460;shm@<place>=10.0.0.1:7461``. A sender takes the first of
its own, in the order of ``[kv] movers``, that the receiver has too, and whose place (where it has one) is its own.
"""

from collections.abc import Mapping

from msgspec import Struct

from quartet_agent.kv.mooncake import MooncakeMemory
from quartet_agent.kv.mover import Blocks, MoveError, Mover, MoveReason, Sent, Sink
from quartet_agent.kv.nixl import NixlMemory
from quartet_agent.kv.shm import ShmMemory
from quartet_agent.kv.slots import SlotMemory, SlotMover
from quartet_agent.kv.tcp import TcpMover
from quartet_bus.catalogue import WHERE
from quartet_bus.config.check import ConfigError
from quartet_bus.config.schema import KvSection

_ANOTHER_WAY = frozenset((MoveReason.CONNECTION, MoveReason.BUSY, MoveReason.TIMEOUT, MoveReason.PROTOCOL))
"""Why one mover's failure, before the lease was opened, may be another's chance. A refused lease is refused to all."""


class Way(Struct, frozen=True):
    """One entry of an address. ``place`` "" can be reached from everywhere."""

    kind: str
    place: str
    address: str


def parse_ways(address: str) -> list[Way]:
    """The ways that ``address`` names; a bare ``host:port`` is TCP. What cannot be understood is left out."""
    ways = []
    for entry in address.split(";"):
        name, separator, where = entry.partition("=")
        kind, _, place = name.partition("@")
        ways.append(Way(kind, place, where) if separator else Way("tcp", "", entry))
    return [way for way in ways if way.kind and way.address]


class MoverChoice:
    """A ``Mover`` made of several. ``movers`` by kind, the preferred first; ``places`` of those that have one."""

    def __init__(self, movers: Mapping[str, Mover], places: Mapping[str, str]) -> None:
        self._movers = movers
        self._places = places
        self.sends: dict[str, int] = dict.fromkeys(movers, 0)
        """Transfers that went each way."""

    async def serve(self, sink: Sink) -> str:
        """As ``Mover.serve``: the addresses of all."""
        ways = []
        for kind, mover in self._movers.items():
            place = self._places.get(kind, "")
            ways.append(f"{kind}{'@' + place if place else ''}={await mover.serve(sink)}")
        return ";".join(ways)

    async def close(self) -> None:
        """As ``Mover.close``."""
        for mover in self._movers.values():
            await mover.close()

    def ways(self, address: str) -> list[Way]:
        """How a peer at ``address`` can be reached from here, the preferred way first."""
        theirs = {way.kind: way for way in parse_ways(address)}
        found = (theirs[kind] for kind in self._movers if kind in theirs)
        return [way for way in found if not way.place or way.place == self._places.get(way.kind)]

    async def send(
        self, address: str, secret: bytes, transfer: str, epoch: int, blocks: Blocks, chunk_bytes: int
    ) -> Sent:
        """As ``Mover.send``, over the first way that gets as far as the lease."""
        failed = MoveError(MoveReason.CONNECTION, f"no mover of ours reaches {address}", opened=False)
        for way in self.ways(address):
            try:
                sent = await self._movers[way.kind].send(way.address, secret, transfer, epoch, blocks, chunk_bytes)
            except MoveError as error:
                if error.opened or error.reason not in _ANOTHER_WAY:
                    raise
                failed = error
                continue
            self.sends[way.kind] += 1
            return sent
        raise failed


def make_movers(kv: KvSection) -> MoverChoice:
    """The movers that ``[kv] movers`` names. Raises ``ConfigError`` for one whose library is not there."""
    movers: dict[str, Mover] = {}
    places: dict[str, str] = {}
    host, _, _ = kv.listen.rpartition(":")
    for kind in kv.movers:
        if kind == "tcp":
            movers[kind] = TcpMover(kv.listen, checksums=kv.checksums)
            continue
        try:
            mover = SlotMover(_memory(kind, host, kv), f"{host}:0", checksums=kv.checksums)
            place = mover.place
        except (ImportError, OSError) as error:
            raise ConfigError(WHERE, "kv.movers", kind, f"cannot be used here: {error}") from error
        movers[kind] = mover
        if place:
            places[kind] = place
    return MoverChoice(movers, places)


def _memory(kind: str, host: str, kv: KvSection) -> SlotMemory:
    if kind == "shm":
        return ShmMemory()
    if kind == "nixl":
        return NixlMemory()
    return MooncakeMemory(host, kv.mooncake_protocol)
