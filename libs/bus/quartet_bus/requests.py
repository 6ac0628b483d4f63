"""Request and reply on top of publish and subscribe, the same on every bus.

All answers of one client come in on one wildcard subscription; a number tells them apart.
"""

import asyncio
import itertools
from collections.abc import Mapping
from types import MappingProxyType

from quartet_bus.bus import Bus, Disconnected, Headers, Message, NoResponders, RequestTimeout, Subscription

STATUS = "Status"
NO_RESPONDERS: Mapping[str, str] = MappingProxyType({STATUS: "503"})
"""The headers of the empty message that a broker sends to a reply subject when nobody listens."""


def nobody_listens(message: Message) -> bool:
    """Whether ``message`` is the broker's word that a request reached nobody."""
    return not message.data and message.headers is not None and message.headers.get(STATUS) == "503"


class Requests:
    """The open requests of one bus client; answers arrive under ``prefix``, subscribed to on first use."""

    def __init__(self, bus: Bus, prefix: str) -> None:
        self._bus = bus
        self._prefix = prefix
        self._numbers = itertools.count(1)
        self._waiting: dict[str, asyncio.Future[Message]] = {}
        self._subscription: asyncio.Future[Subscription] | None = None

    async def ask(self, subject: str, data: bytes, *, timeout_s: float, headers: Headers | None) -> Message:
        """Publish and return the first answer. Raises ``NoResponders``, ``RequestTimeout`` or what publish raises."""
        await self._listen()
        reply = f"{self._prefix}.{next(self._numbers)}"
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[reply] = answer
        try:
            self._bus.publish(subject, data, headers=headers, reply=reply)
            async with asyncio.timeout(timeout_s):
                message = await answer
        except TimeoutError:
            raise RequestTimeout(subject, timeout_s) from None
        finally:
            del self._waiting[reply]
        if nobody_listens(message):
            raise NoResponders(subject)
        return message

    def close(self) -> None:
        """Every open request fails with ``Disconnected``."""
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(Disconnected("the bus was closed before the answer came"))

    async def _listen(self) -> None:
        if self._subscription is None:
            self._subscription = asyncio.ensure_future(self._bus.subscribe(f"{self._prefix}.*", self._on_answer))
        try:
            await asyncio.shield(self._subscription)
        except Exception:
            self._subscription = None  # the next request tries again
            raise

    def _on_answer(self, message: Message) -> None:
        answer = self._waiting.get(message.subject)
        if answer is not None and not answer.done():
            answer.set_result(message)
