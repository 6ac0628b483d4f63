"""What the fleet itself says while a pass runs: ends of requests and transfers, and how busy its engines were."""

import msgspec
from msgspec import Struct

from quartet_bus import subjects
from quartet_bus.bus import Bus, Message, Subscription
from quartet_bus.messages import ControlReply, ControlRequest, Phase, RequestEvent, Role, TransferReport
from quartet_bus.subjects import Topic
from quartet_cli.errors import CommandFailed

_ASK_S = 3.0

_encode = msgspec.msgpack.Encoder().encode
_reply = msgspec.msgpack.Decoder(ControlReply).decode
_event = msgspec.msgpack.Decoder(RequestEvent).decode
_report = msgspec.msgpack.Decoder(TransferReport).decode


class RouterStatus(Struct):
    """A router's counts, as far as the demo shows them."""

    workers: int
    up: int
    coordinator: str | None
    decide_p50_us: float
    decide_p99_us: float
    dispatched: int
    splits: int
    affinity_hits: int
    holds: int
    retries: int


class WorkerStatus(Struct):
    """How long a worker's engine was busy since it started."""

    id: str
    hardware: str
    model: str
    busy_ms: float


class _NodeStatus(Struct):
    workers: list[WorkerStatus]


class Witness:
    """Hears request ends and transfer reports of one pass. ``begin`` before the first request, ``stop`` at the end."""

    def __init__(self, bus: Bus) -> None:
        self.answers: dict[str, RequestEvent] = {}
        """The END that counts of each request: its answering worker's, by request id."""
        self.ends: list[RequestEvent] = []
        """Every END: both halves of splits, and tries that came to nothing."""
        self.moved: list[TransferReport] = []
        self.failed_moves: list[TransferReport] = []
        self._bus = bus
        self._subscriptions: list[Subscription] = []

    async def begin(self) -> None:
        """Start hearing."""
        for topic, handler in (
            (subjects.request_event(Phase.END), self._on_end),
            (subjects.kv_done(), lambda message: self.moved.append(_report(message.data))),
            (subjects.kv_failed(), lambda message: self.failed_moves.append(_report(message.data))),
        ):
            self._subscriptions.append(await self._bus.subscribe(topic.subject, handler))

    async def stop(self) -> None:
        """Hear no more."""
        for subscription in self._subscriptions:
            await subscription.stop()

    async def router(self, instance: str) -> RouterStatus:
        """A router's status. Raises ``BusError`` or ``CommandFailed``."""
        reply = await self._ask(subjects.control("router", instance, "status"))
        return msgspec.json.decode(reply.payload, type=RouterStatus)

    async def workers(self, node: str) -> list[WorkerStatus]:
        """The workers of a node. Raises ``BusError`` or ``CommandFailed``."""
        reply = await self._ask(subjects.control("agent", node, "status"))
        return msgspec.json.decode(reply.payload, type=_NodeStatus).workers

    async def _ask(self, topic: Topic[ControlRequest]) -> ControlReply:
        message = await self._bus.request(topic.subject, _encode(ControlRequest()), timeout_s=_ASK_S)
        reply = _reply(message.data)
        if not reply.ok:
            raise CommandFailed(f"{topic.subject}: {reply.reason}")
        return reply

    def _on_end(self, message: Message) -> None:
        event = _event(message.data)
        self.ends.append(event)
        if event.role is not Role.PREFILL and event.status == "ok":
            self.answers[event.stream.id] = event
