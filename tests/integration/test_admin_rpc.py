"""The admin service behind real gRPC on loopback, with a fleet of few words on an in-memory bus."""

import asyncio
import contextlib
import random

import grpc
import grpc.aio
import msgspec
import pytest
from contract.bus_contract import until
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from quartet_admin.decisions import KEPT, Decisions
from quartet_admin.door import AdminDoor, admin_rpc
from quartet_admin.service import AdminService
from quartet_bus import subjects
from quartet_bus.config.schema import Config
from quartet_bus.memory import MemoryBroker, MemoryBus
from quartet_bus.messages import (
    ControlReply,
    FleetDelta,
    FleetSnapshot,
    KvLayout,
    NodeInventory,
    NodeStamp,
    Phase,
    RequestEvent,
    StreamId,
    WorkerInfo,
    WorkerState,
)
from quartet_bus.service import Service
from quartet_core import word as words
from quartet_core.catalogue import builtin
from quartet_core.verdict import Verdict
from quartet_rpc.channel import channel
from quartet_rpc.errors import reason_of
from quartet_rpc.server import serve
from quartet_rpc.v1 import admin_pb2 as pb
from quartet_rpc.v1.admin_pb2_grpc import AdminStub
from quartet_rpc.v1.common_pb2 import Reason
from quartet_rpc.v1.coordinator_pb2 import ListTransfersRequest
from quartet_rpc.v1.predictor_pb2 import GetForecastsRequest

LAYOUT = KvLayout(16, 131_072, "bf16")
NOWHERE = "127.0.0.1:9"
BUSY = words.pack(
    free_kv=words.free_kv_level(0.5),
    queue=words.queue_level(120.0),
    batch=words.batch_level(17),
    drift=words.drift_level(1.4),
    accepting=True,
    throttled=True,
)


def info(name, ordinal, hardware="H100_SXM5", model="llama"):
    return WorkerInfo(
        name, ordinal, 3, hardware, model, "fp8", 1, (ordinal,), 100_000, 8192, 256, 2048, LAYOUT, "simulated"
    )  # fmt: skip


class Agent(Service):
    """A node that obeys, and remembers what it was told."""

    name = "agent"

    def __init__(self, bus):
        super().__init__(bus, Config(), instance="n1", random=random.Random(1))
        self.told = []
        self.workers = (info("n1-0", 0), info("n1-1", 1, "L40S_PCIE"))

    async def start(self):
        await super().start()
        handlers = {verb: self.obey(verb) for verb in ("drain", "resume", "cordon", "uncordon", "role")}
        await self.controls(handlers | {"inventory": lambda _: self.announce()})
        self.announce()

    def announce(self):
        inventory = NodeInventory("n1", 5, 1, self.workers, zone="z", resident=("llama",))
        self.say(subjects.inventory("n1"), inventory)
        return ControlReply(True)

    def obey(self, verb):
        def obeyed(request):
            self.told.append((verb, request.worker, request.argument))
            if verb == "resume":
                return ControlReply(False, reason="engine is starting")
            return ControlReply(True, payload=b'{"running": 2}')

        return obeyed


class Router(Service):
    """A router that knows two policies and one request."""

    name = "router"

    def __init__(self, bus, instance, known=""):
        super().__init__(bus, Config(), instance=instance, random=random.Random(1))
        self.policy = "finish-time"
        self.known = known

    async def start(self):
        await super().start()
        await self.controls({"policy": self.choose, "explain": self.explain})

    def choose(self, request):
        if request.argument not in ("", "finish-time", "round-robin"):
            return ControlReply(False, reason="unknown policy; allowed are finish-time, round-robin")
        self.policy = request.argument or self.policy
        payload = {"policy": self.policy, "policies": ["finish-time", "round-robin"], "later": 1}
        return ControlReply(True, payload=msgspec.json.encode(payload))

    def explain(self, request):
        if request.argument != self.known:
            return ControlReply(False, reason="unknown request")
        return ControlReply(True, payload=b'{"reason":"fastest"}')


class World:
    """One admin service with its door, and whoever else a test adds."""

    def __init__(self, stack, broker, admin, there, address):
        self.stack = stack
        self.broker = broker
        self.admin = admin
        self.stub = AdminStub(there)
        self.there = there
        self.address = address

    async def add(self, make):
        service = make(MemoryBus(self.broker))
        await service.start()
        self.stack.push_async_callback(service.stop)
        await self.settle()
        return service

    async def settle(self):
        for _ in range(10):
            await asyncio.sleep(0)

    async def failure(self, call):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call
        return failed.value.code(), Reason.Name(reason_of(failed.value)), failed.value.details()


@pytest.fixture
async def world():
    config = Config()
    config.admin.gather_ms = 150.0
    async with contextlib.AsyncExitStack() as stack:
        broker = MemoryBroker()
        admin = AdminService(
            MemoryBus(broker), config, instance="a", random=random.Random(1), catalogue=builtin()
        )  # fmt: skip
        await admin.start()
        stack.push_async_callback(admin.stop)
        nobody = await stack.enter_async_context(channel(NOWHERE, deadline_s=1.0))
        door = AdminDoor(admin, nobody, nobody)
        serving = await stack.enter_async_context(serve("127.0.0.1:0", [admin_rpc(door)], admin.not_ready))
        there = await stack.enter_async_context(channel(serving.address, deadline_s=10.0))
        yield World(stack, broker, admin, there, serving.address)


def speak(world, *states, stamps=()):
    world.admin.say(subjects.fleet_snapshot(), FleetSnapshot("c", 1, 1, states, stamps))


async def test_the_fleet_is_told_in_units(world):
    await world.add(Agent)
    stamp = NodeStamp("n1", 5, 70, 0)
    speak(world, WorkerState("n1-0", 3, BUSY & words.STATE_MASK, 70, Verdict.SUSPECT), stamps=(stamp,))
    await world.settle()
    fleet = await world.stub.GetFleet(pb.GetFleetRequest())
    assert [(node.name, node.zone, list(node.resident)) for node in fleet.nodes] == [("n1", "z", ["llama"])]
    assert 0 <= fleet.nodes[0].last_beat_age_ms < 5_000
    assert list(fleet.collectors) == ["c"]
    busy, unheard = fleet.workers
    assert (busy.id, busy.node, busy.hardware, busy.incarnation) == ("n1-0", "n1", "H100_SXM5", 3)
    assert (busy.role, busy.verdict) == (pb.ROLE_BOTH, pb.VERDICT_SUSPECT)
    assert 40 <= busy.state.free_kv_percent <= 50
    assert busy.state.queued_prefill_ms == pytest.approx(120, rel=0.15)
    assert busy.state.running == 17
    assert busy.state.drift == pytest.approx(1.35)
    assert (busy.state.accepting, busy.state.throttled, busy.state.fault) == (True, True, False)
    assert (unheard.id, unheard.verdict, unheard.HasField("state")) == ("n1-1", pb.VERDICT_UNSPECIFIED, False)


async def test_the_fleet_can_be_asked_by_class_and_model(world):
    await world.add(Agent)
    by_class = await world.stub.GetFleet(pb.GetFleetRequest(hardware="L40S_PCIE"))
    assert [worker.id for worker in by_class.workers] == ["n1-1"]
    by_model = await world.stub.GetFleet(pb.GetFleetRequest(model="other"))
    assert list(by_model.workers) == []


async def test_a_watcher_hears_the_whole_and_then_what_changed(world):
    agent = await world.add(Agent)
    watch = world.stub.WatchFleet(pb.WatchFleetRequest(interval_ms=100))
    first = await watch.read()
    assert first.whole
    assert [worker.id for worker in first.workers] == ["n1-0", "n1-1"]
    changed = WorkerState("n1-1", 3, BUSY & words.STATE_MASK, 71, Verdict.UP)
    world.admin.say(subjects.fleet_delta(), FleetDelta("c", 1, 1, (changed,)))
    agent.workers = agent.workers[1:]
    agent.announce()
    await world.settle()
    second = await watch.read()
    while not second.workers:
        second = await watch.read()
    assert not second.whole
    assert [(worker.id, worker.state.running) for worker in second.workers] == [("n1-1", 17)]
    assert list(second.gone) == ["n1-0"]
    watch.cancel()


@pytest.mark.parametrize("interval_ms", [1, 99, 60_001])
async def test_a_watch_has_a_sensible_interval(world, interval_ms):
    watch = world.stub.WatchFleet(pb.WatchFleetRequest(interval_ms=interval_ms))
    code, reason, words_ = await world.failure(watch.read())
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "REASON_INVALID")
    assert "100" in words_


async def test_orders_reach_the_workers_agent(world):
    agent = await world.add(Agent)
    reply = await world.stub.DrainWorker(pb.WorkerRequest(worker="n1-1"))
    assert (reply.worker, reply.json) == ("n1-1", '{"running": 2}')
    await world.stub.CordonWorker(pb.WorkerRequest(worker="n1-0"))
    await world.stub.UncordonWorker(pb.WorkerRequest(worker="n1-0"))
    await world.stub.SetRole(pb.SetRoleRequest(worker="n1-0", role=pb.ROLE_PREFILL))
    assert agent.told == [
        ("drain", "n1-1", ""),
        ("cordon", "n1-0", ""),
        ("uncordon", "n1-0", ""),
        ("role", "n1-0", "prefill"),
    ]


async def test_an_agent_that_refuses_is_quoted(world):
    await world.add(Agent)
    failure = await world.failure(world.stub.ResumeWorker(pb.WorkerRequest(worker="n1-0")))
    assert failure[:2] == (grpc.StatusCode.FAILED_PRECONDITION, "REASON_REFUSED")
    assert "engine is starting" in failure[2]


async def test_an_unknown_worker_is_not_found(world):
    await world.add(Agent)
    failure = await world.failure(world.stub.DrainWorker(pb.WorkerRequest(worker="n9-9")))
    assert failure[:2] == (grpc.StatusCode.NOT_FOUND, "REASON_UNKNOWN_WORKER")
    assert "n9-9" in failure[2]


async def test_an_agent_that_is_gone_is_unavailable(world):
    agent = await world.add(Agent)
    await agent.stop()
    failure = await world.failure(world.stub.DrainWorker(pb.WorkerRequest(worker="n1-0")))
    assert failure[:2] == (grpc.StatusCode.UNAVAILABLE, "REASON_AGENT_ABSENT")


async def test_a_role_must_be_one(world):
    await world.add(Agent)
    failure = await world.failure(world.stub.SetRole(pb.SetRoleRequest(worker="n1-0")))
    assert failure[:2] == (grpc.StatusCode.INVALID_ARGUMENT, "REASON_INVALID")


async def test_without_routers_policy_and_explain_are_unavailable(world):
    for call in (
        world.stub.GetPolicy(pb.GetPolicyRequest()),
        world.stub.SetPolicy(pb.SetPolicyRequest(policy="round-robin")),
        world.stub.Explain(pb.ExplainRequest(request_id="r1")),
    ):
        failure = await world.failure(call)
        assert failure[:2] == (grpc.StatusCode.UNAVAILABLE, "REASON_ROUTER_ABSENT")


async def test_every_router_chooses_and_a_bad_choice_changes_nothing(world):
    routers = [await world.add(lambda bus, name=name: Router(bus, name)) for name in ("r1", "r2")]
    reply = await world.stub.SetPolicy(pb.SetPolicyRequest(policy="round-robin"))
    assert [(line.router, line.policy) for line in reply.routers] == [("r1", "round-robin"), ("r2", "round-robin")]
    failure = await world.failure(world.stub.SetPolicy(pb.SetPolicyRequest(policy="magic")))
    assert failure[:2] == (grpc.StatusCode.INVALID_ARGUMENT, "REASON_UNKNOWN_POLICY")
    assert "finish-time, round-robin" in failure[2]
    assert [router.policy for router in routers] == ["round-robin", "round-robin"]
    reply = await world.stub.GetPolicy(pb.GetPolicyRequest())
    assert [list(line.policies) for line in reply.routers] == [["finish-time", "round-robin"]] * 2


async def test_the_router_that_decided_explains(world):
    await world.add(lambda bus: Router(bus, "r1"))
    await world.add(lambda bus: Router(bus, "r2", known="req-7"))
    reply = await world.stub.Explain(pb.ExplainRequest(request_id="req-7"))
    assert (reply.router, reply.json) == ("r2", '{"reason":"fastest"}')
    failure = await world.failure(world.stub.Explain(pb.ExplainRequest(request_id="req-8")))
    assert failure[:2] == (grpc.StatusCode.NOT_FOUND, "REASON_UNKNOWN_REQUEST")


async def test_absent_peers_are_named(world):
    failure = await world.failure(world.stub.Transfers(ListTransfersRequest()))
    assert failure[:2] == (grpc.StatusCode.UNAVAILABLE, "REASON_COORDINATOR_ABSENT")
    failure = await world.failure(world.stub.Forecasts(GetForecastsRequest()))
    assert failure[:2] == (grpc.StatusCode.UNAVAILABLE, "REASON_PREDICTOR_ABSENT")


def end(name, **changes):
    fields = {"tenant": "acme", "model": "llama", "hardware": "H100_SXM5", "status": "ok", "gpu_ms": 3_600_000.0}
    return RequestEvent(Phase.END, StreamId(name), prompt_tokens=900, output_tokens=100, **(fields | changes))


async def test_costs_survive_the_service_that_counted_them(world):
    topic = subjects.request_event(Phase.END)
    for number in range(3):
        world.admin.say(topic, end(f"r{number}", tenant="acme" if number else "other"))
    await world.settle()
    successor = AdminService(
        MemoryBus(world.broker), Config(), instance="b", random=random.Random(1), catalogue=builtin()
    )  # fmt: skip
    await successor.start()
    world.stack.push_async_callback(successor.stop)
    await world.settle()
    world.admin.say(topic, end("r3"))  # both hear it live
    world.admin.say(topic, end("r2"))  # said twice
    await world.settle()
    reply = await world.stub.Cost(pb.CostRequest(by=[pb.COST_KEY_TENANT]))
    assert not reply.replaying
    assert reply.history == ""
    lines = {line.tenant: line for line in reply.lines}
    assert (lines["acme"].requests, lines["other"].requests) == (3, 1)
    price = builtin().hardware_class("H100_SXM5").price_per_hour
    assert lines["acme"].dollars == pytest.approx(3 * price)
    assert lines["acme"].gpu_seconds == pytest.approx(3 * 3600)
    assert lines["acme"].dollars_per_million_tokens == pytest.approx(price / 1000 * 1e6)
    assert successor.cost.sums() == world.admin.cost.sums()


async def test_cost_columns_must_exist(world):
    failure = await world.failure(world.stub.Cost(pb.CostRequest(by=[pb.COST_KEY_UNSPECIFIED])))
    assert failure[:2] == (grpc.StatusCode.INVALID_ARGUMENT, "REASON_INVALID")


async def test_health_waits_for_the_fleet_to_speak(world):
    health = health_pb2_grpc.HealthStub(world.there)
    watch = health.Watch(health_pb2.HealthCheckRequest(service="quartet.v1.Admin"))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    speak(world)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


async def test_reflection_lists_the_admin_service(world):
    def listed():
        with grpc.insecure_channel(world.address) as there:
            return set(ProtoReflectionDescriptorDatabase(there).get_services())

    assert {"quartet.v1.Admin", "grpc.health.v1.Health"} <= await asyncio.to_thread(listed)


async def test_an_unreadable_answer_is_no_answer(world):
    bus = MemoryBus(world.broker)
    await world.add(Agent)

    def garbage(message):
        bus.publish(message.reply, b"\xc1")

    await bus.subscribe(subjects.control("router", "_all", "policy").subject, garbage)
    failure = await world.failure(world.stub.SetPolicy(pb.SetPolicyRequest(policy="round-robin")))
    assert failure[:2] == (grpc.StatusCode.UNAVAILABLE, "REASON_NO_ANSWER")
    assert "unreadable" in failure[2]


def decided(name, model="llama", tenant="acme", **more):
    return RequestEvent(
        Phase.DISPATCHED, StreamId(name), tenant, model, worker="n1-0", router="r1", reason="best", **more
    )


async def test_a_watcher_sees_the_decisions_it_asked_for_as_they_are_made(world):
    watch = world.stub.WatchDecisions(pb.WatchDecisionsRequest(model="llama"))
    reading = asyncio.ensure_future(watch.read())
    await until(lambda: world.admin.decisions._watchers)
    world.admin.say(subjects.request_event(Phase.DISPATCHED), decided("other", model="qwen"))
    world.admin.say(subjects.request_event(Phase.DISPATCHED), decided("one", prompt_tokens=9, predicted_ttft_ms=12.5))
    decision = await asyncio.wait_for(reading, 5.0)
    assert (decision.request_id, decision.worker, decision.reason) == ("one", "n1-0", "best")
    assert (decision.phase, decision.prompt_tokens, decision.predicted_ttft_ms) == ("dispatched", 9, 12.5)
    watch.cancel()
    await until(lambda: not world.admin.decisions._watchers)


def test_a_slow_watcher_loses_the_oldest_and_is_told_how_many():
    decisions = Decisions()
    watcher = decisions.watch("", "acme")
    for number in range(KEPT + 3):
        decisions.hear(decided(str(number)))
    decisions.hear(decided("x", tenant="other"))
    assert watcher.dropped == 3
    assert [event.stream.id for event in watcher.take()] == [str(number) for number in range(3, KEPT + 3)]


class DryRouter(Router):
    """A router that compares policies."""

    async def start(self):
        await Service.start(self)
        await self.controls({"dryrun": self.compare})

    def compare(self, request):
        if request.argument == "magic":
            return ControlReply(False, reason="no policy 'magic'; there are: finish-time, round-robin")
        return ControlReply(True, payload=b'{"dry_run":"round-robin"}')


async def test_a_dry_run_asks_every_router_and_an_unknown_policy_is_refused(world):
    failure = await world.failure(world.stub.DryRun(pb.DryRunRequest(policy="round-robin")))
    assert failure[:2] == (grpc.StatusCode.UNAVAILABLE, "REASON_ROUTER_ABSENT")
    for name in ("r1", "r2"):
        await world.add(lambda bus, name=name: DryRouter(bus, name))
    reply = await world.stub.DryRun(pb.DryRunRequest(policy="round-robin"))
    assert [(each.router, each.json) for each in reply.routers] == [
        (name, '{"dry_run":"round-robin"}') for name in ("r1", "r2")
    ]
    failure = await world.failure(world.stub.DryRun(pb.DryRunRequest(policy="magic")))
    assert failure[:2] == (grpc.StatusCode.INVALID_ARGUMENT, "REASON_UNKNOWN_POLICY")
