"""``python -m quartet_heartbeat_collector --config quartet.toml``."""

from quartet_bus.process import run
from quartet_heartbeat_collector.edge import edges, make


def main() -> None:
    """Run the collector until a signal ends it."""
    run(make, edges)


if __name__ == "__main__":
    main()
