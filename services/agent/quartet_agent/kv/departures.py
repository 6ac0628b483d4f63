"""The sending side of transfers: KV that a prefill keeps, from the prefill's dispatch to its RELEASE.

A departure needs two things, which may come in either order: the order to move, and computed KV. Of an engine that
tells how its prefill gets on, the first part is enough to begin with; what follows is sent as it comes to be. It ends
exactly once, released, cancelled, failed or expired, and frees what it keeps. Its lease runs from when the KV was
computed (before, the prefill's own deadline bounds it), or from an order that came before its prefill.
"""

from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from quartet_agent.engines.pools import KvPool
from quartet_bus.messages import KvCommand, KvLease, StreamId, TransferReason, TransferReport
from quartet_core.links import crossing_ms
from quartet_core.transfer_words import KvLost, State


class DepartureEnd(StrEnum):
    """How a departure ended."""

    MOVED = "moved"
    RELEASED = "released"
    EXPIRED = KvLost.EXPIRED.value
    FAILED = KvLost.FAILED.value
    CANCELLED = "cancelled"


class DepartureOwner(Protocol):
    """The prefill whose KV departs."""

    def departed(self, end: DepartureEnd) -> None:
        """Called once, when the KV is not kept any more."""
        ...


def charged_ms(kv_bytes: int, gb_per_s: float, setup_ms: float) -> float:
    """What the link takes for ``kv_bytes``; without a rate only the setup."""
    return crossing_ms(gb_per_s, setup_ms, kv_bytes) if gb_per_s > 0 else setup_ms


class Sending(Protocol):
    """A send under way."""

    def cancel(self) -> object:
        """Called when nobody wants it any more. Nothing is told of it afterwards."""
        ...

    def grew(self) -> object:
        """Called when more can be sent, or when that was all."""
        ...

    def left_bytes(self) -> int:
        """What of the KV is not over yet."""
        ...


class Send(Protocol):
    """Begins a send; `Departures.sent` or `Departures.unsendable` is told how it went, unless it is cancelled."""

    def __call__(self, departures: "Departures", departure: "Departure", order: KvCommand) -> Sending: ...


class Departure:
    """KV of one transfer on its sending side."""

    __slots__ = ("begun", "incarnation", "moved", "order", "owner", "pinned", "pool", "sending", "stream", "timer",
                 "tokens", "transfer", "worker")  # fmt: skip

    def __init__(self, transfer: str, worker: str, incarnation: int) -> None:
        self.transfer = transfer
        self.worker = worker
        self.incarnation = incarnation
        self.stream = StreamId("")
        self.tokens = 0
        self.order: KvCommand | None = None
        self.owner: DepartureOwner | None = None
        self.pool: KvPool | None = None
        self.begun = False
        self.pinned = False
        self.moved = False
        self.sending: Sending | None = None
        self.timer: TimerHandle | None = None

    @property
    def state(self) -> State:
        """As a coordinator sees it."""
        if self.moved:
            return State.MOVED
        return State.MOVING if self.sending is not None else State.RESERVED


class Departures:
    """All departures of one agent. ``report`` publishes progress, ``send`` carries the bytes."""

    def __init__(
        self, loop: AbstractEventLoop, send: Send, report: Callable[[TransferReport], None], *, lease_ms: float
    ) -> None:
        self._loop = loop
        self._send = send
        self._report = report
        self._lease_ms = lease_ms
        self._departures: dict[str, Departure] = {}
        self.expired = 0
        """Departures that nobody renewed or released in time."""

    def __len__(self) -> int:
        return len(self._departures)

    def expect(
        self, transfer: str, worker: str, incarnation: int, stream: StreamId, tokens: int, pool: KvPool,
        owner: DepartureOwner,
    ) -> bool:  # fmt: skip
        """A prefill was accepted whose KV is for ``transfer``; False when another one has that name."""
        departure = self._departures.get(transfer)
        if departure is None:
            departure = self._departures[transfer] = Departure(transfer, worker, incarnation)
        elif departure.owner is not None or departure.worker != worker:
            return False
        self._stop_timer(departure)
        departure.stream, departure.tokens = stream, tokens
        departure.pool, departure.owner = pool, owner
        return True

    def grew(self, transfer: str) -> None:
        """The prefill goes on, and a first or further part of its KV can be sent."""
        departure = self._departures.get(transfer)
        if departure is None or departure.pinned:
            return
        if not departure.begun:
            departure.begun = True
            if departure.order is None:
                self._say(departure, State.COMPUTING, computing=True)
        if departure.sending is not None:
            departure.sending.grew()
        else:
            self._go(departure)

    def pinned(self, transfer: str) -> None:
        """The prefill is done: all of its KV can be sent, and its lease runs."""
        departure = self._departures.get(transfer)
        if departure is None:
            return
        departure.pinned = True
        self._renew(departure, self._lease_ms)
        if departure.sending is not None:
            self._say(departure, State.MOVING, left_bytes=departure.sending.left_bytes())
            departure.sending.grew()
        else:
            self._go(departure)

    def move(self, command: KvCommand, worker: str, incarnation: int) -> str:
        """MOVE: send as soon as there is something to send. Returns "" or why not; asked again, it answers the same."""
        departure = self._departures.get(command.transfer)
        if departure is None:
            # Its prefill may still be on its way: another subject, another order.
            departure = self._departures[command.transfer] = Departure(command.transfer, worker, incarnation)
            departure.stream = command.stream or StreamId("")
            departure.tokens = command.tokens
            self._renew(departure, command.lease_ms or self._lease_ms)
        elif departure.worker != worker:
            return "fenced"
        if departure.order is None:
            departure.order = command
            self._go(departure)
        elif departure.order.epoch != command.epoch:
            return "fenced"
        return ""

    def renew(self, command: KvCommand) -> bool:
        """RENEW: a whole lease from now; False when nothing is kept under that name."""
        departure = self._departures.get(command.transfer)
        if departure is None:
            return False
        if departure.pinned or departure.owner is None:
            self._renew(departure, command.lease_ms or self._lease_ms)
        return True

    def holds(self, worker: str, transfer: str) -> bool:
        """Whether anything departs, or will, from ``worker`` under that name; worker "" stands for any."""
        departure = self._departures.get(transfer)
        return departure is not None and worker in ("", departure.worker)

    def release(self, transfer: str) -> None:
        """RELEASE: free it, whatever became of it."""
        departure = self._departures.get(transfer)
        if departure is not None:
            self._end(departure, DepartureEnd.MOVED if departure.moved else DepartureEnd.RELEASED)

    def failed(self, transfer: str, end: DepartureEnd, detail: str) -> None:
        """Its prefill came to nothing: whoever waits for the KV is told at once. The owner knows already."""
        departure = self._departures.get(transfer)
        if departure is not None:
            departure.owner = None
            self._say(departure, State.ABORTED, detail=detail)
            self._end(departure, end)

    def leases(self) -> list[KvLease]:
        """What this side keeps, for a coordinator that rebuilds itself."""
        now_s = self._loop.time()
        return [
            KvLease(
                departure.transfer,
                departure.worker,
                departure.incarnation,
                departure.order.epoch if departure.order is not None else 0,
                departure.tokens,
                departure.state.value,
                max(0.0, (departure.timer.when() - now_s) * 1e3) if departure.timer is not None else 0.0,
            )
            for departure in self._departures.values()
        ]

    def close(self) -> None:
        """Free everything."""
        for departure in list(self._departures.values()):
            self._end(departure, DepartureEnd.RELEASED)

    def sent(self, departure: Departure, wire_bytes: int, took_ms: float, link: str, overlap_ms: float = 0.0) -> None:
        """Everything arrived, over ``link``, on which it was for ``took_ms``, ``overlap_ms`` of them while the prefill
        computed. A departure that ended meanwhile has said so."""
        if self._departures.get(departure.transfer) is departure:
            departure.sending, departure.moved = None, True
            self._say(departure, State.MOVED, wire_bytes=wire_bytes, took_ms=took_ms, link=link, overlap_ms=overlap_ms)

    def unsendable(self, departure: Departure, detail: str, took_ms: float) -> None:
        """It could not be sent, or not all of it."""
        if self._departures.get(departure.transfer) is departure:
            departure.sending = None
            self._say(departure, State.ABORTED, detail=detail, took_ms=took_ms)
            self._end(departure, DepartureEnd.FAILED)

    def _go(self, departure: Departure) -> None:
        computed = departure.pinned or departure.begun
        if computed and departure.order is not None and departure.sending is None and not departure.moved:
            self._say(
                departure, State.MOVING, computing=not departure.pinned,
                left_bytes=departure.order.kv_bytes if departure.pinned else 0,
            )  # fmt: skip
            departure.sending = self._send(self, departure, departure.order)

    def _say(
        self,
        departure: Departure,
        state: State,
        *,
        wire_bytes: int = 0,
        took_ms: float = 0.0,
        link: str = "",
        detail: str = "",
        overlap_ms: float = 0.0,
        computing: bool = False,
        left_bytes: int = 0,
    ) -> None:
        order = departure.order
        self._report(
            TransferReport(
                transfer=departure.transfer,
                stream=departure.stream,
                reason=order.reason if order is not None else TransferReason.SPLIT,
                state=state.value,
                source=departure.worker,
                target="",
                epoch=order.epoch if order is not None else 0,
                tokens=departure.tokens,
                wire_bytes=wire_bytes,
                kv_bytes=order.kv_bytes if order is not None else 0,
                took_ms=took_ms,
                predicted_ms=(charged_ms(order.kv_bytes, order.gb_per_s, order.setup_ms) if order is not None else 0.0),
                link=link or (order.link if order is not None else ""),
                detail=detail,
                overlap_ms=overlap_ms,
                computing=computing,
                left_bytes=left_bytes,
            )
        )

    def _renew(self, departure: Departure, lease_ms: float) -> None:
        self._stop_timer(departure)
        departure.timer = self._loop.call_later(lease_ms / 1e3, self._expire, departure)

    def _expire(self, departure: Departure) -> None:
        self.expired += 1
        if departure.order is not None and not departure.moved:
            self._say(departure, State.ABORTED, detail=DepartureEnd.EXPIRED)
        self._end(departure, DepartureEnd.MOVED if departure.moved else DepartureEnd.EXPIRED)

    def _end(self, departure: Departure, end: DepartureEnd) -> None:
        del self._departures[departure.transfer]
        self._stop_timer(departure)
        if departure.sending is not None:
            departure.sending.cancel()
        if departure.pool is not None:
            departure.pool.release(departure.transfer)
        if departure.owner is not None:
            departure.owner.departed(end)

    @staticmethod
    def _stop_timer(departure: Departure) -> None:
        if departure.timer is not None:
            departure.timer.cancel()
            departure.timer = None
