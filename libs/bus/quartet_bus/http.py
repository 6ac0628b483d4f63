"""The small HTTP door of every process: is it alive, is it ready, and its metrics.

h11 reads the protocol and asyncio the sockets: a lean service has no room for a framework. Everything is bounded, since
whoever scrapes may be anybody: header bytes, connections, and the time a request may take to arrive.
"""

import asyncio
import json
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Self

import h11

MAX_HEADER_BYTES = 8192
MAX_CONNECTIONS = 64
READ_BYTES = 4096
IDLE_TIMEOUT_S = 15.0
WRITE_TIMEOUT_S = 15.0

JSON = "application/json"
METRICS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class Page(NamedTuple):
    """What a GET gets."""

    status: int
    content_type: str
    body: bytes


class HttpDoor:
    """Serves ``/livez``, ``/healthz``, ``/readyz`` and ``/metrics``; use it as an async context manager.

    ``/livez`` is 200 while the process runs. ``/healthz`` and ``/readyz`` are 503, with the reason, when the service
    cannot do its work: a green light that only says "I run" hides outages. Port 0 takes a free port.
    """

    def __init__(
        self, host: str, port: int, *, not_ready: Callable[[], str | None], metrics: Callable[[], bytes]
    ) -> None:
        self.host = host
        self.port = port
        self._not_ready = not_ready
        self._metrics = metrics
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Listen. Raises ``OSError`` when the port is taken."""
        self._server = await asyncio.start_server(self._on_connection, self.host, self.port, limit=MAX_HEADER_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        if connections:
            await asyncio.wait(connections)

    def page(self, target: str) -> Page:
        """The page at ``target``."""
        match target.partition("?")[0]:
            case "/livez":
                return Page(200, JSON, b'{"status":"alive"}')
            case "/healthz" | "/readyz":
                reason = self._not_ready()
                if reason is None:
                    return Page(200, JSON, b'{"status":"ready"}')
                return Page(503, JSON, json.dumps({"status": "not ready", "reason": reason}).encode())
            case "/metrics":
                return Page(200, METRICS_TEXT, self._metrics())
            case _:
                return Page(404, JSON, b'{"error":"try /livez, /healthz, /readyz or /metrics"}')

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            writer.close()
            return
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._converse(reader, writer)
        except (TimeoutError, ConnectionError, h11.LocalProtocolError):
            return  # the other side is gone, or too slow to wait for
        finally:
            self._connections.discard(task)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)
        while True:
            try:
                request = await _next_request(connection, reader)
            except h11.RemoteProtocolError as error:
                status = error.error_status_hint if error.error_status_hint else 400
                await _send(connection, writer, Page(status, JSON, b'{"error":"not a request we take"}'), True)
                return
            if request is None:
                return
            if request.method not in (b"GET", b"HEAD"):
                page = Page(405, JSON, b'{"error":"only GET"}')
            else:
                page = self.page(request.target.decode("ascii", "replace"))
            await _send(connection, writer, page, request.method != b"HEAD")
            if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                return
            connection.start_next_cycle()


async def _next_request(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Request | None:
    """The next whole request, its body thrown away; None when the other side is done. Raises ``TimeoutError``."""
    request: h11.Request | None = None
    async with asyncio.timeout(IDLE_TIMEOUT_S):
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                if connection.they_are_waiting_for_100_continue:
                    return request  # a body is announced that nobody here wants
                connection.receive_data(await reader.read(READ_BYTES))
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.EndOfMessage):
                return request
            elif isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
                return None


async def _send(connection: h11.Connection, writer: asyncio.StreamWriter, page: Page, with_body: bool) -> None:
    if connection.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
        return
    headers = [("content-type", page.content_type), ("content-length", str(len(page.body)))]
    parts = [connection.send(h11.Response(status_code=page.status, headers=headers))]
    if with_body:
        parts.append(connection.send(h11.Data(data=page.body)))
    parts.append(connection.send(h11.EndOfMessage()))
    writer.write(b"".join(part for part in parts if part))
    async with asyncio.timeout(WRITE_TIMEOUT_S):
        await writer.drain()
