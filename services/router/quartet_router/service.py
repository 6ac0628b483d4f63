"""The router hears requests, fleet state, affinity, links and its replicas; says plans; owns holds and credit."""

import importlib
import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from quartet_bus import catalogue, frames, subjects
from quartet_bus.bus import Bus, Message, Subscription
from quartet_bus.config.load import ConfigError
from quartet_bus.config.schema import Config
from quartet_bus.messages import (
    AffinityUpdate,
    Cancel,
    ControlReply,
    ControlRequest,
    FleetDelta,
    FleetSnapshot,
    LedgerAction,
    LedgerNote,
    LinkTable,
    NodeInventory,
    Phase,
    RequestEvent,
    Role,
    TransferReport,
)
from quartet_bus.service import UNREADABLE, Service
from quartet_core import openai
from quartet_core.breaker import counts
from quartet_core.dispatch import Stage
from quartet_core.fleet import WorkerFacts
from quartet_core.lengths import OutputLengths
from quartet_core.linkbook import LinkBook
from quartet_core.openai import Refused
from quartet_core.policy.base import Policy
from quartet_core.profile import Profile
from quartet_core.routing import Routing, UnknownPolicy
from quartet_core.verdict import Verdict
from quartet_router.arrival import Arrivals, tenant_and_model
from quartet_router.desk import Desk
from quartet_router.explain import Explanations
from quartet_router.feed import Feed
from quartet_router.figures import Figures
from quartet_router.flight import Flights

_json = msgspec.json.Encoder().encode
_delta = msgspec.msgpack.Decoder(FleetDelta).decode
_cancel = msgspec.msgpack.Decoder(Cancel).decode
_HOLD_TICK_S = 0.005
_SILENT_INVENTORIES = 3.5
"""A node is gone after so many inventory intervals of silence: three lost in a row, and some delay."""
_AGENTS_PHASES = (Phase.ACCEPTED, Phase.REFUSED, Phase.PREFILLED, Phase.FIRST_TOKEN, Phase.END)
_SWEEP_TICK_S = 0.002


class RouterService(Service):
    """One replica. All replicas share the queue group ``router``, and their ledgers over ``routed``."""

    name = "router"

    def __init__(self, bus: Bus, config: Config, *, instance: str, random: random.Random) -> None:
        super().__init__(bus, config, instance=instance, random=random)
        router = config.router
        hardware = catalogue.load(config)
        long_context = router.long_context_classes or tuple(
            name for name, each in hardware.hardware.items() if each.long_context
        )

        def profile_of(fact: WorkerFacts) -> Profile:
            section = config.models.get(fact.model)
            return hardware.profile(fact.hardware, section.spec if section else fact.model, fact.precision, fact.tp)

        policies = imported_policies(router.policies)
        if router.policy not in policies:
            allowed = f"must be one of {', '.join(policies) or 'none, for router.policies is empty'}"
            raise ConfigError(catalogue.WHERE, "router.policy", router.policy, allowed)
        self._links = LinkBook(config.kv.coordinator_silence_ms)
        self.routing = Routing(
            profile_of,
            hardware.hardware_class,
            policies,
            policy=router.policy,
            links=self._links,
            long_context=long_context,
            long_prompt_tokens=router.long_prompt_tokens,
            long_context_tokens=router.long_context_tokens,
            kappa=router.kappa,
            split_margin=router.split_margin,
            hold_ahead_chunks=router.hold_ahead_chunks,
            affinity_rows=router.affinity_rows,
            affinity_hashes=router.affinity_hashes,
            max_workers=router.max_workers,
            without_prefill_worker=router.split_without_prefill_worker,
            long_prefill_ms=router.long_prefill_ms,
            long_prefill_share=router.long_prefill_share,
            begin=random.getrandbits(16),
        )
        self._front: list[Subscription] = []
        self.ring_prefix = b""
        """How the deltas begin that come from a ring, set by the edge that reads it: the bus's copies are skipped."""
        self._figures = Figures(self.metrics)
        self._flights = Flights()
        self._lengths = OutputLengths()
        self._arrivals = Arrivals(config, self._lengths)
        self._explanations = Explanations(router.explain_last, self._name_of)
        self._desk = Desk(self, config, self.routing, self._flights, self._explanations, self._figures)
        self.feed = Feed(
            self.routing, self._links, self.say, self.metrics, self._lost,
            rows=router.affinity_rows, hashes=router.affinity_hashes,
            node_silence_ms=_SILENT_INVENTORIES * config.fleet.inventory_interval_ms,
        )  # fmt: skip
        self.metrics.gauge("workers", "Workers known.").set_function(lambda: len(self.routing.fleet))
        self.metrics.gauge("flights", "Requests under way.").set_function(lambda: len(self._flights))
        self.metrics.gauge("held", "Requests held now.").set_function(lambda: len(self._desk.holds))
        self.metrics.gauge("breakers_open", "Workers that rest after failures or a freeze.").set_function(
            lambda: self.routing.breakers.open.bit_count()
        )
        self.metrics.gauge("long_prefill_workers", "Workers with a long prefill ahead of them.").set_function(
            lambda: self.routing.ledger.long.bit_count()
        )
        self.metrics.gauge("ledger_entries", "Entries of the shared ledger.").set_function(
            lambda: len(self.routing.ledger)
        )
        self.metrics.gauge("state_age_ms", "Time since any collector said anything about the fleet.").set_function(
            lambda: self.feed.age_ms(self._desk.now_ms())
        )
        workers = self.metrics.gauge("workers_judged", "Known workers by the collectors' verdict.", ("verdict",))
        for verdict in Verdict:
            workers.labels(verdict.name.lower()).set_function(partial(self._judged, verdict))

    async def start(self) -> None:
        """Hear everything, then ask the fleet to say all it knows."""
        await super().start()
        await self.hear(subjects.inventory_all(), self._on_inventory)
        await self.hear(subjects.fleet_snapshot(), self._on_snapshot)
        await self.hear_raw(subjects.fleet_delta_raw(), self._on_delta)
        await self.hear(subjects.affinity_all(), self._on_affinity)
        await self.hear(subjects.kv_links(), self._on_links)
        await self.hear(subjects.kv_failed(), self._on_kv_failed)
        await self.hear(subjects.routed(), self._on_routed)
        for phase in _AGENTS_PHASES:
            await self.hear(subjects.request_event(phase), self._on_event)
        await self.hear_raw(subjects.cancel_raw(), self._on_cancel)
        await self.controls(
            {"policy": self._policy, "dryrun": self._dry_run, "explain": self._explain, "status": self._status}
        )
        self.feed.ask_all()
        self.every(_HOLD_TICK_S, self._desk.end_due_holds)
        self.every(_SWEEP_TICK_S, self._sweep)
        self.every(1.0, self._tend)
        self.every(0.25, self._desk.say_alive)
        await self.hear_raw(subjects.infer_all(), self._on_infer, queue="router")
        await self.hear_raw(subjects.gateway_all(), self._on_gateway, queue="router")
        self._front = self._subscriptions[-2:]

    async def stop(self) -> None:
        """Refuse what is held: the client library sends it to another replica."""
        for subscription in self._front:
            await subscription.stop()  # first, or what we refuse would be sent to us again
        if self._loop is not None:
            for flight in self._flights:
                if flight.key in self._desk.holds:
                    self._desk.fail(flight, openai.stopping())
        await super().stop()

    def not_ready(self) -> str | None:
        """A router is ready when it could route: it knows a live worker."""
        if not self.bus.connected:
            return "broker away"
        return None if self.routing.fleet.up else "no live worker known"

    # Requests

    def _on_infer(self, message: Message) -> None:
        self._receive(message, trusted=False)

    def _on_gateway(self, message: Message) -> None:
        self._receive(message, trusted=True)

    def _receive(self, message: Message, *, trusted: bool) -> None:
        tenant, model = tenant_and_model(message.subject)
        if not message.reply.startswith(subjects.inbox_prefix(tenant)):
            self._figures.dropped.labels("inbox").inc()
            self.log.warning(
                "request without a usable reply inbox", subject=message.subject, reply=message.reply,
                allowed=f"{subjects.inbox_prefix(tenant)}>",
            )  # fmt: skip
            return
        request_id, attempt = "", 1
        try:
            headers = self._arrivals.headers(message, trusted=trusted)
            request_id, attempt = headers.request_id, headers.attempt
            flight = self._arrivals.flight(message, headers, tenant, model, self._desk.now_ms(), self._fresh_id)
        except Refused as error:
            self._refuse(message.reply, request_id, attempt, error)
            return
        if self._flights.body_bytes + len(message.data) > self.config.router.body_max_bytes:
            self._refuse(message.reply, flight.id, flight.attempt, openai.all_busy(model, 1.0))
            return
        if not self._flights.add(flight):
            self._figures.dropped.labels("duplicate").inc()
            running = self._flights.get(flight.key)
            if running is not None and running.inbox != flight.inbox:
                self._refuse(message.reply, flight.id, flight.attempt, openai.duplicate(flight.id))
            return
        self._desk.take(flight)

    def _refuse(self, inbox: str, request_id: str, attempt: int, error: Refused) -> None:
        self._figures.refused(error.status)
        refusal = frames.Error(
            id=request_id, attempt=attempt, try_=1, status=error.status, error=error.body,
            retry_after_s=error.retry_after_s,
        )  # fmt: skip
        self.say(subjects.inbox(inbox), frames.encode(refusal))

    def _fresh_id(self) -> str:
        return f"{self.instance}-{self.random.getrandbits(64):016x}"

    def _on_cancel(self, message: Message) -> None:
        try:
            cancel = _cancel(message.data)
        except UNREADABLE as error:
            self._unreadable(subjects.cancel_raw().subject, message, error)
            return
        tenant = subjects.text_of(message.subject, 1)
        for flight in self._flights.of_request(tenant, cancel.id, cancel.attempt):
            if cancel.try_ in (0, flight.dispatch.try_):
                self._desk.act(flight, flight.dispatch.cancelled())

    def _on_event(self, event: RequestEvent) -> None:
        now_ms = self._desk.now_ms()
        stream = event.stream
        key = (event.tenant, stream.id, stream.attempt, stream.try_, event.worker, event.incarnation)
        flight = self._flights.get((event.tenant, stream.id, stream.attempt))
        if event.phase is Phase.ACCEPTED:
            self.routing.accepted(key, event.beat, now_ms)
            if flight is not None:
                self._desk.act(flight, flight.dispatch.accepted(event.worker, stream.try_))
        elif event.phase is Phase.REFUSED:
            self.routing.ended(key, 0, now_ms)
            if flight is not None:
                self._desk.act(flight, flight.dispatch.refused(event.worker, stream.try_, event.reason))
        elif event.phase is Phase.PREFILLED:
            self.routing.prefilled(key, event.beat, now_ms)
            self._worked(event.worker)
        elif event.phase is Phase.FIRST_TOKEN:
            self.routing.prefilled(key, event.beat, now_ms)
            self._worked(event.worker)
            if event.predicted_ttft_ms > 0.0:
                self._figures.ttft_error.observe((event.waited_ms + event.ttft_ms) / event.predicted_ttft_ms)
            if flight is not None and stream.try_ == flight.dispatch.try_:
                self._desk.act(flight, flight.dispatch.first_token(stream.try_))
                if flight.dispatch.stage is Stage.STREAMING:  # else it is held again, and will be sent again
                    self._flights.drop_body(flight)
        else:
            self.routing.ended(key, event.beat, now_ms)
            if event.status == "ok" and event.role is not Role.PREFILL:
                self._lengths.observe(event.tenant, event.model, event.output_tokens)
                if event.predicted_total_ms > 0.0:
                    self._figures.total_error.observe((event.waited_ms + event.e2e_ms) / event.predicted_total_ms)
            elif event.status == "error" and counts(event.code) and event.reason != "too_large":
                self._desk.worker_failed(event.worker)
            if flight is not None:
                failure = event.reason or "error" if event.status == "error" else ""
                self._desk.act(flight, flight.dispatch.ended(event.worker, stream.try_, failure))
        self._desk.review_soon()

    def _worked(self, worker: str) -> None:
        slot = self.routing.fleet.slot_of(worker)
        if slot is not None:
            self.routing.breakers.succeeded(slot)

    def _on_routed(self, note: LedgerNote) -> None:
        if note.router == self.instance:
            if note.action is LedgerAction.DISPATCHED and note.role is not Role.PREFILL:
                self._desk.echoed(note)
            return
        now_ms = self._desk.now_ms()
        stream = note.stream
        key = (note.tenant, stream.id, stream.attempt, stream.try_, note.worker, note.incarnation)
        if note.action is LedgerAction.ENDED:
            self.routing.ended(key, 0, now_ms)
            return
        slot = self.routing.fleet.slot_of(note.worker)
        if slot is None or self.routing.fleet.at(slot).incarnation != note.incarnation:
            return
        self.routing.opened(
            key, slot,
            prefill_ms=note.prefill_ms,
            tokens=note.prompt_tokens,
            decodes=note.role is not Role.PREFILL,
            tpot_ms=note.tpot_ms,
            total_ms=note.total_ms,
            now_ms=now_ms,
            reserved_for_ms=note.expires_ms if note.action is LedgerAction.RESERVED else 0.0,
        )  # fmt: skip

    def _on_kv_failed(self, report: TransferReport) -> None:
        flight = self._flights.of_transfer(report.transfer)
        if flight is not None:
            if flight.dispatch.lender is not None:
                self._figures.fetches_failed.inc()
            self._desk.act(flight, flight.dispatch.transfer_failed(report.stream.try_, report.detail or report.state))

    # Fleet

    def _on_inventory(self, message: NodeInventory) -> None:
        for problem in self.feed.inventory(message, self._desk.now_ms()):
            self.log.error("worker cannot be routed to", problem=problem)
        self._desk.review_soon()

    def _on_delta(self, message: Message) -> None:
        if self.ring_prefix and message.data.startswith(self.ring_prefix):
            return
        try:
            self.on_deltas((message.data,))
        except UNREADABLE as error:
            self._unreadable(message.subject, message, error)

    def on_deltas(self, records: Sequence[bytes]) -> None:
        """Take encoded deltas, from the ring of a collector on this host or from the bus."""
        now_ms = self._desk.now_ms()
        for record in records:
            self.feed.delta(_delta(record), now_ms)
        self._desk.review_soon()

    def _on_snapshot(self, message: FleetSnapshot) -> None:
        self.feed.snapshot(message, self._desk.now_ms())
        self._desk.review_soon()

    def _on_affinity(self, message: AffinityUpdate) -> None:
        self.feed.affinity(message, self._desk.now_ms())

    def _on_links(self, message: LinkTable) -> None:
        self.feed.links(message, self._desk.now_ms())

    def _lost(self, worker: str) -> None:
        for flight in self._flights.on_worker(worker):
            self._desk.act(flight, flight.dispatch.worker_lost(worker))

    def _sweep(self) -> None:
        if self.routing.sweeping:
            self.routing.sweep()

    def _tend(self) -> None:
        now_ms = self._desk.now_ms()
        self.routing.tend(now_ms)
        for node in self.feed.tend(now_ms):
            self.log.warning("node gone: it announces nothing any more", node=node)
        self._desk.tend()

    # Operators

    def _policy(self, request: ControlRequest) -> ControlReply:
        if request.argument:
            try:
                self.routing.choose_policy(request.argument)
            except UnknownPolicy as error:
                return ControlReply(ok=False, reason=str(error))
            self.log.info("policy chosen", policy=request.argument)
        return self._told({"policy": self.routing.policy.name, "policies": self.routing.policy_names})

    def _dry_run(self, request: ControlRequest) -> ControlReply:
        """``argument``: a policy to compare with, "off" to stop, nothing to read what was found."""
        run = self._desk.dry_run
        if request.argument == "off":
            run.stop()
        elif request.argument == self.routing.policy.name:
            return ControlReply(ok=False, reason=f"{request.argument} is the policy in use")
        elif request.argument:
            try:
                run.start(request.argument, self._desk.now_ms())
            except UnknownPolicy as error:
                return ControlReply(ok=False, reason=str(error))
        return self._told(run.report(self._desk.now_ms()))

    def _explain(self, request: ControlRequest) -> ControlReply:
        decisions = self._explanations.of(request.argument)
        if not decisions:
            return ControlReply(ok=False, reason=f"no decision on {request.argument!r} among the last kept here")
        return self._told({"request": request.argument, "decisions": decisions})

    def _status(self, _: ControlRequest) -> ControlReply:
        return self._told(
            {
                "policy": self.routing.policy.name,
                "workers": len(self.routing.fleet),
                "up": self.routing.fleet.up.bit_count(),
                "flights": len(self._flights),
                "held": len(self._desk.holds),
                "ledger_entries": len(self.routing.ledger),
                "groups": self.routing.board.groups,
                "coordinator": self._links.leader,
                "decide_p50_us": round(self._figures.decision_us(0.5), 2),
                "decide_p99_us": round(self._figures.decision_us(0.99), 2),
                **self._figures.totals(),
            }
        )

    def _told(self, payload: Mapping[str, Any]) -> ControlReply:
        return ControlReply(ok=True, service=self.name, instance=self.instance, payload=_json(payload))

    def _judged(self, verdict: Verdict) -> int:
        fleet = self.routing.fleet
        return sum(worker is not None and fleet.verdict(slot) == verdict for slot, worker in enumerate(fleet.workers))

    def _name_of(self, slot: int) -> str:
        worker = self.routing.fleet.workers[slot] if slot >= 0 else None
        return "" if worker is None else worker.id


def imported_policies(paths: tuple[str, ...]) -> dict[str, type[Policy]]:
    """The policy classes at ``module:Class`` paths, by name. Raises ``ConfigError`` for one that is none."""
    found: dict[str, type[Policy]] = {}
    for path in paths:
        module, _, attribute = path.partition(":")
        try:
            policy = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                catalogue.WHERE, "router.policies", path, f"must be an importable module:Class ({error})"
            ) from None
        if not (isinstance(policy, type) and issubclass(policy, Policy)):
            raise ConfigError(
                catalogue.WHERE, "router.policies", path, "must be a subclass of quartet_core.policy.base.Policy"
            )
        found[policy.name] = policy
    return found
