"""Answers as OpenAI's clients expect them: one JSON body, a stream of server-sent events, or an error object."""

import asyncio
import math

from aiohttp import web

from quartet_core.openai import Refused
from quartet_gateway.errors import error_json
from quartet_gateway.exchange import Exchange

_DONE = b"data: [DONE]\n\n"


class SlowClient(Exception):
    """The client did not read its answer: more than ``limit_bytes`` waited for it for ``patience_ms``."""

    def __init__(self, limit_bytes: int, patience_ms: int) -> None:
        super().__init__(f"more than {limit_bytes} bytes waited for the client for {patience_ms} ms")
        self.limit_bytes = limit_bytes
        self.patience_ms = patience_ms


def json_reply(body: bytes, exchange: Exchange) -> web.Response:
    """200 with ``body``."""
    return web.Response(body=body, content_type="application/json", headers=exchange.headers)


def error_reply(refused: Refused, exchange: Exchange, *, close: bool = False, allowed: str = "") -> web.Response:
    """The error as status, headers and OpenAI's error object; ``close`` ends the connection after it."""
    headers = exchange.headers
    if refused.retry_after_s > 0:
        headers["Retry-After"] = str(math.ceil(refused.retry_after_s))
        headers["Retry-After-Ms"] = str(math.ceil(refused.retry_after_s * 1e3))
    elif refused.status == 429:
        headers["x-should-retry"] = "false"  # OpenAI's clients would else try every 429 again
    if refused.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if allowed:
        headers["Allow"] = allowed
    reply = web.Response(
        status=refused.status, body=error_json(refused.body), content_type="application/json", headers=headers
    )
    if close:
        reply.force_close()
    return reply


class EventStream:
    """One streamed answer. Headers go out with the first event, so that an error before it still has its status.

    A client that does not read is written to until ``limit_bytes`` wait for it in this process; then it has
    ``patience_ms`` to catch up.
    """

    def __init__(self, exchange: Exchange, *, limit_bytes: int, patience_ms: int) -> None:
        self._request = exchange.request
        self._limit_bytes = limit_bytes
        self._patience_ms = patience_ms
        self.reply = web.StreamResponse(
            headers={
                **exchange.headers,
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # nginx would else collect the tokens
            }
        )
        self.sent_bytes = 0

    async def begin(self) -> None:
        """Fix the status. Nothing can be refused with a status of its own after this."""
        transport = self._request.transport
        if transport is not None:
            transport.set_write_buffer_limits(high=self._limit_bytes)
        await self.reply.prepare(self._request)

    async def chunk(self, data: bytes) -> None:
        """Send one JSON object untouched. Raises ``SlowClient``, or ``ConnectionError`` when the client is gone."""
        if b"\n" in data:  # only a pretty-printing engine: every line of an event needs its own field name
            data = data.replace(b"\n", b"\ndata: ")
        await self._send(b"data: " + data + b"\n\n")

    async def done(self) -> None:
        """Say that the answer is complete."""
        await self._send(_DONE)

    async def error(self, refused: Refused) -> None:
        """Say that it failed. No ``[DONE]`` follows, so that nobody takes the text before it for the whole."""
        await self._send(b"data: " + error_json(refused.body) + b"\n\n")

    async def _send(self, event: bytes) -> None:
        self.sent_bytes += len(event)
        if not self._request.protocol.writing_paused:
            await self.reply.write(event)
            return
        try:
            async with asyncio.timeout(self._patience_ms / 1e3) as patience:
                await self.reply.write(event)
        except TimeoutError:
            if not patience.expired():
                raise
            raise SlowClient(self._limit_bytes, self._patience_ms) from None
