"""``python -m quartet_heartbeat_collector --config quartet.toml``."""

import os

# Before numpy is loaded: its linear algebra would start a thread a core, each spinning for a fifth of a second and
# holding megabytes, for multiplications that nobody here does.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from quartet_bus.process import run
from quartet_heartbeat_collector.edge import edges, make


def main() -> None:
    """Run the collector until a signal ends it."""
    run(make, edges)


if __name__ == "__main__":
    main()
