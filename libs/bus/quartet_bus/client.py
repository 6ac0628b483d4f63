"""The client library: one call a request, an iterator of chunks an answer.

    client = Client(bus, "acme")
    async with await client.infer("chat", body) as answer:
        async for chunk in answer:
            ...

It speaks the stream protocol (``quartet_core.stream``): a fresh inbox for every attempt, sending again after silence,
gaps found, and a cancel on the bus whenever an answer is no longer wanted.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec

from quartet_bus import frames, subjects
from quartet_bus.bus import Bus, Disconnected, Message, PayloadTooLarge, Subscription
from quartet_bus.headers import RequestHeaders
from quartet_bus.loop import clock_of
from quartet_bus.messages import Cancel
from quartet_bus.requests import nobody_listens
from quartet_core.openai import ROUTER_STOPPING, ErrorBody, late, too_large
from quartet_core.stream import MAX_TRIES, Kind, Step, StreamReceiver

BUFFER_BYTES = 1024 * 1024

_encode = msgspec.msgpack.Encoder().encode


class InferError(Exception):
    """A request that failed: HTTP ``status``, OpenAI's error object, and when trying again makes sense (0: never)."""

    def __init__(self, status: int, body: ErrorBody, retry_after_s: float = 0.0) -> None:
        super().__init__(f"{status}: {body.message}")
        self.status = status
        self.body = body
        self.retry_after_s = retry_after_s


class Client:
    """Sends a tenant's requests and receives their answers, thousands at a time, on one subscription.

    ``buffer_bytes`` is what one answer may have received that nobody took yet; beyond it the answer fails. ``source``
    makes inboxes and request ids: leave it out in real life, where inboxes must not be guessed.
    """

    def __init__(
        self, bus: Bus, tenant: str, *, buffer_bytes: int = BUFFER_BYTES, source: random.Random | None = None
    ) -> None:
        self.tenant = tenant
        self.strays = 0
        """Messages on our inboxes that belong to no open answer, or are no frames."""
        self.resends = 0
        self.uncancelled = 0
        """Cancels that could not be sent because the broker is away."""
        self._bus = bus
        self._buffer_bytes = buffer_bytes
        self._source = source or random.SystemRandom()
        self._prefix = f"{subjects.inbox_prefix(tenant)}{self.fresh()}."
        self._inboxes: dict[str, tuple[Answer, int]] = {}
        self._subscription: asyncio.Future[Subscription] | None = None

    def fresh(self) -> str:
        """A name that nobody else has or can guess."""
        return f"{self._source.getrandbits(128):032x}"

    async def infer(
        self, model: str, body: bytes, *, headers: RequestHeaders | None = None, via_gateway: bool = False
    ) -> "Answer":
        """Send ``body`` (OpenAI JSON) to ``model`` and return when its answer begins.

        ``via_gateway`` uses the gateway's subject, whose trusted headers count. Raises ``InferError`` when the request
        is refused or lost before that. Cancelling the call cancels the request.
        """
        await self._listen()
        headers = headers or RequestHeaders()
        topic = (subjects.gateway if via_gateway else subjects.infer)(self.tenant, model)
        answer = Answer(self, topic.subject, body, headers, headers.request_id or self.fresh())
        try:
            await answer.begin()
        except BaseException:
            await answer.aclose()
            raise
        return answer

    async def close(self) -> None:
        """Give up every open answer, and hear no more."""
        for answer in list({id(answer): answer for answer, _ in self._inboxes.values()}.values()):
            await answer.aclose()
        if self._subscription is not None:
            subscription = await self._subscription
            await subscription.stop()

    # For answers

    def send(self, answer: "Answer", attempt: int, subject: str, body: bytes, headers: RequestHeaders) -> None:
        """Publish one attempt with an inbox of its own. Raises what ``Bus.publish`` does."""
        inbox = self._prefix + self.fresh()
        self._inboxes[inbox] = (answer, attempt)
        answer.inboxes.append(inbox)
        self._bus.publish(subject, body, headers=headers.encode(), reply=inbox)

    def forget(self, answer: "Answer") -> None:
        """``answer`` hears no more."""
        for inbox in answer.inboxes:
            self._inboxes.pop(inbox, None)

    def cancel(self, id: str, attempt: int, try_: int, reason: str) -> None:
        """Tell routers and agents that nobody waits any more."""
        try:
            self._bus.publish(subjects.cancel(self.tenant).subject, _encode(Cancel(id, attempt, try_, reason)))
        except Disconnected:
            # Nothing can be told to anybody now. Agents end the work at its deadline.
            self.uncancelled += 1

    def unanswered(self) -> InferError:
        """Why nobody answered any attempt, as far as can be known here."""
        if not self._bus.connected:
            return _away("it went away while the request waited")
        return InferError(503, ErrorBody("No router or worker answered.", "service_unavailable", code="no_answer"), 1.0)

    @property
    def buffer_bytes(self) -> int:
        """See the class."""
        return self._buffer_bytes

    async def _listen(self) -> None:
        if self._subscription is None:
            self._subscription = asyncio.ensure_future(self._bus.subscribe(self._prefix + "*", self._on_message))
        try:
            await asyncio.shield(self._subscription)
        except Disconnected as error:
            self._subscription = None
            raise _away(error) from error
        except Exception:
            self._subscription = None  # the next request tries again
            raise

    def _on_message(self, message: Message) -> None:
        known = self._inboxes.get(message.subject)
        if known is None:
            self.strays += 1
            return
        answer, attempt = known
        if nobody_listens(message):
            answer.on_nobody(attempt)
            return
        try:
            frame = frames.decode(message.data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.strays += 1
            return
        if frame.id == answer.id:
            answer.on_frame(frame)
        else:
            self.strays += 1


class Answer:
    """One answer: iterate for its chunks, each the engine's JSON as it came. ``end`` is there after the last.

    Iterating raises ``InferError`` when the answer breaks off. Leave it with ``aclose`` (or as a context manager):
    whatever is not finished by then is cancelled.
    """

    def __init__(self, client: Client, subject: str, body: bytes, headers: RequestHeaders, id: str) -> None:
        self.id = id
        self.end: frames.End | None = None
        self.inboxes: list[str] = []
        self._client = client
        self._subject = subject
        self._body = body
        self._headers = headers
        self._loop = asyncio.get_running_loop()
        self._clock_ns = clock_of(self._loop)
        self._sent_ms = now_ms = self._now_ms()
        self._receiver = StreamReceiver(
            now_ms, deadline_ms=now_ms + headers.deadline_ms if headers.deadline_ms else None
        )
        self._workers: dict[tuple[int, int], str] = {}
        self._chunks: deque[bytes] = deque()
        self._buffered_bytes = 0
        self._take: Callable[[bytes], None] | None = None
        self._error: InferError | None = None
        self._news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def worker(self) -> str:
        """The worker whose answer this is, "" before it began."""
        return "" if self._receiver.kept is None else self._workers.get(self._receiver.kept, "")

    async def begin(self) -> None:
        """Send, and return when the first chunk or the end is here; raises ``InferError``. For ``Client.infer``."""
        self._send()
        while not self._chunks and not self._receiver.over:
            self._news.clear()
            await self._news.wait()
        if self._error is not None and not self._chunks:
            raise self._error

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self._receiver.over:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        chunk = self._chunks.popleft()
        self._buffered_bytes -= len(chunk)
        return chunk

    async def pour(self, take: Callable[[bytes], None]) -> None:
        """Call ``take`` with every chunk as it comes, until the end: no task is woken for a chunk, only for the end.

        ``take`` must neither raise nor wait, and bounds what it keeps itself. Raises ``InferError`` when the answer
        breaks off. For one that is not iterated as well.
        """
        self._take = take
        while self._chunks:
            take(self._chunks.popleft())
        self._buffered_bytes = 0
        while not self._receiver.over:
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            raise self._error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Take nothing more; if the answer is not finished, cancel it everywhere. Closing twice does nothing."""
        if not self._receiver.over:
            self._fail(
                InferError(499, ErrorBody("The client closed the request.", "cancelled", code="cancelled")), "client"
            )

    # What the client hears for this answer

    def on_frame(self, frame: frames.AnyFrame) -> None:
        """One frame of some try of this request."""
        receiver = self._receiver
        if type(frame) is frames.Chunk and receiver.next_chunk(
            frame.attempt, frame.try_, frame.seq, self._clock_ns() / 1e6
        ):
            self._deliver(bytes(frame.data))
            return
        if isinstance(frame, frames.Accepted) and len(self._workers) < MAX_TRIES:
            self._workers[frame.attempt, frame.try_] = frame.worker
        seq = None if isinstance(frame, frames.Held) else frame.seq
        kind = _kind(frame)
        step = receiver.hear(kind, frame.attempt, frame.try_, seq, self._now_ms())
        for attempt, try_ in receiver.take_cancels():
            self._client.cancel(self.id, attempt, try_, "duplicate")
        if step is Step.DELIVER and isinstance(frame, frames.Chunk):
            self._body = b""  # an answer that has begun is never sent for again, and may last for minutes
            self._deliver(bytes(frame.data))
        elif step is Step.DONE and isinstance(frame, frames.End):
            self.end = frame
            self._finish()
        elif step is Step.REFUSED and isinstance(frame, frames.Error):
            self._error = InferError(frame.status, frame.error, frame.retry_after_s)
            if receiver.attempt > 1:
                self._client.cancel(self.id, 0, 0, "failed")
            self._finish()
        else:
            self._act(step)

    def on_nobody(self, attempt: int) -> None:
        """The broker says that no router listens."""
        if self._receiver.hear(Kind.ERROR, attempt, 0, None, self._now_ms()) is Step.REFUSED:
            body = ErrorBody("No router is listening.", "service_unavailable", code="no_router")
            self._fail(InferError(503, body, 1.0), "no router")

    # Inside

    def _now_ms(self) -> float:
        return self._clock_ns() / 1e6

    def _send(self) -> None:
        attempt = self._receiver.attempt
        deadline_ms = self._headers.deadline_ms
        if deadline_ms:
            deadline_ms = max(1, deadline_ms - round(self._now_ms() - self._sent_ms))
        headers = msgspec.structs.replace(self._headers, request_id=self.id, attempt=attempt, deadline_ms=deadline_ms)
        try:
            self._client.send(self, attempt, self._subject, self._body, headers)
        except PayloadTooLarge as error:
            refused = too_large(error.size_bytes, error.limit_bytes)
            self._fail(InferError(refused.status, refused.body), "too large")
        except Disconnected as error:
            self._fail(_away(error), "broker away")
        else:
            self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # At least a millisecond, uvloop's unit, so that a timer that fires early does not spin.
        wait_s = max(self._receiver.due_ms - self._now_ms(), 1.0) / 1000
        self._timer = self._loop.call_later(wait_s, self._on_timer)

    def _on_timer(self) -> None:
        # Frames move the due time without touching the timer: one timer every two seconds, not one a frame.
        self._timer = None
        self._act(self._receiver.tick(self._now_ms()))
        if not self._receiver.over and self._timer is None:
            self._arm()

    def _act(self, step: Step) -> None:
        if step is Step.RESEND:
            self._client.resends += 1
            self._send()
        elif step is Step.GAP:
            self._fail(_lost("A part of the answer was lost on its way.", "stream_gap"), "gap")
        elif step is Step.LOST and self._receiver.kept is None:
            self._fail(self._client.unanswered(), "silence")
        elif step is Step.LOST:
            self._fail(_lost("The worker fell silent in the middle of the answer.", "stream_lost"), "silence")
        elif step is Step.EXPIRED:
            expired = late()
            self._fail(InferError(expired.status, expired.body), "deadline")

    def _deliver(self, chunk: bytes) -> None:
        if self._take is not None:
            self._take(chunk)
            return
        if self._chunks and self._buffered_bytes + len(chunk) > self._client.buffer_bytes:
            body = ErrorBody("The answer was not read quickly enough.", "server_error", code="slow_reader")
            self._fail(InferError(500, body), "slow reader")
            return
        self._chunks.append(chunk)
        self._buffered_bytes += len(chunk)
        self._news.set()

    def _fail(self, error: InferError, reason: str) -> None:
        self._error = error
        self._client.cancel(self.id, 0, 0, reason)
        self._finish()

    def _finish(self) -> None:
        self._receiver.over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._client.forget(self)
        self._news.set()


_KINDS: dict[type, Kind] = {frames.Chunk: Kind.CHUNK, frames.End: Kind.END, frames.Error: Kind.ERROR}


def _kind(frame: frames.AnyFrame) -> Kind:
    # Only agents number their frames, and what an agent's engine says is no word of a router.
    if isinstance(frame, frames.Error) and frame.seq is None and frame.error.code == ROUTER_STOPPING:
        return Kind.STOPPING
    return _KINDS.get(type(frame), Kind.SIGN)


def _lost(message: str, code: str) -> InferError:
    return InferError(502, ErrorBody(message, "server_error", code=code))


def _away(reason: object) -> InferError:
    body = ErrorBody(f"The message broker cannot be reached: {reason}.", "service_unavailable", code="no_broker")
    return InferError(503, body, 1.0)
