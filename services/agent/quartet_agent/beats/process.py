"""The agent's side of the beating child: starts it, feeds it, and starts it again if it dies."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec

from quartet_agent.beats.child import BeatSettings
from quartet_agent.beats.shared import SharedWords
from quartet_bus.config.schema import FleetSection
from quartet_core.heartbeat import BeatWorker, node_key

_RESTART_INTERVAL_S = 1.0
_STOP_TIMEOUT_S = 1.0


class ChildBeats:
    """A ``BeatPort`` whose beats come from a child process, as ``[fleet]`` says; tagged with the first master key."""

    def __init__(self, fleet: FleetSection) -> None:
        self._fleet = fleet
        self._fd = -1
        self._words: SharedWords | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._settings: BeatSettings | None = None
        self._started_s = 0.0
        self._restarts = 0
        self._sequence = 0
        self._failed = 0

    @property
    def sequence(self) -> int:
        """As ``BeatPort.sequence``."""
        if self._words is not None:
            self._sequence = self._words.sequence
        return self._sequence

    @property
    def trouble(self) -> int:
        """As ``BeatPort.trouble``."""
        if self._words is not None:
            self._failed = self._words.failed
        return self._failed + self._restarts

    @property
    def pid(self) -> int | None:
        """The child's process id while there is one."""
        return None if self._child is None else self._child.pid

    def start(self, node: str, incarnation: int) -> None:
        """As ``BeatPort.start``. Raises ``ValueError`` for a master key that is none."""
        fleet = self._fleet
        key = node_key(bytes.fromhex(fleet.master_keys[0]), node).hex() if fleet.master_keys else ""
        self._fd = SharedWords.create()
        self._words = SharedWords(self._fd)
        self._settings = BeatSettings(
            fd=self._fd,
            parent=os.getpid(),
            node=node,
            incarnation=incarnation,
            interval_us=fleet.beat_interval_us,
            multicast_group=fleet.multicast_group,
            port=fleet.port,
            interface=fleet.interface,
            multicast_ttl=fleet.multicast_ttl,
            targets=fleet.targets,
            key=key,
        )
        self._words.write_tick(time.monotonic_ns())
        self._spawn()

    def publish(self, workers: Sequence[BeatWorker]) -> None:
        """As ``BeatPort.publish``."""
        if self._words is not None:
            self._words.write(workers)

    def tick(self) -> None:
        """As ``BeatPort.tick``. A child that ended is started again, once a second at most; its sequence goes on."""
        if self._words is None or self._child is None:
            return
        self._words.write_tick(time.monotonic_ns())
        if self._child.poll() is not None and time.monotonic() - self._started_s > _RESTART_INTERVAL_S:
            self._restarts += 1
            self._spawn()

    def stop(self) -> None:
        """As ``BeatPort.stop``."""
        child, words = self._child, self._words
        self._child = self._words = None
        if child is not None:
            child.terminate()
            try:
                child.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        if words is not None:
            self._sequence, self._failed = words.sequence, words.failed
            words.close()
            os.close(self._fd)

    def _spawn(self) -> None:
        self._started_s = time.monotonic()
        child = subprocess.Popen(
            [sys.executable, "-m", "quartet_agent.beats"], stdin=subprocess.PIPE, pass_fds=(self._fd,)
        )
        assert child.stdin is not None  # PIPE
        try:
            child.stdin.write(msgspec.json.encode(self._settings) + b"\n")
            child.stdin.close()
        except BrokenPipeError:
            pass  # it died at once; the next tick sees that and tries again
        self._child = child
