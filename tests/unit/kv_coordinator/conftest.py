"""A coordinator's world: a memory bus under virtual time, nodes whose agents answer ``kv.cmd`` as real ones do."""

import asyncio
from random import Random

import msgspec
import pytest

from quartet_bus import subjects
from quartet_bus.config.schema import Config, KvSection
from quartet_bus.loop import run_virtual
from quartet_bus.memory import MemoryBroker, MemoryBus
from quartet_bus.messages import (
    Cancel,
    FleetDelta,
    KvCommand,
    KvLayout,
    KvLease,
    KvReply,
    KvVerb,
    LinkInfo,
    LinkTable,
    NodeInventory,
    NodeStamp,
    Phase,
    RequestEvent,
    Role,
    StreamId,
    TransferPlan,
    TransferReason,
    TransferReport,
    WorkerInfo,
    WorkerState,
)
from quartet_kv_coordinator.service import CoordinatorService

encode = msgspec.msgpack.Encoder().encode
MB = 1_000_000


def worker(node, ordinal=0, *, hardware="H100_SXM5", tp=1, model="llama", capabilities=("export", "import", "reserve")):
    return WorkerInfo(
        id=f"{node}-{ordinal}",
        ordinal=ordinal,
        incarnation=1,
        hardware=hardware,
        model=model,
        precision="fp8",
        tp=tp,
        gpus=tuple(range(tp)),
        kv_tokens=100_000,
        max_context=8192,
        max_batch=64,
        chunk_tokens=2048,
        layout=KvLayout(16, 131_072, "bf16", tp=tp),
        engine="simulated",
        capabilities=capabilities,
    )


class Agent:
    """One node's agent: leases and pins by transfer, and what it was asked.

    ``refuse`` and ``mute`` say which verbs it refuses, or does not answer; ``fails`` makes its sends fail after
    ``move_ms``, ``stuck`` makes them never end.
    """

    def __init__(self, world, node, workers, fabrics):
        self.world = world
        self.bus = MemoryBus(world.broker)
        self.inventory = NodeInventory(
            node, incarnation=1, epoch=1, workers=workers, links=tuple(LinkInfo(k, r, 0.0) for k, r in fabrics.items())
        )
        self.node = node
        self.refuse = {}
        self.mute = set()
        self.move_ms = 20.0
        self.fails = self.stuck = False
        self.link = None
        self.asked = []
        self.leases = {}
        self.pins = {}
        self.handed_over = {}
        self.has_tokens = 0  # of any page
        self.sends = {}
        self.epoch = 0
        self.rank = (0, "")

    async def start(self):
        await self.bus.subscribe(subjects.kv_command(self.node).subject, self._on_command)
        await self.bus.subscribe(subjects.control("agent", "_all", "inventory").subject, lambda _: self.say_inventory())
        self.say_inventory()

    def say_inventory(self):
        self.world.say(subjects.inventory(self.node), self.inventory)

    def verbs(self):
        return [command.verb for command in self.asked if command.verb not in (KvVerb.LEASES, KvVerb.RENEW)]

    def _on_command(self, message):
        command = msgspec.msgpack.decode(message.data, type=KvCommand)
        if command.verb in self.mute:
            return
        self.asked.append(command)
        self.bus.publish(message.reply, encode(self._answer(command)))

    def _answer(self, command):
        name = command.transfer
        if (command.term, command.coordinator) < self.rank:
            return KvReply(False, name, "old_term", term=self.rank[0])
        self.rank = (command.term, command.coordinator)
        if command.verb in self.refuse:
            return KvReply(False, name, self.refuse[command.verb])
        match command.verb:
            case KvVerb.RESERVE:
                if name not in self.leases:
                    self.epoch += 1
                    self.leases[name] = [self.epoch, "reserved", command.worker]
                return KvReply(True, name, "", self.leases[name][0], f"{self.node}:1", b"secret")
            case KvVerb.MOVE:
                self.pins[name] = command.worker
                if name not in self.sends:
                    self.sends[name] = self.world.loop.create_task(self._send(command))
                return KvReply(True, name, "", command.epoch)
            case KvVerb.COMMIT:
                if name in self.handed_over:
                    return KvReply(command.epoch == self.handed_over[name], name, "fenced", self.handed_over[name])
                if name not in self.leases or self.leases[name][0] != command.epoch:
                    return KvReply(False, name, "fenced")
                self.handed_over[name] = self.leases.pop(name)[0]
                return KvReply(True, name, "", command.epoch)
            case KvVerb.RELEASE:
                if self.leases.get(name, ["", "", ""])[2] == command.worker:
                    del self.leases[name]
                if self.pins.get(name) == command.worker:
                    del self.pins[name]
                    if name in self.sends:
                        self.sends.pop(name).cancel()
                return KvReply(True, name)
            case KvVerb.PAGE:
                self.pins[name] = command.worker
                return KvReply(True, name, tokens=16_000, manifest=b"manifest")
            case KvVerb.HELD:
                return KvReply(True, name, tokens=self.has_tokens)
            case KvVerb.RENEW:
                return KvReply(name in self.leases or name in self.pins, name)
            case KvVerb.LEASES:
                held = [KvLease(n, w, 1, e, 64, state, 1000.0) for n, (e, state, w) in self.leases.items()]
                held += [KvLease(n, w, 1, 0, 64, "reserved", 1000.0) for n, w in self.pins.items()]
                return KvReply(True, leases=tuple(held))
        raise AssertionError(command)

    async def _send(self, command):
        self._report(command, "moving")
        await asyncio.sleep(1e6 if self.stuck else self.move_ms / 1e3)
        self._report(command, "aborted" if self.fails else "moved", took_ms=self.move_ms, detail="connection")

    def _report(self, command, state, **more):
        self.world.say(
            subjects.kv_progress(),
            TransferReport(
                command.transfer,
                command.stream,
                command.reason,
                state,
                command.worker,
                "",
                command.epoch,
                wire_bytes=64,
                link=self.link or command.link,
                **more,
            ),
        )


class World:
    """Agents, coordinators and what was announced. Node ``p`` prefills and node ``d`` decodes unless made otherwise."""

    def __init__(self, kv):
        self.loop = asyncio.get_running_loop()
        self.broker = MemoryBroker()
        self.bus = MemoryBus(self.broker)
        self.config = Config(kv=kv)
        self.agents = {}
        self.coordinators = {}
        self.done, self.failed, self.tables = [], [], []

    async def start(self, *agents, coordinators=("c1",), lead=True):
        for topic, kept in (
            (subjects.kv_done(), self.done),
            (subjects.kv_failed(), self.failed),
            (subjects.kv_links(), self.tables),
        ):
            await self.bus.subscribe(topic.subject, self._keep(topic.kind, kept))
        for node, workers, fabrics in agents or (
            ("p", (worker("p"),), {"TCP": 9.0}),
            ("d", (worker("d", hardware="L40S_PCIE"),), {"TCP": 9.0}),
        ):
            self.agents[node] = Agent(self, node, workers, fabrics)
            await self.agents[node].start()
        for name in coordinators:
            await self.coordinator(name)
        if lead:
            await asyncio.sleep(0.6)
            assert sum(service.active for service in self.coordinators.values()) == 1

    async def coordinator(self, name):
        service = CoordinatorService(MemoryBus(self.broker), self.config, instance=name, random=Random(7))
        self.coordinators[name] = service
        await service.start()
        return service

    async def kill(self, name):
        """The process is gone: its bus too, so that nothing it still wanted to say gets out."""
        service = self.coordinators.pop(name)
        await service.bus.close()
        await service.stop()

    def leader(self):
        (service,) = [service for service in self.coordinators.values() if service.active]
        return service

    def _keep(self, kind, kept):
        return lambda message: kept.append(msgspec.msgpack.decode(message.data, type=kind))

    def say(self, topic, message):
        self.bus.publish(topic.subject, encode(message))

    def plan(self, name="t1", *, source="p-0", target="d-0", kv_bytes=9 * MB, deadline_ms=5000.0, request="r1",
             source_incarnation=1, ready=True, reason=TransferReason.SPLIT, tenant="tenant"):  # fmt: skip
        plan = TransferPlan(
            name, reason, StreamId(request), "llama", source, source_incarnation, target, 1, 64, kv_bytes, deadline_ms,
            router="router", tenant=tenant,
        )  # fmt: skip
        self.say(subjects.kv_plan(), plan)
        self.agents[source.rpartition("-")[0]].pins.setdefault(name, source)
        if ready:
            self.prefilled(request, source, tenant=tenant)
        return plan

    def prefilled(self, request="r1", source="p-0", tenant="tenant"):
        self.event(Phase.PREFILLED, request, source, tenant=tenant, role=Role.PREFILL)

    def event(self, phase, request, at, tenant="tenant", **more):
        event = RequestEvent(phase, StreamId(request), tenant, "llama", at, 1, **more)
        self.say(subjects.request_event(phase), event)

    def verdict(self, at, verdict, *, beat=10, collector="collector"):
        word = WorkerState(at, 1, 0, beat, verdict)
        self.say(subjects.fleet_delta(), FleetDelta(collector, 1, 1, (word,)))

    def stamp(self, node, sequence, *, collector="collector"):
        self.say(subjects.fleet_delta(), FleetDelta(collector, 1, 1, (), (NodeStamp(node, 1, sequence, 0),)))

    def cancel(self, request="r1", whose="tenant", **more):
        self.say(subjects.cancel(whose), Cancel(request, **more))

    def others_lead(self, term, name):
        self.say(subjects.kv_links(), LinkTable(term, name))

    def held(self):
        """Everything that agents hold for transfers, apart from blocks that were handed to their request."""
        return [(node, name) for node, agent in self.agents.items() for name in (*agent.leases, *agent.pins)]

    def outcomes(self):
        told = [(report.transfer, "done") for report in self.done]
        return told + [(report.transfer, report.detail.partition(":")[0]) for report in self.failed]


@pytest.fixture
def play():
    """Run a story, an async function of a `World`, under virtual time."""

    def run(story, **kv):
        async def main():
            world = World(KvSection(**kv))
            result = await story(world)
            for service in world.coordinators.values():
                failures = service.metrics.registry.get_sample_value(
                    "quartet_coordinator_failures_total", {"where": "handler"}
                )
                assert not failures, "a handler raised"
                await service.stop()
            for agent in world.agents.values():
                for task in agent.sends.values():
                    task.cancel()
            return result

        return run_virtual(main())

    return run


@pytest.fixture
def make_worker():
    return worker
