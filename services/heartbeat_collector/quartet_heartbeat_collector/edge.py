"""What only a real collector has: the socket, the ring, and the timer that empties the one into the other."""

import contextlib
import random
from collections.abc import AsyncIterator

from quartet_bus.bus import Bus
from quartet_bus.config.schema import Config
from quartet_bus.process import Fault
from quartet_bus.ring import RingError, RingWriter
from quartet_heartbeat_collector.receive import CannotReceive, Receiver
from quartet_heartbeat_collector.service import CollectorService

_SHORTEST_BATCH_S = 0.001
"""The shortest batch a timer can make: uvloop's clock counts whole milliseconds."""


def make(bus: Bus, config: Config, instance: str, source: random.Random) -> CollectorService:
    """The collector of this process."""
    return CollectorService(bus, config, instance=instance, random=source)


@contextlib.asynccontextmanager
async def edges(service: CollectorService) -> AsyncIterator[None]:
    """Attach ring and socket to ``service``; take them off again, the ring's file included.

    Datagrams are not announced by the event loop: a timer every ``receive_batch_ms`` reads what came meanwhile. Waking
    for each would cost the loop a turn and numpy its batches.
    """
    fleet = service.config.fleet
    with contextlib.ExitStack() as stack:
        try:
            receiver = Receiver(fleet)
            stack.callback(receiver.close)
            if fleet.ring_path:
                service.ring = RingWriter(fleet.ring_path, fleet.ring_bytes, service.incarnation)
                stack.callback(service.ring.close)
        except (CannotReceive, RingError) as error:
            raise Fault(str(error)) from error
        if receiver.warning:
            service.log.warning(receiver.warning)
        service.log.info("hearing", address=receiver.address, buffer_bytes=receiver.buffer_bytes, ring=fleet.ring_path)
        service.counts.receive_buffer.set(receiver.buffer_bytes)
        service.kernel_drops = receiver.kernel_drops
        service.counts.kernel_drops.set_function(receiver.kernel_drops)

        def receive() -> None:
            try:
                receiver.drain(service.heard)
                service.trouble = None
            except CannotReceive as error:
                if service.trouble is None:
                    service.log.error(str(error))
                service.trouble = str(error)

        service.receive = receive
        service.every(max(fleet.receive_batch_ms / 1000, _SHORTEST_BATCH_S), service.read)
        try:
            yield
        finally:
            # Deltas may still be said while the service stops, but no longer into a closed ring.
            service.receive = service.ring = None
            service.kernel_drops = int
            service.counts.kernel_drops.set_function(lambda: 0.0)
