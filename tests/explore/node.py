"""One agent of the explored world: the real lease tables over a real KV pool; its loop, sockets and jobs by hand.

Everything here can be pickled: that is how the exploration goes back to a state that it has seen.
"""

from dataclasses import dataclass, field
from functools import partial

from quartet_agent.engines.simulated import SimulatedKv
from quartet_agent.kv.arrivals import Arrivals
from quartet_agent.kv.commands import KvCommands
from quartet_agent.kv.departures import DepartureEnd, Departures
from quartet_bus.messages import Phase, StreamId
from quartet_sim import content
from quartet_sim.pool import Fenced, KvPool

BLOCK_TOKENS = 4
LEASE_MS = 3_000.0
KV_BYTES = 9_000_000
ALIEN = 0xA11E
"""Content of blocks that somebody else took once they were free."""


def contents(transfer: str, blocks: int) -> list[int]:
    """What the prompt's KV must be, block by block."""
    return [content.after(f"{transfer}/{index}".encode(), 0) for index in range(blocks)]


@dataclass(eq=False)
class Timer:
    """A ``TimerHandle`` that fires when the exploration says so: clocks may be late by any amount."""

    loop: "Hands"
    callback: object
    arguments: tuple
    due_s: float

    def when(self) -> float:
        return self.due_s

    def cancel(self) -> None:
        if self in self.loop.timers:
            self.loop.timers.remove(self)

    def fire(self) -> None:
        self.cancel()
        self.callback(*self.arguments)


@dataclass(eq=False)
class Hands:
    """What lease tables need of an event loop."""

    timers: list[Timer] = field(default_factory=list)

    def time(self) -> float:
        return 0.0

    def call_later(self, delay_s: float, callback, *arguments) -> Timer:
        timer = Timer(self, callback, arguments, delay_s)
        self.timers.append(timer)
        return timer


class WatchedKv(SimulatedKv):
    """The simulated engine's KV, and a witness of what was promised under which epoch, apart from both tables."""

    def __init__(self, pool: KvPool) -> None:
        super().__init__(pool, _nothing)
        self.promised: dict[str, int] = {}
        self.ended: set[tuple[str, int]] = set()
        self.freed = False

    def reserve(self, transfer: str, tokens: int, epoch: int) -> bool:
        granted = super().reserve(transfer, tokens, epoch)
        if granted:
            assert epoch > self.promised.get(transfer, 0), "an epoch was given out twice"
            self.promised[transfer] = epoch
        return granted

    def write(self, transfer, epoch, first_block, blocks) -> None:
        super().write(transfer, epoch, first_block, blocks)
        assert self.promised[transfer] == epoch, "an old epoch wrote"
        assert (transfer, epoch) not in self.ended, "a lease that had ended was written"

    def release(self, transfer: str) -> None:
        if transfer in self.promised:
            self.ended.add((transfer, self.promised[transfer]))
        held = self._pool.lease(transfer) or self._pool.pinned(transfer)
        super().release(transfer)
        self.freed = self.freed or held is not None

    def adopt(self, transfer: str, wanted: list[int]) -> None:
        """The request that waited reads the blocks, and is done. Raises ``quartet_sim.pool.Fenced``."""
        lease = self._pool.lease(transfer)
        adopted = self._pool.adopt(transfer, len(wanted) * BLOCK_TOKENS, wanted)
        assert adopted.verified == len(wanted), "blocks were read that are not the prompt's"
        assert (transfer, lease.epoch) not in self.ended, "a lease that had ended was read"
        self.ended.add((transfer, lease.epoch))
        self._pool.blocks.release(adopted.blocks)
        self.freed = True


def _nothing() -> None:
    pass


@dataclass(eq=False)
class Engine:
    kv: WatchedKv


@dataclass(eq=False)
class Replica:
    """What ``KvCommands`` asks of a hosted worker."""

    id: str
    incarnation: int
    adapter: Engine


@dataclass(eq=False)
class Socket:
    """One send under way. ``stage`` counts what has crossed: hello, then chunks, then the last word."""

    transfer: str
    epoch: int
    secret: bytes
    total: int
    stage: int = 0
    intake: object = None
    broken: bool = False

    def cancel(self) -> None:
        self.broken = True

    def grew(self) -> None:
        pass

    def left_bytes(self) -> int:
        return KV_BYTES // 2  # nothing but a lane's figures follows from it, so all worlds say the same


class Secrets:
    """Other secrets each time."""

    def __init__(self) -> None:
        self.given = 0

    def __call__(self, size: int) -> bytes:
        self.given += 1
        return self.given.to_bytes(size, "little")


class Owner:
    """The prefill whose KV departs."""

    def __init__(self, node: "Node", transfer: str) -> None:
        self.node, self.transfer = node, transfer

    def departed(self, end: DepartureEnd) -> None:
        self.node.prefills[self.transfer] = "over"
        self.node._stop_computing(self.transfer)
        status = {DepartureEnd.MOVED: "ok", DepartureEnd.RELEASED: "cancelled", DepartureEnd.CANCELLED: "cancelled"}
        self.node.world.phase(self.transfer, Phase.END, self.node, status.get(end, "error"))


class Node:
    """An agent with one worker, in one life of it."""

    def __init__(self, world, name: str, incarnation: int, blocks: int) -> None:
        self.name = name
        self.world = world
        self.loop = Hands()
        self.pool = KvPool(blocks, BLOCK_TOKENS)
        self.kv = WatchedKv(self.pool)
        self.worker = Replica(f"{name}-0", incarnation, Engine(self.kv))
        self.arrivals = Arrivals(
            self.loop, Secrets(), partial(world.committed, incarnation), partial(world.lost, incarnation)
        )
        self.arrivals.address = name
        self.departures = Departures(self.loop, self.send, world.progress, lease_ms=LEASE_MS)
        self.commands = KvCommands({self.worker.id: self.worker}, self.arrivals, self.departures)
        self.sockets: list[Socket] = []
        self.prefills: dict[str, str] = {}
        self.parts: dict[str, list[int]] = {}
        """Blocks of prefills of which a part is computed: the engine's own, all but the last with their KV."""
        self.alien: list[int] = []

    def send(self, departures, departure, order) -> Socket:
        socket = Socket(order.transfer, order.epoch, order.secret, self.world.blocks)
        self.sockets.append(socket)
        return socket

    # The prefill half of a request -----------------------------------------------------------------------------------

    def dispatch(self, transfer: str, stream: StreamId) -> None:
        """A prefill for ``transfer`` arrives. A second copy is told apart by its stream, before this."""
        if transfer not in self.prefills:
            tokens = self.world.blocks * BLOCK_TOKENS
            owner = Owner(self, transfer)
            taken = self.departures.expect(
                transfer, self.worker.id, self.worker.incarnation, stream, tokens, self.kv, owner
            )
            self.prefills[transfer] = "computing" if taken else "over"

    def part(self, transfer: str) -> None:
        """The engine has computed all but the last block; raises nothing without room: then it goes on waiting."""
        blocks = self.pool.blocks.allocate(self.world.blocks)
        if blocks is None:
            return
        for block, what in zip(blocks[:-1], contents(transfer, len(blocks)), strict=False):
            self.pool.blocks.mark(block, what)
        self.parts[transfer] = blocks
        self.pool.grow(transfer, len(blocks) * BLOCK_TOKENS, blocks, len(blocks) - 1)
        self.departures.grew(transfer)

    def preempted(self, transfer: str) -> None:
        """The engine takes the blocks of a prefill for somebody else, and will compute it again."""
        blocks = self.parts.pop(transfer)
        self.pool.grow(transfer, len(blocks) * BLOCK_TOKENS, [], 0)
        self.pool.blocks.release(blocks)
        self.kv.freed = True

    def can_flow(self, socket: Socket) -> bool:
        """Whether a send gets on: only with a next block, or at its end."""
        index = socket.stage - 1
        if socket.broken or index < 0 or self.departures.holds("", socket.transfer) is False:
            return True
        try:
            there = self.pool.exportable(socket.transfer)
        except Fenced:
            return True  # it learns that there is nothing more
        return there.whole or index < there.blocks

    def computed(self, transfer: str) -> None:
        """The engine is done; raises nothing when it has no room: then the prefill goes on waiting."""
        blocks = self.parts.pop(transfer, None) or self.pool.blocks.allocate(self.world.blocks)
        if blocks is None:
            return
        for block, what in zip(blocks, contents(transfer, len(blocks)), strict=True):
            self.pool.blocks.mark(block, what)
        self.pool.pin(transfer, len(blocks) * BLOCK_TOKENS, blocks)
        self.prefills[transfer] = "kept"
        self.world.whole.add((self.worker.incarnation, transfer))
        self.departures.pinned(transfer)

    def no_prefill(self, transfer: str, end: DepartureEnd) -> None:
        """It failed, or was cancelled."""
        self.prefills[transfer] = "over"
        self._stop_computing(transfer)
        self.departures.failed(transfer, end, end.value)

    def _stop_computing(self, transfer: str) -> None:
        blocks = self.parts.pop(transfer, None)
        self.pool.stop_growing(transfer)
        if blocks is not None:
            self.pool.blocks.release(blocks)
            self.kv.freed = True

    def grab(self) -> None:
        """Somebody else's request takes whatever is free, and writes to it."""
        blocks = self.pool.blocks.allocate(self.pool.blocks.available)
        for block in blocks:
            self.pool.blocks.mark(block, ALIEN)
        self.alien += blocks
        self.kv.freed = False

    # What must hold --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        pool = self.pool
        leased = {lease.transfer for lease in pool.leases()}
        assert leased == set(self.arrivals._leases), "the pool and the table disagree about what is leased"
        kept = {name for name, state in self.prefills.items() if state == "kept"}
        assert {pin.transfer for pin in pool.pins()} == kept, "a pin without its prefill, or a prefill without its pin"
        held = [block for each in (*pool.leases(), *pool.pins()) for block in each.blocks] + self.alien
        held += [block for blocks in self.parts.values() for block in blocks]
        computing = {name for name, state in self.prefills.items() if state == "computing"}
        assert set(self.parts) <= computing, "blocks of a prefill that is over"
        assert len(held) == len(set(held)), "a block is held twice"
        assert len(held) + pool.blocks.available == pool.blocks.total, "a block leaked"
        for each in (*self.arrivals._leases.values(), *self.departures._departures.values()):
            waits = getattr(each, "owner", None) is not None and not each.pinned
            assert waits or each.timer in self.loop.timers, "a lease without an end"

    def key(self) -> tuple:
        return (
            self.worker.incarnation,
            self.commands._terms.highest,
            tuple(sorted(self.prefills.items())),
            tuple(sorted(self.parts)),
            self.kv.freed,
            len(self.alien),
            self.arrivals._epoch,
            tuple(sorted(self.arrivals._over.items())),
            tuple(
                (lease.transfer, lease.epoch, lease.state, lease.opened, lease.received)
                for lease in self.arrivals._leases.values()
            ),
            tuple(
                (d.transfer, d.order and d.order.epoch, d.begun, d.pinned, d.moved, d.owner is None, d.sending is None)
                for d in self.departures._departures.values()
            ),
            tuple((s.transfer, s.epoch, s.stage, s.broken, s.intake is None) for s in self.sockets),
            tuple((lease.transfer, lease.epoch, tuple(map(bool, lease.digests))) for lease in self.pool.leases()),
            len(self.loop.timers),
        )
