"""``python -m quartet_kv_coordinator --config quartet.toml``."""

from quartet_bus.process import run
from quartet_kv_coordinator.door import serve
from quartet_kv_coordinator.service import make


def main() -> None:
    """Run the coordinator and its gRPC door until a signal ends it."""
    run(make, serve)


if __name__ == "__main__":
    main()
