"""The socket side: an aiohttp server for the door, and how it begins and ends.

aiohttp's low-level server is used, not its Application: the door has a handful of addresses, and whatever goes wrong,
an unreadable request line included, must come back as OpenAI's error object.
"""

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler

from quartet_bus.config.check import ConfigError
from quartet_bus.process import Fault
from quartet_core.openai import invalid
from quartet_gateway.door import Door
from quartet_gateway.errors import header_too_long, internal
from quartet_gateway.service import GatewayService

_BACKLOG = 1024
_REASONS = {
    errno.EADDRINUSE: "the port is taken",
    errno.EACCES: "not allowed",
    errno.EADDRNOTAVAIL: "this host has no such address",
}
_CLOSE_S = 2.0
"""What connections get to write their last bytes after their requests have ended."""


class CannotListen(Fault):
    """``gateway.listen`` is taken, or not an address of this host."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"cannot listen on {address} (gateway.listen): {reason}")
        self.address = address
        self.reason = reason


class _Connection(RequestHandler):
    """One client connection, whose protocol errors are OpenAI error objects and structured log lines."""

    door: Door
    service: GatewayService

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Called for requests that are not HTTP, or too large in line or headers, and for faults outside the door."""
        if isinstance(exc, ConnectionError):
            raise exc
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun; only closing the connection can tell the client")
        if isinstance(exc, LineTooLong):
            return self.door.refuse_unreadable(request, header_too_long(self.max_field_size))
        reason = next(iter(str(message or exc).splitlines()), "").rstrip(":")  # further lines quote the request
        refused = internal() if status >= 500 else invalid(f"The request is not valid HTTP: {reason}.")
        return self.door.refuse_unreadable(request, refused)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """A fault inside the HTTP library or outside the door's own net; a broken body is only its sender's."""
        say = self.service.log.error
        if isinstance(kw.get("exc_info"), web.RequestPayloadError):
            say = self.service.log.debug
        say("connection failed", error=str(args[0] if args else ""), exc_info=kw.get("exc_info"))


class _HttpServer(web.Server):
    """Makes connections with this gateway's limits; a lost one cancels its handler."""

    def __init__(self, service: GatewayService) -> None:
        self._service = service
        self._door = Door(service)
        super().__init__(self._door.handle, handler_cancellation=True)

    def __call__(self) -> RequestHandler:
        settings = self._service.config.gateway
        connection = _Connection(
            self,
            loop=self._loop,
            access_log=None,  # type: ignore[arg-type]  # None switches it off; the door writes its own
            keepalive_timeout=settings.idle_timeout_ms / 1e3,
            max_line_size=settings.max_header_bytes,
            max_field_size=settings.max_header_bytes,
        )
        connection.door = self._door
        connection.service = self._service
        return connection


@asynccontextmanager
async def http_site(service: GatewayService) -> AsyncIterator[None]:
    """Serve HTTP inside. At the end: say so, accept nobody, let open streams finish, end what is left, close.

    Raises ``CannotListen``, or ``ConfigError`` when ``gateway.listen`` is no address.
    """
    settings = service.config.gateway
    listen = settings.listen
    host, port = _address(listen)
    runner = web.ServerRunner(_HttpServer(service), shutdown_timeout=_CLOSE_S)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, backlog=_BACKLOG, reuse_port=settings.reuse_port or None)
        try:
            await site.start()
        except OSError as error:
            raise CannotListen(listen, _REASONS.get(error.errno or 0) or error.strerror or str(error)) from None
        bound = runner.addresses[0]
        service.address = f"{bound[0]}:{bound[1]}"
        service.log.info("listening", address=service.address, keys_required=service.keys.required)
        try:
            yield
        finally:
            service.leave()
            if settings.drain_notice_ms:
                service.log.info("leaving", listens_for_ms=settings.drain_notice_ms)
                await asyncio.sleep(settings.drain_notice_ms / 1e3)
            await site.stop()
            ended = await service.streams.drain(service.config.service.stop_timeout_ms / 1e3)
            if ended:
                service.log.warning("streams ended by the stop", streams=ended)
            service.address = ""
    finally:
        await runner.cleanup()


def _address(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ConfigError("configuration", "gateway.listen", listen, "must be HOST:PORT; port 0 takes a free one")
    return host.strip("[]") or "0.0.0.0", int(port)
