"""Sends: the bytes of a departure go out over the mover as they come to be, and the link is charged for what they stand
for.

Transfers of simulated engines at once on one link share it, as those of real ones do (``quartet_sim.sharing``). One
that waits for its prefill to compute more is not on the link meanwhile: the others have its share.
"""

import asyncio
from collections.abc import Callable, Coroutine

from quartet_agent.engines.pools import BlocksFenced, KvPool
from quartet_agent.kv.departures import Departure, Departures, charged_ms
from quartet_agent.kv.flow import Charge, Flow
from quartet_agent.kv.memory import TimedLink
from quartet_agent.kv.mover import MoveError, Mover
from quartet_bus.messages import KvCommand
from quartet_sim.sharing import SharedLink

_MAX_LINKS = 4096
"""Links that are charged, at most; the one longest known is forgotten first."""


class UnderWay:
    """As ``Sending``: the task that sends, and the flow that it sends of."""

    __slots__ = ("_flow", "_kv_bytes", "task")

    def __init__(self, task: "asyncio.Task[None]", flow: Flow, kv_bytes: int) -> None:
        self.task = task
        self._flow = flow
        self._kv_bytes = kv_bytes

    def cancel(self) -> None:
        """As ``Sending.cancel``."""
        self.task.cancel()

    def grew(self) -> None:
        """As ``Sending.grew``."""
        self._flow.grew()

    def left_bytes(self) -> int:
        """As ``Sending.left_bytes``."""
        return max(0, self._kv_bytes - int(self._kv_bytes * self._flow.over))


class Sends:
    """As ``Send``. ``spawn`` runs the sends; chunks have ``chunk_bytes`` at most."""

    def __init__(
        self,
        now_ms: Callable[[], float],
        mover: Mover,
        spawn: Callable[[Coroutine[None, None, None], str], "asyncio.Task[None]"],
        *,
        chunk_bytes: int,
    ) -> None:
        self._now_ms = now_ms
        self._mover = mover
        self._spawn = spawn
        self._chunk_bytes = chunk_bytes
        self._links: dict[tuple[str, str], TimedLink] = {}

    def __call__(self, departures: Departures, departure: Departure, order: KvCommand) -> UnderWay:
        """As ``Send.__call__``."""
        pool = departure.pool
        assert pool is not None  # computed in its owner's pool
        charge = None
        if pool.stands_in:
            # The model's KV is larger than what we send for it: the link is busy for as long as that would take.
            charge = Charge(order.setup_ms, order.kv_bytes, order.gb_per_s, self._link(order), self._now_ms)
        flow = Flow(pool, departure.transfer, departure.tokens, charge, self._now_ms)
        sends = self._send(departures, departure, order, pool, flow)
        return UnderWay(self._spawn(sends, f"move {departure.transfer}"), flow, order.kv_bytes)

    async def _send(
        self, departures: Departures, departure: Departure, order: KvCommand, pool: KvPool, flow: Flow
    ) -> None:
        charging = asyncio.ensure_future(flow.charge.run()) if flow.charge is not None else None
        try:
            await pool.ready(order.transfer)
            sent = await self._mover.send(
                order.address, order.secret, order.transfer, order.epoch, flow, self._chunk_bytes
            )
            if charging is not None:
                await charging
        except (MoveError, BlocksFenced) as error:
            departures.unsendable(departure, str(error), flow.clock.flowed_ms)
            return
        finally:
            if charging is not None:
                charging.cancel()
        clock = flow.clock
        clock.stop()
        took_ms, link = clock.flowed_ms, sent.link
        if flow.charge is not None:
            # a real loop's timers may be half a millisecond early
            took_ms = max(took_ms, charged_ms(order.kv_bytes, order.gb_per_s, order.setup_ms))
            link = order.link
        departures.sent(departure, sent.wire_bytes, took_ms, link, clock.overlap_ms)

    def _link(self, order: KvCommand) -> TimedLink | None:
        if order.gb_per_s <= 0:
            return None
        key = (order.link, order.address)
        link = self._links.get(key)
        if link is None:
            while len(self._links) >= _MAX_LINKS and (idle := next(iter(self._links))):
                del self._links[idle]
            # a link of 1 GB/s carries milliseconds in place of megabytes: workers behind it may have different rates
            link = self._links[key] = TimedLink(SharedLink(1.0), self._now_ms)
        return link
