"""Readings of cards that are not there: from what simulated engines do, and said to be simulated.

Power is between idle and the class's limit by the share of time in which an engine was busy, temperature follows it
slowly, PCIe and NIC carry the KV that was charged to links. Clocks, throttle reasons and replays are not made up.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from quartet_agent.telemetry.port import Taken
from quartet_agent.worker import HostedWorker
from quartet_core.readings import GpuReading, HostReading, NicReading, pcie_gb_per_s

NIC = "sim0"
_IDLE_SHARE = 0.1  # of the power limit, as data/hardware.toml has it
_IDLE_C = 30.0
_BUSY_C = 80.0
_WARM_UP_S = 30.0


class SimulatedReadings:
    """A ``ReadingsPort`` of simulated engines. ``sent_bytes`` and ``received_tokens`` are the KV that left and reached
    each worker since start, kept up by whoever moves it."""

    source = "simulated"

    def __init__(
        self,
        workers: Sequence[HostedWorker],
        now_s: Callable[[], float],
        nic_gbit_per_s: float,
        sent_bytes: Mapping[str, int],
        received_tokens: Mapping[str, int],
    ) -> None:
        self._workers = workers
        self._now_s = now_s
        self._nic_gbit_per_s = nic_gbit_per_s
        self._before_s = 0.0
        self._busy_ms: dict[str, float] = {}
        self._temperature_c: dict[int, float] = {}
        self._sent_bytes = sent_bytes
        self._received_tokens = received_tokens
        self._counted: dict[str, tuple[int, int]] = {}

    def start(self) -> None:
        """As ``ReadingsPort.start``."""
        self._before_s = self._now_s()

    def take(self) -> Taken:
        """As ``ReadingsPort.take``."""
        now_s = self._now_s()
        seconds = max(1e-3, now_s - self._before_s)
        self._before_s = now_s
        gpus: dict[int, GpuReading] = {}
        for worker in self._workers:
            for reading in self._cards(worker, seconds):
                gpus.setdefault(reading.index, reading)
        nic = NicReading(
            name=NIC,
            rx_bytes=sum(self._totals(worker)[0] for worker in self._workers),
            tx_bytes=sum(self._totals(worker)[1] for worker in self._workers),
            gbit_per_s=self._nic_gbit_per_s,
        )
        return Taken(HostReading(gpus=tuple(gpus[index] for index in sorted(gpus)), nics=(nic,)), now_s)

    def stop(self) -> None:
        """As ``ReadingsPort.stop``."""

    def _cards(self, worker: HostedWorker, seconds: float) -> list[GpuReading]:
        """The cards of one worker: they do the same, and divide its bytes."""
        facts, busy_ms = worker.facts, worker.adapter.load().busy_ms
        busy = min(1.0, max(0.0, busy_ms - self._busy_ms.get(worker.id, 0.0)) / (seconds * 1e3))
        self._busy_ms[worker.id] = busy_ms
        totals = self._totals(worker)
        before = self._counted.get(worker.id, (0, 0))
        self._counted[worker.id] = totals
        capacity = pcie_gb_per_s(facts.pcie_gen, 16) or math.inf
        # A transfer is charged when it is over, however long it took: no link carries more than it can.
        rx, tx = (
            min(capacity, (now - then) / seconds / 1e9 / len(facts.gpus))
            for now, then in zip(totals, before, strict=True)
        )
        limit_w = facts.watts_per_gpu or None
        return [
            GpuReading(
                index=index,
                temperature_c=self._warm(index, busy, seconds),
                power_w=None if limit_w is None else limit_w * (_IDLE_SHARE + (1 - _IDLE_SHARE) * busy),
                power_limit_w=limit_w,
                busy_share=busy,
                reasons=(),
                pcie_rx_gb_per_s=rx,
                pcie_tx_gb_per_s=tx,
                pcie_gen=facts.pcie_gen or None,
                pcie_width=16 if facts.pcie_gen else None,
            )
            for index in facts.gpus
        ]

    def _totals(self, worker: HostedWorker) -> tuple[int, int]:
        """Bytes of KV that (came, left) since start."""
        tokens = self._received_tokens.get(worker.id, 0)
        return tokens * worker.facts.layout.bytes_per_token, self._sent_bytes.get(worker.id, 0)

    def _warm(self, index: int, busy: float, seconds: float) -> float:
        before = self._temperature_c.get(index, _IDLE_C)
        target = _IDLE_C + (_BUSY_C - _IDLE_C) * busy
        now = target + (before - target) * math.exp(-seconds / _WARM_UP_S)
        self._temperature_c[index] = now
        return now
