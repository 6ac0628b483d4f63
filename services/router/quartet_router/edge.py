"""What only a real router has: the shared-memory ring of a collector on the same host."""

import contextlib
from collections.abc import AsyncIterator

import msgspec

from quartet_bus.messages import FleetDelta
from quartet_bus.ring import RingReader
from quartet_router.service import RouterService

_FIELDS = len(FleetDelta.__struct_fields__)
_encode = msgspec.msgpack.Encoder().encode


def beginning(record: bytes) -> bytes:
    """How every delta of the author of ``record`` begins: the array's length, and the collector's name."""
    collector = msgspec.msgpack.decode(record, type=FleetDelta).collector
    return bytes((0x90 | _FIELDS,)) + _encode(collector)


@contextlib.asynccontextmanager
async def edges(service: RouterService) -> AsyncIterator[None]:
    """Read fleet deltas from the ring at ``[fleet] ring_path``, if one is named and a collector writes it.

    A record of the ring is the delta that the bus carries too, byte for byte, so while the ring is attached the bus's
    copies of *that* collector's deltas are skipped undecoded. Other collectors', and without a ring (another host, a
    collector that stopped) all of them, count as on any router.
    """
    fleet = service.config.fleet
    if not fleet.ring_path:
        yield
        return
    with RingReader(fleet.ring_path) as ring:
        missed = service.metrics.gauge("ring_lost", "Records of the ring that were overwritten before being read.")
        missed.set_function(lambda: float(ring.lost))
        author: list[object] = [None]

        def read() -> None:
            records = ring.poll()
            if not ring.attached:
                service.ring_prefix, author[0] = b"", None
            if records:
                if author[0] != ring.incarnation:
                    service.ring_prefix, author[0] = beginning(records[-1]), ring.incarnation
                service.on_deltas(records)

        service.every(fleet.receive_batch_ms / 1000, read)
        yield
        service.ring_prefix = b""
