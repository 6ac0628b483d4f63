"""Where beats go: addresses behind the names of ``[fleet] targets``, looked up again and again beside the event loop.

A name may stand for several collectors (a headless service of Kubernetes does), and for others tomorrow.
"""

import socket
import threading
from collections.abc import Sequence

Address = tuple[str, int]

MAX_ADDRESSES = 16
"""Each beat is sent to every address, 2,000 times a second."""

LOOK_UP_INTERVAL_S = 5.0


def look_up(targets: Sequence[str]) -> tuple[list[Address], list[str]]:
    """(all IPv4 addresses behind ``targets``, each ``host:port``, at most ``MAX_ADDRESSES``; why the others have none).

    Blocks for as long as the name service takes.
    """
    found: dict[Address, None] = {}
    troubles = []
    for target in targets:
        host, _, port = target.rpartition(":")
        try:
            answers = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_DGRAM)
        except (OSError, ValueError) as error:
            troubles.append(f"{target}: {error}")
            continue
        for *_, place in answers:
            found[str(place[0]), int(place[1])] = None
    return list(found)[:MAX_ADDRESSES], troubles


def has_names(targets: Sequence[str]) -> bool:
    """Whether looking up again may change anything."""
    for target in targets:
        try:
            socket.inet_aton(target.rpartition(":")[0])
        except OSError:
            return True
    return False


class LookUp:
    """Looks ``targets`` up every ``interval_s`` in a thread; ``addresses`` are the last ones found, [] before."""

    def __init__(self, targets: Sequence[str], interval_s: float = LOOK_UP_INTERVAL_S) -> None:
        self._targets = targets
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self.addresses: list[Address] = []
        threading.Thread(target=self._run, name="beat-targets", daemon=True).start()

    def stop(self) -> None:
        """Look no more; a look-up under way is left to itself."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            addresses, _ = look_up(self._targets)
            if addresses:  # a name service that fails does not silence a node
                self.addresses = addresses
