"""Keeping optional parts of other libraries out of our processes.

nats-py loads aiohttp (for WebSocket transport) and structlog loads rich (for colours on a developer's terminal)
whenever they are installed. We use neither there, and they cost 13 MB of every process that shares an environment with
the gateway or the command line.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hidden(*names: str) -> Iterator[None]:
    """Let imports inside behave as if the modules ``names`` were not installed; loaded ones stay as they are."""
    absent = [name for name in names if name not in sys.modules]
    for name in absent:
        sys.modules[name] = None  # type: ignore[assignment]  # what the import system takes as "not found"
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
