"""Calls to the admin's gRPC door, for commands that ask it."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import grpc.aio

from quartet_cli.errors import CommandFailed
from quartet_rpc.channel import channel
from quartet_rpc.errors import reason_of
from quartet_rpc.v1.admin_pb2_grpc import AdminStub
from quartet_rpc.v1.common_pb2 import Reason

if TYPE_CHECKING:
    from quartet_rpc.v1.admin_pb2_grpc import AdminAsyncStub  # a name that only the stubs' types have

T = TypeVar("T")

_HOST_PORT = re.compile(r"([^\s:/\[\]]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})")
"""A name or an IPv4 address, or an IPv6 address in brackets; then the port."""


async def ask(address: str, call: "Callable[[AdminAsyncStub], Awaitable[T]]") -> T:
    """What ``call`` returns of the admin at ``address``. Raises ``CommandFailed`` as ``door`` does."""
    async with door(address) as stub:
        return await call(stub)


@asynccontextmanager
async def door(address: str) -> "AsyncIterator[AdminAsyncStub]":
    """The admin at ``address``. What calls raise becomes a ``CommandFailed``: the admin's own words, or who is there
    instead of one; code 2 when ``address`` is no ``host:port``."""
    async with knocked(address, "admin") as link:
        yield AdminStub(link)


@asynccontextmanager
async def knocked(address: str, who: str) -> "AsyncIterator[grpc.aio.Channel]":
    """A channel to one of our doors, ``who`` of which is expected at ``address`` (and is the option's name)."""
    found = _HOST_PORT.fullmatch(address)
    if found is None or not 0 < int(found[2]) < 1 << 16:
        raise CommandFailed(f"--{who} {address}: HOST:PORT expected", 2)
    async with channel(address) as link:
        try:
            yield link
        except grpc.aio.AioRpcError as error:
            raise CommandFailed(_told(address, who, error)) from None


def _told(address: str, who: str, error: grpc.aio.AioRpcError) -> str:
    details = error.details() or error.code().name
    if reason_of(error) != Reason.REASON_UNSPECIFIED:
        return details  # only services of ours give reasons
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return f"{address} is not a Quartet {who}"
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return f"no {who} at {address}"
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer from {address} in time"
    return details
