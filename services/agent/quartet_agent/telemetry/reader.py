"""Readings of real hardware: a thread that asks the driver, so that a driver that hangs hangs nothing else.

There is one thread and at most one question under way. A driver call that does not come back cannot be ended; its
thread is a daemon, and waits for it alone. The agent goes on, and says that it knows nothing new.
"""

import threading
import time
from collections.abc import Callable
from typing import Protocol

from quartet_agent.telemetry.port import Taken
from quartet_core.readings import HostReading


class Probe(Protocol):
    """Something that can be read; may block for as long as it likes."""

    def read(self) -> HostReading:
        """How everything is just now."""
        ...


class ThreadReadings:
    """A ``ReadingsPort`` over a blocking ``probe``: each ``take`` has the next reading begun."""

    source = "nvml"

    def __init__(self, probe: Probe, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._probe = probe
        self._timeout_s = timeout_s
        self._clock = clock
        self._wanted = threading.Event()
        self._stopped = False
        # Each of these is set by one side only, and in one move.
        self._asked = 0
        self._asked_s = 0.0
        self._done: tuple[int, float, HostReading] | None = None

    def start(self) -> None:
        """As ``ReadingsPort.start``: the first reading is begun."""
        threading.Thread(target=self._run, name="telemetry", daemon=True).start()
        self._ask()

    def take(self) -> Taken:
        """As ``ReadingsPort.take``."""
        now_s = self._clock()
        number, at_s, reading = self._done or (0, self._asked_s, HostReading())
        if number < self._asked:
            waited_s = now_s - self._asked_s
            late = f"the driver has not answered for {waited_s:.0f} s" if waited_s > self._timeout_s else ""
            return Taken(None, at_s, (now_s - at_s) * 1e3, late)
        took_s = at_s - self._asked_s
        degraded = reading.trouble
        if took_s > self._timeout_s:
            degraded = "; ".join(filter(None, (degraded, f"the driver took {took_s:.1f} s to answer")))
        self._ask()
        return Taken(reading, at_s, (now_s - at_s) * 1e3, degraded)

    def stop(self) -> None:
        """As ``ReadingsPort.stop``."""
        self._stopped = True
        self._wanted.set()

    def _ask(self) -> None:
        self._asked_s = self._clock()
        self._asked += 1
        self._wanted.set()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._stopped:
                return
            number = self._asked
            try:
                reading = self._probe.read()
            except Exception as error:  # whatever is wrong with a driver must not end its telemetry
                reading = HostReading(trouble=f"{type(error).__name__}: {error}")
            self._done = (number, self._clock(), reading)
