"""Pages cold prefixes out of workers whose KV is nearly full, before it is evicted there: the virtual VRAM pool.

A worker says what it could part with (``kv.pressure``); what leaves, and for where, `quartet_core.paging` says. The
worker is asked to pin it (PAGE), the target how much of it is there already (HELD), and from then on it is a transfer
like any other, which the conductor carries. Only the active coordinator pages; the others listen, so that they know the
pool when they lead.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from quartet_bus.config.schema import KvSection, ModelSection
from quartet_bus.messages import (
    KvCommand,
    KvPressure,
    KvReply,
    KvVerb,
    StreamId,
    TransferPlan,
    TransferReason,
    TransferReport,
)
from quartet_core.catalogue import Catalogue
from quartet_core.paging import Cold, PageLimits, PageOut, Price, ThrashGuard, Unpaged, choose, missing_blocks
from quartet_core.transfer import State
from quartet_kv_coordinator.conductor import Conductor, Office
from quartet_kv_coordinator.lanes import Lanes
from quartet_kv_coordinator.page_prices import PAGE_DEADLINE_MS, PagePrices
from quartet_kv_coordinator.pool_metrics import PoolMetrics
from quartet_kv_coordinator.pools import Pools, PoolView, Told
from quartet_kv_coordinator.roster import Roster

SOON_MS = 2000.0
"""A prefix that is likely to return within so long is not paged out: it would meet its own page on the way."""

_RESTS_NS = 10_000_000_000
"""A prefix whose page-out was begun is not thought of again for so long, whatever became of it."""

_MAX_RESTING = 16_384

_AVOIDED_NS = 5_000_000_000
"""A target that a page did not reach gets no other one for so long."""


@dataclass(slots=True)
class Going:
    """A page-out from its PAGE to its outcome."""

    transfer: str
    source: str
    incarnation: int
    node: str
    target: str
    tokens: int
    out_ms: float


class Pager:
    """The page-outs of one coordinator. Does nothing but listen until it is told to ``lead``.

    ``life`` is a name that no other life of a coordinator has: it is in its transfers' names.
    """

    def __init__(
        self, office: Office, conductor: Conductor, roster: Roster, lanes: Lanes, catalogue: Catalogue,
        models: Mapping[str, ModelSection], config: KvSection, metrics: PoolMetrics, life: str,
    ) -> None:  # fmt: skip
        self._office = office
        self._life = life
        self._conductor = conductor
        self._roster = roster
        self._config = config
        self._metrics = metrics
        self._limits = PageLimits(
            config.page_min_tokens,
            config.page_min_idle_ms,
            config.page_horizon_ms,
            min(SOON_MS, config.page_horizon_ms),
        )
        self._guard = ThrashGuard(cycle_ms=config.page_cycle_ms, guard_ms=config.page_cycle_ms)
        self._going: dict[str, Going] = {}
        self._promised: Counter[str] = Counter()
        self._leaving: Counter[str] = Counter()
        self._resting: OrderedDict[int, int] = OrderedDict()  # prefix → until when (ns)
        self._avoided: dict[str, int] = {}  # target → until when (ns)
        self._stay: OrderedDict[int, Unpaged] = OrderedDict()  # prefix → why it stayed when last looked at
        self._begun = 0
        self.pools = Pools(roster)
        self._prices = PagePrices(self.pools, lanes, catalogue, models, config, self._promised)
        self.refused: Counter[str] = Counter()
        """Why prefixes stayed where they were, since start, each prefix counted once for a reason."""
        self.outcomes: Counter[str] = Counter()
        """Page-outs that were done, that failed, and that needed no bytes (held), since start."""

    def __len__(self) -> int:
        return len(self._going)

    def __contains__(self, transfer: str) -> bool:
        return transfer in self._going

    def hear(self, pressure: KvPressure, *, leads: bool) -> None:
        """How full a node's KV is; where it is nearly full, page out, if this coordinator ``leads``."""
        heard = self.pools.hear(pressure, self._office.now_ns())
        if leads and self._config.pool:
            for told in heard:
                if told.state.pressed:
                    self._page(told)

    def ended(self, report: TransferReport) -> None:
        """A transfer has an outcome; if it was a page-out, its place is free for another one."""
        going = self._end(report.transfer)
        if going is None:
            return
        done = report.state != State.ABORTED
        self.outcomes["done" if done else "failed"] += 1
        if not done:
            self._avoid(going.target)
        else:
            self._metrics.moved(self._tier(going.source), self._tier(going.target), report.tokens, report.kv_bytes)
            self.pools.paged(going.source, going.target, report.tokens)
        told = self.pools.find(going.source, self._office.now_ns())
        if done and told is not None and told.state.pressed:
            self._page(told)

    def tick(self) -> None:
        """Once in a while: forget what is old, and show what there is."""
        now_ns = self._office.now_ns()
        self.pools.forget(now_ns)
        while self._resting and next(iter(self._resting.values())) <= now_ns:
            self._resting.popitem(last=False)
        for target in [target for target, until_ns in self._avoided.items() if until_ns <= now_ns]:
            del self._avoided[target]
        self._metrics.show(self.pools)

    def abandon(self) -> None:
        """Another coordinator leads: page-outs are its to end, or to free."""
        self._going.clear()
        self._promised.clear()
        self._leaving.clear()

    def views(self) -> list[PoolView]:
        """Every worker and store of the pool, as last heard."""
        now_ns = self._office.now_ns()
        coming = Counter(going.target for going in self._going.values())
        views = []
        for told in self.pools:
            state, info, tokens = told.state, told.replica.info, told.block_tokens
            views.append(
                PoolView(
                    info.id, told.replica.node, told.tier, info.model, state.total_blocks * tokens,
                    state.empty_blocks * tokens, state.idle_blocks * tokens, state.pressed, state.in_blocks * tokens,
                    state.out_blocks * tokens, state.hit_tokens, self._leaving[info.id], coming[info.id],
                    (now_ns - told.heard_ns) / 1e6,
                )
            )  # fmt: skip
        return sorted(views, key=lambda view: (view.tier, view.worker))

    # Inside ----------------------------------------------------------------------------------------------------------

    def _page(self, source: Told) -> None:
        """Begin as many page-outs as its pressure asks for and its places allow."""
        now_ns = self._office.now_ns()
        state = source.state
        under_way = sum(going.tokens for going in self._going.values() if going.source == state.worker)
        missing = missing_blocks(self._config.page_high, state.empty_blocks, state.total_blocks)
        wanted = missing * source.block_tokens - under_way
        while wanted > 0 and self._leaving[state.worker] < self._config.page_transfers:
            chosen = self._choose(source, now_ns)
            if chosen is None:
                return
            self._begin(source, chosen, now_ns)
            wanted -= chosen.cold.tokens

    def _choose(self, source: Told, now_ns: int) -> PageOut | None:
        places = [
            (told, room)
            for told, room in self._prices.places(source, now_ns)
            if self._avoided.get(told.replica.info.id, 0) <= now_ns
        ]
        colds = [
            Cold(cold.prefix, cold.tokens, cold.idle_ms + (now_ns - source.heard_ns) / 1e6, cold.uses, cold.paged)
            for cold in source.state.cold
            if cold.prefix not in self._resting
        ]
        returns_within = self.pools.reuse(source.replica.info.model).returns_within

        def price(cold: Cold) -> Price:
            found = self._prices.price(source, places, cold, now_ns)
            return found if found is not None else Price((), 0.0, 1)

        best, stay = choose(colds, price, returns_within, self._guard, self._limits, now_ns / 1e6)
        for prefix, why in stay.items():
            if self._stay.pop(prefix, None) is not why:
                self.refused[why.value] += 1
                self._metrics.refused.labels(why.value).inc()
            self._stay[prefix] = why
        while len(self._stay) > _MAX_RESTING:
            self._stay.popitem(last=False)
        return best

    def _begin(self, source: Told, page: PageOut, now_ns: int) -> None:
        self._begun += 1
        info, cold = source.replica.info, page.cold
        name = f"page-{self._life}-{self._begun}"
        going = Going(name, info.id, info.incarnation, source.replica.node, page.target, cold.tokens, page.out_ms)
        self._going[going.transfer] = going
        self._promised[going.target] += going.tokens
        self._leaving[going.source] += 1
        self._guard.paged(cold, now_ns / 1e6)
        self._resting[cold.prefix] = now_ns + _RESTS_NS
        while len(self._resting) > _MAX_RESTING:
            self._resting.popitem(last=False)
        command = self._command(KvVerb.PAGE, going, going.source, going.incarnation)
        command.prefix = cold.prefix
        self._office.carry(going.node, command, partial(self.__contains__, name), partial(self._pinned, going))

    def _pinned(self, going: Going, reply: KvReply | None) -> None:
        """The source's answer to PAGE: if it is pinned, its target is asked what it has of it."""
        if going.transfer not in self._going:
            return
        target = self._roster.find(going.target)
        if reply is None or not reply.ok or target is None:
            self._metrics.unpinned.labels("unanswered" if reply is None else reply.reason or "gone").inc()
            self.outcomes["failed"] += 1
            self._end(going.transfer)
            if reply is None or reply.ok:  # it may be pinned: its lease would end it, but later
                self._release(going)
            return
        command = self._command(KvVerb.HELD, going, going.target, target.info.incarnation)
        command.tokens, command.manifest = reply.tokens, reply.manifest
        self._office.carry(
            target.node, command, partial(self.__contains__, going.transfer), partial(self._compared, going, reply)
        )

    def _compared(self, going: Going, pinned: KvReply, reply: KvReply | None) -> None:
        """The target's answer to HELD: the rest is not worth moving, or the transfer begins."""
        if going.transfer not in self._going:
            return
        source, target = self._roster.find(going.source), self._roster.find(going.target)
        if source is None or target is None:
            self.outcomes["failed"] += 1
            self._end(going.transfer)
            self._release(going)
            return
        held = reply.tokens if reply is not None and reply.ok else 0
        if held and self._as_good_as_there(going, held, pinned.tokens):
            self.outcomes["held"] += 1
            self._metrics.held.inc()
            self.pools.paged(going.source, "", pinned.tokens)
            self._end(going.transfer)
            self._release(going, committed=True)
            return
        plan = TransferPlan(
            transfer=going.transfer,
            reason=TransferReason.PAGE_OUT,
            stream=StreamId(going.transfer),
            model=source.info.model,
            source=going.source,
            source_incarnation=going.incarnation,
            target=going.target,
            target_incarnation=target.info.incarnation,
            tokens=pinned.tokens,
            kv_bytes=pinned.tokens * source.info.layout.bytes_per_token,
            deadline_ms=PAGE_DEADLINE_MS,
        )
        self._conductor.plan(plan, self._office.now_ns(), pinned.manifest)

    def _as_good_as_there(self, going: Going, held: int, tokens: int) -> bool:
        """Whether what the target lacks of a page is computed sooner than all of the page is moved."""
        source = self.pools.find(going.source, self._office.now_ns())
        return held >= tokens or (
            source is not None and self._prices.recompute_ms(source, held, tokens - held) < going.out_ms
        )

    def _release(self, going: Going, *, committed: bool = False) -> None:
        command = self._command(KvVerb.RELEASE, going, going.source, going.incarnation)
        command.committed = committed
        self._office.carry(going.node, command, _always, _unheard)

    def _command(self, verb: KvVerb, going: Going, worker: str, incarnation: int) -> KvCommand:
        return KvCommand(
            verb, going.transfer, self._office.term, self._office.instance, worker, incarnation,
            reason=TransferReason.PAGE_OUT, lease_ms=self._config.lease_ms,
        )  # fmt: skip

    def _avoid(self, target: str) -> None:
        self._avoided[target] = self._office.now_ns() + _AVOIDED_NS

    def _end(self, transfer: str) -> Going | None:
        going = self._going.pop(transfer, None)
        if going is not None:
            _less(self._promised, going.target, going.tokens)
            _less(self._leaving, going.source, 1)
        return going

    def _tier(self, worker: str) -> str:
        told = self.pools.find(worker, self._office.now_ns())
        return told.tier if told is not None else "gone"


def _less(counts: Counter[str], key: str, by: int) -> None:
    counts[key] -= by
    if counts[key] <= 0:
        del counts[key]


def _always() -> bool:
    """A release is worth repeating until it is answered."""
    return True


def _unheard(_: KvReply | None) -> None:
    """Whatever the answer is: the lease's expiry does the rest."""
