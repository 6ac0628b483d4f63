"""What a coordinator counts and shows of the virtual VRAM pool. Tiers are hardware classes, and ``host``."""

from collections import Counter

from quartet_bus.metrics import Metrics
from quartet_kv_coordinator.pools import Pools


class PoolMetrics:
    """Counters of page-outs, and gauges of what every tier has and did."""

    def __init__(self, metrics: Metrics) -> None:
        self._pages = metrics.counter("pages", "Prefixes that were paged out.", ("source", "target"))
        self._tokens = metrics.counter("paged_tokens", "Tokens whose KV was paged out.", ("source", "target"))
        self._bytes = metrics.counter("paged_bytes", "KV bytes that were paged out.", ("source", "target"))
        self.held = metrics.counter("pages_held", "Prefixes of which the target had all, so that nothing was moved.")
        self.refused = metrics.counter("unpaged", "Cold prefixes that stayed where they were, by reason.", ("reason",))
        self.unpinned = metrics.counter("pages_unpinned", "Prefixes that their worker did not part with.", ("reason",))
        self._kv = metrics.gauge("pool_tokens", "Room for tokens of each tier, by what is in it.", ("tier", "state"))
        self._workers = metrics.gauge("pool_workers", "Workers and stores of each tier.", ("tier",))
        self._pressed = metrics.gauge("pool_pressed", "Workers with too little KV empty.", ("tier",))
        self._did = metrics.gauge(
            "pool_page_tokens",
            "Tokens that came by pages, left by them, and were found then; of workers that live, since their start.",
            ("tier", "what"),
        )

    def moved(self, source: str, target: str, tokens: int, kv_bytes: int) -> None:
        """A page arrived."""
        self._pages.labels(source, target).inc()
        self._tokens.labels(source, target).inc(tokens)
        self._bytes.labels(source, target).inc(kv_bytes)

    def show(self, pools: Pools) -> None:
        """Set the gauges."""
        kv: Counter[tuple[str, str]] = Counter()
        did: Counter[tuple[str, str]] = Counter()
        workers: Counter[str] = Counter()
        pressed: Counter[str] = Counter()
        for told in pools:
            state, tokens, tier = told.state, told.block_tokens, told.tier
            workers[tier] += 1
            pressed[tier] += state.pressed
            kv[tier, "empty"] += state.empty_blocks * tokens
            kv[tier, "cached"] += state.idle_blocks * tokens
            kv[tier, "referenced"] += told.referenced_blocks * tokens
            did[tier, "in"] += state.in_blocks * tokens
            did[tier, "out"] += state.out_blocks * tokens
            did[tier, "hit"] += state.hit_tokens
        for (tier, what), count in kv.items():
            self._kv.labels(tier, what).set(count)
        for (tier, what), count in did.items():
            self._did.labels(tier, what).set(count)
        for tier, count in workers.items():
            self._workers.labels(tier).set(count)
            self._pressed.labels(tier).set(pressed[tier])
