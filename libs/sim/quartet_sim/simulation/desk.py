"""The router's desk, simulated: core decides, holds and keeps the ledger; here is when it is asked, and what follows.

The rules are those of ``quartet_router.desk``: a hold leaves earliest deadline first, when a worker with less than its
hold-ahead work is heard of, or when its time is over; who comes later does not overtake those that wait for the same
worker; retries exclude workers that were tried, and never split.
"""

from collections.abc import Callable

from quartet_core.hold import HoldQueue
from quartet_core.lengths import OutputLengths
from quartet_core.plan import Ask, Decision, Plan, Reason
from quartet_core.routing import Routing
from quartet_sim.simulation.flight import Flight, HoldKey
from quartet_sim.simulation.sketches import sketch
from quartet_sim.simulation.spec import Request, Settings
from quartet_sim.simulation.timeline import Timeline

_REVIEWED = 16  # as the router's
_MOST = 0.9
_HOLD_MAX_REQUESTS = 4096
_BODY_BYTES_PER_TOKEN = 4
_HOLD_MAX_BYTES = 256 << 20


class Desk:
    """Decides for flights. ``send`` carries a plan out, ``refuse`` ends a flight without one."""

    def __init__(
        self, routing: Routing, settings: Settings, timeline: Timeline, send: Callable[[Flight, Plan], None],
        refuse: Callable[[Flight, str], None],
    ) -> None:  # fmt: skip
        self.routing = routing
        self.lengths = OutputLengths()
        self.holds = HoldQueue(max_requests=_HOLD_MAX_REQUESTS, max_bytes=_HOLD_MAX_BYTES)
        self.decisions = 0
        self.held = 0
        self._settings = settings
        self._timeline = timeline
        self._send = send
        self._refuse = refuse
        self._flights: dict[HoldKey, Flight] = {}
        self._reviewing = False

    def receive(self, request: Request) -> Flight:
        """A request arrives: what the router makes of it. ``take`` then decides."""
        limit = request.max_tokens or None
        lengths = self.lengths
        ask = Ask(
            model=request.model,
            prompt_tokens=request.prompt_tokens,
            output_tokens=lengths.expect(request.tenant, request.model, limit),
            ttft_ms=request.slo.ttft_ms,
            tpot_ms=request.slo.tpot_ms,
            sketch=sketch(request.units, request.unit_tokens, request.prompt_tokens),
            max_tokens=request.max_tokens or 1,
            most_tokens=lengths.quantile(request.tenant, request.model, _MOST, limit),
        )
        return Flight(request, ask, self._timeline.now_ms)

    def take(self, flight: Flight) -> None:
        """Send it, hold it, or refuse it."""
        self._decide(flight, behind_others=len(self.holds) > 0)
        self.look()

    def again(self, flight: Flight) -> None:
        """A try failed before its first token: try elsewhere."""
        if flight.try_ >= self._settings.max_tries:
            self._refuse(flight, "failed")
            return
        self._decide(flight)

    def look(self) -> None:
        """Look at held requests again if a worker of theirs freed. To be called after every message to the router."""
        freed = self.routing.freed
        if not freed or self._reviewing:
            return
        if not len(self.holds):
            freed.clear()
            return
        self._reviewing = True
        while freed and len(self.holds):
            models = list(freed)
            freed.clear()
            for model in models:
                self._review(model)
        self._reviewing = False

    def drop(self, flight: Flight) -> None:
        """The flight is over: end its hold, if it is held."""
        if flight.held:
            self._unhold(flight)

    def _decide(self, flight: Flight, *, behind_others: bool = False) -> None:
        decision = self._decision(flight)
        hold = decision.hold or decision.reason is Reason.ALL_BUSY
        overtakes = behind_others and not hold and decision.plan is not None and self._claimed(decision.plan.prefill)
        if (hold or overtakes) and self._may_hold(flight) and self._hold(flight, decision.plan):
            if overtakes:
                self._review(flight.request.model)
            return
        self._follow(flight, decision)

    def _decision(self, flight: Flight) -> Decision:
        self.decisions += 1
        ask, now_ms, routing = flight.ask, self._timeline.now_ms, self.routing
        ask.waited_ms = now_ms - flight.arrived_ms
        moves = not flight.try_
        ask.plans_split = self._settings.split and moves
        ask.plans_fetch = self._settings.fetch and moves
        ask.at_ms = now_ms
        ask.excluded = 0
        for worker in flight.tried:
            slot = routing.fleet.slot_of(worker)
            if slot is not None:
                ask.excluded |= 1 << slot
        decision = routing.decide(ask)
        if decision.plan is None and flight.try_ and self._settings.split:
            ask.plans_split = True
            decision = routing.decide(ask)
        return decision

    def _follow(self, flight: Flight, decision: Decision) -> None:
        if decision.plan is None:
            self._refuse(flight, decision.reason.value)
            return
        flight.try_ += 1
        self._send(flight, decision.plan)

    def _claimed(self, slot: int) -> bool:
        return self.routing.board.loads[slot].reserved_ms > 0.0

    def _may_hold(self, flight: Flight) -> bool:
        settings = self._settings
        return settings.hold and self._timeline.now_ms < flight.arrived_ms + settings.hold_max_ms

    def _hold(self, flight: Flight, plan: Plan | None) -> bool:
        now_ms = self._timeline.now_ms
        until_ms = flight.arrived_ms + self._settings.hold_max_ms
        request = flight.request
        first = flight.held_ms < 0.0
        if first:
            flight.lag_ms = self.holds.backlog_ms(request.tenant)
        if not self.holds.put(
            flight.key,
            request.model,
            priority=0,
            deadline_ms=flight.arrived_ms + flight.ask.ttft_ms + flight.lag_ms,
            arrival=request.number,
            now_ms=now_ms,
            until_ms=until_ms,
            body_bytes=_BODY_BYTES_PER_TOKEN * request.prompt_tokens,
            work_ms=self.routing.least_prefill_ms(flight.ask),
        ):
            return False
        flight.held = True
        self._flights[flight.key] = flight
        if first:
            flight.held_ms = now_ms
            self.held += 1
            self._timeline.at(until_ms, self._overdue, flight)
        if plan is not None and self._settings.ledger:
            worker = self.routing.fleet.at(plan.prefill)
            flight.keys = {plan.prefill: flight.ledger_key(flight.try_ + 1, worker.id, worker.incarnation)}
            self.routing.sent(flight.keys, plan, flight.ask, now_ms, reserved_for_ms=until_ms - now_ms)
        return True

    def _overdue(self, flight: Flight) -> None:
        if flight.held:
            self._unhold(flight)
            self._follow(flight, self._decision(flight))
            self.look()

    def _unhold(self, flight: Flight) -> None:
        self.holds.take(flight.key)
        del self._flights[flight.key]
        flight.held = False
        now_ms = self._timeline.now_ms
        for key in flight.keys.values():
            self.routing.ended(key, 0, now_ms)
        flight.keys = {}

    def _review(self, model: str) -> None:
        """Decide the first held requests of ``model`` anew, in their order; see ``quartet_router.desk``."""
        waited_for: set[int] = set()
        sent = False
        for held in self.holds.first(model, _REVIEWED):
            flight = self._flights.get(held.key)
            if flight is None:
                continue
            self._unhold(flight)
            decision = self._decision(flight)
            plan = decision.plan
            claimed = plan is not None and plan.prefill in waited_for
            if (
                (decision.hold or claimed or decision.reason is Reason.ALL_BUSY)
                and self._may_hold(flight)
                and self._hold(flight, plan)
            ):
                if plan is None:
                    return
                waited_for.add(plan.prefill)
            else:
                sent = True
                self._follow(flight, decision)
        if sent and not waited_for and self.holds.first(model, 1):
            self.routing.freed[model] = None  # all left, and workers may have room for more
