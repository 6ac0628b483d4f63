"""The gRPC door of the KV coordinator."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc

from quartet_kv_coordinator.book import TransferView
from quartet_kv_coordinator.planning import NotPlanned
from quartet_kv_coordinator.pools import PoolView
from quartet_kv_coordinator.service import CoordinatorService, UnknownNode, UnknownTransfer
from quartet_rpc import server
from quartet_rpc.errors import CallFailed, invalid, not_found, unavailable
from quartet_rpc.v1 import coordinator_pb2 as pb
from quartet_rpc.v1.common_pb2 import Reason
from quartet_rpc.v1.coordinator_pb2_grpc import CoordinatorServicer, add_CoordinatorServicer_to_server

DEFAULT_LIMIT = 100
MAX_LIMIT = 1_000

WATCH_S = 0.05
"""How often a watcher's transfers are looked at."""


class CoordinatorDoor(CoordinatorServicer):
    """What ``quartet.v1.Coordinator`` answers; the docstrings of the calls are in ``coordinator.proto``."""

    def __init__(self, service: CoordinatorService) -> None:
        self._service = service

    async def ListTransfers(self, request: pb.ListTransfersRequest, context: object) -> pb.ListTransfersReply:
        limit = request.limit or DEFAULT_LIMIT
        if limit > MAX_LIMIT:
            raise invalid(f"limit must be at most {MAX_LIMIT}, not {limit}")
        views = [view for view in self._service.transfers() if view.live or not request.live_only]
        return pb.ListTransfersReply(
            transfers=[_transfer(view) for view in views[:limit]],
            coordinator=self._service.instance,
            term=self._service.highest_term,
            active=self._service.active,
        )

    async def WatchTransfers(self, request: pb.WatchTransfersRequest, context: object) -> AsyncIterator[pb.Transfer]:
        # Looked at, not told: a slow watcher misses states in between, and never holds anything up.
        told: dict[str, str] = {}
        first = True
        while True:
            views = self._service.transfers()
            for view in reversed(views):
                if told.get(view.transfer) != view.state and (view.live or not first):
                    yield _transfer(view)
            told = {view.transfer: view.state for view in views}
            first = False
            await asyncio.sleep(WATCH_S)

    async def PlanTransfer(self, request: pb.PlanTransferRequest, context: object) -> pb.PlanTransferReply:
        if request.tokens <= 0 or request.held_tokens >= request.tokens or request.deadline_ms < 0:
            raise invalid("tokens must be positive and more than held_tokens, deadline_ms not negative")
        self._must_lead()
        try:
            weighed = self._service.weigh(
                request.source, request.target, request.tokens, request.held_tokens, request.deadline_ms
            )
        except NotPlanned as error:
            return pb.PlanTransferReply(failure=error.failure.value, detail=error.detail)
        choice = weighed.choice
        return pb.PlanTransferReply(
            possible=True,
            link=weighed.link,
            kv_bytes=weighed.kv_bytes,
            move_ms=choice.move_ms,
            recompute_ms=choice.recompute_ms,
            move=choice.move,
        )

    async def ListLinks(self, request: pb.ListLinksRequest, context: object) -> pb.ListLinksReply:
        return pb.ListLinksReply(
            links=[
                pb.Link(
                    source=lane.source,
                    target=lane.target,
                    kind=lane.link.kind,
                    gb_per_s=lane.link.gb_per_s,
                    setup_ms=lane.link.setup_ms,
                    in_flight_bytes=lane.link.bytes_in_flight,
                    transfers=lane.sending,
                    promised_gb_per_s=lane.link.promised_gb_per_s,
                    slowed=lane.link.slowed,
                    measured=lane.measured,
                    waiting=lane.waiting,
                )
                for lane in self._service.links()
            ],
            coordinator=self._service.instance,
            term=self._service.highest_term,
        )

    async def CancelTransfer(self, request: pb.CancelTransferRequest, context: object) -> pb.CancelTransferReply:
        self._must_lead()
        ended = {view.transfer: view.state for view in self._service.transfers() if not view.live}
        if request.transfer in ended:
            raise CallFailed(
                grpc.StatusCode.FAILED_PRECONDITION,
                Reason.REASON_TOO_LATE,
                f"transfer {request.transfer} is {ended[request.transfer]} already",
            )
        try:
            return pb.CancelTransferReply(state=self._service.cancel(request.transfer).value)
        except UnknownTransfer as error:
            raise not_found(Reason.REASON_UNKNOWN_TRANSFER, str(error)) from None

    async def LinkBudget(self, request: pb.LinkBudgetRequest, context: object) -> pb.LinkBudgetReply:
        if request.bytes <= 0 or not request.deadline_ms > 0:
            raise invalid("bytes and deadline_ms must be positive")
        self._must_lead()
        try:
            predicted_ms = self._service.budget(request.node, request.bytes)
        except UnknownNode as error:
            raise not_found(Reason.REASON_UNKNOWN_NODE, str(error)) from None
        late = predicted_ms > request.deadline_ms
        return pb.LinkBudgetReply(
            granted=not late,
            predicted_ms=predicted_ms,
            detail=f"{predicted_ms:.0f} ms where {request.deadline_ms:.0f} ms remain" if late else "",
        )

    async def GetPool(self, request: pb.GetPoolRequest, context: object) -> pb.GetPoolReply:
        pager = self._service.pager
        return pb.GetPoolReply(
            on=self._service.config.kv.pool,
            parts=[_part(view) for view in pager.views()],
            pages=pager.outcomes,
            refused=pager.refused,
            coordinator=self._service.instance,
            term=self._service.highest_term,
            active=self._service.active,
        )

    def _must_lead(self) -> None:
        """A standby does not know what is on the links, and owns no transfer."""
        if not self._service.active:
            raise unavailable(Reason.REASON_STANDBY, f"coordinator {self._service.instance} stands by")


def coordinator_rpc(service: CoordinatorService) -> server.RpcService:
    """The door, for ``quartet_rpc.server.serve``."""
    door = CoordinatorDoor(service)
    return server.RpcService("quartet.v1.Coordinator", lambda target: add_CoordinatorServicer_to_server(door, target))


@contextlib.asynccontextmanager
async def serve(service: CoordinatorService) -> AsyncIterator[server.Serving]:
    """The door, open on ``[kv] grpc`` while the context lasts. Raises ``quartet_rpc.server.AddressTaken``."""
    async with server.serve(service.config.kv.grpc, [coordinator_rpc(service)], service.not_ready) as serving:
        service.log.info("grpc listens", address=serving.address)
        yield serving


def _transfer(view: TransferView) -> pb.Transfer:
    return pb.Transfer(
        transfer=view.transfer,
        reason=view.reason,
        state=view.state,
        request_id=view.request_id,
        source=view.source,
        target=view.target,
        tokens=view.tokens,
        kv_bytes=view.kv_bytes,
        wire_bytes=view.wire_bytes,
        age_ms=view.age_ms,
        predicted_ms=view.predicted_ms,
        took_ms=view.took_ms,
        epoch=view.epoch,
        link=view.link,
        detail=view.detail,
        live=view.live,
        overlap_ms=view.overlap_ms,
    )


def _part(view: PoolView) -> pb.PoolPart:
    return pb.PoolPart(
        worker=view.worker,
        node=view.node,
        tier=view.tier,
        model=view.model,
        total_tokens=view.total_tokens,
        empty_tokens=view.empty_tokens,
        cached_tokens=view.idle_tokens,
        pressed=view.pressed,
        in_tokens=view.in_tokens,
        out_tokens=view.out_tokens,
        hit_tokens=view.hit_tokens,
        leaving=view.leaving,
        coming=view.coming,
        age_ms=view.age_ms,
    )
