"""The router's desk, simulated: core decides, holds and keeps the ledger; here is when it is asked, and what follows.

Who is decided when is up to ``quartet_core.turns``, as at the router's. A retry excludes workers that were tried, and
splits only where no worker can do all of it.
"""

from collections.abc import Callable

from quartet_core.hold import HoldKey, HoldQueue
from quartet_core.lengths import OutputLengths
from quartet_core.plan import Ask, Decision, Plan
from quartet_core.routing import Routing
from quartet_core.turns import Turns
from quartet_sim.simulation.flight import Flight
from quartet_sim.simulation.sketches import sketch
from quartet_sim.simulation.spec import Request, Settings
from quartet_sim.simulation.timeline import Timeline

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
        self._turns = Turns(self, routing, self.holds)
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
        self._turns.newcomer(flight)
        self.look()

    def again(self, flight: Flight) -> None:
        """A try failed before its first token: try elsewhere."""
        if flight.try_ >= self._settings.max_tries:
            self._refuse(flight, "failed")
            return
        self._turns.again(flight)

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
                self._turns.review(model)
        self._reviewing = False

    def drop(self, flight: Flight) -> None:
        """The flight is over: end its hold, if it is held."""
        if flight.held:
            self.unhold(flight.key)

    def decide(self, flight: Flight) -> Decision:
        """As ``turns.Desk.decide``."""
        self.decisions += 1
        ask, now_ms, routing = flight.ask, self._timeline.now_ms, self.routing
        ask.waited_ms = now_ms - flight.arrived_ms
        ask.whole_first = flight.try_ > 0
        ask.plans_split = self._settings.split
        ask.plans_fetch = self._settings.fetch and not ask.whole_first
        ask.at_ms = now_ms
        ask.excluded = routing.fleet.plane_of(flight.tried)
        return routing.decide(ask)

    def go(self, flight: Flight, decision: Decision) -> None:
        """As ``turns.Desk.go``."""
        if decision.plan is None:
            self._refuse(flight, decision.reason.value)
            return
        flight.try_ += 1
        self._send(flight, decision.plan)

    def hold(self, flight: Flight, decision: Decision) -> bool:
        """As ``turns.Desk.hold``."""
        now_ms = self._timeline.now_ms
        until_ms = flight.arrived_ms + self._settings.hold_max_ms
        if not self._settings.hold or until_ms <= now_ms:
            return False
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
        plan = decision.plan
        if plan is not None and self._settings.ledger:
            worker = self.routing.fleet.at(plan.prefill)
            flight.keys = {plan.prefill: flight.ledger_key(flight.try_ + 1, worker.id, worker.incarnation)}
            self.routing.sent(flight.keys, plan, flight.ask, now_ms, reserved_for_ms=until_ms - now_ms)
        return True

    def unhold(self, key: HoldKey) -> Flight | None:
        """As ``turns.Desk.unhold``."""
        flight = self._flights.pop(key, None)
        if flight is None:
            return None
        self.holds.take(key)
        flight.held = False
        now_ms = self._timeline.now_ms
        for ledger_key in flight.keys.values():
            self.routing.ended(ledger_key, 0, now_ms)
        flight.keys = {}
        return flight

    def _overdue(self, flight: Flight) -> None:
        if flight.held:
            self.unhold(flight.key)
            self.go(flight, self.decide(flight))
            self.look()
