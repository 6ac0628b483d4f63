"""Streamed answers: server-sent events as OpenAI's clients expect them, with one write for each turn of the loop.

A token that arrives wakes no task and is written by no coroutine. It is kept until the loop has handled whatever else
arrived with it; then every stream that has something is written to, once: a write to a socket costs more than all else
that happens to a token.
"""

import asyncio
from collections.abc import Callable

from aiohttp import web

from quartet_core.openai import Refused
from quartet_gateway.errors import error_json
from quartet_gateway.exchange import Exchange

_DONE = b"[DONE]"


class Outbox:
    """The streams that have something to write in this turn of the loop."""

    def __init__(self) -> None:
        self._streams: list[EventStream] = []

    def add(self, stream: "EventStream") -> None:
        """Have ``stream`` flushed at the end of this turn. Called at most once before that."""
        if not self._streams:
            asyncio.get_running_loop().call_soon(self._flush)
        self._streams.append(stream)

    def _flush(self) -> None:
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.flush()


class EventStream:
    """One streamed answer. Headers go out with the first event, so that an error before it still has its status.

    A client that does not read is written to until ``limit_bytes`` wait for it in the transport, and as many more here.
    Then it has ``patience_ms`` to catch up; ``on_slow`` is called when it does not, which is to end the connection.
    """

    def __init__(
        self, exchange: Exchange, outbox: Outbox, *, limit_bytes: int, patience_ms: int, on_slow: Callable[[], None]
    ) -> None:
        self._request = exchange.request
        self._outbox = outbox
        self._limit_bytes = limit_bytes
        self._patience_s = patience_ms / 1e3
        self._on_slow = on_slow
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._transport: asyncio.Transport | None = None
        self._catching_up: asyncio.Task[None] | None = None
        self.reply = web.StreamResponse(
            headers={
                **exchange.headers,
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # nginx would else collect the tokens
            }
        )
        self._chunked = exchange.request.version >= (1, 1)
        if self._chunked:
            self.reply.enable_chunked_encoding()
        self.sent_bytes = 0
        self.chunks = 0

    async def begin(self) -> None:
        """Fix the status. Nothing can be refused with a status of its own after this."""
        self._transport = self._request.transport
        if self._transport is None:
            raise ConnectionResetError("the client is gone")
        self._transport.set_write_buffer_limits(high=self._limit_bytes)
        await self.reply.prepare(self._request)

    def take(self, data: bytes) -> None:
        """Send one JSON object untouched, at the end of this turn of the loop."""
        self.chunks += 1
        if b"\n" in data:  # only a pretty-printing engine: every line of an event needs its own field name
            data = data.replace(b"\n", b"\ndata: ")
        if not self._waiting:
            self._outbox.add(self)
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        if self._catching_up is not None and self._waiting_bytes > self._limit_bytes:
            self._slow()

    async def done(self) -> None:
        """Say that the answer is complete."""
        await self._last(_DONE)

    async def error(self, refused: Refused) -> None:
        """Say that it failed. No ``[DONE]`` follows, so that nobody takes the text before it for the whole."""
        await self._last(error_json(refused.body))

    def flush(self) -> None:
        """Write what waits. For ``Outbox``."""
        transport = self._transport
        if not self._waiting or self._catching_up is not None or transport is None:
            return
        if transport.is_closing():
            self._forget()
        elif self._request.protocol.writing_paused:
            self._catching_up = asyncio.get_running_loop().create_task(self._catch_up())
        else:
            events = b"data: " + b"\n\ndata: ".join(self._waiting) + b"\n\n"
            self._forget()
            self.sent_bytes += len(events)
            # Past aiohttp's own writer, which would wake a coroutine and wrap every event by itself.
            transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)

    def close(self) -> None:
        """Write nothing more. Closing twice does nothing."""
        self._forget()
        if self._catching_up is not None:
            self._catching_up.cancel()

    async def _last(self, data: bytes) -> None:
        self._waiting.append(data)
        self.flush()
        if self._catching_up is not None:
            await self._catching_up
        self.flush()

    async def _catch_up(self) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                await self._request.writer.drain()
        except TimeoutError:
            self._slow()
            return
        self._catching_up = None
        self.flush()

    def _slow(self) -> None:
        self._forget()
        self._on_slow()

    def _forget(self) -> None:
        self._waiting = []
        self._waiting_bytes = 0
