"""The sending side of transfers: KV that a prefill keeps, from the prefill's dispatch to its RELEASE.

A departure needs two things, which may come in either order: the order to move, and the computed KV. It ends exactly
once, released, cancelled, failed or expired, and frees what it keeps. Its lease runs from when the KV was computed
(before, the prefill's own deadline bounds it), or from an order that came before its prefill.
"""

import asyncio
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable, Coroutine
from enum import StrEnum
from typing import Protocol

from quartet_agent.engines.base import BlocksFenced, KvPool
from quartet_agent.kv.mover import MoveError, Mover
from quartet_bus.messages import KvCommand, KvLease, StreamId, TransferReason, TransferReport
from quartet_core.transfer_words import KvLost, State

_BYTES_PER_MS = 1e6  # of one GB/s


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
    """What the link takes for ``kv_bytes``: setup, then bytes over bandwidth (1 GB/s is 1e6 bytes a millisecond)."""
    return setup_ms + (kv_bytes / (gb_per_s * _BYTES_PER_MS) if gb_per_s > 0 else 0.0)


class Departure:
    """KV of one transfer on its sending side."""

    __slots__ = ("incarnation", "moved", "order", "owner", "pinned", "pool", "sending", "stream", "timer", "tokens",
                 "transfer", "worker")  # fmt: skip

    def __init__(self, transfer: str, worker: str, incarnation: int) -> None:
        self.transfer = transfer
        self.worker = worker
        self.incarnation = incarnation
        self.stream = StreamId("")
        self.tokens = 0
        self.order: KvCommand | None = None
        self.owner: DepartureOwner | None = None
        self.pool: KvPool | None = None
        self.pinned = False
        self.moved = False
        self.sending: asyncio.Task[None] | None = None
        self.timer: TimerHandle | None = None

    @property
    def state(self) -> State:
        """As a coordinator sees it."""
        if self.moved:
            return State.MOVED
        return State.MOVING if self.sending is not None else State.RESERVED


class Departures:
    """All departures of one agent. ``report`` publishes progress, ``spawn`` runs the sends."""

    def __init__(
        self,
        loop: AbstractEventLoop,
        now_ms: Callable[[], float],
        mover: Mover,
        report: Callable[[TransferReport], None],
        spawn: Callable[[Coroutine[None, None, None], str], "asyncio.Task[None]"],
        *,
        lease_ms: float,
        chunk_bytes: int,
    ) -> None:
        self._loop = loop
        self._now_ms = now_ms
        self._mover = mover
        self._report = report
        self._spawn = spawn
        self._lease_ms = lease_ms
        self._chunk_bytes = chunk_bytes
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

    def pinned(self, transfer: str) -> None:
        """The prefill is done: its KV can be sent, and its lease runs."""
        departure = self._departures.get(transfer)
        if departure is not None:
            departure.pinned = True
            self._renew(departure, self._lease_ms)
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

    def _go(self, departure: Departure) -> None:
        if departure.pinned and departure.order is not None and departure.sending is None:
            departure.sending = self._spawn(self._send(departure, departure.order), f"move {departure.transfer}")

    async def _send(self, departure: Departure, order: KvCommand) -> None:
        started_ms = self._now_ms()
        self._say(departure, State.MOVING)
        pool = departure.pool
        assert pool is not None  # pinned by its owner's pool
        try:
            wire_bytes = await self._mover.send(
                order.address,
                order.secret,
                order.transfer,
                order.epoch,
                pool.export(order.transfer),
                self._chunk_bytes,
            )
        except (MoveError, BlocksFenced) as error:
            if self._departures.get(departure.transfer) is departure:
                self._say(departure, State.ABORTED, detail=str(error), took_ms=self._now_ms() - started_ms)
                self._end(departure, DepartureEnd.FAILED)
            return
        # The model's KV is larger than what we send for it: the link is busy for as long as that would take.
        charge_ms = charged_ms(order.kv_bytes, order.gb_per_s, order.setup_ms)
        left_ms = charge_ms - (self._now_ms() - started_ms)
        if left_ms > 0:
            await asyncio.sleep(left_ms / 1e3)
        departure.moved = True
        took_ms = max(self._now_ms() - started_ms, charge_ms)  # a real loop's timers may be half a millisecond early
        self._say(departure, State.MOVED, wire_bytes=wire_bytes, took_ms=took_ms)

    def _say(
        self, departure: Departure, state: State, *, wire_bytes: int = 0, took_ms: float = 0.0, detail: str = ""
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
                link=order.link if order is not None else "",
                detail=detail,
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
        if departure.sending is not None and departure.sending is not asyncio.current_task(self._loop):
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
