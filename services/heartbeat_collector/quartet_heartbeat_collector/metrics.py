"""The collector's metrics: counts kept by the board as plain integers, brought to Prometheus once a second."""

from collections import Counter

from quartet_bus.metrics import Metrics
from quartet_core.verdict import Verdict
from quartet_heartbeat_collector.fleet import Fleet
from quartet_heartbeat_collector.roster import Outcome


class CollectorMetrics:
    """Metrics of one collector. ``update`` costs a pass over the fleet; beats themselves touch no metric."""

    def __init__(self, metrics: Metrics) -> None:
        self._datagrams = metrics.counter("datagrams", "Heartbeat datagrams received.")
        self._taken = metrics.counter("taken", "Datagrams that were the newest of their node in a batch.")
        self._dropped = metrics.counter("dropped", "Datagrams that changed nothing, by reason.", ("reason",))
        self._lost = metrics.counter("lost", "Beats that never arrived, from gaps in the nodes' sequences.")
        self._resumed = metrics.counter(
            "resumed", "Nodes taken up again behind a beat that somebody else seems to have sent for them."
        )
        self._foreign = metrics.counter("foreign_words", "Words of workers or incarnations that nobody announced.")
        self._inventories = metrics.counter("inventories", "Inventories heard, by what they meant.", ("outcome",))
        self._nodes = metrics.gauge("nodes", "Announced nodes, by verdict.", ("verdict",))
        self._workers = metrics.gauge("workers", "Workers that were heard, by verdict.", ("verdict",))
        self._age = metrics.gauge("beat_age_seconds", "Age of the oldest newest beat among nodes that are not dead.")
        self._alarm = metrics.gauge("mass_silence", "Nodes silent while half of eight or more are silent at once.")
        self.deltas = metrics.counter("deltas", "Deltas said.")
        self.changes = metrics.counter("changes", "Worker states said in deltas.")
        self.snapshots = metrics.counter("snapshots", "Snapshots said.")
        self.ring_records = metrics.counter("ring_records", "Records written to the shared-memory ring.")
        self.ring_refused = metrics.counter("ring_refused", "Deltas too large for a ring record.")
        self.kernel_drops = metrics.gauge(
            "kernel_drops", "Datagrams the kernel dropped for want of buffer, since start."
        )
        self.receive_buffer = metrics.gauge("receive_buffer_bytes", "Socket buffer that the kernel granted.")
        self._told: Counter[object] = Counter()

    def update(self, fleet: Fleet, now_ns: int) -> None:
        """Bring all metrics up to date."""
        board = fleet.board
        self._datagrams.inc(self._growth("received", board.received))
        self._taken.inc(self._growth("taken", board.taken))
        self._lost.inc(self._growth("lost", board.lost))
        self._resumed.inc(self._growth("resumed", board.sequences.resumed))
        self._foreign.inc(self._growth("foreign", fleet.foreign_entries))
        for reason, number in board.dropped.items():
            self._dropped.labels(str(reason)).inc(self._growth(("dropped", reason), number))
        for outcome in Outcome:
            grown = self._growth(outcome, fleet.outcomes[outcome])
            self._inventories.labels(outcome.name.lower()).inc(grown)
        nodes, workers, age_ns = Counter[Verdict](), Counter[Verdict](), 0
        for node in fleet.nodes.values():
            verdict = fleet.verdict(node)
            nodes[verdict] += 1
            if verdict is not Verdict.DEAD:
                age_ns = max(age_ns, now_ns - node.heard_ns)
            workers.update(verdict for worker, verdict in fleet.verdicts(node) if worker.state is not None)
        for verdict in Verdict:
            self._nodes.labels(verdict.name.lower()).set(nodes[verdict])
            self._workers.labels(verdict.name.lower()).set(workers[verdict])
        self._age.set(age_ns / 1e9)
        self._alarm.set(fleet.alarm.silent if fleet.alarm else 0)

    def _growth(self, key: object, now: int) -> int:
        before, self._told[key] = self._told[key], now
        return now - before
