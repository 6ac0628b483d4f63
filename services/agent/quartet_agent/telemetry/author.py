"""Says how this node's cards and NICs fare, and puts what matters for routing into its workers' words."""

from collections.abc import Callable, Iterable, Sequence

from msgspec import structs

from quartet_agent.telemetry.places import Places
from quartet_agent.telemetry.port import ReadingsPort, Taken
from quartet_agent.worker import HostedWorker
from quartet_bus.config.schema import TelemetrySection
from quartet_bus.logs import Logger
from quartet_bus.messages import GpuTelemetry, NicTelemetry, NodeTelemetry, RootAlert
from quartet_core.contention import Contention, ContentionLimits
from quartet_core.readings import GpuReading, HostReading, NicReading, rate_per_s
from quartet_core.strain import GpuStrain, StrainLimits

STALE_S = 30.0
"""Without a reading of a card for so long, what the last ones said of it holds no more: old news must not bend
routing."""

MAX_WATCHED = 256
"""Pairs of a worker and a NIC beside it; 16 workers and 16 NICs below one root complex are no real host."""

_TOLD_AS_READ = (set(GpuReading.__struct_fields__) & set(GpuTelemetry.__struct_fields__)) - {"reasons"}


class TelemetryAuthor:
    """Reads, judges and says, once an interval."""

    def __init__(
        self,
        section: TelemetrySection,
        workers: Sequence[HostedWorker],
        places: Places,
        port: ReadingsPort,
        touch: Callable[[HostedWorker], None],
        log: Logger,
    ) -> None:
        self._workers = workers
        self._places = places
        self._port = port
        self._touch = touch
        self._log = log
        self._strain_limits = strain_limits(section)
        self._contention_limits = contention_limits(section)
        self._strains: dict[int, GpuStrain] = {}
        self._seen_s: dict[int, float] = {}
        self._contentions: dict[tuple[str, str], Contention] = {}
        self._fed: dict[tuple[str, str], int] = {}
        self._steps: dict[str, int] = {}
        self._before: HostReading | None = None
        self._before_s = 0.0
        self._gpus: tuple[GpuTelemetry, ...] = ()
        self._nics: tuple[NicTelemetry, ...] = ()
        self._number = 0
        self._degraded = ""

    def start(self) -> None:
        """Begin to read."""
        self._port.start()

    def stop(self) -> None:
        """Read no more."""
        self._port.stop()

    def tick(self, node: str, incarnation: int) -> NodeTelemetry:
        """Take what is new, and make of it what is to be said. Without anything new, the last values are said again,
        with their age."""
        taken = self._port.take()
        if taken.reading is not None:
            self._read(taken.reading, taken.at_s)
            self._before, self._before_s = taken.reading, taken.at_s
        self._forget(taken.at_s + taken.age_ms / 1e3)
        self._mark_workers()
        self._note(taken)
        self._number += 1
        return NodeTelemetry(
            node=node,
            incarnation=incarnation,
            number=self._number,
            source=self._port.source,
            degraded=taken.degraded,
            age_ms=max(0.0, taken.age_ms),
            gpus=self._gpus,
            nics=self._nics,
            alerts=tuple(self._alerts()),
        )

    def _read(self, reading: HostReading, at_s: float) -> None:
        seconds = at_s - self._before_s if self._before is not None else 0.0
        for gpu in reading.gpus:
            strain = self._strains.setdefault(gpu.index, GpuStrain(self._strain_limits))
            self._seen_s[gpu.index] = at_s
            if strain.feed(gpu, seconds):
                self._log.warning(
                    "a card's state changed",
                    gpu=gpu.index,
                    throttled=strain.throttled,
                    congested=strain.congested,
                    reasons=list(gpu.reasons or ()),
                    temperature_c=gpu.temperature_c,
                    pcie_share=strain.pcie_share,
                    replays_per_s=strain.replays_per_s,
                )
        before = {nic.name: nic for nic in self._before.nics} if self._before is not None else {}
        self._nics = tuple(self._nic(nic, before.get(nic.name), seconds) for nic in reading.nics)
        self._watch_roots(reading)
        self._gpus = tuple(self._gpu(gpu) for gpu in reading.gpus)

    def _watch_roots(self, reading: HostReading) -> None:
        """Feed every worker that had work with how busy each NIC beside it was."""
        roots = {gpu.index: self._places.root_of(gpu) for gpu in reading.gpus}
        for worker in self._workers:
            load = worker.adapter.load()
            worked = load.steps != self._steps.get(worker.id, load.steps)
            self._steps[worker.id] = load.steps
            mine = {roots.get(gpu, "") for gpu in worker.facts.gpus} - {""}
            for nic in self._nics:
                share = nic_share(nic)
                if worked and share is not None and nic.root in mine:
                    self._feed(worker, nic, load.drift, share)

    def _feed(self, worker: HostedWorker, nic: NicTelemetry, drift: float, share: float) -> None:
        key = (worker.id, nic.name)
        contention = self._contentions.get(key)
        if contention is None:
            if len(self._contentions) >= MAX_WATCHED:
                return
            contention = self._contentions[key] = Contention(self._contention_limits)
        self._fed[key] = self._number
        if contention.feed(drift, share):
            found = contention.finding
            self._log.warning(
                "root complex congested: a worker is slower while a NIC beside it is busy"
                if contention.alarm
                else "root complex no longer congested",
                root=nic.root,
                worker=worker.id,
                nic=nic.name,
                **({} if found is None else structs.asdict(found)),
            )

    def _forget(self, now_s: float) -> None:
        """Drop cards that were not read for a while, and pairs that nothing was learned of for a whole window."""
        for gpu in [gpu for gpu, seen_s in self._seen_s.items() if now_s - seen_s > STALE_S]:
            del self._seen_s[gpu], self._strains[gpu]
        window = self._contention_limits.window
        for key in [key for key, number in self._fed.items() if self._number - number > window]:
            del self._fed[key], self._contentions[key]

    def _mark_workers(self) -> None:
        for worker in self._workers:
            strains = [self._strains[gpu] for gpu in worker.facts.gpus if gpu in self._strains]
            beside = any(c.alarm for (name, _), c in self._contentions.items() if name == worker.id)
            throttled = any(strain.throttled for strain in strains)
            congested = beside or any(strain.congested for strain in strains)
            if (throttled, congested) != (worker.throttled, worker.congested):
                worker.throttled, worker.congested = throttled, congested
                self._touch(worker)

    def _alerts(self) -> Iterable[RootAlert]:
        roots = {nic.name: nic.root for nic in self._nics}
        for (worker, nic), contention in self._contentions.items():
            if contention.alarm:
                found = contention.finding
                yield RootAlert(
                    root=roots.get(nic, ""),
                    worker=worker,
                    nic=nic,
                    correlation=found.correlation if found else 0.0,
                    t=found.t if found else 0.0,
                    drift_busy=found.drift_busy if found else 0.0,
                    drift_quiet=found.drift_quiet if found else 0.0,
                )

    def _gpu(self, reading: GpuReading) -> GpuTelemetry:
        strain = self._strains[reading.index]
        return GpuTelemetry(
            **{name: getattr(reading, name) for name in _TOLD_AS_READ},
            reasons=tuple(reason.value for reason in reading.reasons or ()),
            workers=tuple(worker.id for worker in self._workers if reading.index in worker.facts.gpus),
            root=self._places.root_of(reading),
            throttled=strain.throttled,
            congested=strain.congested,
        )

    def _nic(self, now: NicReading, before: NicReading | None, seconds: float) -> NicTelemetry:
        rx = rate_per_s(before.rx_bytes if before else None, now.rx_bytes, seconds)
        tx = rate_per_s(before.tx_bytes if before else None, now.tx_bytes, seconds)
        return NicTelemetry(
            name=now.name,
            root=self._places.of_nic.get(now.name, ""),
            gbit_per_s=now.gbit_per_s,
            rx_gb_per_s=None if rx is None else rx / 1e9,
            tx_gb_per_s=None if tx is None else tx / 1e9,
            rx_bytes=now.rx_bytes,
            tx_bytes=now.tx_bytes,
            rx_dropped=now.rx_dropped,
            errors=now.errors,
        )

    def _note(self, taken: Taken) -> None:
        """Log when telemetry degrades, and when it is whole again, not every second in between."""
        if bool(taken.degraded) != bool(self._degraded):
            if taken.degraded:
                self._log.warning("telemetry is degraded", source=self._port.source, reason=taken.degraded)
            else:
                self._log.info("telemetry is whole again", source=self._port.source)
        self._degraded = taken.degraded


def nic_share(nic: NicTelemetry) -> float | None:
    """How busy the busier direction of a NIC is, of its line rate; None while that or its traffic is not known."""
    if nic.rx_gb_per_s is None or nic.tx_gb_per_s is None or not nic.gbit_per_s:
        return None
    return max(nic.rx_gb_per_s, nic.tx_gb_per_s) * 8 / nic.gbit_per_s


def strain_limits(section: TelemetrySection) -> StrainLimits:
    """``[telemetry]`` as the rules for one card."""
    return StrainLimits(**{name: getattr(section, name) for name in StrainLimits.__struct_fields__})


def contention_limits(section: TelemetrySection) -> ContentionLimits:
    """``[telemetry]`` as the rules for a root complex."""
    return ContentionLimits(
        window=section.contention_window,
        t_raise=section.contention_t,
        slowdown_raise=section.contention_slowdown,
    )
