"""What an agent counts of prefixes that its workers fetch from others."""

from quartet_bus.metrics import Metrics


class FetchFigures:
    """Ends of fetches, how long runs waited for them, and what came in vain."""

    def __init__(self, metrics: Metrics) -> None:
        self._ends = metrics.counter("prefix_fetches", "Prefixes that runs waited for, by how it ended.", ("outcome",))
        self._wait_ms = metrics.histogram(
            "prefix_fetch_wait_ms",
            "How long runs waited for a prefix.",
            buckets=(2, 5, 10, 20, 50, 100, 200, 500, 1000),
        )
        self._dropped = metrics.counter(
            "prefix_blocks_dropped", "Blocks of fetched prefixes that were of no use, and were computed."
        )

    def over(self, outcome: str, waited_ms: float) -> None:
        """A run waits no longer."""
        self._ends.labels(outcome).inc()
        self._wait_ms.observe(waited_ms)

    def dropped(self, blocks: int) -> None:
        """``blocks`` of a fetched prefix were not used."""
        self._dropped.inc(blocks)
