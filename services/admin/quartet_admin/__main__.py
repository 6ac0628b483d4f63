"""``quartet-admin``: the admin service with its gRPC door."""

import contextlib
import random
from collections.abc import AsyncIterator

from quartet_admin.door import AdminDoor, admin_rpc
from quartet_admin.service import AdminService
from quartet_bus import catalogue, process
from quartet_bus.bus import Bus
from quartet_bus.config.schema import Config
from quartet_rpc.channel import channel
from quartet_rpc.server import serve


def make(bus: Bus, config: Config, instance: str, source: random.Random) -> AdminService:
    """The service alone, as the virtual fleet has it."""
    return AdminService(bus, config, instance=instance, random=source, catalogue=catalogue.load(config))


@contextlib.asynccontextmanager
async def edges(service: AdminService) -> AsyncIterator[None]:
    """gRPC in, and out to coordinator and predictor."""
    config = service.config
    async with channel(config.kv.grpc) as coordinator, channel(config.prefetch.grpc) as predictor:
        door = AdminDoor(service, coordinator, predictor)
        async with serve(config.admin.grpc, [admin_rpc(door)], service.not_ready) as serving:
            service.log.info("grpc listens", address=serving.address)
            yield


def main() -> None:
    """Run until told to stop."""
    process.run(make, edges)


if __name__ == "__main__":
    main()
