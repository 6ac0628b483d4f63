"""One HTTP request and what became of it: what handlers fill in, and the access log and metrics read."""

import asyncio
from enum import StrEnum

from aiohttp import web

from quartet_core.openai import Refused, too_large
from quartet_gateway.errors import broken_body, slow_body
from quartet_gateway.quotas import Grant
from quartet_gateway.streams import Seat

REQUEST_ID = "x-request-id"
CLIENT_GONE = 499
"""The status logged for a client that left before its answer began (nginx' convention; it is never sent)."""


class Outcome(StrEnum):
    """How an exchange ended."""

    OK = "ok"
    REFUSED = "refused"
    STREAM_ERROR = "stream_error"
    CLIENT_GONE = "client_gone"
    SLOW_CLIENT = "slow_client"


class Exchange:
    """A request on its way through the gateway. Times are ns of the service's clock, 0 for "not yet"."""

    __slots__ = (
        "cached_tokens",
        "chunks",
        "code",
        "endpoint",
        "first_byte_ns",
        "grant",
        "model",
        "outcome",
        "output_tokens",
        "prompt_tokens",
        "received_bytes",
        "request",
        "request_id",
        "said",
        "sent_bytes",
        "started_ns",
        "status",
        "streamed",
        "tenant",
    )

    def __init__(self, request: web.BaseRequest, request_id: str, started_ns: int) -> None:
        self.request = request
        self.request_id = request_id
        self.said: dict[str, str] = {}
        """Headers of the answer, whatever it will be, besides those that every answer has."""
        self.started_ns = started_ns
        self.first_byte_ns = 0
        self.endpoint = "other"
        self.tenant = ""
        self.model = ""
        self.streamed = False
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.cached_tokens = 0
        self.chunks = 0
        self.grant: Grant | None = None
        """What it holds of its tenant's token limit."""
        self.received_bytes = 0
        self.sent_bytes = 0
        self.status = CLIENT_GONE
        self.outcome = Outcome.CLIENT_GONE
        self.code = ""

    @property
    def headers(self) -> dict[str, str]:
        """What the answer says in any case: its request's id, and no more of who answers than it must."""
        return {REQUEST_ID: self.request_id, "Server": "quartet", **self.said}

    async def read_body(self, seat: Seat, *, limit_bytes: int, timeout_ms: int) -> bytes:
        """The whole body, held on ``seat``.

        Raises ``Refused``: 413 over ``limit_bytes``, 408 after ``timeout_ms``, 429 without room, 400 when broken.
        """
        request = self.request
        length = request.content_length
        if length is not None and length > limit_bytes:
            raise too_large(length, limit_bytes)
        self._invite()
        body = bytearray()
        try:
            async with asyncio.timeout(timeout_ms / 1e3):
                # Not request.read(): it keeps the body for as long as the answer lasts.
                while piece := await request.content.readany():
                    body += piece
                    if len(body) > limit_bytes:
                        raise too_large(None, limit_bytes)
                    seat.hold(len(piece))
        except TimeoutError:
            raise slow_body(timeout_ms) from None
        except web.RequestPayloadError as error:
            raise broken_body(" ".join(str(error).split())) from None
        self.received_bytes = len(body)
        return bytes(body)

    def failed(self, refused: Refused) -> None:
        """Note that the exchange ended with ``refused``, before or after its first byte."""
        self.code = refused.body.code or refused.body.type
        self.outcome = Outcome.STREAM_ERROR if self.first_byte_ns else Outcome.REFUSED

    def _invite(self) -> None:
        """Answer ``Expect: 100-continue``: curl waits a second for it before it sends a long body."""
        transport = self.request.transport
        if transport is not None and self.request.headers.get("Expect", "").lower() == "100-continue":
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
