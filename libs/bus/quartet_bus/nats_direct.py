"""nats-py's client, with a shorter way in and out for what is on the path of every request.

nats-py gives each subscription a queue and a task, and has another task write. Each costs a message a turn of the loop,
and a turn handles everything else that is ready before it. So here

- a message's handler is called as soon as the message is read, in the order of arrival on the connection. What is not
  handled yet is not read yet: it waits in the kernel and at the broker, which bounds it;
- what is urgent is written to the socket before ``send`` returns, and the rest with one system call at the end of the
  loop's turn.

Everything else (TLS, credentials, pings, JetStream) is nats-py's. ``tests/contract`` holds for this client.
"""

import asyncio
import os
from collections.abc import Callable

from quartet_bus.bus import Headers, Message
from quartet_bus.lean import hidden
from quartet_bus.nats_reader import PLAIN_HEADERS, DirectParser, read_headers

with hidden("aiohttp"):
    from nats.aio.client import PING_PROTO, Client
    from nats.aio.subscription import Subscription
    from nats.aio.transport import TcpTransport


class DirectClient(Client):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self._handlers: dict[int, Callable[[Message], None]] = {}
        self._ps = DirectParser(self, self._handlers)
        self._flushing = False

    def deliver(self, subscription: Subscription, handler: Callable[[Message], None]) -> None:
        """Call ``handler``, which must not raise, with each message of ``subscription`` from now on."""
        self._handlers[subscription._id] = handler

    def send(self, subject: str, data: bytes, headers: Headers | None, reply: str, urgent: bool) -> None:
        """Publish what was found to be publishable, on a connection that is there."""
        if headers:
            # nats-py's coroutine suspends only when its buffer is full or a thousand flushes wait. The caller has
            # looked at the buffer, and the command is in it by the time that a full flush queue would suspend.
            step = self.publish(subject, data, reply=reply, headers=dict(headers))
            try:
                step.send(None)
            except StopIteration:
                pass
            else:
                step.close()
        else:
            command = b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply.encode(), len(data), data)
            self._pending.append(command)
            self._pending_data_size += len(command)
        if urgent and self._write_now():
            return
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush_turn)

    def _flush_turn(self) -> None:
        """Write what this turn of the loop published; what cannot go out at once is the flusher's, who can wait."""
        self._flushing = False
        if not self._pending or self._write_now():
            return
        flushes = self._flush_queue
        if flushes is not None and flushes.empty():
            flushes.put_nowait(asyncio.get_running_loop().create_future())

    async def _send_ping(self, future: asyncio.Future[None] | None = None) -> None:
        """A ping behind all that was published before it, which the pong is to confirm; nats-py sends it ahead."""
        self._pongs.append(future if future is not None else asyncio.get_running_loop().create_future())
        self._pending.append(PING_PROTO)
        self._pending_data_size += len(PING_PROTO)
        await self._flush_pending()

    def _write_now(self) -> bool:
        """Give the kernel all that was published so far; False where that is the flusher's to do: when earlier writes
        are still on their way, or bytes do not go out as they are (TLS)."""
        writer = self._transport._io_writer if isinstance(self._transport, TcpTransport) else None
        if writer is None:
            return False
        transport = writer.transport
        if transport.get_write_buffer_size() or transport.get_extra_info("ssl_object") is not None:
            return False
        data = b"".join(self._pending)
        try:
            # Neither loop's transport writes at once for certain; uvloop's never does.
            written = os.write(transport.get_extra_info("socket").fileno(), data)
        except OSError:
            return False  # full or broken, as the flusher will find out
        self._pending = []
        self._pending_data_size = 0
        if written < len(data):
            transport.write(data[written:])
        return True

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        handler = self._handlers.get(sid)
        if handler is None:
            await super()._process_msg(sid, subject, reply, data, headers or b"")
            return
        said: Headers | None = None
        if headers:
            if headers.startswith(PLAIN_HEADERS):
                said = read_headers(headers)
            else:
                said = await self._process_headers(headers)
        handler(Message(subject.decode(), data, said, reply.decode()))

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self._handlers.pop(sid, None)
        super()._remove_sub(sid, max_msgs)
