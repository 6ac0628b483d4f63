"""Turns: newcomers and those who wait, with a desk that records what it was told."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_core.hold import HoldKey, HoldQueue
from quartet_core.plan import Decision, Plan, Reason
from quartet_core.turns import REVIEWED, Turns

MODEL = "llama-3.1-8b"


class Request:
    """A request that would go to the workers in ``wants``, one more each time that it is decided."""

    def __init__(self, number: int, *wants: Decision) -> None:
        self.number = number
        self.model = MODEL
        self.wants = list(wants)

    @property
    def key(self) -> HoldKey:
        return ("t", str(self.number), 1)


def plan_on(worker: int) -> Plan:
    """A plan that does everything on ``worker``."""
    return Plan(
        worker, worker, cached_tokens=0, prefill_ms=1.0, ttft_ms=1.0, tpot_ms=1.0, total_ms=1.0, ahead_ms=0.0, cost=1.0
    )


def to(worker: int) -> Decision:
    """Send it to ``worker`` now."""
    return Decision(Reason.BEST, plan=plan_on(worker))


def wait_for(worker: int) -> Decision:
    """Wait for ``worker``."""
    return Decision(Reason.HELD, plan=plan_on(worker), hold=True)


BUSY = Decision(reason=Reason.ALL_BUSY)
NOBODY = Decision(reason=Reason.NO_WORKER)


class RecordingDesk:
    """Holds as long as ``room`` says, and writes down what went where."""

    def __init__(self, workers: int = 4, room: int = 1000) -> None:
        self.holds = HoldQueue(max_requests=room, max_bytes=1 << 20)
        self.loads = [SimpleNamespace(reserved_ms=0.0) for _ in range(workers)]
        self.routing = SimpleNamespace(board=SimpleNamespace(loads=self.loads), freed={})
        self.turns: Turns[Request] = Turns(self, self.routing, self.holds)  # type: ignore[arg-type]
        self.waiting: dict[HoldKey, Request] = {}
        self.went: list[tuple[int, Decision]] = []

    def decide(self, request: Request) -> Decision:
        return request.wants.pop(0) if len(request.wants) > 1 else request.wants[0]

    def hold(self, request: Request, decision: Decision) -> bool:
        number = request.number
        if not self.holds.put(
            request.key, MODEL, priority=0, deadline_ms=number, arrival=number, now_ms=0.0, until_ms=1e9, body_bytes=1
        ):
            return False
        self.waiting[request.key] = request
        self._reserve(decision, 1.0)
        return True

    def go(self, request: Request, decision: Decision) -> None:
        self.went.append((request.number, decision))

    def unhold(self, key: HoldKey) -> Request | None:
        self.holds.take(key)
        return self.waiting.pop(key, None)

    def _reserve(self, decision: Decision, ms: float) -> None:
        if decision.plan is not None:
            self.loads[decision.plan.prefill].reserved_ms += ms


def test_a_newcomer_goes_where_nobody_waits() -> None:
    desk = RecordingDesk()
    desk.turns.newcomer(Request(1, wait_for(0)))
    desk.turns.newcomer(Request(2, to(1)))
    assert [number for number, _ in desk.went] == [2]
    assert list(desk.waiting) == [("t", "1", 1)]


def test_a_newcomer_does_not_overtake_those_that_wait_for_its_worker() -> None:
    desk = RecordingDesk()
    desk.turns.newcomer(Request(1, wait_for(0), to(0)))
    desk.turns.newcomer(Request(2, to(0)))
    # The look at those who wait finds that the first may go now, and the newcomer, behind it, as well.
    assert [number for number, _ in desk.went] == [1, 2]


def test_a_retry_does_not_queue_again() -> None:
    desk = RecordingDesk()
    desk.turns.newcomer(Request(1, wait_for(0)))
    desk.turns.again(Request(2, to(0)))
    assert [number for number, _ in desk.went] == [2]


@pytest.mark.parametrize("decision", [wait_for(0), BUSY])
def test_what_cannot_be_held_is_carried_out_as_it_is(decision: Decision) -> None:
    desk = RecordingDesk(room=0)
    desk.turns.newcomer(Request(1, decision))
    desk.turns.again(Request(2, decision))
    assert desk.went == [(1, decision), (2, decision)]


def test_a_review_keeps_the_order_for_one_worker_and_lets_others_pass() -> None:
    desk = RecordingDesk()
    for request in (
        Request(1, wait_for(0), wait_for(0)),
        Request(2, wait_for(0), to(0)),
        Request(3, wait_for(0), to(1)),
    ):
        assert desk.hold(request, desk.decide(request))
    desk.turns.review(MODEL)
    assert [number for number, _ in desk.went] == [3]
    assert {key[1] for key in desk.waiting} == {"1", "2"}


def test_a_review_ends_when_no_worker_takes_work() -> None:
    desk = RecordingDesk()
    later = Request(2, wait_for(0), to(0))
    for request in (Request(1, BUSY), later):
        assert desk.hold(request, wait_for(0))
    desk.turns.review(MODEL)
    assert not desk.went
    assert len(later.wants) == 2  # nobody asked


def test_one_that_nobody_can_serve_is_refused_at_its_review() -> None:
    desk = RecordingDesk()
    assert desk.hold(Request(1, NOBODY), wait_for(0))
    desk.turns.review(MODEL)
    assert desk.went == [(1, NOBODY)]


def test_a_review_that_lets_all_go_asks_for_another() -> None:
    desk = RecordingDesk()
    for number in range(REVIEWED + 1):
        assert desk.hold(Request(number, to(0)), wait_for(0))
    desk.turns.review(MODEL)
    assert len(desk.went) == REVIEWED
    assert list(desk.routing.freed) == [MODEL]
    desk.routing.freed.clear()
    desk.turns.review(MODEL)
    assert not desk.routing.freed
    assert not desk.waiting


_DECISIONS = st.one_of(st.integers(0, 3).map(to), st.integers(0, 3).map(wait_for), st.just(BUSY), st.just(NOBODY))


@given(
    requests=st.lists(st.lists(_DECISIONS, min_size=1, max_size=4), max_size=30),
    reviews=st.lists(st.booleans(), max_size=30),
    room=st.integers(0, 30),
)
def test_nobody_is_lost_or_goes_twice(requests: list[list[Decision]], reviews: list[bool], room: int) -> None:
    desk = RecordingDesk(room=room)
    for number, wants in enumerate(requests):
        desk.turns.newcomer(Request(number, *wants))
        if number < len(reviews) and reviews[number]:
            desk.turns.review(MODEL)
    went = [number for number, _ in desk.went]
    assert sorted(went + [int(key[1]) for key in desk.waiting]) == list(range(len(requests)))
    assert len(desk.holds) == len(desk.waiting)
