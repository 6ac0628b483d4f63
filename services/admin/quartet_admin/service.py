"""The admin service: what it heard of the fleet, what ended requests cost, and operators' wishes passed on."""

import random

import msgspec
from msgspec import Struct

from quartet_admin.cost import CostLedger
from quartet_admin.decisions import Decisions
from quartet_admin.errors import Absent, Denied, NoAnswer, UnknownPolicy, UnknownRequest, UnknownWorker
from quartet_admin.fleet import FleetTable, WorkerView
from quartet_admin.gathering import Gathering
from quartet_admin.telemetry import TelemetryTable
from quartet_bus import subjects
from quartet_bus.bus import Bus, BusError, NoResponders
from quartet_bus.config.schema import Config
from quartet_bus.messages import (
    ControlReply,
    ControlRequest,
    FleetDelta,
    FleetSnapshot,
    NodeInventory,
    NodeTelemetry,
    Phase,
    RequestEvent,
)
from quartet_bus.service import UNREADABLE, Service
from quartet_core.catalogue import Catalogue

_SETTLE_NS = 2_000_000_000
"""A fleet that is there has told of itself by then: snapshots come every 250 ms, inventories are asked for."""

_decode_event = msgspec.msgpack.Decoder(RequestEvent).decode


class RouterChoice(Struct, frozen=True):
    """Which policy a router has, and which it may have: the payload of its ``policy`` verb."""

    policy: str
    policies: tuple[str, ...] = ()


class AdminService(Service):
    """Hears inventories, fleet state, telemetry and request ends; says control verbs; owns nothing that it could not
    rebuild."""

    name = "admin"

    def __init__(self, bus: Bus, config: Config, *, instance: str, random: random.Random, catalogue: Catalogue) -> None:
        super().__init__(bus, config, instance=instance, random=random)
        self.fleet = FleetTable(config.router.max_workers)
        self.telemetry = TelemetryTable(config.router.max_workers)
        listed = {name: hardware.price_per_hour for name, hardware in catalogue.hardware.items()}
        self.cost = CostLedger(listed | config.cost.price_per_hour)
        self.replaying = True
        self.history = ""
        """Why costs do not reach back as far as the log; "" when they do."""
        self.decisions = Decisions()
        self._gathering = Gathering(self)
        self._gather_s = config.admin.gather_ms / 1000
        self._started_ns = 0
        self._counted = self.metrics.counter("requests_ended", "Request ends counted.", ("origin",))
        self._wishes = self.metrics.counter("wishes", "Operators' wishes, by verb and outcome.", ("verb", "outcome"))
        self.metrics.gauge("nodes", "Nodes announced.").set_function(lambda: len(self.fleet.nodes(0)))
        self.metrics.gauge("workers", "Workers announced.").set_function(lambda: sum(1 for _ in self.fleet.workers()))

    async def start(self) -> None:
        await super().start()
        self._started_ns = self.now_ns()
        await self._gathering.start()
        await self.hear(subjects.inventory_all(), self._on_inventory)
        await self.hear(subjects.fleet_delta(), self._on_delta)
        await self.hear(subjects.fleet_snapshot(), self._on_snapshot)
        await self.hear(subjects.request_event(Phase.END), self._on_end)
        for phase in (Phase.HELD, Phase.DISPATCHED, Phase.REJECTED):
            await self.hear(subjects.request_event(phase), self.decisions.hear)
        await self.hear(subjects.telemetry_all(), self._on_telemetry)
        self.every(1.0, self._forget)
        self.say(subjects.control("agent", "_all", "inventory"), ControlRequest())
        self.say(subjects.control("collector", "_all", "snapshot"), ControlRequest())
        self.spawn(self._replay(), "replay of request ends")

    def not_ready(self) -> str | None:
        """Until the fleet has spoken, or had the time to: an empty answer at once would be a wrong one."""
        if not self._started_ns:
            return "not started"
        if not self.bus.connected:
            return "the broker is away"
        if not self.fleet.collectors() and self.now_ns() - self._started_ns < _SETTLE_NS:
            return "no collector heard yet"
        return None

    # Wishes

    def worker(self, worker: str) -> WorkerView:
        """One worker; raises `UnknownWorker`."""
        view = self.fleet.worker(worker)
        if view is None:
            raise UnknownWorker(worker)
        return view

    async def order(self, worker: str, verb: str, argument: str = "") -> ControlReply:
        """Have the worker's agent do ``verb``. Raises `UnknownWorker`, `Absent`, `NoAnswer` or `Denied`."""
        node = self.worker(worker).node
        topic = subjects.control("agent", node, verb)
        try:
            reply = await self.ask(
                topic, ControlRequest(worker=worker, argument=argument), ControlReply, timeout_s=4 * self._gather_s
            )
        except NoResponders:
            self._wishes.labels(verb, "absent").inc()
            raise Absent("agent", node) from None
        except BusError as error:
            self._wishes.labels(verb, "no_answer").inc()
            raise NoAnswer(f"agent {node}", str(error)) from error
        self._wishes.labels(verb, "done" if reply.ok else "denied").inc()
        self.log.info("order", worker=worker, verb=verb, argument=argument, ok=reply.ok, reason=reply.reason)
        if not reply.ok:
            raise Denied(f"agent {node}", reply.reason)
        return reply

    async def policies(self) -> dict[str, RouterChoice]:
        """The choice of every router. Raises `Absent` or `NoAnswer`."""
        return {reply.instance: _choice(reply) for reply in await self._routers("policy", "", first=False)}

    async def choose(self, policy: str) -> dict[str, RouterChoice]:
        """Have every router choose ``policy``. Raises `UnknownPolicy`, `Absent` or `NoAnswer`.

        Routers with different lists may disagree: those that know the policy have then taken it, the error names one
        that has not.
        """
        replies = await self._routers("policy", policy, first=False)
        self.log.info("policy", policy=policy, routers=[reply.instance for reply in replies if reply.ok])
        for reply in replies:
            if not reply.ok:
                raise UnknownPolicy(policy, reply.instance, reply.reason)
        return {reply.instance: _choice(reply) for reply in replies}

    async def explain(self, request: str) -> ControlReply:
        """The decision for a request, from the router that made it. Raises `UnknownRequest`, `Absent`."""
        replies = await self._routers("explain", request, first=True)
        for reply in replies:
            if reply.ok:
                return reply
        raise UnknownRequest(request, len(replies))

    async def dry_run(self, policy: str) -> list[ControlReply]:
        """Start, stop ("off") or read ("") a dry run on every router. Raises `Absent`, `UnknownPolicy`."""
        replies = await self._routers("dryrun", policy, first=False)
        for reply in replies:
            if not reply.ok:
                raise UnknownPolicy(policy, reply.instance, reply.reason)
        return replies

    async def _routers(self, verb: str, argument: str, *, first: bool) -> list[ControlReply]:
        topic = subjects.control("router", "_all", verb)
        replies = await self._gathering.ask(
            topic,
            ControlRequest(argument=argument),
            timeout_s=self._gather_s,
            enough=lambda reply: first and reply.ok,
        )
        self._wishes.labels(verb, "done" if replies else "absent").inc()
        if not replies:
            raise Absent("router", "")
        signed = [reply for reply in replies if reply.instance]
        if not signed:  # every service signs; what does not is no answer of a router
            raise NoAnswer("a router", replies[0].reason)
        return signed

    # What is heard

    def _on_inventory(self, inventory: NodeInventory) -> None:
        self.fleet.announced(inventory, self.now_ns())

    def _on_delta(self, delta: FleetDelta) -> None:
        self.fleet.delta(delta, self.now_ns())

    def _on_snapshot(self, snapshot: FleetSnapshot) -> None:
        self.fleet.snapshot(snapshot, self.now_ns())

    def _on_telemetry(self, told: NodeTelemetry) -> None:
        self.telemetry.heard(told, self.now_ns())

    def _forget(self) -> None:
        self.fleet.forget(self.now_ns())
        self.telemetry.forget(self.now_ns())

    def _on_end(self, event: RequestEvent) -> None:
        if self.cost.heard(event):
            self._counted.labels("live").inc()

    async def _replay(self) -> None:
        """Read the kept log from its beginning; live ends are counted meanwhile, and none twice."""
        log = subjects.request_ends_log()
        try:
            await self.bus.keep(log)
            for subject in log.subjects:
                async for message in self.bus.replay(log, subject):
                    try:
                        event = _decode_event(message.data)
                    except UNREADABLE:
                        self._counted.labels("unreadable").inc()
                        continue
                    if self.cost.replayed(event):
                        self._counted.labels("log").inc()
        except BusError as error:
            self.history = f"only since this process started, or incomplete: {error}"
            self.log.warning("request ends cannot be replayed", reason=str(error))
        finally:
            self.replaying = False


def _choice(reply: ControlReply) -> RouterChoice:
    """What a router's ``policy`` verb answered. Raises `NoAnswer` when that cannot be read."""
    try:
        return msgspec.json.decode(reply.payload, type=RouterChoice)
    except UNREADABLE as error:
        raise NoAnswer(f"router {reply.instance}", str(error)) from None
