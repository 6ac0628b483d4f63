"""Calls to the admin's gRPC door, for commands that ask it."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import grpc.aio

from quartet_cli.errors import CommandFailed
from quartet_rpc.channel import channel
from quartet_rpc.v1.admin_pb2_grpc import AdminStub

if TYPE_CHECKING:
    from quartet_rpc.v1.admin_pb2_grpc import AdminAsyncStub  # a name that only the stubs' types have

T = TypeVar("T")


async def ask(address: str, call: "Callable[[AdminAsyncStub], Awaitable[T]]") -> T:
    """What ``call`` returns of the admin at ``address``. Raises ``CommandFailed`` with the admin's own words."""
    async with channel(address) as link:
        try:
            return await call(AdminStub(link))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and "connect" in (error.details() or ""):
                raise CommandFailed(f"no admin at {address}") from None
            raise CommandFailed(error.details() or error.code().name) from None
