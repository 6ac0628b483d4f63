"""What a bus is: the contract that the NATS bus and the in-memory bus both keep (``tests/contract``).

Publishing and handling are plain calls, so that services are event-driven state machines without interleavings:
``publish`` queues and returns at once, and a handler runs to its end before the next message of its subscription.
Whatever must wait is a coroutine of its own (``Service.spawn``).
"""

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Protocol

from msgspec import Struct

Headers = Mapping[str, str]


class Message(Struct, frozen=True, gc=False):
    """One message as it arrived. ``reply`` is "" when nobody waits for an answer."""

    subject: str
    data: bytes
    headers: Headers | None = None
    reply: str = ""


Handler = Callable[[Message], None]


class BusError(Exception):
    """Something the bus could not do."""


class PayloadTooLarge(BusError):
    """A message is larger than the broker takes; nothing was sent."""

    def __init__(self, subject: str, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"message on {subject} has {size_bytes} bytes; the broker takes at most {limit_bytes}")
        self.subject = subject
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class NoResponders(BusError):
    """Nobody listens where a request was sent."""

    def __init__(self, subject: str) -> None:
        super().__init__(f"nobody listens on {subject}")
        self.subject = subject


class RequestTimeout(BusError):
    """A request was not answered in time."""

    def __init__(self, subject: str, timeout_s: float) -> None:
        super().__init__(f"no answer on {subject} within {timeout_s:g} s")
        self.subject = subject
        self.timeout_s = timeout_s


class Disconnected(BusError):
    """The bus is closed, or away for so long that its outgoing buffer is full."""


class Unavailable(BusError):
    """The broker lacks something we need, for example JetStream; the text says what to change."""


class Subscription(Protocol):
    """A live subscription."""

    async def stop(self) -> None:
        """Hear no more. Messages already received may still be handled."""
        ...


class LogSpec(Struct, frozen=True):
    """A kept log of messages (a JetStream stream): its name, what it keeps, and for how long at most."""

    name: str
    subjects: tuple[str, ...]
    max_age_s: float
    max_bytes: int


class Bus(Protocol):
    """Subjects, queue groups, request-reply, and kept logs."""

    @property
    def max_payload_bytes(self) -> int:
        """The largest payload ``publish`` takes."""
        ...

    @property
    def connected(self) -> bool:
        """Whether the broker is there right now."""
        ...

    @property
    def unsent_bytes(self) -> int:
        """What was published and is still in this process: who produces faster than the broker takes, should wait."""
        ...

    def publish(
        self, subject: str, data: bytes, *, headers: Headers | None = None, reply: str = "", urgent: bool = False
    ) -> None:
        """Queue a message and return at once; per publisher and subject, order is kept.

        With ``urgent`` it goes out before this returns, if it can, and all that was queued before with it; otherwise
        when the messages at hand are handled.

        Raises ``PayloadTooLarge``, or ``Disconnected`` when the bus is closed or its outgoing buffer is full.
        """
        ...

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """Call ``handler`` with every message on ``subject`` (``*`` one token, ``>`` the rest), one at a time.

        Of the subscribers that share a ``queue`` only one gets each message. An exception in a handler is logged and
        counted, and the subscription lives on. On return the broker knows the subscription.
        """
        ...

    async def request(self, subject: str, data: bytes, *, timeout_s: float, headers: Headers | None = None) -> Message:
        """Publish and return the first answer. Raises ``NoResponders`` or ``RequestTimeout``."""
        ...

    async def flush(self) -> None:
        """Return when the broker has taken everything published so far. Raises ``RequestTimeout``."""
        ...

    async def keep(self, log: LogSpec) -> None:
        """Have the broker keep ``log``; an existing log is brought to this spec. Raises ``Unavailable``."""
        ...

    def replay(self, log: LogSpec, subject: str) -> AsyncIterator[Message]:
        """What ``log`` holds on ``subject`` right now, oldest first, then end."""
        ...

    async def close(self) -> None:
        """Send what is queued, stop every subscription, and disconnect. Closing twice does nothing."""
        ...
