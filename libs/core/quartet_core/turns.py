"""Turns: which request is decided when, while others wait. Router and simulator have one at their desks.

- Who comes new does not overtake those that wait for the same worker: it takes its place among them. Whoever waits for
  another worker does not stand in its way.
- When a worker frees, the first held requests of its model are decided anew, in their order. One that would take a
  worker for which a request before it waits goes on waiting, too; when no worker takes any work, the review ends.
"""

from typing import Generic, Protocol, TypeVar

from quartet_core.hold import HoldKey, HoldQueue
from quartet_core.plan import Decision, Plan, Reason
from quartet_core.routing import Routing

REVIEWED = 16
"""Held requests of a model that one review decides anew, first ones first."""


class Waiting(Protocol):
    """A request, as far as turns concern it."""

    @property
    def model(self) -> str:
        """The model that it asks for."""
        ...


R = TypeVar("R", bound=Waiting)


class Desk(Protocol[R]):
    """Where decisions are made and carried out."""

    def decide(self, request: R) -> Decision:
        """Called whenever it is the request's turn. Nothing happens by it yet."""
        ...

    def hold(self, request: R, decision: Decision) -> bool:
        """Called to keep the request, and reserve its plan's worker. False: it may not wait, or finds no room."""
        ...

    def go(self, request: R, decision: Decision) -> None:
        """Called to carry the decision out: send, or refuse."""
        ...

    def unhold(self, key: HoldKey) -> R | None:
        """Called to end a hold and its reservation; None when nobody waits under that key."""
        ...


class Turns(Generic[R]):
    """Takes requests to ``desk`` when it is their turn. ``routing`` says what is claimed, and what freed."""

    def __init__(self, desk: Desk[R], routing: Routing, holds: HoldQueue) -> None:
        self._desk = desk
        self._routing = routing
        self._holds = holds

    def newcomer(self, request: R) -> None:
        """Decide a request for the first time: it is sent, held, or refused."""
        decision = self._desk.decide(request)
        holds = _holds(decision)
        overtakes = not holds and len(self._holds) > 0 and self._claimed(decision.plan)
        if not (holds or overtakes) or not self._desk.hold(request, decision):
            self._desk.go(request, decision)
        elif overtakes:
            self.review(request.model)

    def again(self, request: R) -> None:
        """Decide a request whose last try failed. It has waited already, and overtakes those that were never sent."""
        decision = self._desk.decide(request)
        if not _holds(decision) or not self._desk.hold(request, decision):
            self._desk.go(request, decision)

    def review(self, model: str) -> None:
        """Decide the first held requests of ``model`` anew. What has freed then is due for the next review."""
        waited_for: set[int] = set()
        left = False
        for held in self._holds.first(model, REVIEWED):
            request = self._desk.unhold(held.key)
            if request is None:
                continue
            decision = self._desk.decide(request)
            plan = decision.plan
            behind = plan is not None and plan.prefill in waited_for
            if (behind or _holds(decision)) and self._desk.hold(request, decision):
                if plan is None:
                    return
                waited_for.add(plan.prefill)
            else:
                left = True
                self._desk.go(request, decision)
        if left and not waited_for and self._holds.first(model, 1):
            self._routing.freed[model] = None  # all that were looked at left: there may be room for more

    def _claimed(self, plan: Plan | None) -> bool:
        """Whether held requests, here or at another replica, wait for the worker of ``plan``."""
        return plan is not None and self._routing.board.loads[plan.prefill].reserved_ms > 0.0


def _holds(decision: Decision) -> bool:
    """Whether the request had better wait."""
    return decision.hold or decision.reason is Reason.ALL_BUSY
