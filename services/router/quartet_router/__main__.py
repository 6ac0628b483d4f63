"""``python -m quartet_router``: one router replica."""

import random

from quartet_bus.bus import Bus
from quartet_bus.config.schema import Config
from quartet_bus.process import run
from quartet_router.edge import edges
from quartet_router.service import RouterService


def _make(bus: Bus, config: Config, instance: str, random: random.Random) -> RouterService:
    return RouterService(bus, config, instance=instance, random=random)


def main() -> None:
    """Run until told to stop."""
    run(_make, edges)


if __name__ == "__main__":
    main()
