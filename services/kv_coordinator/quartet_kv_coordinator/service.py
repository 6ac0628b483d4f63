"""The KV coordinator on the bus."""

import asyncio
import random as random_module
from collections.abc import Callable, Iterator

import msgspec

from quartet_bus import catalogue, subjects
from quartet_bus.bus import Bus, Message
from quartet_bus.config.schema import Config
from quartet_bus.messages import (
    Cancel,
    ControlRequest,
    FleetDelta,
    FleetSnapshot,
    KvCommand,
    KvLease,
    KvPressure,
    KvReply,
    LinkTable,
    NodeInventory,
    NodeStamp,
    Phase,
    RequestEvent,
    StreamId,
    TransferPlan,
    TransferReason,
    TransferReport,
    WorkerState,
)
from quartet_bus.service import UNREADABLE, Service
from quartet_core.links import Place
from quartet_core.transfer import Adopt, Failure, State
from quartet_kv_coordinator.book import TransferView
from quartet_kv_coordinator.commands import Commands
from quartet_kv_coordinator.conductor import Conductor
from quartet_kv_coordinator.lanes import Lane, Lanes
from quartet_kv_coordinator.leadership import Leadership
from quartet_kv_coordinator.metrics import CoordinatorMetrics
from quartet_kv_coordinator.pager import Pager
from quartet_kv_coordinator.planning import Weighed, weigh
from quartet_kv_coordinator.pool_metrics import PoolMetrics
from quartet_kv_coordinator.roster import Gone, Roster
from quartet_kv_coordinator.takeover import Survey, Watch, orphaned

_cancel = msgspec.msgpack.Decoder(Cancel).decode

POOL_S = 1.0
"""How often what was heard of the pool is shown as metrics, and forgotten where it is old."""

TICK_S = 0.02
"""How often deadlines, renewals and the silence of others are looked at."""


class UnknownTransfer(LookupError):
    """No transfer of that name is under way here."""

    def __init__(self, transfer: str) -> None:
        super().__init__(f"no transfer {transfer!r} is under way here")
        self.transfer = transfer


class UnknownNode(LookupError):
    """No inventory named that node."""

    def __init__(self, node: str) -> None:
        super().__init__(f"no node {node!r} is known here")
        self.node = node


class CoordinatorService(Service):
    """Hears plans, progress, inventories, verdicts, cancels and how full KV is; commands agents; says outcomes and
    link state.

    Of several coordinators one is active. The others watch: they remember plans without an outcome, and the one that
    takes over brings them to their end.
    """

    name = "coordinator"

    def __init__(self, bus: Bus, config: Config, *, instance: str, random: random_module.Random) -> None:
        super().__init__(bus, config, instance=instance, random=random)
        self._counts = CoordinatorMetrics(self.metrics)
        self._catalogue = catalogue.load(config)
        self._roster = Roster(self._catalogue)
        self._lanes = Lanes(config.kv)
        self._commands = Commands(self.ask, asyncio.sleep, self._count_command, self._fenced)
        self._conductor = Conductor(self, self._roster, self._lanes, self._counts, lease_ms=config.kv.lease_ms)
        self.pager = Pager(
            self, self._conductor, self._roster, self._lanes, self._catalogue, config.models, config.kv,
            PoolMetrics(self.metrics), f"{instance}-{random.getrandbits(32):08x}",
        )  # fmt: skip
        self._watch = Watch()
        self._leadership: Leadership | None = None
        self._rebuilt = False
        self._reign = 0  # counts claims: a term grows within a reign

    async def start(self) -> None:
        """Listen first, then ask who is there, then wait out the silence."""
        await super().start()
        silence_ns = int(self.config.kv.coordinator_silence_ms * 1e6)
        self._leadership = Leadership(self.instance, silence_ns=silence_ns, now_ns=self.now_ns())
        await self.hear(subjects.kv_links(), self._on_links)
        await self.hear(subjects.inventory_all(), self._on_inventory)
        await self.hear(subjects.fleet_delta(), self._on_delta)
        await self.hear(subjects.fleet_snapshot(), self._on_snapshot)
        await self.hear(subjects.kv_plan(), self._on_plan)
        await self.hear(subjects.kv_progress(), self._on_progress)
        await self.hear(subjects.kv_pressure(), self._on_pressure)
        await self.hear(subjects.kv_done(), self._on_outcome)
        await self.hear(subjects.kv_failed(), self._on_outcome)
        await self.hear_raw(subjects.cancel_raw(), self._on_cancel)
        for phase in (Phase.PREFILLED, Phase.REFUSED, Phase.END):
            await self.hear(subjects.request_event(phase), self._on_request_event)
        self.say(subjects.control("agent", "_all", "inventory"), ControlRequest())
        self.every(TICK_S, self._tick)
        self.every(self.config.kv.links_interval_ms / 1e3, self._say_links)
        self.every(POOL_S, self.pager.tick)

    async def stop(self) -> None:
        """Leave what is under way to a successor: it finds plans and leases, and nothing is announced twice."""
        await super().stop()
        self._counts.active.set(0)

    # For the door ----------------------------------------------------------------------------------------------------

    @property
    def term(self) -> int:
        """The term this coordinator leads, 0 while it stands by."""
        return self.leadership.term

    @property
    def highest_term(self) -> int:
        """The highest term known, whoever leads it."""
        return self.leadership.highest_term

    @property
    def active(self) -> bool:
        """Whether this coordinator leads and knows what was under way before."""
        return self.leadership.leads and self._rebuilt

    @property
    def leadership(self) -> Leadership:
        """Who leads, as far as is known here. Raises ``RuntimeError`` before ``start``."""
        if self._leadership is None:
            raise RuntimeError("the coordinator was not started")
        return self._leadership

    def transfers(self) -> list[TransferView]:
        """Transfers under way and lately ended, newest first."""
        return self._conductor.book.views(self.now_ns())

    def links(self) -> tuple[Lane, ...]:
        """Links that are measured or busy, then those between known nodes that nobody used yet; bounded."""
        return self._lanes.listing(self._pairs(self._roster.nodes, self._roster.nodes))

    def weigh(self, source: str, target: str, tokens: int, held: int, deadline_ms: float) -> Weighed:
        """What moving the KV of ``tokens`` tokens would take now, less ``held`` that ``target`` has, or computing it.

        ``deadline_ms`` 0 stands for none. Raises ``NotPlanned`` where no such transfer would be begun.
        """
        return weigh(
            self._roster, self._lanes, self._catalogue, self.config.models, source, target, tokens, held, deadline_ms,
            self.now_ns(),
        )  # fmt: skip

    def cancel(self, transfer: str) -> State:
        """Abort a transfer and free both sides; returns its state then. Raises ``UnknownTransfer``."""
        entry = self._conductor.cancel(transfer)
        if entry is None:
            raise UnknownTransfer(transfer)
        return entry.machine.state

    def budget(self, target: str, size_bytes: int, source: str = "") -> float:
        """Milliseconds until ``size_bytes`` more would have arrived on node ``target``, behind what is on its links.

        From node ``source``, or, without one, over the slowest link into the target from any other node. 0 when there
        is none: no other node is known. Raises ``UnknownNode``.
        """
        for node in (target, source):
            if node and node not in self._roster.nodes:
                raise UnknownNode(node)
        sources = [source] if source else self._roster.nodes
        lanes = (self._lanes.look(here, there).lane for here, there in self._pairs(sources, [target]))
        return max(
            (
                lane.predict_ms(lane.link.bytes_in_flight, size_bytes, 1.0)
                for lane in lanes
                if lane.source != lane.target
            ),
            default=0.0,
        )

    def _pairs(self, sources: list[str], targets: list[str]) -> Iterator[tuple[Place, Place]]:
        """Every place on ``sources`` with every one on ``targets``."""
        for source in sources:
            for target in targets:
                for place in self._roster.places(source):
                    for other in self._roster.places(target):
                        yield place, other

    # What it hears ---------------------------------------------------------------------------------------------------

    def _on_plan(self, plan: TransferPlan) -> None:
        if self.active:
            self._conductor.plan(plan, self.now_ns())
            return
        if not self.leadership.somebody_leads(self.now_ns()):
            self._counts.plans_ignored.labels("no_coordinator").inc()
        if plan.transfer not in self._conductor.book:
            self._watch.keep(plan, self.now_ns())

    def _on_progress(self, report: TransferReport) -> None:
        self._conductor.progress(report)

    def _on_pressure(self, pressure: KvPressure) -> None:
        self.pager.hear(pressure, leads=self.active)

    def _on_outcome(self, report: TransferReport) -> None:
        self._watch.over(report.transfer)

    def _on_cancel(self, message: Message) -> None:
        try:
            cancel = _cancel(message.data)
        except UNREADABLE as error:
            self._unreadable(subjects.cancel_raw().subject, message, error)
            return
        cancel.tenant = subjects.text_of(message.subject, 1)  # whatever the body says: the subject is authorised
        self._conductor.cancelled(cancel)

    def _on_request_event(self, event: RequestEvent) -> None:
        if self.active:
            self._conductor.request_event(event)

    def _on_inventory(self, inventory: NodeInventory) -> None:
        learned = self._roster.learn(inventory, self.now_ns())
        if learned.gone:
            self._conductor.gone(learned.gone)
        if learned.new_agent and self.active:
            self.spawn(self._sweep(self._reign, [inventory.node]), f"sweep {inventory.node}")

    def _on_delta(self, delta: FleetDelta) -> None:
        self._judge(delta.collector, delta.changes, delta.stamps)

    def _on_snapshot(self, snapshot: FleetSnapshot) -> None:
        self._judge(snapshot.collector, snapshot.workers, snapshot.stamps)

    def _judge(self, collector: str, words: tuple[WorkerState, ...], stamps: tuple[NodeStamp, ...]) -> None:
        now_ns = self.now_ns()
        for stamp in stamps:
            self._roster.stamp(collector, stamp)
        gone: list[Gone] = []
        for word in words:
            dead = self._roster.judge(collector, word, now_ns)
            if dead is not None:
                gone.append(dead)
        if gone:
            self._conductor.gone(gone)

    def _on_links(self, table: LinkTable) -> None:
        if self.leadership.heard(table.term, table.coordinator, self.now_ns()):
            self._step_down(f"{table.coordinator} leads term {table.term}")

    # Leading ---------------------------------------------------------------------------------------------------------

    def announce(self, report: TransferReport, failure: Failure | None) -> None:
        """Say how a transfer ended."""
        self.say(subjects.kv_done() if failure is None else subjects.kv_failed(), report)
        self._counts.ended(report, failure or "")
        self.pager.ended(report)
        if failure is not None:
            self.log.info("transfer failed", transfer=report.transfer, detail=report.detail)

    def carry(
        self,
        node: str | None,
        command: KvCommand,
        wanted: Callable[[], bool],
        answered: Callable[[KvReply | None], None],
    ) -> None:
        """As ``Office.carry``."""
        self.spawn(self._put(node, command, wanted, answered), f"kv {command.transfer}")

    async def _put(
        self,
        node: str | None,
        command: KvCommand,
        wanted: Callable[[], bool],
        answered: Callable[[KvReply | None], None],
    ) -> None:
        answered(None if node is None else await self._commands.put(node, command, wanted))

    def _fenced(self, sent: int, obeyed: int) -> int:
        """An agent that obeys term ``obeyed`` refused a command of term ``sent``: the term to ask it under now, or 0.

        It is told by each of many agents and for commands that were on their way, so only the first word of a term
        moves ours.
        """
        leadership = self.leadership
        if not leadership.leads or (sent < self.term and obeyed <= self.term):
            return self.term
        if leadership.fenced(obeyed, self.now_ns()):
            self.log.info("leading above a term that agents remember", term=self.term)
            self._say_links()
        else:
            self._step_down("an agent obeys another coordinator")
        return self.term

    def _tick(self) -> None:
        if self.leadership.claim(self.now_ns()):
            self._reign += 1
            self._counts.takeovers.inc()
            self.log.info("leading", term=self.term)
            self._say_links()
            self.spawn(self._rebuild(self._reign, self.now_ns()), "rebuild")
        if self.active:
            self._conductor.tick()

    def _step_down(self, why: str) -> None:
        self.log.warning("stepping down", why=why)
        self._counts.stepped_down.inc()
        self._rebuilt = False
        self.pager.abandon()
        for entry in self._conductor.abandon():
            if (
                entry.plan.reason is not TransferReason.PAGE_OUT
            ):  # whoever leads knows nothing of it, and frees both ends
                self._watch.keep(entry.plan, entry.heard_ns)

    def _reigns(self, reign: int) -> bool:
        return self.leadership.leads and self._reign == reign

    async def _rebuild(self, reign: int, claimed_ns: int) -> None:
        """Bring what the last coordinator left to an end, free what nobody stands for, then take plans."""
        survey = Survey(self._commands, self.term, self.instance)
        leases = await survey.leases(self._roster.nodes)
        before = self._watch.take(claimed_ns)
        fates = await asyncio.gather(*(self._fate(survey, one.plan, leases) for one in before))
        if not self._reigns(reign):
            for one in before:
                self._watch.keep(one.plan, one.heard_ns)
            return
        for one, fate in zip(before, fates, strict=True):
            self._conductor.adopt(one.plan, one.heard_ns, fate)
        self._rebuilt = True
        for one in self._watch.take(self.now_ns() + 1):  # heard meanwhile: nobody has begun with them
            self._conductor.plan(one.plan, one.heard_ns)
        await self._free_orphans(survey, leases)

    async def _fate(self, survey: Survey, plan: TransferPlan, leases: dict[str, list[tuple[str, KvLease]]]) -> Adopt:
        replica = self._roster.find(plan.target)
        return await survey.fate(plan, None if replica is None else replica.node, leases.get(plan.transfer, []))

    async def _sweep(self, reign: int, nodes: list[str]) -> None:
        """An agent turned up: free what it holds for transfers that nobody knows."""
        survey = Survey(self._commands, self.term, self.instance)
        leases = await survey.leases(nodes)
        if self._reigns(reign):
            await self._free_orphans(survey, leases)

    async def _free_orphans(self, survey: Survey, found: dict[str, list[tuple[str, KvLease]]]) -> None:
        frees = []
        for transfer, leases in found.items():
            lost = orphaned(leases)
            known = transfer in self._conductor.book or transfer in self._watch or transfer in self.pager
            if not lost or known:
                continue
            self._counts.orphans_freed.inc(len(lost))
            self._say_orphan(transfer, [lease for _, lease in leases])
            frees += [survey.free(node, lease) for node, lease in lost]
        await asyncio.gather(*frees)

    def _say_orphan(self, transfer: str, leases: list[KvLease]) -> None:
        """Its plan was never heard here, so only its name can be told: enough for a router that waits for it."""
        report = TransferReport(
            transfer=transfer,
            stream=StreamId(""),
            reason=TransferReason.SPLIT,
            state=State.ABORTED.value,
            source="",
            target="",
            tokens=leases[0].tokens,
            detail=Failure.COORDINATOR_LOST,
        )
        self.announce(report, Failure.COORDINATOR_LOST)

    def _say_links(self) -> None:
        self._show()
        if self.leadership.leads:
            self.say(subjects.kv_links(), LinkTable(self.term, self.instance, self._lanes.states()))

    def _show(self) -> None:
        """Gauges, and a warning for each link that turned out far slower than its class."""
        slowed = sending = trickling = waiting = 0
        for lane in self._lanes:
            sending += lane.sending
            trickling += lane.trickling
            waiting += lane.waiting
            link = lane.link
            slowed += link.slowed
            if link.slowed is not lane.warned:
                lane.warned = link.slowed
                self.log.warning(
                    "link far below its class" if link.slowed else "link recovered",
                    source=lane.source,
                    target=lane.target,
                    kind=link.kind,
                    measured_gb_per_s=round(link.gb_per_s, 3),
                    promised_gb_per_s=round(link.promised_gb_per_s, 3),
                )
        self._counts.active.set(int(self.active))
        self._counts.term.set(self.highest_term)
        self._counts.under_way.set(len(self._conductor.book))
        self._counts.sending.set(sending)
        self._counts.trickling.set(trickling)
        self._counts.waiting.set(waiting)
        self._counts.links_slowed.set(slowed)

    def _count_command(self, verb: str, result: str) -> None:
        self._counts.commands.labels(verb, result).inc()


def make(bus: Bus, config: Config, instance: str, random: random_module.Random) -> CoordinatorService:
    """A coordinator, as ``quartet_bus.process.run`` wants it made."""
    return CoordinatorService(bus, config, instance=instance, random=random)
