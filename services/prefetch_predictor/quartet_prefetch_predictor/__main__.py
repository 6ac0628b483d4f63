"""``quartet-prefetch-predictor``: the predictor with its gRPC door."""

import contextlib
import random
from collections.abc import AsyncIterator
from itertools import pairwise

from quartet_bus import catalogue, process
from quartet_bus.bus import Bus
from quartet_bus.config.load import ConfigError
from quartet_bus.config.schema import Config
from quartet_prefetch_predictor.door import CoordinatorBudget, PredictorDoor, predictor_rpc
from quartet_prefetch_predictor.service import PredictorService
from quartet_rpc.channel import channel
from quartet_rpc.server import serve


def make(bus: Bus, config: Config, instance: str, source: random.Random) -> PredictorService:
    """The service alone, as the virtual fleet has it. Raises ``ConfigError``."""
    horizons_s = config.prefetch.horizons_s
    if not horizons_s or horizons_s[0] <= 0 or any(a >= b for a, b in pairwise(horizons_s)):
        raise ConfigError("configuration", "prefetch.horizons_s", list(horizons_s), "must be positive and rise")
    return PredictorService(bus, config, instance=instance, random=source, catalogue=catalogue.load(config))


@contextlib.asynccontextmanager
async def edges(service: PredictorService) -> AsyncIterator[None]:
    """gRPC in, and out to the coordinator."""
    async with channel(service.config.kv.grpc) as coordinator:
        service.budget = CoordinatorBudget(coordinator)
        rpc = predictor_rpc(PredictorDoor(service))
        async with serve(service.config.prefetch.grpc, [rpc], service.not_ready) as serving:
            service.log.info("grpc listens", address=serving.address)
            yield


def main() -> None:
    """Run until told to stop."""
    process.run(make, edges)


if __name__ == "__main__":
    main()
