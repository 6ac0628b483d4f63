"""Runs the transfers of an active coordinator: feeds their machines, does what these ask for, shares the lanes."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from quartet_bus.messages import (
    Cancel,
    KvCommand,
    KvReply,
    Phase,
    RequestEvent,
    TransferPlan,
    TransferReason,
    TransferReport,
)
from quartet_core.transfer import (
    Action,
    Adopt,
    Announce,
    Begun,
    Cancelled,
    Died,
    Event,
    Failure,
    Go,
    Move,
    Moved,
    MoveFailed,
    Moving,
    Ready,
    Reject,
    Side,
    Start,
    State,
    Tick,
    Transfer,
)
from quartet_kv_coordinator.book import Ask, Book, Entry, ask_of
from quartet_kv_coordinator.commands import OLD_TERM, command_of, event_of
from quartet_kv_coordinator.lanes import Lane, Lanes
from quartet_kv_coordinator.metrics import CoordinatorMetrics
from quartet_kv_coordinator.planning import NotPlanned, check
from quartet_kv_coordinator.roster import Gone, Roster

MAX_DEADLINE_MS = 600_000.0
"""What a plan without a deadline (or a silly one) gets: no transfer may hold blocks for ever."""

_COMPUTED_FIRST = (TransferReason.SPLIT, TransferReason.FETCH)
"""Transfers whose source says PREFILLED when it has the KV: computed, or (of a fetch) found in its cache."""

MAX_EARLY = 4096
EARLY_MS = 2000.0
"""How many tries' events that came before their plan are kept for it, and for how long: a router says plan and
dispatches at once. Most belong to requests that no plan will ever come for: refusals of whole ones."""


_EVENTS_OF_A_TRY = 8
"""A try has two halves, and each says little before it ends."""


class Office(Protocol):
    """What a conductor needs of the service around it."""

    now_ns: Callable[[], int]

    @property
    def term(self) -> int:
        """The term under which commands go out."""
        ...

    @property
    def instance(self) -> str:
        """The coordinator's id."""
        ...

    def carry(
        self,
        node: str | None,
        command: KvCommand,
        wanted: Callable[[], bool],
        answered: Callable[[KvReply | None], None],
    ) -> None:
        """Take ``command`` to the agent on ``node`` in the background, as often as it needs while it is ``wanted``.

        ``answered`` is called once, later: with its reply, or None when there was none (or, node None, nobody to ask).
        """
        ...

    def announce(self, report: TransferReport, failure: Failure | None) -> None:
        """Publish an outcome."""
        ...


class Conductor:
    """All transfers of one active coordinator. ``lease_ms`` is what leases last unrenewed."""

    def __init__(
        self,
        office: Office,
        roster: Roster,
        lanes: Lanes,
        metrics: CoordinatorMetrics,
        *,
        lease_ms: float,
    ) -> None:
        self._office = office
        self._roster = roster
        self._lanes = lanes
        self._metrics = metrics
        self._lease_ms = lease_ms
        self._early: OrderedDict[Ask, tuple[int, list[RequestEvent]]] = OrderedDict()  # since when (ns), oldest first
        self.book = Book()

    # What it is told -------------------------------------------------------------------------------------------------

    def plan(self, plan: TransferPlan, heard_ns: int, manifest: bytes = b"") -> None:
        """Take up a plan that was heard at ``heard_ns``, or refuse it aloud. A known one is left as it is.

        ``manifest`` is what a page's target must know of its blocks.
        """
        if plan.transfer in self.book:
            self._metrics.plans_ignored.labels("duplicate").inc()
            return
        entry = self._enter(plan, heard_ns)
        entry.manifest = manifest
        try:
            if self.book.full:
                raise NotPlanned(Failure.OVERLOADED, f"{len(self.book)} transfers under way")
            checked = check(
                plan,
                self._roster,
                self._lanes,
                deadline_ns=entry.machine.deadline_ns,
                now_ns=self._office.now_ns(),
            )
        except NotPlanned as refused:
            self._feed(entry, Reject(refused.failure, refused.detail))
            return
        entry.route, entry.predicted_ms = checked.route, checked.predicted_ms
        entry.link = checked.route.lane.link.kind
        self._feed(entry, Start())
        self._forget_early()
        _, early = self._early.pop(ask_of(plan), (0, ()))
        for event in early:
            self.request_event(event)

    def adopt(self, plan: TransferPlan, heard_ns: int, found: Adopt) -> None:
        """Bring a transfer of a lost coordinator to its end, as its target's lease says."""
        if plan.transfer not in self.book:
            self._feed(self._enter(plan, heard_ns), found)

    def progress(self, report: TransferReport) -> None:
        """A source's word on its sending."""
        entry = self.book.live(report.transfer)
        if entry is None or entry.machine.announced:
            return
        if report.link and entry.link and report.link != entry.link and entry.machine.epoch == report.epoch:
            self._metrics.other_path.labels(entry.link, report.link).inc()
            entry.link = report.link
        match report.state:
            case State.COMPUTING:
                self._feed(entry, Begun())
            case State.MOVING:
                if not report.computing and entry.machine.epoch == report.epoch:
                    entry.left_bytes = min(report.left_bytes, entry.plan.kv_bytes)
                self._feed(entry, Moving(report.epoch, report.computing))
            case State.MOVED:
                if entry.machine.state is State.MOVING and entry.machine.epoch == report.epoch:
                    entry.took_ms, entry.wire_bytes = report.took_ms, report.wire_bytes
                    entry.overlap_ms = report.overlap_ms
                self._feed(entry, Moved(report.epoch))
            case State.ABORTED | "failed":
                self._feed(entry, MoveFailed(report.epoch, report.detail))

    def request_event(self, event: RequestEvent) -> None:
        """A phase of a request: its prefill is done, or one of its halves is over."""
        entries = self.book.of(event.tenant, event.stream)
        if not entries:
            self._keep_early(event)
        for entry in entries:
            side = entry.side_of(event.worker, event.incarnation)
            if side is None:
                continue
            if event.phase is Phase.PREFILLED:
                if side is Side.SOURCE:
                    self._feed(entry, Ready())
            elif event.phase is Phase.REFUSED:
                self._feed(entry, Cancelled(Failure.REFUSED, f"{side}: {event.reason}"))
            elif event.status == "ok" and (side is Side.SOURCE or entry.machine.state is State.COMMITTING):
                pass  # a request may have read the blocks before we hear that they were readable: COMMIT's answer tells
            elif event.phase is Phase.END:
                self._feed(entry, Cancelled(Failure.ENDED, f"{side}: {event.reason or event.status}"))

    def cancelled(self, cancel: Cancel) -> None:
        """A client or router no longer wants an answer. ``cancel.tenant`` is whose: others may use the same id."""
        for entry in self.book:
            stream = entry.plan.stream
            if (cancel.tenant, cancel.id) != (entry.plan.tenant, stream.id):
                continue
            if cancel.attempt not in (0, stream.attempt):
                continue
            if cancel.attempt == 0 or cancel.try_ in (0, stream.try_):
                self._feed(entry, Cancelled(detail=cancel.reason))

    def gone(self, workers: list[Gone]) -> None:
        """These workers are dead, or run under another incarnation."""
        lost = set(workers)
        for entry in self.book:
            for side in Side:
                if entry.worker(side) in lost:
                    self._feed(entry, Died(side))

    def tick(self) -> None:
        """Time passed: deadlines, renewals, and sources whose word that they are ready was lost."""
        self._forget_early()
        now_ns = self._office.now_ns()
        patience_ns = int(self._lease_ms * 1e6)
        for entry in self.book:
            self._feed(entry, Tick())
            machine = entry.machine
            if machine.state is State.RESERVED and not machine.ready and now_ns - entry.reserved_ns >= patience_ns:
                # An early order does no harm: the source sends once it can, and uses the lane only from then on.
                self._feed(entry, Go())

    def cancel(self, transfer: str) -> Entry | None:
        """An operator ends a transfer; returns it, or None when none of that name is under way."""
        entry = self.book.live(transfer)
        if entry is not None:
            self._feed(entry, Cancelled(detail="operator"))
        return entry

    def abandon(self) -> list[Entry]:
        """Another coordinator leads: drop everything without a word; returns what had no outcome yet."""
        for entry in self.book:
            if entry.route is not None:
                entry.route.lane.leave(entry.plan.transfer, self._office.now_ns())
        self._early.clear()
        return self.book.abandon()

    # What it does ----------------------------------------------------------------------------------------------------

    def _enter(self, plan: TransferPlan, heard_ns: int) -> Entry:
        deadline_ms = plan.deadline_ms if 0 < plan.deadline_ms < MAX_DEADLINE_MS else MAX_DEADLINE_MS
        machine = Transfer(
            deadline_ns=heard_ns + int(deadline_ms * 1e6),
            lease_ns=int(self._lease_ms * 1e6),
            ready=plan.reason not in _COMPUTED_FIRST,
        )
        nodes = {}
        for side, worker in ((Side.SOURCE, plan.source), (Side.TARGET, plan.target)):
            replica = self._roster.find(worker)
            if replica is not None:
                nodes[side] = replica.node
        entry = Entry(plan, machine, nodes, heard_ns)
        self.book.open(entry)
        return entry

    def _feed(self, entry: Entry, event: Event) -> None:
        before = entry.machine.state
        for action in entry.machine.on(event, self._office.now_ns()):
            if isinstance(action, Announce):
                entry.detail = f"{action.failure}: {action.detail}" if action.detail else str(action.failure or "")
                self._office.announce(entry.report(), action.failure)
            else:
                self._order(entry, action)
        if before is State.RESERVING and entry.machine.state is State.RESERVED:
            entry.reserved_ns = self._office.now_ns()
        self._share_lane(entry)
        if entry.machine.ended:
            self.book.end(entry)

    def _share_lane(self, entry: Entry) -> None:
        """Queue the transfer on its lane, put it on or take it off, and let the next ones go."""
        route, machine, name = entry.route, entry.machine, entry.plan.transfer
        if route is None:
            return
        lane, now_ns = route.lane, self._office.now_ns()
        if machine.state is State.RESERVED and machine.begun and not machine.ready:
            if lane.takes_trickle:  # else it is sent when it is computed, as where nothing overlaps
                self._feed(entry, Go())
        elif machine.state is State.RESERVED and machine.ready:
            if lane.is_waiting(name):
                return
            page = entry.plan.reason is TransferReason.PAGE_OUT
            lane.wait(name, machine.deadline_ns, entry.plan.kv_bytes, route, yields=page)
            self._grant([lane], now_ns)
        elif machine.trickles:
            if not lane.is_sending(name):
                entry.trickled = True
                entry.predicted_ms = lane.trickle(name, entry.plan.kv_bytes, route, now_ns).predicted_ms
        elif machine.on_the_wire:
            if not lane.is_sending(name):
                entry.predicted_ms = lane.enter(name, entry.plan.kv_bytes, route, now_ns).predicted_ms
            elif entry.trickled and (lane.is_trickling(name) or entry.left_bytes != entry.settled_bytes):
                entry.settled_bytes = entry.left_bytes
                lane.settle(name, entry.left_bytes, now_ns)
        elif lane.is_sending(name) or lane.is_waiting(name):
            arrived = machine.state is State.COMMITTING
            lane.leave(name, now_ns, entry.took_ms if arrived else 0.0, route.share, trickled=entry.trickled)
            # room in a root complex may be what another lane waits for
            self._grant(self._lanes if route.roots else [lane], now_ns)

    def _grant(self, lanes: Iterable[Lane], now_ns: int) -> None:
        for lane in list(lanes):
            while (granted := lane.grant(now_ns)) is not None:
                waiter = self.book.live(granted)
                if waiter is not None:
                    self._feed(waiter, Go())

    def _order(self, entry: Entry, action: Action) -> None:
        """Have ``action`` taken to its agent, and its answer brought back to the machine."""
        side, command = command_of(
            entry, action, term=self._office.term, coordinator=self._office.instance, lease_ms=self._lease_ms
        )
        if isinstance(action, Move) and entry.route is not None:
            lane = entry.route.lane
            command.link, command.setup_ms = lane.link.kind, lane.link.setup_ms
            command.gb_per_s = lane.charge_gb_per_s(entry.route.share)
        self._office.carry(
            entry.nodes.get(side), command, partial(self._wants, entry, action), partial(self._answered, entry, action)
        )

    def _wants(self, entry: Entry, action: Action) -> bool:
        return self.book.live(entry.plan.transfer) is entry and entry.machine.wants(action)

    def _answered(self, entry: Entry, action: Action, reply: KvReply | None) -> None:
        if self.book.live(entry.plan.transfer) is not entry:
            return
        if reply is not None and not reply.ok and reply.reason == OLD_TERM:
            return  # another leads, and carries this on
        event = event_of(action, reply)
        if event is not None:
            self._feed(entry, event)

    def _keep_early(self, event: RequestEvent) -> None:
        if event.phase is Phase.END:
            return
        _, events = self._early.setdefault((event.tenant, event.stream), (self._office.now_ns(), []))
        if len(events) < _EVENTS_OF_A_TRY:
            events.append(event)
        while len(self._early) > MAX_EARLY:
            self._early.popitem(last=False)

    def _forget_early(self) -> None:
        begin_ns = self._office.now_ns() - int(EARLY_MS * 1e6)
        while self._early and next(iter(self._early.values()))[0] < begin_ns:
            self._early.popitem(last=False)

    @property
    def early(self) -> int:
        """How many tries' events wait for their plan."""
        return len(self._early)
