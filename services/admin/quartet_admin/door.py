"""The gRPC door: requests in, what the service knows or fetches out, failures as statuses with reasons."""

import asyncio
from collections.abc import AsyncIterator, Iterable

import grpc
import grpc.aio

from quartet_admin import wire
from quartet_admin.errors import Absent, Denied, NoAnswer, UnknownPolicy, UnknownRequest, UnknownWorker, WishFailed
from quartet_admin.gathering import TooManyQuestions
from quartet_admin.service import AdminService, RouterChoice
from quartet_bus.messages import Role
from quartet_rpc.errors import CallFailed, invalid, not_found, relayed, unavailable
from quartet_rpc.server import RpcService
from quartet_rpc.v1 import admin_pb2 as pb
from quartet_rpc.v1 import coordinator_pb2, predictor_pb2
from quartet_rpc.v1.admin_pb2_grpc import AdminServicer, add_AdminServicer_to_server
from quartet_rpc.v1.common_pb2 import Reason
from quartet_rpc.v1.coordinator_pb2_grpc import CoordinatorStub
from quartet_rpc.v1.predictor_pb2_grpc import PredictorStub

MAX_WATCHERS = 64
DEFAULT_INTERVAL_MS = 1_000
DECISIONS_INTERVAL_S = 0.05
"""Decisions are passed on in small batches: fresh enough for people, cheap at any rate."""
INTERVAL_MS = range(100, 60_001)

_ROLE_WORDS = {role: word for word, role in wire.ROLES.items() if word is not Role.STORE}


class AdminDoor(AdminServicer):
    """What ``quartet.v1.Admin`` answers; the docstrings of the calls are in ``admin.proto``."""

    def __init__(self, service: AdminService, coordinator: grpc.aio.Channel, predictor: grpc.aio.Channel) -> None:
        self._service = service
        self._coordinator = CoordinatorStub(coordinator)
        self._predictor = PredictorStub(predictor)
        self._watchers = 0

    async def GetFleet(self, request: pb.GetFleetRequest, context: object) -> pb.Fleet:
        fleet = self._service.fleet
        workers = [
            wire.worker(view)
            for view in fleet.workers()
            if request.model in ("", view.info.model) and request.hardware in ("", view.info.hardware)
        ]
        return pb.Fleet(nodes=self._nodes(), workers=workers, collectors=fleet.collectors())

    async def WatchFleet(self, request: pb.WatchFleetRequest, context: object) -> AsyncIterator[pb.FleetChange]:
        interval_ms = request.interval_ms or DEFAULT_INTERVAL_MS
        if interval_ms not in INTERVAL_MS:
            raise invalid(f"interval_ms must be {INTERVAL_MS[0]} to {INTERVAL_MS[-1]}, not {interval_ms}")
        self._admit_watcher()
        try:
            told: dict[str, pb.Worker] = {}
            whole = True
            while True:
                now = {view.info.id: wire.worker(view) for view in self._service.fleet.workers()}
                yield pb.FleetChange(
                    nodes=self._nodes(),
                    workers=[worker for name, worker in now.items() if told.get(name) != worker],
                    gone=[name for name in told if name not in now],
                    whole=whole,
                )
                told, whole = now, False
                await asyncio.sleep(interval_ms / 1000)
        finally:
            self._watchers -= 1

    async def GetTelemetry(self, request: pb.GetTelemetryRequest, context: object) -> pb.Telemetry:
        views = self._service.telemetry.views(request.node, self._service.now_ns())
        return pb.Telemetry(nodes=[wire.telemetry(view) for view in views])

    async def DrainWorker(self, request: pb.WorkerRequest, context: object) -> pb.WorkerReply:
        return await self._order(request.worker, "drain")

    async def ResumeWorker(self, request: pb.WorkerRequest, context: object) -> pb.WorkerReply:
        return await self._order(request.worker, "resume")

    async def CordonWorker(self, request: pb.WorkerRequest, context: object) -> pb.WorkerReply:
        return await self._order(request.worker, "cordon")

    async def UncordonWorker(self, request: pb.WorkerRequest, context: object) -> pb.WorkerReply:
        return await self._order(request.worker, "uncordon")

    async def SetRole(self, request: pb.SetRoleRequest, context: object) -> pb.WorkerReply:
        role = _ROLE_WORDS.get(request.role)
        if role is None:
            raise invalid(f"role must be one of {', '.join(pb.Role.Name(role) for role in _ROLE_WORDS)}")
        return await self._order(request.worker, "role", role.value)

    async def GetPolicy(self, request: pb.GetPolicyRequest, context: object) -> pb.PolicyReply:
        try:
            return _policies(await self._service.policies())
        except (WishFailed, TooManyQuestions) as error:
            raise _failed(error) from None

    async def SetPolicy(self, request: pb.SetPolicyRequest, context: object) -> pb.PolicyReply:
        if not request.policy:
            raise invalid("policy must not be empty")
        try:
            return _policies(await self._service.choose(request.policy))
        except (WishFailed, TooManyQuestions) as error:
            raise _failed(error) from None

    async def Explain(self, request: pb.ExplainRequest, context: object) -> pb.ExplainReply:
        if not request.request_id:
            raise invalid("request_id must not be empty")
        try:
            reply = await self._service.explain(request.request_id)
        except (WishFailed, TooManyQuestions) as error:
            raise _failed(error) from None
        return pb.ExplainReply(router=reply.instance, json=reply.payload.decode())

    async def WatchDecisions(
        self, request: pb.WatchDecisionsRequest, context: object
    ) -> AsyncIterator[pb.RoutingDecision]:
        self._admit_watcher()
        watcher = self._service.decisions.watch(request.model, request.tenant)
        told = 0
        try:
            while True:
                for event in watcher.take():
                    yield wire.decision(event, watcher.dropped - told)
                    told = watcher.dropped
                await asyncio.sleep(DECISIONS_INTERVAL_S)
        finally:
            self._service.decisions.leave(watcher)
            self._watchers -= 1

    async def DryRun(self, request: pb.DryRunRequest, context: object) -> pb.DryRunReply:
        try:
            replies = await self._service.dry_run(request.policy)
        except (WishFailed, TooManyQuestions) as error:
            raise _failed(error) from None
        return pb.DryRunReply(
            routers=[pb.RouterDryRun(router=reply.instance, json=reply.payload.decode()) for reply in replies]
        )

    async def Transfers(
        self, request: coordinator_pb2.ListTransfersRequest, context: object
    ) -> coordinator_pb2.ListTransfersReply:
        try:
            return await self._coordinator.ListTransfers(request)
        except grpc.aio.AioRpcError as error:
            raise relayed(error, Reason.REASON_COORDINATOR_ABSENT, "the KV coordinator") from None

    async def Forecasts(
        self, request: predictor_pb2.GetForecastsRequest, context: object
    ) -> predictor_pb2.GetForecastsReply:
        try:
            return await self._predictor.GetForecasts(request)
        except grpc.aio.AioRpcError as error:
            raise relayed(error, Reason.REASON_PREDICTOR_ABSENT, "the prefetch predictor") from None

    async def Cost(self, request: pb.CostRequest, context: object) -> pb.CostReply:
        unknown = [key for key in request.by if key not in wire.COLUMNS]
        if unknown:
            raise invalid(f"by must be of {', '.join(pb.CostKey.Name(key) for key in wire.COLUMNS)}, not {unknown}")
        service = self._service
        return pb.CostReply(
            lines=[wire.cost_line(line) for line in service.cost.sums(wire.COLUMNS[key] for key in request.by)],
            replaying=service.replaying,
            history=service.history,
            unpriced=service.cost.unpriced,
        )

    def _admit_watcher(self) -> None:
        if self._watchers >= MAX_WATCHERS:
            raise CallFailed(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                Reason.REASON_TOO_MANY_WATCHERS,
                f"{MAX_WATCHERS} watchers are here already",
            )
        self._watchers += 1

    def _nodes(self) -> Iterable[pb.Node]:
        return [wire.node(view) for view in self._service.fleet.nodes(self._service.now_ns())]

    async def _order(self, worker: str, verb: str, argument: str = "") -> pb.WorkerReply:
        if not worker:
            raise invalid("worker must not be empty")
        try:
            reply = await self._service.order(worker, verb, argument)
        except WishFailed as error:
            raise _failed(error) from None
        return pb.WorkerReply(worker=worker, json=reply.payload.decode())


def admin_rpc(door: AdminDoor) -> RpcService:
    """The door, for ``quartet_rpc.server.serve``."""
    return RpcService("quartet.v1.Admin", lambda server: add_AdminServicer_to_server(door, server))


def _policies(choices: dict[str, RouterChoice]) -> pb.PolicyReply:
    return pb.PolicyReply(
        routers=[
            pb.RouterPolicy(router=router, policy=choice.policy, policies=choice.policies)
            for router, choice in choices.items()
        ]
    )


def _failed(error: WishFailed | TooManyQuestions) -> CallFailed:
    match error:
        case UnknownWorker():
            return not_found(Reason.REASON_UNKNOWN_WORKER, str(error))
        case UnknownRequest():
            return not_found(Reason.REASON_UNKNOWN_REQUEST, str(error))
        case UnknownPolicy():
            return invalid(str(error), Reason.REASON_UNKNOWN_POLICY)
        case Absent(service="router"):
            return unavailable(Reason.REASON_ROUTER_ABSENT, str(error))
        case Absent():
            return unavailable(Reason.REASON_AGENT_ABSENT, str(error))
        case NoAnswer():
            return unavailable(Reason.REASON_NO_ANSWER, str(error))
        case Denied():
            return CallFailed(grpc.StatusCode.FAILED_PRECONDITION, Reason.REASON_REFUSED, str(error))
        case TooManyQuestions():
            return CallFailed(
                grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.REASON_NOT_READY, "too many questions wait for answers"
            )
    return CallFailed(grpc.StatusCode.UNKNOWN, Reason.REASON_INTERNAL, str(error))
