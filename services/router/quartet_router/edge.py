"""What only a real router has: the shared-memory ring of a collector on the same host."""

import contextlib
from collections.abc import AsyncIterator

from quartet_bus.ring import RingReader
from quartet_router.service import RouterService


@contextlib.asynccontextmanager
async def edges(service: RouterService) -> AsyncIterator[None]:
    """Read fleet deltas from the ring at ``[fleet] ring_path``, if one is named and a collector writes it.

    A record of the ring is the delta of the same number, so while the ring is attached the bus's deltas are not even
    decoded; without it (another host, a collector that stopped) they count as on any router.
    """
    fleet = service.config.fleet
    if not fleet.ring_path:
        yield
        return
    with RingReader(fleet.ring_path) as ring:
        missed = service.metrics.gauge("ring_lost", "Records of the ring that were overwritten before being read.")
        missed.set_function(lambda: float(ring.lost))

        def read() -> None:
            records = ring.poll()
            service.ring_attached = ring.attached
            if records:
                service.on_ring(records)

        service.every(fleet.receive_batch_ms / 1000, read)
        yield
        service.ring_attached = False
