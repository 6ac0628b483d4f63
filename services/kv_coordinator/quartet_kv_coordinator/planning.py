"""Whether a plan may start: everything that can be known to be wrong before a block is leased."""

from dataclasses import dataclass

from quartet_bus.messages import TransferPlan
from quartet_core.pairing import lacking, why_not_pair
from quartet_core.transfer import Failure
from quartet_kv_coordinator.lanes import Lanes, Route
from quartet_kv_coordinator.roster import Replica, Roster


class NotPlanned(Exception):
    """A plan that must not start: ``failure`` is why, ``detail`` for people."""

    def __init__(self, failure: Failure, detail: str) -> None:
        super().__init__(f"{failure}: {detail}")
        self.failure = failure
        self.detail = detail


@dataclass(slots=True, frozen=True)
class Checked:
    """A plan that may start, and its path."""

    route: Route
    predicted_ms: float


def check(plan: TransferPlan, roster: Roster, lanes: Lanes, *, deadline_ns: int, now_ns: int) -> Checked:
    """The path of ``plan`` and its predicted time once its KV is computed. Raises `NotPlanned`.

    Only the link is predicted here: what is left of a split's prefill is the router's to foresee in its deadline.
    """
    if plan.source == plan.target or plan.kv_bytes <= 0 or plan.tokens <= 0:
        raise NotPlanned(Failure.CAPABILITY, "nothing to move")
    source = _alive(roster, plan.source, plan.source_incarnation)
    target = _alive(roster, plan.target, plan.target_incarnation)
    missing = lacking(source.info, target.info)
    if missing is not None:
        raise NotPlanned(Failure.CAPABILITY, missing)
    differs = why_not_pair(source.info, target.info)
    if differs is not None:
        raise NotPlanned(Failure.LAYOUT, differs)
    if source.place is None or target.place is None:
        unknown = source if source.place is None else target
        raise NotPlanned(Failure.CAPABILITY, f"hardware class {unknown.info.hardware} is in no catalogue here")
    route = lanes.route(source.place, target.place)
    predicted_ms = route.predict_ms(plan.kv_bytes, deadline_ns)
    if now_ns + predicted_ms * 1e6 > deadline_ns:
        remaining_ms = (deadline_ns - now_ns) / 1e6
        raise NotPlanned(
            Failure.WOULD_MISS_DEADLINE,
            f"{predicted_ms:.1f} ms over {route.lane.link.kind} where {remaining_ms:.1f} ms remain",
        )
    return Checked(route, predicted_ms)


def _alive(roster: Roster, worker: str, incarnation: int) -> Replica:
    replica = roster.find(worker)
    if replica is None:
        raise NotPlanned(Failure.UNKNOWN_WORKER, worker)
    if replica.info.incarnation != incarnation:
        raise NotPlanned(Failure.FENCED, f"{worker} runs as {replica.info.incarnation}, not {incarnation}")
    if replica.dead:
        raise NotPlanned(Failure.DEAD, worker)
    return replica
