"""The desk carries out decisions: sends, holds, retries, cancels, fails. Every flight's outcome is written here."""

import time

from quartet_bus import subjects
from quartet_bus.bus import PayloadTooLarge
from quartet_bus.config.schema import Config
from quartet_bus.messages import (
    Cancel,
    LedgerAction,
    LedgerNote,
    Phase,
)
from quartet_bus.service import Service
from quartet_core import dispatch as steps
from quartet_core import openai
from quartet_core.dispatch import Half, Stage
from quartet_core.hold import HoldKey, HoldQueue
from quartet_core.openai import Refused
from quartet_core.pairing import handshake
from quartet_core.plan import Decision, Plan, Reason
from quartet_core.routing import Routing
from quartet_core.turns import Turns
from quartet_router import orders
from quartet_router.dryrun import DryRun
from quartet_router.explain import Explanations
from quartet_router.figures import Figures
from quartet_router.flight import Flight, Flights
from quartet_router.voice import Voice

_RETRY_AFTER_S = 1.0

_ECHO_PATIENCE = 6.0
"""Times ``dispatch_ack_ms`` after which a dispatch is given up whose note never came back."""

_EXPIRY_FACTOR, _EXPIRY_MS = 5.0, 60_000.0
"""So many times its predicted time, and so many ms, after its dispatch a request is given up: its events were lost."""

_TRIAL_FACTOR, _TRIAL_MS = 2.0, 500.0
"""A worker on trial gets so many times its predicted time to first token, plus so many ms; then another is asked."""


class Desk:
    """Decides for flights and acts on it. ``service`` gives bus, clock and timers."""

    def __init__(
        self, service: Service, config: Config, routing: Routing, flights: Flights, explanations: Explanations,
        figures: Figures,
    ) -> None:  # fmt: skip
        self._service = service
        self._config = config
        self._router = config.router
        self._routing = routing
        self._flights = flights
        self._explanations = explanations
        self._figures = figures
        self.dry_run = DryRun(routing)
        self._voice = Voice(service)
        self._transfers = 0
        self._logged_ms = -1000.0
        self._life = f"{service.instance}-{service.random.getrandbits(48):012x}"
        """Names this router's transfers: a restarted one under the same name must not use a former life's again."""
        self._review_due = False
        self.holds = HoldQueue(max_requests=config.router.hold_max_requests, max_bytes=config.router.hold_max_bytes)
        self._turns = Turns(self, routing, self.holds)

    def now_ms(self) -> float:
        """The service's clock in milliseconds."""
        return self._service.now_ns() / 1e6

    # From arrival to dispatch

    def take(self, flight: Flight) -> None:
        """A new flight: send it, hold it, or refuse it, unless it came too late."""
        if not self._late(flight):
            self._turns.newcomer(flight)
            self._review_what_freed()

    def act(self, flight: Flight, actions: list[steps.Action]) -> None:
        """Carry out what a flight's state machine asks for."""
        for action in actions:
            if isinstance(action, steps.Cancel):
                self._cancel(flight, action)
            elif isinstance(action, steps.Fail):
                self._tell_failure(flight, action.error)
                self._voice.error(flight, action.error, self.now_ms())
            elif isinstance(action, steps.Send):
                self._figures.retried()
                self._tell_retry(flight, action)
                self._flights.lifted(flight)
                if not self._late(flight):
                    self._turns.again(flight)
            else:
                self._release(flight)
                self._flights.remove(flight)

    def _tell_retry(self, flight: Flight, action: steps.Send) -> None:
        if self._may_log():
            self._service.log.warning("trying elsewhere", request=flight.id, why=action.why, excluded=action.excluded)

    def _tell_failure(self, flight: Flight, error: Refused) -> None:
        if error.status >= 500 and flight.dispatch.try_ and self._may_log():
            self._service.log.warning(
                "request failed", request=flight.id, status=error.status, why=error.body.message,
                tried=flight.dispatch.tried,
            )  # fmt: skip

    def _may_log(self) -> bool:
        """Once a second: in an outage thousands of requests fail alike, and one line tells what is the matter."""
        now_ms = self.now_ms()
        if now_ms - self._logged_ms < 1000.0:
            return False
        self._logged_ms = now_ms
        return True

    def fail(self, flight: Flight, error: Refused) -> None:
        """Refuse a flight for a reason of the router's own."""
        self._figures.refused(error.status)
        reason = error.body.code or error.body.type
        self._voice.event(flight, Phase.REJECTED, self.now_ms(), reason=reason, code=error.status)
        self.act(flight, flight.dispatch.failed(error))

    def decide(self, flight: Flight) -> Decision:
        """As ``turns.Desk.decide``."""
        ask, now_ms = flight.ask, self.now_ms()
        ask.waited_ms = now_ms - flight.arrived_ms
        moves = self._routing.links.live(now_ms) and not ask.embeds
        # A retry goes to one worker, if any can do all of it: what failed may be whatever moves KV.
        ask.whole_first = flight.dispatch.try_ > 0
        ask.plans_split = self._router.split and moves and not self._gives_up_splitting(flight)
        ask.plans_fetch = self._router.fetch and moves and not ask.whole_first
        ask.at_ms = now_ms
        ask.excluded = self._routing.fleet.plane_of(flight.dispatch.excluded)
        started_ns = time.perf_counter_ns()
        try:
            decision = self._routing.decide(ask)
        # A policy may be anybody's code: its fault must not leave a request without an answer.
        except Exception as error:
            self._figures.policy_failures.inc()
            if self._may_log():
                self._service.log.exception("policy failed", policy=self._routing.policy.name, exc_info=error)
            decision = Decision(reason=Reason.POLICY_FAILED)
        flight.decided_us = (time.perf_counter_ns() - started_ns) / 1e3
        if self.dry_run.policy and flight.decision is None:
            self.dry_run.note(ask, decision)
        flight.decision = decision
        return decision

    def _account(self, flight: Flight, decision: Decision) -> None:
        """Count a decision, and keep it to be explained: once it was acted on, so that no request waits for it."""
        self._figures.decided(decision, flight.decided_us)
        self._explanations.note(flight, decision, self._routing.policy.name, self.now_ms())

    def _late(self, flight: Flight) -> bool:
        """Whether the flight's deadline has passed; then it is refused."""
        late = 0.0 < flight.deadline_at_ms <= self.now_ms()
        if late:
            self.fail(flight, openai.late())
        return late

    def _gives_up_splitting(self, flight: Flight) -> bool:
        """Whether KV did not arrive and this is the last try: then rather one half does all, where that is allowed."""
        dispatch = flight.dispatch
        last = dispatch.try_ + 1 >= dispatch.max_tries
        return last and dispatch.transfers_failed > 0 and self._router.split_without_prefill_worker == "whole"

    def _left_hold(self, flight: Flight) -> None:
        if flight.held_at_ms:
            self._figures.held_ms.observe(self.now_ms() - flight.held_at_ms)
            flight.held_at_ms = 0.0

    def go(self, flight: Flight, decision: Decision) -> None:
        """As ``turns.Desk.go``."""
        self._left_hold(flight)
        if decision.plan is not None:
            self._send(flight, decision.plan)
        else:
            self._refuse(flight, decision)
        self._account(flight, decision)

    def _refuse(self, flight: Flight, decision: Decision) -> None:
        model = flight.model
        if decision.reason is Reason.TOO_LONG:
            self.fail(
                flight,
                openai.too_long(flight.ask.prompt_tokens + flight.ask.max_tokens, self._routing.longest_context(model)),
            )
        elif decision.reason is Reason.NO_EMBEDDINGS:
            self.fail(flight, openai.no_embeddings(model))
        elif decision.reason is Reason.ALL_BUSY:
            self.fail(flight, openai.all_busy(model, _RETRY_AFTER_S))
        elif decision.reason is Reason.POLICY_FAILED:
            self.fail(flight, openai.broken("The routing policy failed.", "policy_failed"))
        elif decision.reason is Reason.UNKNOWN_MODEL and model not in self._config.models:
            self.fail(flight, openai.unknown_model(model))
        else:
            self.fail(flight, openai.no_worker(model))

    # Holding

    def review_soon(self) -> None:
        """Look at held requests again once the messages at hand are handled, if a worker of theirs freed."""
        if not len(self.holds):
            self._routing.freed.clear()
        elif not self._review_due:  # a review that is due takes what freed until then, too
            self._review_due = True
            self._service.loop.call_soon(self._review_freed)

    def end_due_holds(self) -> None:
        """Holds whose time is over leave for the best worker there is, or are refused."""
        now_ms = self.now_ms()
        for held in self.holds.due(now_ms):
            flight = self.unhold(held.key)
            if flight is None:
                continue
            self._figures.holds_expired.inc()
            if not self._late(flight):
                self.go(flight, self.decide(flight))

    def say_alive(self) -> None:
        """Four times a second: tell clients whose requests wait that they do, if they were not told for a while."""
        now_ms = self.now_ms()
        for key in self.holds:
            flight = self._flights.get(key)
            if flight is not None:
                self._voice.alive(flight, now_ms)

    def tend(self) -> None:
        """Once a second: give up what no event ever ended."""
        now_ms = self.now_ms()
        for flight in self._flights:
            if flight.dispatch.stage is not Stage.HELD and 0.0 < flight.expires_ms < now_ms:
                self.fail(flight, openai.upstream("The end of the answer was never heard.", "stream_lost"))

    def hold(self, flight: Flight, decision: Decision) -> bool:
        """As ``turns.Desk.hold``."""
        now_ms = self.now_ms()
        until_ms = flight.arrived_ms + self._router.hold_max_ms
        if flight.deadline_at_ms:
            until_ms = min(until_ms, flight.deadline_at_ms)
        if flight.no_hold or until_ms <= now_ms:
            return False
        if flight.dispatch.stage is not Stage.HELD:
            flight.lag_ms = self.holds.backlog_ms(flight.tenant)
        if not self.holds.put(
            flight.key,
            flight.model,
            priority=flight.priority,
            deadline_ms=flight.arrived_ms + flight.ask.ttft_ms + flight.lag_ms,
            arrival=flight.arrival,
            now_ms=now_ms,
            until_ms=until_ms,
            body_bytes=len(flight.body or b""),
            work_ms=self._routing.least_prefill_ms(flight.ask),
        ):
            return False
        if flight.dispatch.stage is not Stage.HELD:
            self._figures.held()
            flight.held_at_ms = now_ms
            flight.dispatch.held()
            self._voice.held(flight, until_ms - now_ms, now_ms)
        if decision.plan is not None:
            self._reserve(flight, decision.plan, until_ms - now_ms)
        self._account(flight, decision)
        return True

    def _reserve(self, flight: Flight, plan: Plan, remaining_ms: float) -> None:
        worker = self._routing.fleet.at(plan.prefill)
        # Under the number of the try that it may become: then the one turns into the other, at the replicas too.
        key = flight.ledger_key(flight.dispatch.try_ + 1, worker.id, worker.incarnation)
        flight.ledger_keys = {plan.prefill: key}
        self._routing.sent(flight.ledger_keys, plan, flight.ask, self.now_ms(), reserved_for_ms=remaining_ms)
        self._voice.note(flight, LedgerAction.RESERVED, plan, self._routing.ledger, remaining_ms)

    def unhold(self, key: HoldKey) -> Flight | None:
        """As ``turns.Desk.unhold``."""
        held = self.holds.take(key)
        flight = self._flights.get(key)
        if held is None or flight is None:
            return None
        now_ms = self.now_ms()
        for ledger_key in flight.ledger_keys.values():
            self._routing.ended(ledger_key, 0, now_ms)
        flight.ledger_keys = {}
        return flight

    def _review_freed(self) -> None:
        self._review_due = False
        freed = list(self._routing.freed)
        self._routing.freed.clear()
        for model in freed:
            self._turns.review(model)
        self._review_what_freed()

    def _review_what_freed(self) -> None:
        """A review may leave more to be done, which is for later: messages come first."""
        if self._routing.freed:
            self.review_soon()

    # Sending

    def _send(self, flight: Flight, plan: Plan) -> None:
        now_ms, router = self.now_ms(), self._service.instance
        target = self._half(plan.decode)
        prefill = self._half(plan.prefill) if plan.split else None
        lender = self._half(plan.source) if plan.fetches else None
        giver = prefill or lender
        try_ = flight.dispatch.sent(plan, target, prefill, lender)
        if giver is not None:
            self._transfers += 1
            flight.transfer = f"{self._life}-{self._transfers}"
        say = self._service.say
        try:
            run = orders.run(flight, plan, target, giver, router, now_ms)
            say(subjects.worker_run(target.worker), run, urgent=giver is None)
            if giver is not None:
                order = orders.prefill(flight, plan, target, giver, router, now_ms)
                hands_over = self._shake_hands(giver, target)
                say(subjects.worker_prefill(giver.worker), order, urgent=hands_over)
                if not hands_over:
                    transfer = orders.transfer(flight, plan, target, giver, router, now_ms)
                    say(subjects.kv_plan(), transfer, urgent=True)
        except PayloadTooLarge as error:
            self.fail(flight, openai.too_large(error.size_bytes, error.limit_bytes))
            return
        flight.ledger_keys = {
            half.slot: flight.ledger_key(try_, half.worker, half.incarnation) for half in flight.dispatch.involved
        }
        self._routing.sent(flight.ledger_keys, plan, flight.ask, now_ms)
        for half in flight.dispatch.involved:
            if self._routing.breakers.open >> half.slot & 1:
                self._routing.breakers.tried(half.slot, now_ms)
        self._flights.placed(flight)
        self._voice.note(flight, LedgerAction.DISPATCHED, plan, self._routing.ledger)
        self._figures.sent(plan, self._routing.fleet)
        self._voice.event(flight, Phase.DISPATCHED, now_ms, worker=target.worker)
        flight.expires_ms = now_ms + _EXPIRY_FACTOR * plan.total_ms + _EXPIRY_MS
        self._await_ack(flight, plan, try_)

    def _await_ack(self, flight: Flight, plan: Plan, try_: int) -> None:
        # The worker's time to ack begins when our own note of the dispatch comes back: then the broker has passed it
        # on, and we hear what comes. A router that lags must not blame its workers, and try everything three times.
        self._service.later(_ECHO_PATIENCE * self._router.dispatch_ack_ms / 1e3, self._ack_due, flight, try_)
        if flight.decision is not None and flight.decision.reason is Reason.TRIAL:
            # Of an answer in one piece nothing is heard before its end.
            first_ms = plan.ttft_ms if flight.streams else plan.total_ms
            patience_ms = _TRIAL_FACTOR * first_ms + _TRIAL_MS
            self._service.later(patience_ms / 1e3, self._trial_due, flight, try_)

    def _shake_hands(self, giver: Half, target: Half) -> bool:
        """Whether these workers' engines hand KV over by themselves, so that no coordinator is to move anything."""
        fleet = self._routing.fleet
        return bool(handshake(fleet.at(giver.slot).facts, fleet.at(target.slot).facts))

    def _half(self, slot: int) -> Half:
        worker = self._routing.fleet.at(slot)
        return Half(worker.slot, worker.id, worker.incarnation)

    def echoed(self, note: LedgerNote) -> None:
        """Our own note of a dispatch came back."""
        stream = note.stream
        flight = self._flights.get((note.tenant, stream.id, stream.attempt))
        if flight is not None and flight.dispatch.awaits_ack(stream.try_):
            self._service.later(self._router.dispatch_ack_ms / 1e3, self._ack_due, flight, stream.try_)

    def _ack_due(self, flight: Flight, try_: int) -> None:
        actions = flight.dispatch.ack_due(try_)
        self._blame(actions)
        self.act(flight, actions)

    def _trial_due(self, flight: Flight, try_: int) -> None:
        actions = flight.dispatch.first_token_due(try_)
        self._blame(actions)
        self.act(flight, actions)

    def _blame(self, actions: list[steps.Action]) -> None:
        """Workers that did not answer in time: it counts against them."""
        for action in actions:
            if isinstance(action, steps.Cancel):
                for half in action.halves:
                    if not half.acked or action.reason == "trial_failed":
                        self.worker_failed(half.worker)

    def worker_failed(self, worker: str) -> None:
        """A request failed by this worker's fault."""
        slot = self._routing.fleet.slot_of(worker)
        if slot is not None:
            self._routing.breakers.failed(slot, self.now_ms())

    def _cancel(self, flight: Flight, cancel: steps.Cancel) -> None:
        now_ms = self.now_ms()
        for half in cancel.halves:
            self._service.say(
                subjects.worker_cancel(half.worker),
                Cancel(flight.id, flight.attempt, cancel.try_, cancel.reason, flight.tenant),
            )
            if not half.acked:
                # The worker may never have heard of it, and then no event of its own ends the entry.
                key = flight.ledger_key(cancel.try_, half.worker, half.incarnation)
                self._routing.ended(key, 0, now_ms)
                self._voice.ended(key)

    def _release(self, flight: Flight) -> None:
        if flight.key in self.holds:
            self.unhold(flight.key)
        self._left_hold(flight)
