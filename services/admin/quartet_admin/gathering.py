"""One question to every instance of a service, and all the answers that come in time.

A plain request returns the first answer only. Here each question gets a reply subject of its own below one
subscription; it ends after its time, or as soon as the caller has heard enough.
"""

import asyncio
import itertools
from collections.abc import Callable

import msgspec
from msgspec import Struct

from quartet_bus.bus import Message
from quartet_bus.messages import ControlReply, ControlRequest
from quartet_bus.service import UNREADABLE, Service
from quartet_bus.subjects import Topic, token

MAX_REPLIES = 256
MAX_QUESTIONS = 256

_decode = msgspec.msgpack.Decoder(ControlReply).decode


class TooManyQuestions(Exception):
    """256 questions wait for their answers already."""


class _Question(Struct):
    replies: list[ControlReply]
    ended: asyncio.Event
    enough: Callable[[ControlReply], bool]


class Gathering:
    """The open questions of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        # below the prefix that this process's NATS user may subscribe to (quartet_bus.nats_bus)
        user = service.config.nats.user
        self._inbox = f"_INBOX.{token(user) if user else 'service'}.gather.{token(service.instance)}"
        self._numbers = itertools.count(1)
        self._open: dict[str, _Question] = {}

    async def start(self) -> None:
        """Begin to listen for answers."""
        await self._service.hear_raw(Topic(f"{self._inbox}.*", bytes), self._on_reply)

    async def ask(
        self,
        topic: Topic[ControlRequest],
        request: ControlRequest,
        *,
        timeout_s: float,
        enough: Callable[[ControlReply], bool],
    ) -> list[ControlReply]:
        """All answers within ``timeout_s``, or up to the first that is ``enough``; none when nobody listens.

        Raises `TooManyQuestions`.
        """
        if len(self._open) >= MAX_QUESTIONS:
            raise TooManyQuestions
        subject = f"{self._inbox}.{next(self._numbers)}"
        question = self._open[subject] = _Question([], asyncio.Event(), enough)
        try:
            self._service.say(topic, request, reply=subject)
            async with asyncio.timeout(timeout_s):
                await question.ended.wait()
        except TimeoutError:
            pass  # that is how most gatherings end: nobody knows how many instances there are
        finally:
            del self._open[subject]
        return sorted(question.replies, key=lambda reply: reply.instance)

    def _on_reply(self, message: Message) -> None:
        question = self._open.get(message.subject)
        if question is None:
            return
        if not message.data:  # the broker says that nobody listens
            question.ended.set()
            return
        try:
            reply = _decode(message.data)
        except UNREADABLE as error:
            reply = ControlReply(False, reason=f"unreadable answer: {error}")
        question.replies.append(reply)
        if len(question.replies) >= MAX_REPLIES or question.enough(reply):
            question.ended.set()
