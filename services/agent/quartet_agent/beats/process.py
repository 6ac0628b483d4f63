"""The agent's side of the beating child: starts it (again, if it dies), feeds it, gives it new keys and addresses."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec

from quartet_agent.beats.child import BeatSettings, Order
from quartet_agent.beats.shared import SharedWords
from quartet_agent.beats.targets import Address, LookUp, has_names
from quartet_bus.config.check import ConfigError
from quartet_bus.config.keys import MasterKeys
from quartet_bus.config.schema import FleetSection
from quartet_bus.logs import logger
from quartet_bus.multicast import outgoing
from quartet_core.heartbeat import BeatWorker, node_key

_RESTART_INTERVAL_S = 1.0
_LOOK_INTERVAL_S = 1.0
_STOP_TIMEOUT_S = 1.0


class ChildBeats:
    """A ``BeatPort`` whose beats come from a child process, as ``[fleet]`` says; tagged with the first master key."""

    def __init__(self, fleet: FleetSection) -> None:
        self._fleet = fleet
        self._log = logger()
        self._fd = -1
        self._words: SharedWords | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._settings: BeatSettings | None = None
        self._keys: MasterKeys | None = None
        self._look_up: LookUp | None = None
        self._addresses: list[Address] = []
        self._started_s = 0.0
        self._looked_s = 0.0
        self._restarts = 0
        self._sequence = 0
        self._failed = 0
        self._skipped = 0

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
    def skipped(self) -> int:
        """As ``BeatPort.skipped``."""
        if self._words is not None:
            self._skipped = self._words.skipped
        return self._skipped

    @property
    def realtime(self) -> bool:
        """As ``BeatPort.realtime``."""
        return self._words is not None and self._words.realtime

    @property
    def pid(self) -> int | None:
        """The child's process id while there is one."""
        return None if self._child is None else self._child.pid

    def start(self, node: str, incarnation: int) -> None:
        """As ``BeatPort.start``. Raises ``ConfigError`` for keys that are none and an interface that is not there."""
        fleet = self._fleet
        self._keys = MasterKeys(fleet)
        if not fleet.targets:
            try:
                outgoing(fleet.interface)
            except OSError as error:
                raise ConfigError("configuration", "fleet.interface", fleet.interface, str(error)) from None
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
            key=self._node_key(node),
            scheduling=fleet.beat_scheduling,
        )
        self._words.write_tick(time.monotonic_ns())
        if has_names(fleet.targets):
            self._look_up = LookUp(fleet.targets)
        self._spawn()

    def publish(self, workers: Sequence[BeatWorker]) -> None:
        """As ``BeatPort.publish``."""
        if self._words is not None:
            self._words.write(workers)

    def tick(self) -> None:
        """As ``BeatPort.tick``. A child that ended is started again, once a second at most; its sequence goes on.

        Keys are looked at once a second, and addresses that were looked up meanwhile are taken over.
        """
        if self._words is None or self._child is None:
            return
        self._words.write_tick(time.monotonic_ns())
        now_s = time.monotonic()
        if self._child.poll() is not None:
            if now_s - self._started_s > _RESTART_INTERVAL_S:
                self._restarts += 1
                self._spawn()
        elif now_s - self._looked_s > _LOOK_INTERVAL_S:
            self._looked_s = now_s
            self._look()

    def stop(self) -> None:
        """As ``BeatPort.stop``."""
        child, words = self._child, self._words
        self._child = self._words = None
        if self._look_up is not None:
            self._look_up.stop()
        if child is not None:
            assert child.stdin is not None  # PIPE
            with contextlib.suppress(OSError):
                child.stdin.close()
            child.terminate()
            try:
                child.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        if words is not None:
            self._sequence, self._failed, self._skipped = words.sequence, words.failed, words.skipped
            words.close()
            os.close(self._fd)

    def _look(self) -> None:
        """Tell the child of a new key, and of addresses that are not those of before."""
        assert self._keys is not None  # since ``start``
        assert self._settings is not None
        trouble = self._keys.trouble
        changed = self._keys.look()
        if changed:
            self._log.info("master keys changed", keys=len(self._keys.keys))
        if self._keys.trouble and self._keys.trouble != trouble:
            self._log.error("master keys stay as they were", reason=self._keys.trouble)
        addresses = self._look_up.addresses if self._look_up is not None else []
        if addresses and sorted(addresses) != sorted(self._addresses):
            self._addresses = addresses
            self._log.info("beats go to", addresses=[f"{host}:{port}" for host, port in addresses])
            changed = True
        if changed:
            self._settings = msgspec.structs.replace(self._settings, key=self._node_key(self._settings.node))
            self._order(Order(self._settings.key, tuple(self._addresses)))

    def _node_key(self, node: str) -> str:
        assert self._keys is not None  # since ``start``
        return node_key(self._keys.keys[0], node).hex() if self._keys.keys else ""

    def _order(self, order: Order) -> None:
        """Give an order to the child. One that died just now gets it with its successor's settings."""
        assert self._words is not None  # since ``start``
        assert self._child is not None
        assert self._child.stdin is not None  # PIPE
        try:
            self._child.stdin.write(msgspec.json.encode(order) + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            return
        self._words.count_order()

    def _spawn(self) -> None:
        assert self._settings is not None  # since ``start``
        assert self._words is not None
        self._started_s = time.monotonic()
        self._addresses = []  # the child looks its targets up itself, and is told if that changes
        if self._child is not None and self._child.stdin is not None:
            with contextlib.suppress(OSError):
                self._child.stdin.close()
        settings = msgspec.structs.replace(self._settings, orders=self._words.orders)
        child = subprocess.Popen(
            [sys.executable, "-m", "quartet_agent.beats"], stdin=subprocess.PIPE, pass_fds=(self._fd,)
        )
        assert child.stdin is not None  # PIPE
        with contextlib.suppress(BrokenPipeError):  # it died at once; the next tick sees that and tries again
            child.stdin.write(msgspec.json.encode(settings) + b"\n")
            child.stdin.flush()
        self._child = child
