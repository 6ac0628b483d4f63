"""Whether a plan may start: everything that can be known to be wrong before a block is leased."""

from collections.abc import Mapping
from dataclasses import dataclass

from quartet_bus.config.schema import ModelSection
from quartet_bus.messages import StreamId, TransferPlan, TransferReason
from quartet_core.catalogue import Catalogue, UnknownProfile
from quartet_core.links import MoveChoice, choose
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


def check(
    plan: TransferPlan, roster: Roster, lanes: Lanes, *, deadline_ns: int, now_ns: int, keep: bool = True
) -> Checked:
    """The path of ``plan`` and its predicted time once its KV is computed. Raises `NotPlanned`.

    ``keep`` False only asks: no lane is made for it.

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
    route = (lanes.route if keep else lanes.look)(source.place, target.place)
    predicted_ms = route.predict_ms(plan.kv_bytes, deadline_ns)
    if now_ns + predicted_ms * 1e6 > deadline_ns:
        remaining_ms = (deadline_ns - now_ns) / 1e6
        raise NotPlanned(
            Failure.WOULD_MISS_DEADLINE,
            f"{predicted_ms:.1f} ms over {route.lane.link.kind} where {remaining_ms:.1f} ms remain",
        )
    return Checked(route, predicted_ms)


@dataclass(slots=True, frozen=True)
class Weighed:
    """Both prices of a prefix at a worker, and the path that moving it would take."""

    link: str
    kv_bytes: int
    choice: MoveChoice


def weigh(
    roster: Roster,
    lanes: Lanes,
    catalogue: Catalogue,
    models: Mapping[str, ModelSection],
    source: str,
    target: str,
    tokens: int,
    held: int,
    deadline_ms: float,
    now_ns: int,
) -> Weighed:
    """As `check`, for a transfer that nobody planned, and what computing it on the target would take instead."""
    ends = [roster.find(worker) for worker in (source, target)]
    for worker, replica in zip((source, target), ends, strict=True):
        if replica is None:
            raise NotPlanned(Failure.UNKNOWN_WORKER, worker)
    here, there = ends
    assert here is not None
    assert there is not None
    new = max(tokens - held, 0)
    kv_bytes = new * here.info.layout.bytes_per_token
    plan = TransferPlan(
        "", TransferReason.FETCH, StreamId(""), here.info.model, source, here.info.incarnation, target,
        there.info.incarnation, new, kv_bytes, deadline_ms,
    )  # fmt: skip
    deadline_ns = now_ns + int((deadline_ms or 1e9) * 1e6)
    checked = check(plan, roster, lanes, deadline_ns=deadline_ns, now_ns=now_ns, keep=False)
    served = models.get(there.info.model)
    try:
        spec = served.spec if served is not None else there.info.model
        profile = catalogue.profile(there.info.hardware, spec, there.info.precision, there.info.tp)
    except UnknownProfile as unknown:
        raise NotPlanned(Failure.CAPABILITY, f"no profile {unknown.what}") from unknown
    choice = choose(checked.predicted_ms, profile, held, new)
    return Weighed(checked.route.lane.link.kind, kv_bytes, choice)


def _alive(roster: Roster, worker: str, incarnation: int) -> Replica:
    replica = roster.find(worker)
    if replica is None:
        raise NotPlanned(Failure.UNKNOWN_WORKER, worker)
    if replica.info.incarnation != incarnation:
        raise NotPlanned(Failure.FENCED, f"{worker} runs as {replica.info.incarnation}, not {incarnation}")
    if replica.dead:
        raise NotPlanned(Failure.DEAD, worker)
    return replica
