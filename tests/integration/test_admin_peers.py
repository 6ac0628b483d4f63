"""Coordinator and predictor behind their own doors, and what admin passes on of them."""

import asyncio
import contextlib
import random

import grpc
import grpc.aio
import msgspec
import pytest

from quartet_admin.door import AdminDoor, admin_rpc
from quartet_admin.service import AdminService
from quartet_bus import subjects
from quartet_bus.config.schema import Config, ModelSection
from quartet_bus.memory import MemoryBroker, MemoryBus
from quartet_bus.messages import (
    KvLayout,
    KvReply,
    NodeInventory,
    Phase,
    RequestEvent,
    StreamId,
    TransferPlan,
    TransferReason,
    WorkerInfo,
)
from quartet_core.catalogue import builtin
from quartet_kv_coordinator import door as coordinator_door
from quartet_kv_coordinator.service import CoordinatorService
from quartet_prefetch_predictor.door import CoordinatorBudget, PredictorDoor, predictor_rpc
from quartet_prefetch_predictor.ports import NoBudget
from quartet_prefetch_predictor.service import PredictorService
from quartet_rpc.channel import channel
from quartet_rpc.errors import reason_of
from quartet_rpc.server import serve
from quartet_rpc.v1 import coordinator_pb2 as kv
from quartet_rpc.v1.admin_pb2_grpc import AdminStub
from quartet_rpc.v1.common_pb2 import Reason
from quartet_rpc.v1.coordinator_pb2_grpc import CoordinatorStub
from quartet_rpc.v1.predictor_pb2 import GetForecastsRequest

CAPABLE = ("export", "import", "reserve")


def inventory(node, hardware):
    worker = WorkerInfo(
        f"{node}-0", 0, 1, hardware, "small", "fp8", 1, (0,), 100_000, 8192, 8, 2048,
        KvLayout(16, 131_072, "bf16"), "simulated", capabilities=CAPABLE,
    )  # fmt: skip
    return NodeInventory(node, 1, 1, (worker,), kv_address="127.0.0.1:1")


def config():
    made = Config(models={"small": ModelSection(spec="llama-3.1-8b")})
    made.kv.grpc = "127.0.0.1:0"
    made.kv.coordinator_silence_ms = 60.0
    made.prefetch.tick_ms = 20.0
    return made


class Peers:
    """A coordinator, a predictor, and an admin in front of them."""

    def __init__(self, stack):
        self.stack = stack
        self.broker = MemoryBroker()

    async def enter(self):
        self.coordinator = CoordinatorService(MemoryBus(self.broker), config(), instance="kv1", random=random.Random(1))
        await self.run(self.coordinator)
        served = await self.stack.enter_async_context(coordinator_door.serve(self.coordinator))
        self.to_coordinator = await self.channel(served.address)
        self.predictor = PredictorService(
            MemoryBus(self.broker),
            config(),
            instance="p1",
            random=random.Random(1),
            catalogue=builtin(),
            budget=CoordinatorBudget(self.to_coordinator),
        )
        await self.run(self.predictor)
        rpc = predictor_rpc(PredictorDoor(self.predictor))
        served = await self.stack.enter_async_context(serve("127.0.0.1:0", [rpc], self.predictor.not_ready))
        to_predictor = await self.channel(served.address)
        admin = AdminService(
            MemoryBus(self.broker), config(), instance="a1", random=random.Random(1), catalogue=builtin()
        )
        await self.run(admin)
        rpc = admin_rpc(AdminDoor(admin, self.to_coordinator, to_predictor))
        served = await self.stack.enter_async_context(serve("127.0.0.1:0", [rpc], admin.not_ready))
        self.admin = AdminStub(await self.channel(served.address))
        self.kv = CoordinatorStub(self.to_coordinator)
        self.say = admin.say
        for node, hardware in (("n1", "H100_SXM5"), ("n2", "L40S_PCIE")):
            self.say(subjects.inventory(node), inventory(node, hardware))

    async def run(self, service):
        await service.start()
        self.stack.push_async_callback(service.stop)

    async def channel(self, address):
        return await self.stack.enter_async_context(channel(address, deadline_s=10.0))

    async def obedient_agents(self):
        """Agents that say yes to every KV command."""
        bus = MemoryBus(self.broker)
        yes = msgspec.msgpack.encode(KvReply(True))
        for node in ("n1", "n2"):
            await bus.subscribe(subjects.kv_command(node).subject, lambda message: bus.publish(message.reply, yes))

    async def leads(self):
        await self.until(lambda: self.coordinator.active)

    async def until(self, holds):
        async with asyncio.timeout(10.0):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def plan(self, name, deadline_ms=60_000.0):
        return TransferPlan(
            name, TransferReason.SPLIT, StreamId("r1"), "small", "n1-0", 1, "n2-0", 1, 1024, 1024 * 131_072, deadline_ms
        )  # fmt: skip


@pytest.fixture
async def peers():
    async with contextlib.AsyncExitStack() as stack:
        made = Peers(stack)
        await made.enter()
        yield made


async def failure(call):
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return failed.value.code(), Reason.Name(reason_of(failed.value))


async def test_links_between_nodes_are_listed(peers):
    await peers.leads()
    reply = await peers.kv.ListLinks(kv.ListLinksRequest())
    assert (reply.coordinator, reply.term) == ("kv1", 1)
    pairs = {(link.source, link.target): link for link in reply.links}
    assert pairs["n1", "n2"].kind == "TCP"
    assert pairs["n1", "n2"].gb_per_s > 0


async def test_a_budget_is_granted_when_the_bytes_arrive_in_time_and_only_then(peers):
    await peers.leads()
    budget = CoordinatorBudget(peers.to_coordinator)
    granted = await budget.ask("n2", 1_000_000_000, 30_000.0)
    assert granted.granted
    assert granted.predicted_ms > 10.0
    refused = await budget.ask("n2", 1_000_000_000, 1.0)
    assert not refused.granted
    assert "1 ms remain" in refused.detail


async def test_a_budget_needs_a_known_node_and_sensible_numbers(peers):
    await peers.leads()
    with pytest.raises(NoBudget, match="NOT_FOUND"):
        await CoordinatorBudget(peers.to_coordinator).ask("nowhere", 1, 1.0)
    assert await failure(peers.kv.LinkBudget(kv.LinkBudgetRequest(node="n1", bytes=0, deadline_ms=1.0))) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "REASON_INVALID",
    )


async def test_a_standby_gives_no_budget_and_cancels_nothing():
    standby = CoordinatorService(MemoryBus(MemoryBroker()), Config(), instance="kv2", random=random.Random(1))
    await standby.start()
    rpc = coordinator_door.coordinator_rpc(standby)
    async with serve("127.0.0.1:0", [rpc], lambda: None) as served, channel(served.address) as there:
        stub = CoordinatorStub(there)
        for call in (
            stub.LinkBudget(kv.LinkBudgetRequest(node="n1", bytes=1, deadline_ms=1.0)),
            stub.CancelTransfer(kv.CancelTransferRequest(transfer="t1")),
        ):
            assert await failure(call) == (grpc.StatusCode.UNAVAILABLE, "REASON_STANDBY")
        assert not (await stub.ListTransfers(kv.ListTransfersRequest())).active
    await standby.stop()


async def test_transfers_are_seen_cancelled_and_remembered(peers):
    await peers.leads()
    # the agent that should reserve never answers: the transfer stays on its way
    await MemoryBus(peers.broker).subscribe(subjects.kv_command("n2").subject, lambda message: None)
    peers.say(subjects.kv_plan(), peers.plan("t1"))
    await peers.until(lambda: peers.coordinator.transfers())
    reply = await peers.admin.Transfers(kv.ListTransfersRequest(live_only=True))
    (one,) = reply.transfers
    assert (one.transfer, one.reason, one.request_id, one.source, one.target) == (
        "t1",
        "split",
        "r1",
        "n1-0",
        "n2-0",
    )
    assert (one.tokens, one.kv_bytes, one.live) == (1024, 1024 * 131_072, True)
    await peers.kv.CancelTransfer(kv.CancelTransferRequest(transfer="t1"))
    assert await failure(peers.kv.CancelTransfer(kv.CancelTransferRequest(transfer="t9"))) == (
        grpc.StatusCode.NOT_FOUND,
        "REASON_UNKNOWN_TRANSFER",
    )


async def test_a_refused_transfer_says_why_and_cannot_be_cancelled(peers):
    await peers.obedient_agents()
    await peers.leads()
    peers.say(subjects.kv_plan(), peers.plan("t2", deadline_ms=0.001))
    await peers.until(lambda: [view for view in peers.coordinator.transfers() if not view.live])
    (one,) = (await peers.admin.Transfers(kv.ListTransfersRequest())).transfers
    assert not one.live
    assert "deadline" in one.detail
    assert (await peers.admin.Transfers(kv.ListTransfersRequest(live_only=True))).transfers == []
    assert await failure(peers.kv.CancelTransfer(kv.CancelTransferRequest(transfer="t2"))) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "REASON_TOO_LATE",
    )


async def test_a_peers_own_reason_comes_through_admin(peers):
    assert await failure(peers.admin.Transfers(kv.ListTransfersRequest(limit=5_000))) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "REASON_INVALID",
    )


async def test_forecasts_come_through_admin_filtered_and_with_their_scores(peers):
    for number in range(5):
        event = RequestEvent(Phase.ACCEPTED, StreamId(f"r{number}"), "acme", "small", prompt_tokens=10)
        peers.say(subjects.request_event(Phase.ACCEPTED), event)
    await peers.until(lambda: peers.predictor.last.models)
    reply = await peers.admin.Forecasts(GetForecastsRequest(hardware=["H100_SXM5"]))
    assert {(one.model, one.hardware) for one in reply.forecasts} == {("small", "H100_SXM5")}
    assert [one.horizon_s for one in reply.forecasts] == [25.0, 300.0, 1800.0]
    assert [score.horizon_s for score in reply.scores] == [25.0, 300.0, 1800.0]
    assert sum(reply.scores[0].weights.values()) == pytest.approx(1.0)
    assert (reply.seen, reply.predictor) == (5, "p1")
    assert list((await peers.admin.Forecasts(GetForecastsRequest(models=["other"]))).forecasts) == []
