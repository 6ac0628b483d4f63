"""The base of every service: what it hears, answers, says, and does in time, all of it stopped together.

Handlers are plain calls that run to their end; whatever must wait is a coroutine given to ``spawn``. Nothing a message
contains can stop a service: what cannot be read is counted and logged, and a handler that fails is, too.
"""

import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec

from quartet_bus import subjects
from quartet_bus.bus import Bus, BusError, Disconnected, Message, PayloadTooLarge, Subscription
from quartet_bus.config.schema import Config
from quartet_bus.logs import logger
from quartet_bus.loop import VirtualLoop, clock_of
from quartet_bus.messages import ControlReply, ControlRequest
from quartet_bus.metrics import Metrics
from quartet_bus.micro import Endpoint, MicroService
from quartet_bus.subjects import Topic
from quartet_bus.ticker import Ticker

T = TypeVar("T")
Q = TypeVar("Q")
R = TypeVar("R")

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not the expected message."""

_LOG_PAUSE_NS = 1_000_000_000

_encode = msgspec.msgpack.Encoder().encode


class MalformedReply(BusError):
    """An answer came, but not of the type that was asked for; ``reason`` is the other side's own, if it gave one."""

    def __init__(self, subject: str, reason: str) -> None:
        super().__init__(f"answer on {subject} is not usable: {reason}")
        self.subject = subject
        self.reason = reason


class Failure(msgspec.Struct):
    """What a question gets when its handler failed: decodes as any reply type with ``ok`` and ``reason``."""

    ok: bool
    reason: str


class Service:
    """One service on one bus. Subclasses set ``name`` and override ``start``, ``stop`` and ``not_ready``."""

    name: ClassVar[str]

    def __init__(self, bus: Bus, config: Config, *, instance: str, random: random.Random) -> None:
        self.bus = bus
        self.config = config
        self.instance = instance
        self.random = random
        self.metrics = Metrics(self.name)
        self.log = logger(service=self.name, instance=instance)
        self.now_ns: Callable[[], int] = _not_started
        """Nanoseconds of the running loop's clock, virtual or monotonic; usable from ``start`` on."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._micro = MicroService(self.name, instance)
        self._subscriptions: list[Subscription] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._tickers: list[Ticker] = []
        self._stopped = False
        self._logged_ns = -_LOG_PAUSE_NS
        self._malformed = self.metrics.counter("malformed", "Messages that could not be read.", ("subject",))
        self._failed = self.metrics.counter("failures", "Handlers, timers and tasks that raised.", ("where",))
        self._unsaid = self.metrics.counter("unsaid", "Messages dropped because the broker is away.")

    async def start(self) -> None:
        """Begin. Subclasses call this first, then ``hear`` what they hear."""
        self._loop = asyncio.get_running_loop()
        self.now_ns = clock_of(self._loop)
        self._micro.started(self.now_ns(), virtual=isinstance(self._loop, VirtualLoop))
        for subject, answer in self._micro.subjects():
            await self._subscribe(subject, self._micro_answer(answer), "")

    async def stop(self) -> None:
        """End subscriptions, timers and tasks; a second call does nothing. The bus is its owner's to close."""
        if self._stopped:
            return
        self._stopped = True
        for ticker in self._tickers:
            ticker.stop()
        for subscription in self._subscriptions:
            await subscription.stop()
        current = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not current]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def not_ready(self) -> str | None:
        """Why this service cannot do its work right now, or None. Served on /readyz."""
        return None

    # Hearing

    async def hear(self, topic: Topic[T], handler: Callable[[T], None], *, queue: str = "") -> None:
        """Call ``handler`` with every message on ``topic``; of services sharing a ``queue``, one gets each."""
        decode = _decoder(topic.kind)
        endpoint = self._micro.endpoint(topic.subject, queue)

        def on_message(message: Message) -> None:
            endpoint.requests += 1
            try:
                decoded = decode(message.data)
            except UNREADABLE as error:
                endpoint.fail(str(error))
                self._unreadable(topic.subject, message, error)
                return
            try:
                handler(decoded)
            except Exception as error:
                endpoint.fail(str(error))
                self._failure("handler", topic.subject)

        await self._subscribe(topic.subject, on_message, queue)

    async def hear_raw(self, topic: Topic[bytes], handler: Callable[[Message], None], *, queue: str = "") -> None:
        """As ``hear``, with subject, headers and reply, undecoded."""
        endpoint = self._micro.endpoint(topic.subject, queue)

        def on_message(message: Message) -> None:
            endpoint.requests += 1
            try:
                handler(message)
            except Exception as error:
                endpoint.fail(str(error))
                self._failure("handler", topic.subject)

        await self._subscribe(topic.subject, on_message, queue)

    async def answer(self, topic: Topic[Q], handler: Callable[[Q], R | Awaitable[R]]) -> None:
        """Reply to every question on ``topic`` with what ``handler`` returns.

        Every question with a reply subject gets an answer: when it cannot be read or ``handler`` raises, ``Failure``.
        """
        decode = _decoder(topic.kind)
        endpoint = self._micro.endpoint(topic.subject, "")

        answering = _Answering(endpoint, topic.subject)

        def on_message(message: Message) -> None:
            endpoint.requests += 1
            try:
                question = decode(message.data)
            except UNREADABLE as error:
                self._unreadable_question(message, answering, error)
                return
            self._answer(message, answering, lambda: handler(question))

        await self._subscribe(topic.subject, on_message, "")

    async def controls(
        self, handlers: Mapping[str, Callable[[ControlRequest], ControlReply | Awaitable[ControlReply]]]
    ) -> None:
        """Answer operators' verbs, for this instance and for ``_all``. An unknown verb is told which there are."""
        for whom in (self.instance, "_all"):
            subject = subjects.control_all(self.name, whom).subject
            answering = _Answering(self._micro.endpoint(subject, ""), "control", self._signed, self._control_failure)
            await self._subscribe(subject, partial(self._on_control, handlers, answering), "")

    # Saying

    def say(self, topic: Topic[T], message: T, *, reply: str = "", urgent: bool = False) -> None:
        """Publish ``message``. While the broker is away for long it is dropped and counted, as the network would.

        Raises ``PayloadTooLarge``.
        """
        data = message if isinstance(message, bytes) else _encode(message)
        try:
            self.bus.publish(topic.subject, data, reply=reply, urgent=urgent)
        except Disconnected:
            self._unsaid.inc()

    async def ask(self, topic: Topic[Q], message: Q, kind: type[R], *, timeout_s: float) -> R:
        """Put a question and return the first answer.

        Raises ``BusError``: ``MalformedReply``, or what ``Bus.request`` raises.
        """
        answer = await self.bus.request(topic.subject, _encode(message), timeout_s=timeout_s)
        try:
            return _decoder(kind)(answer.data)
        except UNREADABLE as error:
            raise MalformedReply(topic.subject, _reason(answer.data) or str(error)) from None

    # Time and tasks

    def every(self, interval_s: float, tick: Callable[[], None]) -> None:
        """Call ``tick`` every ``interval_s``, first after one interval. Ticks missed while busy are skipped."""
        self._tickers.append(Ticker(self.loop, self.now_ns, interval_s, lambda: self._guarded(tick, ())))

    def later(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> asyncio.TimerHandle:
        """Call ``call`` once after ``delay_s``, unless the service stops first or the handle is cancelled."""
        return self.loop.call_later(delay_s, self._guarded, call, arguments)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str = "") -> asyncio.Task[Any]:
        """Run ``work`` until it ends or the service stops; what it raises is logged and counted."""
        task = self.loop.create_task(work, name=name or None)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop the service was started on."""
        if self._loop is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._loop

    # Inside

    async def _subscribe(self, subject: str, handler: Callable[[Message], None], queue: str) -> None:
        self._subscriptions.append(await self.bus.subscribe(subject, handler, queue=queue))

    def _on_control(
        self,
        handlers: Mapping[str, Callable[[ControlRequest], ControlReply | Awaitable[ControlReply]]],
        answering: "_Answering",
        message: Message,
    ) -> None:
        answering.endpoint.requests += 1
        verb = subjects.text_of(message.subject, 3)
        handler = handlers.get(verb)
        if handler is None:
            answering.endpoint.fail(f"unknown verb {verb}")
            allowed = ", ".join(sorted(handlers))
            self._reply(message, self._control_failure(f"unknown verb {verb!r}; {self.name} knows {allowed}"))
            return
        try:
            request = _decoder(ControlRequest)(message.data) if message.data else ControlRequest()
        except UNREADABLE as error:
            self._unreadable_question(message, answering, error)
            return
        self._answer(message, answering, lambda: handler(request))

    def _answer(self, message: Message, answering: "_Answering", call: Callable[[], Any]) -> None:
        try:
            result = call()
        except Exception as error:
            self._answer_failed(message, answering, error)
            return
        if inspect.isawaitable(result):
            self.spawn(self._answer_later(message, answering, result), f"answer {answering.where}")
        else:
            self._reply(message, answering.finish(result))

    async def _answer_later(self, message: Message, answering: "_Answering", result: Awaitable[Any]) -> None:
        try:
            reply = await result
        except asyncio.CancelledError:
            self._reply(message, answering.failure("stopping"))
            raise
        except Exception as error:
            self._answer_failed(message, answering, error)
            return
        self._reply(message, answering.finish(reply))

    def _answer_failed(self, message: Message, answering: "_Answering", error: Exception) -> None:
        answering.endpoint.fail(str(error))
        self._failure("answer", answering.where)
        self._reply(message, answering.failure(f"{type(error).__name__}: {error}"))

    def _unreadable_question(self, message: Message, answering: "_Answering", error: Exception) -> None:
        answering.endpoint.fail(str(error))
        self._unreadable(answering.where, message, error)
        self._reply(message, answering.failure(f"malformed: {error}"))

    def _reply(self, message: Message, reply: Any) -> None:
        if not message.reply:
            return
        try:
            self.say(Topic(message.reply, type(reply)), reply)
        except PayloadTooLarge as error:
            self.say(Topic(message.reply, Failure), Failure(False, f"the answer is too large: {error}"))

    def _signed(self, reply: ControlReply) -> ControlReply:
        return msgspec.structs.replace(
            reply, service=reply.service or self.name, instance=reply.instance or self.instance
        )

    def _control_failure(self, reason: str) -> ControlReply:
        return ControlReply(False, self.name, self.instance, reason)

    def _micro_answer(self, answer: Callable[[], bytes]) -> Callable[[Message], None]:
        def on_message(message: Message) -> None:
            self._reply(message, answer())

        return on_message

    def _unreadable(self, subject: str, message: Message, error: Exception) -> None:
        self._malformed.labels(subject).inc()
        now_ns = self.now_ns()
        if now_ns - self._logged_ns >= _LOG_PAUSE_NS:
            self._logged_ns = now_ns
            self.log.warning(
                "malformed message", subject=message.subject, size_bytes=len(message.data), error=str(error)
            )

    def _guarded(self, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if self._stopped:
            return
        try:
            call(*arguments)
        except Exception:
            self._failure("timer", getattr(call, "__qualname__", repr(call)))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed.labels("task").inc()
            self.log.error("task failed", task=task.get_name(), exc_info=error)

    def _failure(self, kind: str, where: str) -> None:
        """Called while handling the exception."""
        self._failed.labels(kind).inc()
        self.log.exception(f"{kind} failed", where=where)


def _as_it_is(reply: Any) -> Any:
    return reply


def _plain_failure(reason: str) -> Any:
    return Failure(False, reason)


class _Answering(NamedTuple):
    """How one subscription answers: where it counts, and how replies and failures look."""

    endpoint: Endpoint
    where: str
    finish: Callable[[Any], Any] = _as_it_is
    failure: Callable[[str], Any] = _plain_failure


_decoders: dict[type, Callable[[bytes], Any]] = {bytes: lambda data: data}


def _decoder(kind: type[T]) -> Callable[[bytes], T]:
    decode = _decoders.get(kind)
    if decode is None:
        decode = _decoders[kind] = msgspec.msgpack.Decoder(kind).decode
    return decode


def _reason(data: bytes) -> str:
    """What a ``Failure`` says, "" when it is none."""
    try:
        return _decoder(Failure)(data).reason
    except UNREADABLE:
        return ""


def _not_started() -> int:
    raise RuntimeError("a service has no clock before start()")
