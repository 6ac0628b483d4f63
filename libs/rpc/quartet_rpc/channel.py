"""Channels to our own services: every call has a deadline, and a peer that vanished without a word is noticed."""

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

DEADLINE_S = 2.0
"""What a call without a deadline of its own gets."""

_OPTIONS = (
    # a peer that lost its network says nothing; without keepalive a call would hang until its deadline every time
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),  # a fleet of 10,000 workers takes some 3 MB
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


class _Deadline(grpc.aio.UnaryUnaryClientInterceptor):
    """Gives a deadline to unary calls that have none. Streams live as long as their reader wants."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s

    async def intercept_unary_unary(  # the types of a generic call are its caller's business
        self,
        continuation: Callable[[grpc.aio.ClientCallDetails, Any], Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        asked = client_call_details
        if asked.timeout is None:
            asked = grpc.aio.ClientCallDetails(
                asked.method, self._deadline_s, asked.metadata, asked.credentials, asked.wait_for_ready
            )
        return await continuation(asked, request)


def channel(address: str, *, deadline_s: float = DEADLINE_S) -> grpc.aio.Channel:
    """A channel to ``address`` (``host:port``). It connects at the first call, and again whenever it must.

    Use it as an async context manager, or close it. Calls raise ``grpc.aio.AioRpcError``.
    """
    return grpc.aio.insecure_channel(address, options=_OPTIONS, interceptors=[_Deadline(deadline_s)])
