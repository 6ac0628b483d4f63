"""Metrics of one service in a registry of its own, so that many services can live in one process."""

from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

MAX_SERIES = 1024
"""Series a metric may have; label values beyond them are counted together as ``other``."""

OTHER = "other"

LATENCY_BUCKETS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class _Bounded:
    """Label values come from outside (models, tenants), so their number must not be theirs to choose."""

    _labelnames: tuple[str, ...]
    _series: dict[tuple[object, ...], Any]

    def labels(self, *values: object, **named: object) -> Any:
        series: dict[tuple[object, ...], Any] = self.__dict__.setdefault("_series", {})
        wanted = tuple(str(named[name]) for name in self._labelnames) if named else values
        known = series.get(
            wanted
        )  # hot paths count a thing or two per request: prometheus_client's own look-up is slow
        if known is not None:
            return known
        if len(series) >= MAX_SERIES:
            return super().labels(*(OTHER,) * len(wanted))  # type: ignore[misc]
        series[wanted] = super().labels(*(str(value) for value in wanted))  # type: ignore[misc]
        return series[wanted]


class BoundedCounter(_Bounded, Counter):
    """A counter with at most ``MAX_SERIES`` series."""


class BoundedGauge(_Bounded, Gauge):
    """A gauge with at most ``MAX_SERIES`` series."""


class BoundedHistogram(_Bounded, Histogram):
    """A histogram with at most ``MAX_SERIES`` series."""


class Metrics:
    """Makes a service's metrics; every name becomes ``quartet_<service>_<name>``."""

    def __init__(self, service: str) -> None:
        self.registry = CollectorRegistry()
        self._prefix = f"quartet_{service}_"

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        """A number that only grows; Prometheus adds ``_total``."""
        return BoundedCounter(self._prefix + name, help, labels, registry=self.registry)

    def gauge(self, name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
        """A number that goes up and down, or is read when asked for (``set_function``)."""
        return BoundedGauge(self._prefix + name, help, labels, registry=self.registry)

    def histogram(
        self, name: str, help: str, labels: Sequence[str] = (), *, buckets: Sequence[float] = LATENCY_BUCKETS_S
    ) -> Histogram:
        """A distribution; ``buckets`` are upper bounds in the unit of the name."""
        return BoundedHistogram(self._prefix + name, help, labels, registry=self.registry, buckets=buckets)

    def watch_process(self) -> None:
        """Add memory, CPU seconds and open files of this process; only a process that is one service does this."""
        ProcessCollector(registry=self.registry)

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)
