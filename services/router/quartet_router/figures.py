"""Figures: the router's metrics, and the latency of its last decisions."""

from array import array

from quartet_bus.metrics import Metrics
from quartet_core.fleet import Fleet
from quartet_core.plan import FILTERS, Decision, Plan

_KEPT = 8192


class Figures:
    """What the router counts. Decision times are measured with the process clock, which decides nothing."""

    def __init__(self, metrics: Metrics) -> None:
        self.decisions = metrics.counter("decisions", "Decisions by reason.", ("reason",))
        self.contained = metrics.counter(
            "long_prefills_contained", "Decisions that kept a long prefill to workers that have such work already."
        )
        self.dispatched = metrics.counter(
            "dispatched", "Dispatches by model and hardware class.", ("model", "hardware")
        )
        self.splits = metrics.counter("splits", "Dispatches whose halves went to two workers.")
        self.fetches = metrics.counter("fetches", "Dispatches for which a cached prefix is moved to the worker.")
        self.fetches_failed = metrics.counter("fetches_failed", "Prefixes that were to be moved and were not.")
        self.hits = metrics.counter("affinity_hits", "Dispatches to a worker believed to hold part of the prompt.")
        self._retries = metrics.counter("retries", "Further tries of a request.")
        self._holds = metrics.counter("holds", "Requests held.")
        self.policy_failures = metrics.counter("policy_failures", "Decisions in which the policy raised.")
        self.holds_expired = metrics.counter("holds_expired", "Holds that ended at hold_max_ms.")
        self.held_ms = metrics.histogram(
            "held_ms", "How long requests were held.", buckets=(1, 5, 20, 50, 100, 200, 500, 1000, 2000, 5000)
        )
        self._rejected = metrics.counter("rejected", "Requests refused by the router, by HTTP status.", ("status",))
        self.dropped = metrics.counter("dropped", "Messages that cannot be answered, by reason.", ("reason",))
        self.decide_us = metrics.histogram(
            "decide_us", "Time of one decision.", buckets=(5, 10, 20, 40, 60, 100, 200, 500, 1000)
        )
        self.ttft_error = metrics.histogram(
            "ttft_error_ratio", "Observed over predicted time to first token.", buckets=(0.25, 0.5, 0.8, 1, 1.25, 2, 4)
        )
        self.total_error = metrics.histogram(
            "total_error_ratio",
            "Observed over predicted time to the last token.",
            buckets=(0.25, 0.5, 0.8, 1, 1.25, 2, 4),
        )
        self._times_us = array("f")
        self._next = 0
        self._sent = self._split = self._fetched = self._hit = self._held = self._retried = self._refused = 0

    def decided(self, decision: Decision, took_us: float) -> None:
        """Count a decision."""
        self.decisions.labels(decision.reason.value).inc()
        if len(decision.left) == len(FILTERS):
            self.contained.inc()
        self.decide_us.observe(took_us)
        if len(self._times_us) < _KEPT:
            self._times_us.append(took_us)
        else:
            self._times_us[self._next] = took_us
            self._next = (self._next + 1) % _KEPT

    def sent(self, plan: Plan, fleet: Fleet) -> None:
        """Count a dispatch."""
        kind = fleet.at(plan.decode).kind
        self.dispatched.labels(kind.model, kind.hardware).inc()
        self._sent += 1
        if plan.split:
            self.splits.inc()
            self._split += 1
        if plan.fetches:
            self.fetches.inc()
            self._fetched += 1
        if plan.cached_tokens:
            self.hits.inc()
            self._hit += 1

    def held(self) -> None:
        """Count a request that begins to wait here."""
        self._holds.inc()
        self._held += 1

    def refused(self, status: int) -> None:
        """Count a request that the router refused."""
        self._rejected.labels(str(status)).inc()
        self._refused += 1

    def retried(self) -> None:
        """Count a further try."""
        self._retries.inc()
        self._retried += 1

    def totals(self) -> dict[str, int]:
        """What was counted so far, for an operator's status."""
        return {
            "dispatched": self._sent,
            "splits": self._split,
            "fetches": self._fetched,
            "affinity_hits": self._hit,
            "holds": self._held,
            "retries": self._retried,
            "refused": self._refused,
        }

    def decision_us(self, quantile: float) -> float:
        """A quantile of the last decisions' times, 0 before the first."""
        if not self._times_us:
            return 0.0
        ordered = sorted(self._times_us)
        return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]
