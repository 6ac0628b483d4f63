"""Sends: the bytes of a departure go out over the mover, and the link is charged for what they stand for.

Transfers of simulated engines at once on one link share it, as those of real ones do (``quartet_sim.sharing``).
"""

import asyncio
from collections.abc import Callable, Coroutine

from quartet_agent.engines.base import BlocksFenced, KvPool
from quartet_agent.kv.departures import Departure, Departures, charged_ms
from quartet_agent.kv.memory import TimedLink
from quartet_agent.kv.mover import MoveError, Mover
from quartet_bus.messages import KvCommand
from quartet_sim.sharing import SharedLink

_MAX_LINKS = 4096
"""Links that are charged, at most; the one longest known is forgotten first."""


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

    def __call__(self, departures: Departures, departure: Departure, order: KvCommand) -> "asyncio.Task[None]":
        """As ``Send.__call__``."""
        pool = departure.pool
        assert pool is not None  # pinned by its owner's pool
        return self._spawn(self._send(departures, departure, order, pool), f"move {departure.transfer}")

    async def _send(self, departures: Departures, departure: Departure, order: KvCommand, pool: KvPool) -> None:
        started_ms = self._now_ms()
        # The model's KV is larger than what we send for it: the link is busy for as long as that would take.
        charge = asyncio.ensure_future(self._charge(order)) if pool.stands_in else None
        try:
            await pool.ready(order.transfer)
            sent = await self._mover.send(
                order.address,
                order.secret,
                order.transfer,
                order.epoch,
                pool.export(order.transfer),
                self._chunk_bytes,
            )
            if charge is None:
                departures.sent(departure, sent.wire_bytes, self._now_ms() - started_ms, sent.link)
                return
            await charge
        except (MoveError, BlocksFenced) as error:
            departures.unsendable(departure, str(error), self._now_ms() - started_ms)
            return
        finally:
            if charge is not None:
                charge.cancel()
        # a real loop's timers may be half a millisecond early
        least_ms = charged_ms(order.kv_bytes, order.gb_per_s, order.setup_ms)
        departures.sent(departure, sent.wire_bytes, max(self._now_ms() - started_ms, least_ms), order.link)

    async def _charge(self, order: KvCommand) -> None:
        await asyncio.sleep(order.setup_ms / 1e3)
        if order.gb_per_s <= 0:
            return
        key = (order.link, order.address)
        link = self._links.get(key)
        if link is None:
            while len(self._links) >= _MAX_LINKS and (idle := next(iter(self._links))):
                del self._links[idle]
            link = self._links[key] = TimedLink(SharedLink(1.0), self._now_ms)
        # a link of 1 GB/s carries milliseconds in place of megabytes: workers behind one link may have different rates
        await link.cross(int(order.kv_bytes / order.gb_per_s))
