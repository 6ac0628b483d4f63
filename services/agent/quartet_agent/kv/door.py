"""The receiving end of a mover on sockets: who may connect, how many at once, and that the secret comes first."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

from quartet_agent.kv import sockets, wire
from quartet_agent.kv.mover import MoveError, MoveReason, Sink

Receive = Callable[[socket.socket, Sink, contextlib.ExitStack], Awaitable[None]]
"""Takes one transfer from a connection, the hello on. Raises ``MoveError``, whose reason its sender is then told.

What it pushes on the stack is undone when the sender can do no more: it hung up, or some time after it should have.
"""

_GOODBYE_S = 1.0
_SCRIBBLE_S = 15.0
"""After how long nobody writes any more into memory that was offered on a connection that did not end in order."""


class Door:
    """Listens, and has ``receive`` take each transfer; the ``max_intakes``-th and later ones at once are told busy."""

    def __init__(self, listen: str, receive: Receive, *, max_intakes: int) -> None:
        self._host, _, port = listen.rpartition(":")
        self._port = int(port)
        self._receive = receive
        self._max_intakes = max_intakes
        self._listening: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._intakes: set[asyncio.Task[None]] = set()

    @property
    def intakes(self) -> int:
        """Connections from senders that are open."""
        return len(self._intakes)

    async def open(self, sink: Sink) -> str:
        """Listen; return ``host:port``. Raises ``OSError`` when the address cannot be listened on."""
        self._listening = await sockets.listen(self._host.strip("[]") or "127.0.0.1", self._port)
        self._accepting = asyncio.ensure_future(self._accept(self._listening, sink))
        host, port = self._listening.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def close(self) -> None:
        """Break what is under way. Closing twice does nothing."""
        tasks = [*self._intakes, *([self._accepting] if self._accepting is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listening is not None:
            self._listening.close()
        self._listening = self._accepting = None

    async def _accept(self, listening: socket.socket, sink: Sink) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listening)
            except OSError:  # out of descriptors, or the connection is gone already: there will be others
                await asyncio.sleep(0.05)
                continue
            busy = len(self._intakes) >= self._max_intakes
            task = asyncio.ensure_future(self._serve(sockets.tuned(sock), sink, busy))
            self._intakes.add(task)
            task.add_done_callback(self._intakes.discard)

    async def _serve(self, sock: socket.socket, sink: Sink, busy: bool) -> None:
        later = contextlib.ExitStack()
        hung_up = False
        try:
            with sock:
                reason = await self._outcome(sock, sink, busy, later)
                with contextlib.suppress(OSError):
                    async with asyncio.timeout(_GOODBYE_S):
                        await sockets.send_all(sock, [wire.encode_answer(reason)], _GOODBYE_S)
                        await _drained(sock)
                        hung_up = True
        finally:
            if hung_up:
                later.close()
            else:
                asyncio.get_running_loop().call_later(_SCRIBBLE_S, later.close)

    async def _outcome(
        self, sock: socket.socket, sink: Sink, busy: bool, later: contextlib.ExitStack
    ) -> MoveReason | None:
        try:
            if busy:
                return MoveReason.BUSY
            await self._receive(sock, sink, later)
        except MoveError as error:
            return error.reason
        except TimeoutError:  # an OSError, too
            return MoveReason.TIMEOUT
        except OSError:
            return MoveReason.CONNECTION  # the sender is gone, or soon will be: its own agent reports the transfer
        return None


async def _drained(sock: socket.socket) -> None:
    """Until the sender hung up: closing on bytes that nobody read would take back the answer just sent."""
    sock.shutdown(socket.SHUT_WR)
    waste = memoryview(bytearray(64 * 1024))
    while await asyncio.get_running_loop().sock_recv_into(sock, waste):
        pass
