"""Errors that cross gRPC: a canonical status code for machines, a ``Reason`` for programs, a sentence for people.

Servicers raise ``CallFailed``; the interceptor of ``quartet_rpc.server`` turns it into a status with the reason's name
in the trailing metadata. Clients read it back with ``reason_of``.
"""

from collections.abc import Iterable

import grpc

from quartet_rpc.v1.common_pb2 import Reason

REASON_KEY = "quartet-reason"
"""The metadata key of the reason's name, for example ``REASON_UNKNOWN_WORKER``."""


class CallFailed(Exception):
    """A call that gets an error instead of an answer."""

    def __init__(self, code: grpc.StatusCode, reason: Reason.ValueType, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message


def not_found(reason: Reason.ValueType, message: str) -> CallFailed:
    """What was named does not exist."""
    return CallFailed(grpc.StatusCode.NOT_FOUND, reason, message)


def invalid(message: str, reason: Reason.ValueType = Reason.REASON_INVALID) -> CallFailed:
    """A field has a value that is never allowed; ``message`` names the field and what is allowed."""
    return CallFailed(grpc.StatusCode.INVALID_ARGUMENT, reason, message)


def unavailable(reason: Reason.ValueType, message: str) -> CallFailed:
    """Whoever could answer is not there; trying again later makes sense."""
    return CallFailed(grpc.StatusCode.UNAVAILABLE, reason, message)


def metadata_of(reason: Reason.ValueType) -> tuple[tuple[str, str], ...]:
    """The trailing metadata that carries ``reason``."""
    return ((REASON_KEY, Reason.Name(reason)),)


def reason_of(error: grpc.RpcError) -> Reason.ValueType:
    """The reason a failed call gives; ``REASON_UNSPECIFIED`` for none, or one that this side does not know."""
    trailing = getattr(error, "trailing_metadata", None)
    pairs: Iterable[tuple[str, str | bytes]] = (trailing() if trailing is not None else None) or ()
    for key, value in pairs:
        if key == REASON_KEY and isinstance(value, str) and value in Reason.keys():  # noqa: SIM118 (an enum wrapper)
            return Reason.Value(value)
    return Reason.REASON_UNSPECIFIED


def relayed(error: grpc.aio.AioRpcError, absent: Reason.ValueType, whom: str) -> CallFailed:
    """The same failure, told on: a peer's own reason stays, a peer that is not there becomes ``absent``."""
    reason = reason_of(error)
    if reason != Reason.REASON_UNSPECIFIED:
        return CallFailed(error.code(), reason, error.details() or whom)
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return unavailable(absent, f"{whom} cannot be reached")
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return unavailable(Reason.REASON_NO_ANSWER, f"{whom} did not answer in time")
    return CallFailed(error.code(), Reason.REASON_UNSPECIFIED, f"{whom}: {error.details() or error.code().name}")
