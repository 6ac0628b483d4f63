"""A gRPC server as every front door runs it: health that tells the truth, reflection, errors with reasons."""

from __future__ import annotations  # grpc's classes are generic in its type stubs alone

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from msgspec import Struct

from quartet_rpc.errors import CallFailed, invalid, metadata_of
from quartet_rpc.v1.common_pb2 import Reason

_log = structlog.get_logger()

_Answer = Callable[[Any, Any], Awaitable[Any]]
_Stream = Callable[[Any, Any], AsyncIterator[Any]]
_Parse = Callable[[bytes], Any]

HEALTH_INTERVAL_S = 0.1
"""How long the answer to a health check may lag behind the truth."""

GRACE_S = 2.0
"""What running calls get when the server stops."""


class AddressTaken(Exception):
    """``address`` cannot be listened on: another process has it, or this host has no such address."""

    def __init__(self, address: str) -> None:
        super().__init__(f"cannot listen on {address}: the port is taken, or the address is not this host's")
        self.address = address


class RpcService(Struct, frozen=True):
    """One service for ``serve``: its full name (``quartet.v1.Admin``), and what adds its servicer to a server."""

    name: str
    add: Callable[[grpc.aio.Server], None]


class Serving(Struct, frozen=True):
    """A running server. ``address`` has the real port, where 0 was asked for."""

    address: str


@contextlib.asynccontextmanager
async def serve(
    address: str, services: Sequence[RpcService], ready: Callable[[], str | None]
) -> AsyncIterator[Serving]:
    """Serve ``services``, health and reflection on ``address`` (``host:port``, port 0: any) while the context lasts.

    Health says NOT_SERVING, for the server ("") and for each service, while ``ready()`` gives a reason. Calls are
    answered all the same: an operator may want to look at a service that is not well. At the end health goes first,
    then running calls get ``GRACE_S``. Raises `AddressTaken`.
    """
    server = grpc.aio.server(
        interceptors=[_Reasons()],
        # by default Linux lets two processes share a port, and each would get half of the calls
        options=(("grpc.so_reuseport", 0), ("grpc.keepalive_permit_without_calls", 1)),
    )
    for service in services:
        service.add(server)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    names = [service.name for service in services]
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        port = 0
    if port == 0:
        raise AddressTaken(address)
    watched = ["", *names]
    await _tell(checks, watched, ready() is None)
    await server.start()
    watch = asyncio.create_task(_watch(checks, watched, ready), name="grpc health")
    try:
        yield Serving(f"{address.rpartition(':')[0]}:{port}")
    finally:
        watch.cancel()
        await asyncio.wait([watch])
        await checks.enter_graceful_shutdown()
        await server.stop(GRACE_S)


async def _tell(checks: health.aio.HealthServicer, names: Sequence[str], serving: bool) -> None:
    status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    for name in names:
        await checks.set(name, status)


async def _watch(checks: health.aio.HealthServicer, names: Sequence[str], ready: Callable[[], str | None]) -> None:
    told: str | None = ready()
    while True:
        await asyncio.sleep(HEALTH_INTERVAL_S)
        why_not = ready()
        if (why_not is None) != (told is None):
            _log.info("grpc health", serving=why_not is None, reason=why_not or "")
            await _tell(checks, names, why_not is None)
        told = why_not


class _Reasons(grpc.aio.ServerInterceptor):
    """Turns what a servicer raises into a status: ``CallFailed`` as it says, anything else INTERNAL and a log line.

    Requests are parsed here too: grpc would call bytes that are not the request's message an UNKNOWN error.
    """

    async def intercept_service(
        self,
        # messages of a generic call have any type
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        if handler.unary_unary is not None:
            answering = _answering(method, handler.unary_unary, _parser(handler))
            return grpc.unary_unary_rpc_method_handler(answering, None, handler.response_serializer)
        if handler.unary_stream is not None:
            stream: Any = handler.unary_stream  # typed for threaded servers alone
            # a stream is a generator, or (the health service's) a coroutine that writes to its context
            guarded = _streaming if inspect.isasyncgenfunction(stream) else _answering
            return grpc.unary_stream_rpc_method_handler(
                guarded(method, stream, _parser(handler)), None, handler.response_serializer
            )
        return handler


def _parser(handler: grpc.RpcMethodHandler[Any, Any]) -> _Parse:
    deserializer: _Parse | None = handler.request_deserializer

    def parse(data: bytes) -> Any:
        try:
            return data if deserializer is None else deserializer(data)
        except DecodeError as error:
            raise invalid("the request is not the message that this method takes") from error

    return parse


def _answering(method: str, answer: _Answer, parse: _Parse) -> _Answer:
    async def answered(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await answer(parse(request), context)
        except Exception as error:
            return await _abort(method, context, error)

    return answered


def _streaming(method: str, stream: _Stream, parse: _Parse) -> _Stream:
    async def streamed(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            async for message in stream(parse(request), context):
                yield message
        except Exception as error:
            await _abort(method, context, error)

    return streamed


async def _abort(method: str, context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> None:
    if isinstance(error, CallFailed):
        await context.abort(error.code, error.message, metadata_of(error.reason))
    if isinstance(error, grpc.aio.AbortError):
        raise error
    _log.error("grpc call failed", method=method, exc_info=error)
    await context.abort(
        grpc.StatusCode.INTERNAL, f"{type(error).__name__} in {method}", metadata_of(Reason.REASON_INTERNAL)
    )
