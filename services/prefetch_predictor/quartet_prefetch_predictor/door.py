"""The gRPC door of the predictor, and its way to the coordinator's."""

import grpc
import grpc.aio

from quartet_prefetch_predictor.ports import Budget, NoBudget
from quartet_prefetch_predictor.service import PredictorService
from quartet_rpc.server import RpcService
from quartet_rpc.v1 import predictor_pb2 as pb
from quartet_rpc.v1.coordinator_pb2 import LinkBudgetRequest
from quartet_rpc.v1.coordinator_pb2_grpc import CoordinatorStub
from quartet_rpc.v1.predictor_pb2_grpc import PredictorServicer, add_PredictorServicer_to_server


class PredictorDoor(PredictorServicer):
    """What ``quartet.v1.Predictor`` answers."""

    def __init__(self, service: PredictorService) -> None:
        self._service = service

    async def GetForecasts(self, request: pb.GetForecastsRequest, context: object) -> pb.GetForecastsReply:
        service = self._service
        return pb.GetForecastsReply(
            forecasts=[
                pb.ModelForecast(
                    model=forecast.model,
                    hardware=forecast.hardware,
                    horizon_s=forecast.horizon_s,
                    probability=forecast.probability,
                    requests_per_s=forecast.requests_per_s,
                    prompt_tokens_per_s=forecast.prompt_tokens_per_s,
                    output_tokens_per_s=forecast.output_tokens_per_s,
                    state=forecast.state,
                )
                for forecast in service.last.models
                if (not request.models or forecast.model in request.models)
                and (not request.hardware or forecast.hardware in request.hardware)
            ],
            scores=[
                pb.ForecastScore(
                    horizon_s=scored.horizon_s,
                    scored=scored.score.scored,
                    brier=scored.score.brier,
                    log_loss=scored.score.log_loss,
                    base_brier=scored.score.base_brier,
                    base_log_loss=scored.score.base_log_loss,
                    weights=scored.weights,
                )
                for scored in service.scores()
            ],
            number=service.last.number,
            seen=service.demand.seen,
            standing_down=service.standing_down(),
            predictor=service.instance,
        )


class CoordinatorBudget:
    """``LinkBudget`` over gRPC."""

    def __init__(self, coordinator: grpc.aio.Channel) -> None:
        self._coordinator = CoordinatorStub(coordinator)

    async def ask(self, node: str, transfer_bytes: int, deadline_ms: float) -> Budget:
        """Ask the coordinator; raises `NoBudget`."""
        request = LinkBudgetRequest(node=node, bytes=transfer_bytes, deadline_ms=deadline_ms)
        try:
            reply = await self._coordinator.LinkBudget(request)
        except grpc.aio.AioRpcError as error:
            raise NoBudget(f"{error.code().name}: {error.details()}") from error
        return Budget(reply.granted, reply.predicted_ms, reply.detail)


def predictor_rpc(door: PredictorDoor) -> RpcService:
    """The door, for ``quartet_rpc.server.serve``."""
    return RpcService("quartet.v1.Predictor", lambda server: add_PredictorServicer_to_server(door, server))
