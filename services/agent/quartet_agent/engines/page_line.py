"""The line to an engine's connector: its socket, its words, and its arena's memory. Reconnects for ever."""

import asyncio
import contextlib
import mmap
import os
import socket
from collections.abc import Callable

import msgspec

from quartet_connector.layout import PROTOCOL
from quartet_connector.words import AgentWord, BadFrame, EngineWord, Frames, Welcome, engine_word, frame

_READ_BYTES = 1 << 16
_AGAIN_S = 0.5


class PageLine:
    """Follows the connector at ``path``. ``welcome`` is called with its memory, ``hear`` with each word after it, and
    ``lost`` when the line broke, which ends all that was agreed on it."""

    def __init__(
        self,
        path: str,
        welcome: Callable[[Welcome, memoryview], None],
        hear: Callable[[EngineWord], None],
        lost: Callable[[], None],
    ) -> None:
        self._path = path
        self._welcome = welcome
        self._hear = hear
        self._lost = lost
        self._unsent = bytearray()
        self._more = asyncio.Event()
        self._open = False
        self.problem = f"nobody listens on {path}"
        """Why there is no line, "" while there is."""

    def say(self, word: AgentWord) -> None:
        """Send a word, as soon as the line takes it; without a line it is for nobody."""
        if self._open:
            self._unsent += frame(word)
            self._more.set()

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            try:
                await self._follow()
            except (OSError, EOFError, BadFrame, msgspec.DecodeError) as error:
                self.problem = f"{self._path}: {error or type(error).__name__}"
            finally:
                if self._open:
                    self._open = False
                    self._lost()
            await asyncio.sleep(_AGAIN_S)

    async def _follow(self) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX) as sock:
            sock.setblocking(False)
            await loop.sock_connect(sock, self._path)
            frames, memory = Frames(), None
            sending: asyncio.Task[None] | None = None
            try:
                data, memory = await self._first(sock)
                while True:
                    for body in frames.feed(data):
                        word = engine_word(body)
                        if isinstance(word, Welcome):
                            self._begin(word, memory)
                            if sending is None:
                                sending = loop.create_task(self._send(sock))
                        elif self._open:
                            self._hear(word)
                    data = await loop.sock_recv(sock, _READ_BYTES)
                    if not data:
                        raise EOFError("the connector hung up")
                    if sending is not None and sending.done():
                        sending.result()
            finally:
                if sending is not None:
                    sending.cancel()
                    await asyncio.gather(sending, return_exceptions=True)

    async def _first(self, sock: socket.socket) -> tuple[bytes, mmap.mmap]:
        """The first bytes, and the memory that comes with them."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(sock, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(sock)
        data, descriptors, _, _ = socket.recv_fds(sock, _READ_BYTES, 1)
        try:
            if not data or len(descriptors) != 1:
                raise EOFError("the connector gave no memory")
            return data, mmap.mmap(descriptors[0], 0)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _begin(self, welcome: Welcome, memory: mmap.mmap) -> None:
        if welcome.protocol != PROTOCOL:
            raise BadFrame(f"the connector speaks protocol {welcome.protocol}, this agent {PROTOCOL}")
        if welcome.layout is None or welcome.off:
            self._open = False
            self._lost()
            raise EOFError(f"the engine has no pages: {welcome.off}")
        if welcome.layout.slot_bytes * welcome.slots != len(memory):
            raise BadFrame(f"{welcome.slots} slots of {welcome.layout.slot_bytes} bytes in {len(memory)}")
        self._unsent.clear()
        self._open, self.problem = True, ""
        self._welcome(welcome, memoryview(memory))

    async def _send(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # the reading side learns of it
            while True:
                await self._more.wait()
                self._more.clear()
                data, self._unsent = bytes(self._unsent), bytearray()
                await loop.sock_sendall(sock, data)
