"""Dispatch: bounded tries, nothing run twice unseen, exactly one outcome."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_core.dispatch import Cancel, Close, Dispatch, Fail, Half, Send, Stage
from quartet_core.openai import upstream
from quartet_core.plan import Plan
from quartet_core.transfer_words import KvLost


def plan(prefill=0, decode=0):
    return Plan(
        prefill=prefill, decode=decode, cached_tokens=0, prefill_ms=1.0, ttft_ms=1.0, tpot_ms=1.0, total_ms=1.0,
        ahead_ms=0.0, cost=0.0,
    )  # fmt: skip


def half(number):
    return Half(number, f"w{number}", 1)


def kinds(actions):
    return [type(action) for action in actions]


def whole(max_tries=3):
    dispatch = Dispatch(max_tries)
    dispatch.sent(plan(), half(0), None)
    return dispatch


def split(max_tries=3):
    dispatch = Dispatch(max_tries)
    dispatch.sent(plan(1, 0), half(0), half(1))
    return dispatch


def fetching(max_tries=3):
    dispatch = Dispatch(max_tries)
    dispatch.sent(plan(), half(0), None, half(7))
    return dispatch


def test_whatever_becomes_of_a_lender_changes_nothing():
    dispatch = fetching()
    assert dispatch.accepted("w0", 1) == []
    assert dispatch.ack_due(1) == []  # the lender never answered
    assert dispatch.transfer_failed(1, "link") == []
    assert dispatch.refused("w7", 1, "draining") == []
    assert dispatch.worker_lost("w7") == []
    assert dispatch.stage is Stage.ACCEPTED
    assert dispatch.first_token(1) == []
    assert kinds(dispatch.ended("w0", 1)) == [Close]


def test_a_lender_is_told_when_the_request_is_over_or_goes_elsewhere():
    for end in (lambda d: d.cancelled(), lambda d: d.ended("w0", 1), lambda d: d.refused("w0", 1, "full"),
                lambda d: d.worker_lost("w0"), lambda d: d.failed(upstream("x", "y"))):  # fmt: skip
        cancel = next(action for action in end(fetching()) if isinstance(action, Cancel))
        assert "w7" in [half.worker for half in cancel.halves]
    dispatch = fetching()
    dispatch.ended("w7", 1)
    assert kinds(dispatch.ended("w0", 1)) == [Close]


def test_a_lender_is_forgotten_with_its_try_and_excluded_only_if_it_refused():
    unwilling = fetching()
    unwilling.refused("w7", 1, "draining")
    assert unwilling.refused("w0", 1, "full")[-1].excluded == ("w7", "w0")
    dispatch = fetching()
    assert dispatch.refused("w0", 1, "full")[-1].excluded == ("w0",)
    dispatch.sent(plan(), half(1), None)
    assert dispatch.lender is None
    assert kinds(dispatch.transfer_failed(2, "link")) == [Cancel, Send]


def test_a_request_that_runs_through_closes_and_tells_nothing():
    dispatch = whole()
    assert dispatch.accepted("w0", 1) == []
    assert dispatch.first_token(1) == []
    assert kinds(dispatch.ended("w0", 1)) == [Close]
    assert dispatch.stage is Stage.OVER


def test_a_missed_ack_cancels_that_try_and_tries_another_worker():
    dispatch = whole()
    actions = dispatch.ack_due(1)
    assert kinds(actions) == [Cancel, Send]
    assert actions[0].try_ == 1
    assert [half.worker for half in actions[0].halves] == ["w0"]
    assert actions[1].excluded == ("w0",)


def test_an_ack_in_time_disarms_the_timeout():
    dispatch = whole()
    dispatch.accepted("w0", 1)
    assert dispatch.ack_due(1) == []


def test_a_split_is_acked_by_both_halves():
    dispatch = split()
    dispatch.accepted("w0", 1)
    assert kinds(dispatch.ack_due(1)) == [Cancel, Send]


def test_a_refusal_of_either_half_cancels_the_other_and_retries():
    for refusing, left in (("w0", "w1"), ("w1", "w0")):
        dispatch = split()
        actions = dispatch.refused(refusing, 1, "draining")
        assert kinds(actions) == [Cancel, Send]
        assert [half.worker for half in actions[0].halves] == [left]


def test_tries_are_bounded_and_the_last_failure_is_told():
    dispatch = Dispatch(2)
    dispatch.sent(plan(), half(0), None)
    assert kinds(dispatch.refused("w0", 1, "full")) == [Send]
    dispatch.sent(plan(), half(2), None)
    actions = dispatch.refused("w2", 2, "full")
    assert kinds(actions) == [Fail, Close]
    assert actions[0].error.status == 502
    assert "full" in actions[0].error.body.message


def test_a_worker_lost_before_the_first_token_means_another_try_and_after_it_an_error():
    early = whole()
    early.accepted("w0", 1)
    assert kinds(early.worker_lost("w0")) == [Send]
    late = whole()
    late.accepted("w0", 1)
    late.first_token(1)
    assert kinds(late.worker_lost("w0")) == [Fail, Close]


def test_the_prefill_worker_of_a_streaming_split_may_go():
    dispatch = split()
    dispatch.first_token(1)
    assert dispatch.worker_lost("w1") == []
    assert dispatch.stage is Stage.STREAMING


def test_a_failed_transfer_cancels_both_halves_and_retries_and_is_neithers_fault():
    dispatch = split()
    actions = dispatch.transfer_failed(1, "link down")
    assert kinds(actions) == [Cancel, Send]
    assert len(actions[0].halves) == 2
    assert actions[1].excluded == ()
    assert set(dispatch.tried) == {"w0", "w1"}


@pytest.mark.parametrize("reason", KvLost)
def test_a_half_that_gives_the_request_back_for_want_of_kv_is_not_excluded(reason):
    dispatch = split()
    dispatch.accepted("w0", 1)
    dispatch.accepted("w1", 1)
    dispatch.ended("w1", 1, reason.value)
    actions = dispatch.refused("w0", 1, reason.value)
    assert kinds(actions) == [Send]
    assert actions[0].excluded == ()
    assert dispatch.transfers_failed == 1


def test_transfers_that_fail_again_and_again_use_up_the_tries():
    dispatch = split(max_tries=3)
    for try_ in (1, 2):
        assert kinds(dispatch.transfer_failed(try_, "link")) == [Cancel, Send]
        dispatch.sent(plan(1, 0), half(0), half(1))
    actions = dispatch.transfer_failed(3, "link")
    assert kinds(actions) == [Cancel, Fail, Close]
    assert actions[1].error.body.code == "transfer_failed"


def test_only_who_failed_is_excluded():
    refused = split()
    assert refused.refused("w1", 1, "full")[-1].excluded == ("w1",)
    silent = split()
    silent.accepted("w0", 1)
    assert silent.ack_due(1)[-1].excluded == ("w1",)
    lost = split()
    assert lost.worker_lost("w1")[-1].excluded == ("w1",)
    broken = split()
    broken.ended("w1", 1, "engine_error")
    assert broken.transfer_failed(1, "ended: source")[-1].excluded == ("w1",)


def test_when_tokens_flow_a_transfer_that_seems_to_have_failed_is_not_the_end():
    dispatch = split()
    dispatch.first_token(1)
    assert dispatch.transfer_failed(1, "unanswered: commit") == []
    assert dispatch.stage is Stage.STREAMING


def test_events_of_an_older_try_change_nothing():
    dispatch = whole()
    dispatch.ack_due(1)
    dispatch.sent(plan(2, 2), half(2), None)
    for event in (
        dispatch.accepted("w0", 1), dispatch.refused("w0", 1, "x"), dispatch.ended("w0", 1),
        dispatch.first_token(1), dispatch.transfer_failed(1, "x"), dispatch.worker_lost("w0"),
    ):  # fmt: skip
        assert event == []
    assert dispatch.stage is Stage.SENT


def test_a_client_that_leaves_cancels_every_half_once():
    dispatch = split()
    actions = dispatch.cancelled()
    assert kinds(actions) == [Cancel, Close]
    assert len(actions[0].halves) == 2
    assert dispatch.cancelled() == []


def test_a_held_request_that_is_cancelled_cancels_nobody():
    dispatch = Dispatch(3)
    dispatch.held()
    assert kinds(dispatch.cancelled()) == [Close]


events = st.lists(
    st.tuples(
        st.sampled_from(["accepted", "refused", "ack", "first", "ended", "lost", "kv", "cancel", "fail"]),
        st.integers(0, 1), st.integers(0, 3),
    ),
    max_size=40,
)  # fmt: skip


@given(st.sampled_from(["whole", "split", "fetch"]), events)
def test_every_order_of_events_gives_at_most_one_outcome_and_bounded_tries(shape, history):
    dispatch, outcomes, sends = Dispatch(3), 0, 0
    number = 0

    def send():
        nonlocal number
        number += 2
        other = half(number + 1)
        dispatch.sent(
            plan(number + (shape == "split"), number), half(number), other if shape == "split" else None,
            other if shape == "fetch" else None,
        )  # fmt: skip

    send()
    for what, which, try_ in history:
        worker = f"w{number + which}"
        actions = {
            "accepted": lambda w=worker, t=try_: dispatch.accepted(w, t),
            "refused": lambda w=worker, t=try_: dispatch.refused(w, t, "r"),
            "ack": lambda t=try_: dispatch.ack_due(t),
            "first": lambda t=try_: dispatch.first_token(t),
            "ended": lambda w=worker, t=try_: dispatch.ended(w, t),
            "lost": lambda w=worker: dispatch.worker_lost(w),
            "kv": lambda t=try_: dispatch.transfer_failed(t, "d"),
            "cancel": lambda: dispatch.cancelled(),
            "fail": lambda: dispatch.failed(upstream("x", "y")),
        }[what]()
        for action in actions:
            if isinstance(action, Close):
                outcomes += 1
            elif isinstance(action, Send):
                sends += 1
                assert set(action.excluded) <= set(dispatch.tried)
                if what == "refused":
                    assert worker in action.excluded
                send()
    assert outcomes <= 1
    assert (outcomes == 1) is (dispatch.stage is Stage.OVER)
    assert dispatch.try_ <= 3
    assert sends <= 2
