"""``quartet-gateway`` and ``python -m quartet_gateway``."""

from quartet_bus.process import run
from quartet_gateway.service import make
from quartet_gateway.site import http_site


def main() -> None:
    """Run one gateway until it is told to stop."""
    run(make, http_site)


if __name__ == "__main__":
    main()
