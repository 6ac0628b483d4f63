"""The server and channel that every front door uses, over loopback."""

import asyncio
import contextlib

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from quartet_rpc.channel import channel
from quartet_rpc.errors import CallFailed, not_found, reason_of, relayed
from quartet_rpc.server import AddressTaken, RpcService, serve
from quartet_rpc.v1 import predictor_pb2 as pb
from quartet_rpc.v1.common_pb2 import Reason
from quartet_rpc.v1.predictor_pb2_grpc import PredictorServicer, PredictorStub, add_PredictorServicer_to_server

ANY = "127.0.0.1:0"


class Predictor(PredictorServicer):
    def __init__(self, answer):
        self.answer = answer

    async def GetForecasts(self, request, context):  # noqa: N802
        return await self.answer(request)


def rpc(answer):
    return RpcService("quartet.v1.Predictor", lambda server: add_PredictorServicer_to_server(Predictor(answer), server))


def ready():
    return None


async def fine(request):
    return pb.GetForecastsReply(number=7)


async def call(address, **options):
    async with channel(address, **options) as there:
        return await PredictorStub(there).GetForecasts(pb.GetForecastsRequest())


async def failure_of(answer):
    async with serve(ANY, [rpc(answer)], ready) as serving:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(serving.address)
    return failed.value


async def test_a_call_is_answered():
    async with serve(ANY, [rpc(fine)], ready) as serving:
        assert not serving.address.endswith(":0")
        assert (await call(serving.address)).number == 7


async def test_a_failure_carries_its_code_its_reason_and_its_words():
    async def missing(request):
        raise not_found(Reason.REASON_UNKNOWN_WORKER, "no worker w-9")

    error = await failure_of(missing)
    assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, "no worker w-9")
    assert reason_of(error) == Reason.REASON_UNKNOWN_WORKER


async def test_a_defect_is_an_internal_error_without_its_traceback():
    async def broken(request):
        raise ZeroDivisionError("secret")

    error = await failure_of(broken)
    assert error.code() == grpc.StatusCode.INTERNAL
    assert reason_of(error) == Reason.REASON_INTERNAL
    assert "secret" not in error.details()


async def test_bytes_that_are_no_request_are_the_callers_mistake():
    async with serve(ANY, [rpc(fine)], ready) as serving, channel(serving.address) as there:
        for method in ("/quartet.v1.Predictor/GetForecasts", "/grpc.health.v1.Health/Check"):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await there.unary_unary(method)(b"\xff\xff\xff")
            assert failed.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert reason_of(failed.value) == Reason.REASON_INVALID
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            async for _ in there.unary_stream("/grpc.health.v1.Health/Watch")(b"\xff\xff\xff"):
                pass
        assert failed.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_call_without_an_answer_ends_at_its_deadline():
    async def never(request):
        await asyncio.Event().wait()

    async with serve(ANY, [rpc(never)], ready) as serving:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(serving.address, deadline_s=0.05)
    assert failed.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_taken_port_is_told_in_one_line():
    async with serve(ANY, [rpc(fine)], ready) as serving:
        with pytest.raises(AddressTaken) as taken:
            async with serve(serving.address, [rpc(fine)], ready):
                pass
    assert taken.value.address == serving.address
    assert serving.address in str(taken.value)
    assert "\n" not in str(taken.value)


async def health_of(there, service=""):
    stub = health_pb2_grpc.HealthStub(there)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_health_says_not_serving_until_ready_and_again_afterwards():
    why: list[str | None] = ["warming up"]
    async with serve(ANY, [rpc(fine)], lambda: why[0]) as serving, channel(serving.address) as there:
        for service in ("", "quartet.v1.Predictor"):
            assert await health_of(there, service) == health_pb2.HealthCheckResponse.NOT_SERVING
        watch = health_pb2_grpc.HealthStub(there).Watch(health_pb2.HealthCheckRequest())
        seen = [(await watch.read()).status]
        why[0] = None
        seen.append((await watch.read()).status)
        why[0] = "broker away"
        seen.append((await watch.read()).status)
        watch.cancel()
    status = health_pb2.HealthCheckResponse
    assert seen == [status.NOT_SERVING, status.SERVING, status.NOT_SERVING]


async def test_a_service_that_is_not_ready_still_answers():
    async with serve(ANY, [rpc(fine)], lambda: "not yet") as serving:
        assert (await call(serving.address)).number == 7


async def test_health_of_an_unknown_service_is_not_found():
    async with serve(ANY, [rpc(fine)], ready) as serving, channel(serving.address) as there:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await health_of(there, "quartet.v1.Nobody")
    assert failed.value.code() == grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services_and_their_messages():
    async with serve(ANY, [rpc(fine)], ready) as serving:
        services, fields = await asyncio.to_thread(reflected, serving.address)
    assert {"quartet.v1.Predictor", "grpc.health.v1.Health"} <= services
    assert fields == ["GetForecasts"]


def reflected(address):
    with grpc.insecure_channel(address) as there:
        database = ProtoReflectionDescriptorDatabase(there)
        pool = DescriptorPool(database)
        services = set(database.get_services())
        return services, [method.name for method in pool.FindServiceByName("quartet.v1.Predictor").methods]


async def test_a_running_call_ends_when_the_server_stops():
    reached = asyncio.Event()

    async def never(request):
        reached.set()
        await asyncio.Event().wait()

    async with contextlib.AsyncExitStack() as stack:
        async with serve(ANY, [rpc(never)], ready) as serving:
            there = await stack.enter_async_context(channel(serving.address, deadline_s=30.0))
            running = asyncio.ensure_future(PredictorStub(there).GetForecasts(pb.GetForecastsRequest()))
            await reached.wait()
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await running


async def test_a_relayed_failure_keeps_the_peers_reason_and_names_an_absent_peer():
    async def missing(request):
        raise not_found(Reason.REASON_UNKNOWN_TRANSFER, "no such transfer")

    told = relayed(await failure_of(missing), Reason.REASON_COORDINATOR_ABSENT, "the coordinator")
    assert (told.code, told.reason) == (grpc.StatusCode.NOT_FOUND, Reason.REASON_UNKNOWN_TRANSFER)
    async with serve(ANY, [], ready) as gone:
        pass
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call(gone.address)
    told = relayed(failed.value, Reason.REASON_COORDINATOR_ABSENT, "the coordinator")
    assert isinstance(told, CallFailed)
    assert (told.code, told.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.REASON_COORDINATOR_ABSENT)
    assert "the coordinator" in told.message


def test_a_reason_this_side_does_not_know_is_none():
    class Newer(grpc.RpcError):
        def trailing_metadata(self):
            return (("quartet-reason", "REASON_FROM_THE_FUTURE"),)

    assert reason_of(Newer()) == Reason.REASON_UNSPECIFIED
    assert reason_of(grpc.RpcError()) == Reason.REASON_UNSPECIFIED
