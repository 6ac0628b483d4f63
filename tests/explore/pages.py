"""The explored world of page-outs: the real pager before the real conductor, the real pages of two agents.

An idle prefix lies in ``p``'s cache for each page, and is asked to go to ``d``. It may be used meanwhile, or evicted by
somebody else; everything else may happen that may in ``world``. Beyond what must hold there: what was paged is, until
somebody evicts it or its agent dies, in at least one of the two caches, and once all is well in ``d``'s.
"""

from dataclasses import dataclass

from explore.node import BLOCK_TOKENS, LEASE_MS, Node, Replica, WatchedKv, contents
from explore.world import DEADLINE_MS, SharedRoster, Silent, World, _Direct, _run, roster

from quartet_agent.engines.simulated_pages import SimulatedPages
from quartet_agent.kv.commands import KvCommands
from quartet_agent.kv.pages import Pages
from quartet_bus.config.schema import KvSection
from quartet_bus.messages import (
    KvCommand,
    KvVerb,
    PoolState,
)
from quartet_core.paging import Cold, PageOut
from quartet_core.transfer import Hold, Side, State
from quartet_kv_coordinator.conductor import Conductor
from quartet_kv_coordinator.lanes import Lanes
from quartet_kv_coordinator.pager import Pager
from quartet_kv_coordinator.pools import Told
from quartet_kv_coordinator.takeover import Survey, orphaned

PAGES = KvSection(pool=True, transfers_per_link=1, lease_ms=LEASE_MS)


def _zero() -> float:
    return 0.0


def _nothing(*_) -> None:
    pass


@dataclass(eq=False)
class PagedEngine:
    kv: WatchedKv
    pages: SimulatedPages


class PagedKv(WatchedKv):
    """A lease that became a page has ended as any other."""

    def keeps(self, transfer: str) -> None:
        self.ended.add((transfer, self.promised[transfer]))
        self.freed = True


class WatchedPages(SimulatedPages):
    """The simulated engine's pages, and a witness of what was kept under which lease."""

    def __init__(self, kv: PagedKv) -> None:
        super().__init__(kv._pool, _zero, _nothing)
        self.kv = kv

    def keep_pages(self, transfer, manifest):
        lease = self.kv._pool.lease(transfer)
        assert (transfer, lease.epoch) not in self.kv.ended, "a lease that had ended was kept"
        kept = super().keep_pages(transfer, manifest)
        assert kept == len(manifest.contents) * BLOCK_TOKENS, "blocks were kept that are not the page's"
        self.kv.keeps(transfer)
        return kept

    def drop_pages(self, transfer):
        dropped = super().drop_pages(transfer)
        self.kv.freed = self.kv.freed or dropped > 0
        return dropped


class PageNode(Node):
    """An agent with pages; ``p`` begins with an idle prefix for each."""

    def __init__(self, world, name: str, incarnation: int, blocks: int) -> None:
        super().__init__(world, name, incarnation, blocks)
        self.kv = PagedKv(self.pool)
        self.pages_of_engine = WatchedPages(self.kv)
        self.worker = Replica(f"{name}-0", incarnation, PagedEngine(self.kv, self.pages_of_engine))
        self.pages = Pages(self.departures, _nothing, _nothing)
        self.commands = KvCommands({self.worker.id: self.worker}, self.arrivals, self.departures, self.pages)

    def cache_prefix(self, name: str) -> None:
        wanted = contents(name, self.world.blocks)
        blocks = self.pool.blocks.allocate(len(wanted))
        for index, block in enumerate(blocks):
            self.pool.blocks.keep(block, wanted[index], wanted[index - 1] if index else 0)
        self.pool.blocks.release(blocks)

    def has(self, name: str) -> bool:
        wanted = contents(name, self.world.blocks)
        return self.pool.blocks.match(wanted, len(wanted)) == len(wanted)

    def use(self, name: str) -> None:
        """A request finds it, reads it, and is done."""
        wanted = contents(name, self.world.blocks)
        self.pool.blocks.release(self.pool.blocks.take(wanted, len(wanted), len(wanted)))

    def check(self) -> None:
        pool = self.pool
        assert {lease.transfer for lease in pool.leases()} == set(self.arrivals._leases)
        assert {pin.transfer for pin in pool.pins()} == set(self.pages._leaving), "a pin without its page"
        assert set(self.pages._leaving) <= set(self.departures._departures)
        held = [block for each in (*pool.leases(), *pool.pins()) for block in each.blocks] + self.alien
        assert len(held) == len(set(held)), "a block is held twice"
        assert len(held) + pool.blocks.available == pool.blocks.total, "a block leaked"
        for each in (*self.arrivals._leases.values(), *self.departures._departures.values()):
            assert each.timer in self.loop.timers, "a lease without an end"

    def key(self) -> tuple:
        cached = tuple(self.has(name) for name in self.world.going)
        uses = tuple(sum(self.pool.blocks.use(b).uses for b in pin.blocks) for pin in self.pool.pins())
        return (*super().key(), cached, uses, tuple(self.pages._leaving))


class PageWorld(World):
    """``transfers`` page-outs at once. ``going`` are the prefixes; ``used`` those that somebody has used."""

    def __init__(self, faults: int, *, transfers: int = 1, room: int = 1, blocks: int = 2) -> None:
        self.going = [f"t{number}" for number in range(transfers)]
        self.used: set[str] = set()
        self.evicted = False
        super().__init__(faults, transfers=0, room=room, blocks=blocks)
        self.nodes = {name: PageNode(self, name, 1, blocks * room) for name in self.lives}
        self.pager = self._pager("first")
        for name in self.going:
            self.nodes["p"].cache_prefix(name)
            self._begin(name)

    def _conductor(self) -> Conductor:
        return Conductor(self, self._known(), self.lanes, Silent(), lease_ms=LEASE_MS)

    def _known(self) -> SharedRoster:
        """Who is there now."""
        return roster(*self.lives.values(), "page")

    def _pager(self, life: str) -> Pager:
        return Pager(self, self.conductor, self._known(), self.lanes, None, {}, PAGES, Silent(), life)

    def _begin(self, name: str) -> None:
        prefix = contents(name, self.blocks)[-1]
        source = Told(self._known().find("p-0"), PoolState("p-0", 1, 9, 0, 9), 0)
        cold = Cold(prefix, self.blocks * BLOCK_TOKENS, 1e6)
        self.pager._begin(source, PageOut(cold, "d-0", 0.0, 1.0), self.time_ns)

    def named(self, transfer: str) -> str:
        pin = self.nodes["p"].pool.pinned(transfer)
        last = self.nodes["p"].pool.blocks.content(pin.blocks[-1])
        return next(name for name in self.going if contents(name, self.blocks)[-1] == last)

    def announce(self, report, failure) -> None:
        self.pager.ended(report)

    def committed(self, life: int, worker: str, transfer: str) -> None:
        raise AssertionError("a page was taken for a request's KV")

    def lost(self, life: int, worker: str, transfer: str, end) -> None:
        pass

    # What may happen besides -----------------------------------------------------------------------------------------

    def steps(self) -> list[tuple]:
        found = super().steps()
        source = self.nodes["p"]
        found += [("use", name) for name in self.going if name not in self.used and source.has(name)]
        return found

    FREE = (*World.FREE, "use")

    @property
    def at_rest(self) -> bool:
        faults, self.faults = self.faults, 0
        waits = all(step[0] in ("grab", "use") for step in self.steps())
        self.faults = faults
        return waits

    def use(self, name: str) -> None:
        self.used.add(name)
        self.nodes["p"].use(name)

    def grab(self, name: str) -> None:
        self.evicted = True
        super().grab(name)

    def _hear_progress(self, report) -> None:
        self.conductor.progress(report)

    def _hear_gone(self, worker: str, incarnation: int) -> None:
        known = self._known()
        self.conductor._roster = self.pager._roster = known
        self.pager.pools._roster = known
        self.conductor.gone([(worker, incarnation)])

    def dies(self, name: str) -> None:
        self.evicted = True
        gone = self.nodes[name].worker
        self.lives[name] += 1
        self.nodes[name] = PageNode(self, name, self.lives[name], self.blocks * self.room)
        for socket in self.nodes["p"].sockets:
            socket.broken = True
        self.wire.append(("gone", gone.id, gone.incarnation))

    def takeover(self, how: str) -> None:
        """The next coordinator knows nothing of page-outs: it frees what it finds, where it can."""
        self.term += 1
        self.asks.clear()
        self.lanes = Lanes(PAGES)
        self.conductor = self._conductor()
        self.pager = self._pager(f"term-{self.term}")
        reachable = [node for name, node in self.nodes.items() if how != "unreachable" or name != "d"]
        survey = Survey(_Direct({node.name: node for node in reachable}), self.term, self.instance)
        for node in reachable:
            leases = node.commands.answer(KvCommand(KvVerb.LEASES, "", self.term, self.instance)).leases
            for name, lease in orphaned([(node.name, lease) for lease in leases]):
                _run(survey.free(name, lease))

    # What must hold --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        for node in self.nodes.values():
            node.check()
        for entry in self.conductor.book:
            machine = entry.machine
            if machine.ended:
                assert {machine.hold(side) for side in Side} == {Hold.NOTHING}
            sends = entry.route is not None and entry.route.lane.is_sending(entry.plan.transfer)
            assert not sends or machine.state is State.MOVING
        if not self.evicted:
            for name in self.going:
                assert any(node.has(name) for node in self.nodes.values()), "a page is in neither cache"

    def drain(self) -> None:
        self.faults = 0
        for _ in range(500):
            if not self._drain_one():
                break
        else:
            raise AssertionError("it never comes to rest")
        for node in self.nodes.values():
            assert not node.pool.leases(), "leased for ever"
            assert not node.pool.pins(), "pinned for ever"
            assert not node.loop.timers
            assert not len(node.arrivals)
            assert not len(node.departures)
            assert not len(node.pages)
        assert not len(self.conductor.book), "a transfer never ended"
        assert not len(self.pager), "a page-out never ended"
        assert not self.pager._promised
        assert not any(lane.busy or lane.link.bytes_in_flight for lane in self.lanes), "a link is kept"
        if not self.harmed and not self.evicted:
            for name in self.going:
                assert self.nodes["d"].has(name)
                assert name in self.used or not self.nodes["p"].has(name)

    def _drain_one(self) -> bool:
        steps = [step for step in self.steps() if step[0] not in ("grab", "use")]
        if steps:
            self.step(*steps[0])
        elif self.asks:
            self.silent(0)
        elif timers := [timer for node in self.nodes.values() for timer in node.loop.timers]:
            timers[0].fire()
        elif len(self.conductor.book):
            self.tick(int(DEADLINE_MS * 1e6))
        else:
            return False
        self.check()
        return True

    def _matters(self, message: tuple) -> bool:
        kind, *rest = message
        if kind == "reply":
            return rest[0] in self.asks and rest[0].attempt == rest[1]
        if kind == "progress":
            entry = self.conductor.book.live(rest[0].transfer)
            return entry is not None and not entry.machine.announced
        return True

    def key(self) -> tuple:
        going = tuple((g.transfer, g.target) for g in self.pager._going.values())
        return (*super().key(), going, tuple(sorted(self.used)), self.evicted)
