"""A bus in memory: one ``MemoryBroker`` and any number of ``MemoryBus`` clients on one event loop.

It keeps the whole contract of ``quartet_bus.bus`` and is deterministic: messages are routed when they are published
and delivered first in, first out, by one timer, whoever sends or hears them; the members of a queue group take turns.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import structlog

from quartet_bus.bus import Disconnected, Handler, Headers, LogSpec, Message, RequestTimeout
from quartet_bus.payload import check_size
from quartet_bus.requests import NO_RESPONDERS, Requests
from quartet_bus.routes import Routes, matches

_log = structlog.get_logger()
Tap = Callable[[float, Message], None]

MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
"""As our broker's configuration says (``quartet_bus.server``)."""


@dataclass(slots=True, eq=False)
class MemorySubscription:
    """One live subscription on a ``MemoryBus``."""

    bus: "MemoryBus"
    subject: str
    handler: Handler
    queue: str
    live: bool = True

    async def stop(self) -> None:
        """Hear no more; messages on their way are dropped."""
        self.bus.drop(self)


@dataclass(slots=True)
class _Log:
    spec: LogSpec
    entries: deque[tuple[float, Message]] = field(default_factory=deque)
    size_bytes: int = 0

    def trim(self, now_s: float) -> None:
        """Forget what is too old or too much."""
        oldest_s = now_s - self.spec.max_age_s
        while self.entries and (self.entries[0][0] < oldest_s or self.size_bytes > self.spec.max_bytes):
            self.size_bytes -= len(self.entries.popleft()[1].data)

    def add(self, now_s: float, message: Message) -> None:
        self.entries.append((now_s, message))
        self.size_bytes += len(message.data)
        self.trim(now_s)


class MemoryBroker:
    """What the clients of a memory bus share. Use it from one event loop.

    ``delay_s`` passes between publish and delivery; with 0 a message is delivered in the loop's next iteration. ``tap``
    sees every message as it is published, with the loop's time: the event log of a virtual fleet.
    """

    def __init__(
        self, *, delay_s: float = 0.0, max_payload_bytes: int = MAX_PAYLOAD_BYTES, tap: Tap | None = None
    ) -> None:
        self.delay_s = delay_s
        self.max_payload_bytes = max_payload_bytes
        self.tap = tap
        self.handler_errors = 0
        self._routes: Routes[MemorySubscription] = Routes()
        self._due: deque[tuple[float, MemorySubscription, Message]] = deque()
        self._armed = False
        self._turns: dict[str, int] = {}
        self._logs: dict[str, _Log] = {}
        self._clients = itertools.count(1)

    def client_number(self) -> int:
        """A number that no other client of this broker has."""
        return next(self._clients)

    def add(self, subscription: MemorySubscription) -> None:
        """Route messages to ``subscription`` from now on."""
        self._routes.add(subscription.subject, subscription)

    def remove(self, subscription: MemorySubscription) -> None:
        """Route nothing to ``subscription`` any more."""
        self._routes.remove(subscription.subject, subscription)

    def publish(self, message: Message) -> None:
        """Take one message. Whoever waits for an answer hears at once that nobody listens, as NATS does it."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        if self.tap is not None:
            self.tap(now_s, message)
        for log in self._logs.values():
            if any(matches(pattern, message.subject) for pattern in log.spec.subjects):
                log.add(now_s, message)
        receivers = self._receivers(message.subject)
        if receivers:
            due_s = now_s + self.delay_s
            for subscription in receivers:
                self._due.append((due_s, subscription, message))
            self._arm(loop)
        elif message.reply:
            self.publish(Message(message.reply, b"", NO_RESPONDERS))

    def keep(self, spec: LogSpec) -> None:
        """Keep a log, or bring an existing one to ``spec``."""
        log = self._logs.setdefault(spec.name, _Log(spec))
        log.spec = spec
        log.trim(asyncio.get_running_loop().time())

    def kept(self, name: str, subject: str) -> list[Message]:
        """What the log ``name`` holds on ``subject``, oldest first; nothing when there is no such log."""
        log = self._logs.get(name)
        if log is None:
            return []
        log.trim(asyncio.get_running_loop().time())
        return [message for _, message in log.entries if matches(subject, message.subject)]

    def _receivers(self, subject: str) -> list[MemorySubscription]:
        receivers: list[MemorySubscription] = []
        groups: dict[str, list[MemorySubscription]] = {}
        for subscription in self._routes.find(subject):
            if subscription.queue:
                groups.setdefault(subscription.queue, []).append(subscription)
            else:
                receivers.append(subscription)
        for queue, members in groups.items():
            turn = self._turns.get(queue, 0)
            self._turns[queue] = turn + 1
            receivers.append(members[turn % len(members)])
        return receivers

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._armed or not self._due:
            return
        self._armed = True
        # One timer for the first in line: equal times would otherwise leave a heap in any order.
        if self.delay_s <= 0:
            loop.call_soon(self._deliver, loop)
        else:
            loop.call_at(self._due[0][0], self._deliver, loop)

    def _deliver(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s = loop.time() + 1e-9  # a timer may fire a clock tick early
        due = self._due
        try:
            for _ in range(len(due)):
                if due[0][0] > now_s:
                    break
                _, subscription, message = due.popleft()
                if subscription.live:
                    self._handle(subscription, message)
        finally:
            self._armed = False
            self._arm(loop)

    def _handle(self, subscription: MemorySubscription, message: Message) -> None:
        try:
            subscription.handler(message)
        except Exception:
            self.handler_errors += 1
            _log.exception("handler failed", subject=message.subject)


class MemoryBus:
    """One client of a ``MemoryBroker``; see ``quartet_bus.bus.Bus`` for the contract."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        self._subscriptions: list[MemorySubscription] = []
        self._closed = False
        self._requests = Requests(self, f"_INBOX.memory.{broker.client_number()}")

    @property
    def max_payload_bytes(self) -> int:
        """The largest payload the broker takes."""
        return self._broker.max_payload_bytes

    @property
    def unsent_bytes(self) -> int:
        """As ``Bus.unsent_bytes``: nothing ever waits here."""
        return 0

    @property
    def connected(self) -> bool:
        """True until closed."""
        return not self._closed

    def publish(
        self, subject: str, data: bytes, *, headers: Headers | None = None, reply: str = "", urgent: bool = False
    ) -> None:
        """Hand one message to the broker."""
        if self._closed:
            raise Disconnected("the bus is closed")
        check_size(subject, data, headers, self._broker.max_payload_bytes)
        self._broker.publish(Message(subject, data, dict(headers) if headers else None, reply))

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> MemorySubscription:
        """Call ``handler`` with every message on ``subject``."""
        if self._closed:
            raise Disconnected("the bus is closed")
        subscription = MemorySubscription(self, subject, handler, queue)
        self._subscriptions.append(subscription)
        self._broker.add(subscription)
        return subscription

    def drop(self, subscription: MemorySubscription) -> None:
        """End ``subscription``; ending it twice does nothing."""
        if subscription.live:
            subscription.live = False
            self._subscriptions.remove(subscription)
            self._broker.remove(subscription)

    async def request(self, subject: str, data: bytes, *, timeout_s: float, headers: Headers | None = None) -> Message:
        """Publish and return the first answer."""
        return await self._requests.ask(subject, data, timeout_s=timeout_s, headers=headers)

    async def flush(self) -> None:
        """The broker has everything already; only a closed bus cannot say so."""
        if self._closed:
            raise RequestTimeout("flush", 0.0)

    async def keep(self, log: LogSpec) -> None:
        """Have the broker keep ``log``."""
        self._broker.keep(log)

    async def replay(self, log: LogSpec, subject: str) -> AsyncIterator[Message]:
        """What ``log`` holds on ``subject`` right now, oldest first."""
        for message in self._broker.kept(log.name, subject):
            yield message

    async def close(self) -> None:
        """End every subscription; what was published is still delivered to others."""
        self._closed = True
        for subscription in list(self._subscriptions):
            self.drop(subscription)
        self._requests.close()
