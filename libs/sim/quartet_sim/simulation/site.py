"""One simulated worker: its engine, what it says of itself, and what that will have cost."""

from collections import deque

from msgspec import Struct, structs

from quartet_core import word
from quartet_core.affinity import AffinityCounters
from quartet_core.catalogue import Catalogue, HardwareClass
from quartet_core.links import Place
from quartet_core.pairing import EXPORT, IMPORT, OVERLAP, RESERVE, place_of
from quartet_sim.simulation.engine import SkippingEngine
from quartet_sim.simulation.flight import Flight
from quartet_sim.simulation.sketches import unit_rungs
from quartet_sim.simulation.spec import Group

BEAT_MS = 0.5
_PRESSED_BELOW = 0.03  # as the agent's
_BLOCK_TOKENS = 16
_FRESH = word.pack(free_kv=15, queue=0, batch=0, drift=0, accepting=True)


class Layout(Struct, frozen=True):
    """How KV lies in a worker's memory: ``quartet_core.pairing.LayoutFacts``."""

    block_tokens: int
    bytes_per_token: int
    precision: str
    revision: str
    tp: int


class Facts(Struct, frozen=True, kw_only=True):
    """What a worker's node announces of it: ``quartet_core.fleet.WorkerFacts``."""

    id: str
    incarnation: int
    hardware: str
    model: str
    precision: str
    tp: int
    kv_tokens: int
    max_context: int
    max_batch: int
    chunk_tokens: int
    layout: Layout
    role: str
    cordoned: bool = False
    adapters: tuple[str, ...] = ()
    engine: str = "simulated"
    engine_version: str = ""
    root: str = ""
    capabilities: tuple[str, ...] = (EXPORT, IMPORT, RESERVE)


class Site:
    """A worker. ``scheduled_ms`` is when the world will look at its engine next; ``words`` are on their way to the
    router, oldest first, as [beat, state]."""

    def __init__(
        self, number: int, group_number: int, group: Group, node: str, ordinal: int, catalogue: Catalogue,
        fabrics: dict[str, float], affinity_rows: int, affinity_hashes: int,
        *, overlap: bool = True,
    ) -> None:  # fmt: skip
        self.number = number
        self.group_number = group_number
        self.group = group
        self.node = node
        self.hardware: HardwareClass = catalogue.hardware_class(group.hardware)
        spec = catalogue.model(group.model)
        kv_tokens = catalogue.kv_capacity_tokens(group.hardware, group.model, group.precision, group.tp)
        self.facts = Facts(
            id=f"{node}-{ordinal}",
            incarnation=1,
            hardware=group.hardware,
            model=group.model,
            precision=group.precision,
            tp=group.tp,
            kv_tokens=kv_tokens,
            max_context=spec.max_context,
            max_batch=group.max_batch,
            chunk_tokens=group.chunk_tokens,
            layout=Layout(_BLOCK_TOKENS, spec.kv_bytes_per_token, "bf16", "", group.tp),
            role=group.role,
            capabilities=(EXPORT, IMPORT, RESERVE, OVERLAP) if overlap else (EXPORT, IMPORT, RESERVE),
        )
        self.profile = catalogue.profile(group.hardware, group.model, group.precision, group.tp)
        self.kv_bytes_per_token = spec.kv_bytes_per_token
        self.place: Place = place_of(node, fabrics, self.hardware, group.tp)
        self._affinity_shape = affinity_rows, affinity_hashes
        self.engine = self._engine()
        self.counters = AffinityCounters(affinity_rows, affinity_hashes)
        self.alive = True
        self.draining = False
        self.scheduled_ms = float("inf")
        self.words: deque[list[int]] = deque()
        self.said = _FRESH
        self.affinity_due = False
        self.unread_ms = 0.0
        self.flights: dict[int, Flight] = {}
        """What runs or is on its way here, by request number."""
        self.since_ms = 0.0
        self.paid_ms = 0.0
        self.busy_ms = 0.0
        self.prefill_busy_ms = 0.0
        self.peak_kv_share = 0.0
        self._closed = False
        self._preempted = 0  # in former lives

    def _engine(self) -> SkippingEngine:
        return SkippingEngine(
            self.profile,
            kv_tokens=self.facts.kv_tokens,
            block_tokens=_BLOCK_TOKENS,
            chunk_tokens=self.group.chunk_tokens,
            max_batch=self.group.max_batch,
            time_scale=self.group.slowdown,
        )

    @property
    def preemptions(self) -> int:
        """How often a job lost its blocks here."""
        return self._preempted + self.engine.preemptions

    @property
    def gpus(self) -> int:
        """Cards of this worker."""
        return self.group.tp

    def state(self, *, with_drift: bool) -> int:
        """The state bits of its word just now, as the agent makes them."""
        engine = self.engine
        free = engine.free_kv_fraction
        if 1.0 - free > self.peak_kv_share:
            self.peak_kv_share = 1.0 - free
        return (
            word.free_kv_level(free)
            | word.queue_level(engine.queued_prefill_ms() + self.unread_ms) << word.QUEUE.shift
            | word.batch_level(engine.running) << word.BATCH.shift
            | (word.drift_level(self.group.slowdown) << word.DRIFT.shift if with_drift else 0)
            | (not self.draining) << word.ACCEPTING.shift
            | (free < _PRESSED_BELOW) << word.PRESSED.shift
        )

    def turned_rows(self) -> tuple[list[int], list[int]]:
        """Rows of the affinity filter that turned on and off since the last call: the net change, as agents say it."""
        pool = self.engine.pool
        on, off = pool.turned_on, pool.turned_off
        pool.turned_on, pool.turned_off = [], []
        changed: dict[int, bool] = {}
        counters = self.counters
        for unit, place, unit_tokens in on:
            for rung in unit_rungs(unit, place, unit_tokens):
                changed.update(dict.fromkeys(counters.add(rung), True))
        for unit, place, unit_tokens in off:
            for rung in unit_rungs(unit, place, unit_tokens):
                for row in counters.remove(rung):
                    if changed.pop(row, None) is None:
                        changed[row] = False
        return [row for row, is_on in changed.items() if is_on], [row for row, is_on in changed.items() if not is_on]

    def die(self, now_ms: float) -> None:
        """Lose everything."""
        self.count(now_ms)
        self.alive = False
        self._preempted += self.engine.preemptions
        self.engine = self._engine()
        self.counters = AffinityCounters(*self._affinity_shape)
        self.words.clear()
        self.unread_ms = 0.0

    def live(self, now_ms: float) -> None:
        """Be back, empty, as another incarnation."""
        self.alive = True
        self.facts = structs.replace(self.facts, incarnation=self.facts.incarnation + 1)
        self.said = _FRESH
        self.since_ms = now_ms

    def count(self, now_ms: float) -> None:
        """Add the engine's and the clock's time so far to what is paid for and what was busy. Not after ``close``."""
        if self._closed:
            return
        busy_ms, prefill_ms = self.engine.busy_until(now_ms)
        self.busy_ms += busy_ms
        self.prefill_busy_ms += prefill_ms
        self.paid_ms += now_ms - self.since_ms
        self.since_ms = now_ms

    def close(self, now_ms: float) -> None:
        """The span is over: what comes now is neither paid for nor counted."""
        if self.alive:
            self.count(now_ms)
        self._closed = True
