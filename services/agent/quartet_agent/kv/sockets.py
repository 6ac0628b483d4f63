"""Sockets without streams: bytes go from the caller's memory to the kernel, and back, with no buffer in between.

asyncio's streams copy what they are given at least once, and what they receive twice. A transfer knows its sizes, and
needs neither.
"""

import asyncio
import contextlib
import socket
from collections.abc import Sequence

from quartet_agent.kv.mover import Buffer

_VECTORS = 512
"""Buffers in one call, below every system's limit (IOV_MAX is 1,024 on Linux)."""

_SOCKET_BUFFER_BYTES = 4 * 1024 * 1024
"""Asked of the kernel in each direction, which gives what its own limits allow."""


def tuned(sock: socket.socket) -> socket.socket:
    """The same socket, not blocking, with room for a few chunks and no waiting for small words."""
    sock.setblocking(False)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


async def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises ``OSError``."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(128)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


async def connect(host: str, port: int) -> socket.socket:
    """A connected socket. Raises ``OSError``."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = found[0]
    sock = tuned(socket.socket(family, kind, protocol))
    try:
        await loop.sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


async def send_all(sock: socket.socket, buffers: Sequence[Buffer], silence_s: float) -> None:
    """Send ``buffers``, one after the other, uncopied. Raises ``OSError``.

    However slow: ``TimeoutError`` only when not a byte was taken for ``silence_s``.
    """
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    first = 0
    while first < len(views):
        try:
            sent = sock.sendmsg(views[first : first + _VECTORS])
        except (BlockingIOError, InterruptedError):
            async with asyncio.timeout(silence_s):
                await _writable(sock)
            continue
        while first < len(views) and sent >= len(views[first]):
            sent -= len(views[first])
            first += 1
        if sent:
            views[first] = views[first][sent:]


async def receive(sock: socket.socket, into: memoryview, silence_s: float) -> None:
    """Fill ``into``. Raises ``OSError``: ``ConnectionResetError`` where the other side hung up before, ``TimeoutError``
    when not a byte came for ``silence_s``."""
    loop = asyncio.get_running_loop()
    while into:
        async with asyncio.timeout(silence_s):
            got = await loop.sock_recv_into(sock, into)
        if not got:
            raise ConnectionResetError("the other side hung up")
        into = into[got:]


async def received(sock: socket.socket, size: int, silence_s: float) -> bytearray:
    """The next ``size`` bytes, for small words. Raises as `receive` does."""
    word = bytearray(size)
    await receive(sock, memoryview(word), silence_s)
    return word


async def _writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def say() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_writer(sock, say)
    try:
        await ready
    finally:
        loop.remove_writer(sock)
