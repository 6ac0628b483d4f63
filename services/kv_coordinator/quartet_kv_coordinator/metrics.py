"""What a coordinator counts."""

from quartet_bus.messages import TransferReport
from quartet_bus.metrics import Metrics

_RATIO_BUCKETS = (0.25, 0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 2.0, 4.0, 10.0, 100.0)


class CoordinatorMetrics:
    """The counters, by what they are for."""

    def __init__(self, metrics: Metrics) -> None:
        self._ended = metrics.counter("transfers", "Transfers that ended.", ("kind", "outcome", "reason"))
        self._kv_bytes = metrics.counter("kv_bytes", "KV bytes of committed transfers, full size.", ("link",))
        self._wire_bytes = metrics.counter("wire_bytes", "Bytes of committed transfers that crossed.", ("link",))
        self._predicted_s = metrics.histogram("predicted_seconds", "Predicted time on the link.", ("link",))
        self._overlap_s = metrics.counter(
            "overlap_seconds", "Time on the link that passed while the source still computed.", ("link",)
        )
        self._took_s = metrics.histogram("took_seconds", "Measured time on the link.", ("link",))
        self._ratio = metrics.histogram(
            "took_over_predicted", "Measured over predicted time on the link.", ("link",), buckets=_RATIO_BUCKETS
        )
        self.plans_ignored = metrics.counter("plans_ignored", "Plans that were not taken up.", ("why",))
        self.commands = metrics.counter("commands", "Commands to agents.", ("verb", "result"))
        self.orphans_freed = metrics.counter("orphans_freed", "Leases freed that no transfer stands for.")
        self.takeovers = metrics.counter("takeovers", "Times this coordinator became the active one.")
        self.stepped_down = metrics.counter("stepped_down", "Times it gave way to another.")
        self.other_path = metrics.counter("other_path", "Moves that went another way than told.", ("told", "taken"))
        self.active = metrics.gauge("active", "1 while this coordinator leads.")
        self.term = metrics.gauge("term", "The highest term known.")
        self.under_way = metrics.gauge("under_way", "Transfers under way.")
        self.sending = metrics.gauge("sending", "Transfers whose bytes are on a link.")
        self.trickling = metrics.gauge("trickling", "Transfers that are sent while their source computes.")
        self.waiting = metrics.gauge("waiting", "Transfers that wait for room on a link.")
        self.links_slowed = metrics.gauge("links_slowed", "Links measured far below their class.")

    def ended(self, report: TransferReport, reason: str) -> None:
        """Count an outcome; ``reason`` is "" for a transfer that is done."""
        self._ended.labels(report.reason.value, "failed" if reason else "done", reason).inc()
        if reason or not report.link:
            return
        self._kv_bytes.labels(report.link).inc(report.kv_bytes)
        self._wire_bytes.labels(report.link).inc(report.wire_bytes)
        self._predicted_s.labels(report.link).observe(report.predicted_ms / 1e3)
        self._took_s.labels(report.link).observe(report.took_ms / 1e3)
        self._overlap_s.labels(report.link).inc(report.overlap_ms / 1e3)
        if report.predicted_ms > 0:
            self._ratio.labels(report.link).observe(report.took_ms / report.predicted_ms)
