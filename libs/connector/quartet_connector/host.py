"""The engine's side of the socket: an arena's memory, and a thread that listens for an agent and keeps nobody waiting.

The memory is anonymous (memfd), so that nothing is left of it when the engine ends, however it ends. Agents get it as a
file descriptor; the engine's own workers, which are processes of the same host, open it below ``/proc``.
"""

import contextlib
import mmap
import os
import selectors
import socket
import stat
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from quartet_connector.words import AgentWord, BadFrame, EngineWord, Frames, Welcome, agent_word, frame

_READ_BYTES = 1 << 16
_MOST_WAITING_BYTES = 256 << 20
"""What an agent may leave unread: one that reads nothing is hung up on, and hears it all anew when it comes again."""


class ArenaMemory:
    """Shared memory. ``path`` is where the engine's workers find it. Raises ``OSError`` when there is no room."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.fd = os.memfd_create("quartet-pages", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.fd, 0, size_bytes)  # now, and not by a signal at the first write
        except OSError:
            os.close(self.fd)
            raise
        self.path = f"/proc/{os.getpid()}/fd/{self.fd}"
        self.view = memoryview(mmap.mmap(self.fd, size_bytes))


class Agent(Protocol):
    """Who is told what happens on the socket; called from its thread."""

    def hello(self) -> None:
        """Somebody connected: have ``Welcome`` told first."""
        ...

    def hear(self, word: AgentWord) -> None:
        """They said something."""
        ...

    def gone(self) -> None:
        """They went."""
        ...


class PageHost:
    """Serves one agent at ``path``; ``memory_fd`` goes with the first byte. Used between ``start`` and ``close``."""

    def __init__(self, path: str, memory_fd: int) -> None:
        self._path = path
        self._memory_fd = memory_fd
        self._agent: Agent | None = None
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._greeted = False
        self._queue_lock = threading.Lock()
        self._wakes, self._wake = socket.socketpair()
        self._wakes.setblocking(False)
        self._wake.setblocking(False)
        self._closing = False
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def start(self, agent: Agent) -> None:
        """Listen. Raises ``OSError`` when the path cannot be listened on, or somebody else does."""
        self._agent = agent
        self._listener = _listen(self._path)
        self._thread = threading.Thread(target=self._run, name="quartet-pages", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up and listen no more."""
        self._closing = True
        self._nudge()
        if self._thread is not None:
            self._thread.join(2.0)
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def tell(self, words: Sequence[EngineWord]) -> None:
        """Send words to the agent, if there is one that was welcomed, or is by the first of them."""
        data = []
        for word in words:
            if not self._greeted:
                if not isinstance(word, Welcome):
                    continue
                self._greeted = True
            data.append(frame(word))
        if data:
            with self._queue_lock:
                self._waiting.extend(data)
                self._waiting_bytes += sum(map(len, data))
            self._nudge()

    # In the thread

    def _run(self) -> None:
        assert self._listener is not None
        assert self._agent is not None
        connection: _Connection | None = None
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wakes, selectors.EVENT_READ)
            while not self._closing:
                events = {key.fileobj: mask for key, mask in selector.select()}
                if self._wakes in events:
                    with contextlib.suppress(BlockingIOError):
                        self._wakes.recv(4096)
                if self._listener in events:
                    with contextlib.suppress(OSError):
                        newcomer, _ = self._listener.accept()
                        self._leave(selector, connection)
                        connection = self._meet(selector, newcomer)
                if connection is not None and not self._serve(selector, connection, events):
                    self._leave(selector, connection)
                    connection = None
            self._leave(selector, connection)
        self._listener.close()

    def _meet(self, selector: selectors.BaseSelector, newcomer: socket.socket) -> "_Connection":
        assert self._agent is not None
        newcomer.setblocking(False)
        selector.register(newcomer, selectors.EVENT_READ)
        with self._queue_lock:
            self._waiting.clear()
            self._waiting_bytes = 0
        self._agent.hello()
        return _Connection(newcomer)

    def _leave(self, selector: selectors.BaseSelector, connection: "_Connection | None") -> None:
        if connection is not None:
            assert self._agent is not None
            selector.unregister(connection.socket)
            connection.socket.close()
            self._greeted = False
            self._agent.gone()

    def _serve(self, selector: selectors.BaseSelector, connection: "_Connection", events: dict[Any, int]) -> bool:
        """Read and write what can be; False when the connection is over."""
        assert self._agent is not None
        try:
            if events.get(connection.socket, 0) & selectors.EVENT_READ:
                data = connection.socket.recv(_READ_BYTES)
                if not data:
                    return False
                for body in connection.frames.feed(data):
                    self._agent.hear(agent_word(body))
            left = self._flush(connection)
        except BlockingIOError:
            left = True
        except (OSError, BadFrame, msgspec.DecodeError):
            return False
        selector.modify(connection.socket, selectors.EVENT_READ | (selectors.EVENT_WRITE if left else 0))
        return self._waiting_bytes <= _MOST_WAITING_BYTES

    def _flush(self, connection: "_Connection") -> bool:
        """Send what waits; True when the agent cannot take all of it yet."""
        while True:
            if not connection.unsent:
                with self._queue_lock:
                    if not self._waiting:
                        return False
                    connection.unsent = memoryview(b"".join(self._waiting))
                    self._waiting.clear()
                    self._waiting_bytes = 0
            try:
                if connection.handed:
                    sent = connection.socket.send(connection.unsent)
                else:
                    sent = socket.send_fds(connection.socket, [connection.unsent], [self._memory_fd])
                    connection.handed = True
            except BlockingIOError:
                return True
            connection.unsent = connection.unsent[sent:]

    def _nudge(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.send(b"\0")


class _Connection:
    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.frames = Frames()
        self.unsent = memoryview(b"")
        self.handed = False
        """Whether the memory went over."""


def _listen(path: str) -> socket.socket:
    """A listener at ``path``, in the place of one that nobody listens on any more. Raises ``OSError``."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise OSError(f"{path} is there, and is no socket")
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(path)
            except OSError:
                os.unlink(path)
            else:
                raise OSError(f"somebody listens on {path} already")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    os.chmod(path, 0o660)  # the agent may be another user of the same group
    listener.listen(2)
    return listener
