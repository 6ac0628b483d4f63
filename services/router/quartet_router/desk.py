"""The desk carries out decisions: sends, holds, retries, cancels, fails. Every flight's outcome is written here."""

import time

from quartet_bus import frames, subjects
from quartet_bus.bus import PayloadTooLarge
from quartet_bus.config.schema import Config
from quartet_bus.messages import (
    Cancel,
    LedgerAction,
    LedgerNote,
    Phase,
    Prefill,
    RequestEvent,
    Role,
    Run,
    Split,
    TransferPlan,
    TransferReason,
)
from quartet_bus.service import Service
from quartet_core import dispatch as steps
from quartet_core import openai
from quartet_core.dispatch import Half, Stage
from quartet_core.hold import HoldQueue
from quartet_core.openai import Refused
from quartet_core.plan import Decision, Plan, Reason
from quartet_core.routing import Routing
from quartet_router.dryrun import DryRun
from quartet_router.explain import Explanations
from quartet_router.figures import Figures
from quartet_router.flight import Flight, Flights

_REVIEWED = 16
"""Held requests of a model that one review decides anew, first ones first."""

_RETRY_AFTER_S = 1.0

_ECHO_PATIENCE = 6.0
"""Times ``dispatch_ack_ms`` after which a dispatch is given up whose note never came back."""

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
        self._transfers = 0
        self._review_due = False
        self.holds = HoldQueue(max_requests=config.router.hold_max_requests, max_bytes=config.router.hold_max_bytes)

    def now_ms(self) -> float:
        """The service's clock in milliseconds."""
        return self._service.now_ns() / 1e6

    # From arrival to dispatch

    def take(self, flight: Flight) -> None:
        """A new flight: send it, hold it, or refuse it.

        One that would go to a worker for which others wait takes its place among them. Whoever waits for another
        worker does not stand in its way.
        """
        self._decide(flight, behind_others=len(self.holds) > 0)

    def act(self, flight: Flight, actions: list[steps.Action]) -> None:
        """Carry out what a flight's state machine asks for."""
        for action in actions:
            if isinstance(action, steps.Cancel):
                self._cancel(flight, action)
            elif isinstance(action, steps.Fail):
                self._tell_error(flight, action.error)
            elif isinstance(action, steps.Send):
                self._figures.retried()
                self._flights.lifted(flight)
                self._decide(flight)
            else:
                self._release(flight)
                self._flights.remove(flight)

    def fail(self, flight: Flight, error: Refused) -> None:
        """Refuse a flight for a reason of the router's own."""
        self._figures.rejected.labels(str(error.status)).inc()
        self._say_event(flight, Phase.REJECTED, reason=error.body.code or error.body.type, code=error.status)
        self.act(flight, flight.dispatch.failed(error))

    def _decide(self, flight: Flight, *, behind_others: bool = False) -> None:
        now_ms = self.now_ms()
        if flight.deadline_at_ms and now_ms >= flight.deadline_at_ms:
            self.fail(flight, openai.late())
            return
        decision = self._decision(flight, now_ms)
        hold = decision.hold or decision.reason is Reason.ALL_BUSY
        overtakes = behind_others and not hold and decision.plan is not None and self._claimed(decision.plan.prefill)
        if (hold or overtakes) and self._may_hold(flight, now_ms) and self._hold(flight, decision.plan):
            if overtakes:
                self._review(flight.model)
            return
        self._follow(flight, decision)

    def _decision(self, flight: Flight, now_ms: float) -> Decision:
        ask = flight.ask
        ask.waited_ms = now_ms - flight.arrived_ms
        moves = self._routing.links.live(now_ms)
        ask.plans_split = self._router.split and moves
        ask.plans_fetch = self._router.fetch and moves
        ask.at_ms = now_ms
        ask.excluded = 0
        for worker in flight.dispatch.tried:
            slot = self._routing.fleet.slot_of(worker)
            if slot is not None:
                ask.excluded |= 1 << slot
        started_ns = time.perf_counter_ns()
        decision = self._routing.decide(ask)
        self._figures.decided(started_ns)
        if self.dry_run.policy and flight.decision is None:
            self.dry_run.note(ask, decision)
        flight.decision = decision
        self._figures.decisions.labels(decision.reason.value).inc()
        self._explanations.note(flight, decision, self._routing.policy.name, now_ms)
        return decision

    def _follow(self, flight: Flight, decision: Decision) -> None:
        if decision.plan is not None:
            self._send(flight, decision.plan)
            return
        model = flight.model
        if decision.reason is Reason.TOO_LONG:
            self.fail(flight, openai.too_long(flight.ask.prompt_tokens, self._routing.longest_context(model)))
        elif decision.reason is Reason.ALL_BUSY:
            self.fail(flight, openai.all_busy(model, _RETRY_AFTER_S))
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
            flight = self._flights.get(held.key)
            self._unhold(held.key)
            if flight is not None:
                self._figures.holds_expired.inc()
                self._follow(flight, self._decision(flight, now_ms))

    def say_held(self) -> None:
        """Once a second: tell clients whose requests wait that they do."""
        now_ms = self.now_ms()
        for flight in self._flights:
            if flight.dispatch.stage is Stage.HELD and now_ms - flight.frames_at_ms >= 900.0:
                self._frame(flight, frames.Alive(id=flight.id, attempt=flight.attempt, try_=flight.frame_try))

    def _claimed(self, slot: int) -> bool:
        """Whether held requests wait for this worker, here or at another replica."""
        return self._routing.board.loads[slot].reserved_ms > 0.0

    def _may_hold(self, flight: Flight, now_ms: float) -> bool:
        return not flight.no_hold and now_ms < flight.arrived_ms + self._router.hold_max_ms

    def _hold(self, flight: Flight, plan: Plan | None) -> bool:
        now_ms = self.now_ms()
        until_ms = flight.arrived_ms + self._router.hold_max_ms
        if flight.deadline_at_ms:
            until_ms = min(until_ms, flight.deadline_at_ms)
        if flight.dispatch.stage is not Stage.HELD:
            flight.lag_ms = self.holds.backlog_ms(flight.tenant)
        if until_ms <= now_ms or not self.holds.put(
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
            flight.dispatch.held()
            remaining_ms = until_ms - now_ms
            self._frame(
                flight,
                frames.Held(id=flight.id, attempt=flight.attempt, try_=flight.frame_try, remaining_ms=remaining_ms),
            )
            self._say_event(flight, Phase.HELD)
        if plan is not None:
            self._reserve(flight, plan, until_ms - now_ms)
        return True

    def _reserve(self, flight: Flight, plan: Plan, remaining_ms: float) -> None:
        worker = self._routing.fleet.at(plan.prefill)
        key = flight.ledger_key(worker.id, worker.incarnation)
        flight.ledger_keys = {plan.prefill: key}
        self._routing.sent(flight.ledger_keys, plan, flight.ask, self.now_ms(), reserved_for_ms=remaining_ms)
        self._note(flight, LedgerAction.RESERVED, plan, remaining_ms)

    def _unhold(self, key: tuple[str, str, int]) -> None:
        """End a hold and its reservation."""
        held = self.holds.take(key)
        flight = self._flights.get(key)
        if held is None or flight is None:
            return
        now_ms = self.now_ms()
        for ledger_key in flight.ledger_keys.values():
            self._routing.ended(ledger_key, 0, now_ms)
        flight.ledger_keys = {}
        self._figures.held_ms.observe(now_ms - held.since_ms)

    def _review_freed(self) -> None:
        self._review_due = False
        freed = list(self._routing.freed)
        self._routing.freed.clear()
        for model in freed:
            self._review(model)

    def _review(self, model: str) -> None:
        """Decide the first held requests of ``model`` anew, in their order. One that would take a worker for which a
        request before it waits goes on waiting, too; stop when no worker takes any work."""
        waited_for: set[int] = set()
        for held in self.holds.first(model, _REVIEWED):
            flight = self._flights.get(held.key)
            self._unhold(held.key)
            if flight is None:
                continue
            now_ms = self.now_ms()
            decision = self._decision(flight, now_ms)
            plan = decision.plan
            claimed = plan is not None and plan.prefill in waited_for
            if (
                (decision.hold or claimed or decision.reason is Reason.ALL_BUSY)
                and self._may_hold(flight, now_ms)
                and self._hold(flight, plan)
            ):
                if plan is None:
                    return
                waited_for.add(plan.prefill)
            else:
                self._follow(flight, decision)

    # Sending

    def _send(self, flight: Flight, plan: Plan) -> None:
        fleet = self._routing.fleet
        target = fleet.at(plan.decode)
        prefill = self._half(plan.prefill) if plan.split else None
        lender = self._half(plan.source) if plan.fetches else None
        giver = prefill or lender
        now_ms = self.now_ms()
        try_ = flight.dispatch.sent(plan, self._half(plan.decode), prefill, lender)
        tokens = flight.ask.prompt_tokens
        from_there = from_here = None
        if giver is not None:
            self._transfers += 1
            flight.transfer = f"{self._service.instance}-{self._transfers}"
            moved_tokens = plan.fetched_tokens if plan.fetches else tokens
            from_there = Split(flight.transfer, giver.worker, giver.incarnation, moved_tokens)
            from_here = Split(flight.transfer, target.id, target.incarnation, moved_tokens)
        deadline_ms = max(1, int(flight.deadline_at_ms - now_ms)) if flight.deadline_at_ms else 0
        body = flight.body or b""
        run = Run(
            stream=flight.stream,
            tenant=flight.tenant,
            model=flight.model,
            worker=target.id,
            incarnation=target.incarnation,
            inbox=flight.inbox,
            body=body,
            router=self._service.instance,
            prompt_tokens=tokens,
            deadline_ms=deadline_ms,
            ttft_ms=flight.ask.ttft_ms,
            tpot_ms=flight.ask.tpot_ms,
            predicted_ttft_ms=plan.ttft_ms,
            predicted_prefill_ms=plan.prefill_ms,
            predicted_total_ms=plan.total_ms,
            waited_ms=now_ms - flight.arrived_ms,
            priority=flight.priority,
            session=flight.session,
            salt=flight.salt,
            split=from_there if prefill is not None else None,
            fetch=from_there if lender is not None else None,
            fetch_wait_ms=plan.fetch_wait_ms,
        )
        try:
            self._service.say(subjects.worker_run(target.id), run)
            if giver is not None and from_here is not None:
                self._send_prefill(flight, plan, giver, from_here, deadline_ms)
        except PayloadTooLarge as error:
            self.fail(flight, openai.too_large(error.size_bytes, error.limit_bytes))
            return
        flight.ledger_keys = {
            half.slot: flight.ledger_key(half.worker, half.incarnation) for half in flight.dispatch.involved
        }
        self._routing.sent(flight.ledger_keys, plan, flight.ask, now_ms)
        self._flights.placed(flight)
        self._note(flight, LedgerAction.DISPATCHED, plan)
        self._figures.sent(plan, fleet)
        self._say_event(flight, Phase.DISPATCHED, worker=target.id)
        # The worker's time to ack begins when our own note of the dispatch comes back: then the broker has passed it
        # on, and we hear what comes. A router that lags must not blame its workers, and try everything three times.
        self._service.later(_ECHO_PATIENCE * self._router.dispatch_ack_ms / 1e3, self._ack_due, flight, try_)
        if flight.decision is not None and flight.decision.reason is Reason.TRIAL:
            patience_ms = _TRIAL_FACTOR * plan.ttft_ms + _TRIAL_MS
            self._service.later(patience_ms / 1e3, self._trial_due, flight, try_)

    def _half(self, slot: int) -> Half:
        worker = self._routing.fleet.at(slot)
        return Half(worker.slot, worker.id, worker.incarnation)

    def _send_prefill(self, flight: Flight, plan: Plan, giver: Half, split: Split, deadline_ms: int) -> None:
        """Have ``giver`` compute the prompt, or lend what it has cached of it, and the coordinator move that."""
        target = self._routing.fleet.at(plan.decode)
        reason, patience_ms = TransferReason.SPLIT, deadline_ms or 3.0 * plan.ttft_ms + 10_000.0
        if plan.fetches:
            # A loan ends with its transfer; the request's own deadline would be the lender's failure.
            reason, patience_ms, deadline_ms = TransferReason.FETCH, plan.fetch_wait_ms, 0
        self._service.say(
            subjects.worker_prefill(giver.worker),
            Prefill(
                stream=flight.stream,
                tenant=flight.tenant,
                model=flight.model,
                worker=giver.worker,
                incarnation=giver.incarnation,
                body=flight.body or b"",
                router=self._service.instance,
                prompt_tokens=flight.ask.prompt_tokens,
                split=split,
                deadline_ms=deadline_ms,
                predicted_prefill_ms=0.0 if plan.fetches else plan.prefill_ms,
                salt=flight.salt,
            ),
        )
        self._service.say(
            subjects.kv_plan(),
            TransferPlan(
                transfer=split.transfer,
                reason=reason,
                stream=flight.stream,
                model=flight.model,
                source=giver.worker,
                source_incarnation=giver.incarnation,
                target=target.id,
                target_incarnation=target.incarnation,
                tokens=split.tokens,
                kv_bytes=plan.kv_bytes,
                deadline_ms=patience_ms,
                predicted_ms=plan.kv_ms,
                router=self._service.instance,
            ),
        )

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
                self._routing.ended(flight.ledger_key(half.worker, half.incarnation), 0, now_ms)
                self._service.say(
                    subjects.routed(),
                    LedgerNote(
                        router=self._service.instance,
                        action=LedgerAction.ENDED,
                        stream=flight.stream,
                        tenant=flight.tenant,
                        worker=half.worker,
                        incarnation=half.incarnation,
                    ),
                )

    def _release(self, flight: Flight) -> None:
        if flight.key in self.holds:
            self._unhold(flight.key)

    # Saying

    def _note(self, flight: Flight, action: LedgerAction, plan: Plan, expires_ms: float = 0.0) -> None:
        for slot, key in flight.ledger_keys.items():
            worker = self._routing.fleet.at(slot)
            prefills, decodes = slot == plan.prefill, slot == plan.decode
            self._service.say(
                subjects.routed(),
                LedgerNote(
                    router=self._service.instance,
                    action=action,
                    stream=flight.stream,
                    tenant=flight.tenant,
                    worker=worker.id,
                    incarnation=key[4],
                    role=Role.BOTH if prefills and decodes else Role.DECODE if decodes else Role.PREFILL,
                    prefill_ms=plan.prefill_ms if prefills else 0.0,
                    prompt_tokens=plan.fetched_tokens if slot == plan.source else flight.ask.prompt_tokens,
                    total_ms=plan.total_ms,
                    expires_ms=expires_ms,
                    tpot_ms=flight.ask.tpot_ms,
                ),
            )

    def _tell_error(self, flight: Flight, error: Refused) -> None:
        self._frame(
            flight,
            frames.Error(
                id=flight.id,
                attempt=flight.attempt,
                try_=flight.frame_try,
                status=error.status,
                error=error.body,
                retry_after_s=error.retry_after_s,
            ),
        )

    def _frame(self, flight: Flight, frame: frames.AnyFrame) -> None:
        flight.frames_at_ms = self.now_ms()
        self._service.say(subjects.inbox(flight.inbox), frames.encode(frame))

    def _say_event(self, flight: Flight, phase: Phase, *, worker: str = "", reason: str = "", code: int = 0) -> None:
        plan = flight.dispatch.plan
        self._service.say(
            subjects.request_event(phase),
            RequestEvent(
                phase=phase,
                stream=flight.stream,
                tenant=flight.tenant,
                model=flight.model,
                worker=worker,
                router=self._service.instance,
                reason=reason or ("" if flight.decision is None else flight.decision.reason.value),
                code=code,
                prompt_tokens=flight.ask.prompt_tokens,
                cached_tokens=0 if plan is None else plan.cached_tokens,
                waited_ms=self.now_ms() - flight.arrived_ms,
                predicted_ttft_ms=0.0 if plan is None else plan.ttft_ms,
                predicted_total_ms=0.0 if plan is None else plan.total_ms,
            ),
        )
