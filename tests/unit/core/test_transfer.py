"""The transfer machine, one sentence at a time. Whole worlds are explored in ``test_transfer_world.py``."""

import pytest

from quartet_core import transfer as tr
from quartet_core.transfer import Failure, Hold, Side, State, Step, Transfer

MS = 1_000_000
LEASE = 300 * MS
DEADLINE = 5_000 * MS
FORWARD = (tr.Start(), tr.Reserved(7, "there", b"key"), tr.Ready(), tr.Go(), tr.MoveTaken(), tr.Moving(7), tr.Moved(7))


def machine(*events, ready=False):
    made = Transfer(deadline_ns=DEADLINE, lease_ns=LEASE, ready=ready)
    for event in events:
        made.on(event, 0)
    return made


def test_a_transfer_that_meets_no_trouble_reserves_moves_commits_and_frees_its_source():
    transfer = machine()
    said = [action for event in (*FORWARD, tr.Committed(7)) for action in transfer.on(event, 0)]
    assert said == [
        tr.Reserve(),
        tr.Move(7, "there", b"key"),
        tr.Commit(7),
        tr.Announce(),
        tr.Release(Side.SOURCE, 7),
    ]
    assert transfer.state is State.COMMITTED
    assert not transfer.ended
    transfer.on(tr.Freed(Side.SOURCE), 0)
    assert transfer.state is State.RELEASED
    assert transfer.ended


@pytest.mark.parametrize("reached", range(1, len(FORWARD) + 1))
@pytest.mark.parametrize(
    ("trouble", "failure"),
    [
        (tr.Cancelled(), Failure.CANCELLED),
        (tr.Died(Side.TARGET), Failure.DEAD),
    ],
)
def test_trouble_at_any_step_frees_both_sides_once_and_is_announced_once(reached, trouble, failure):
    transfer = machine(*FORWARD[:reached])
    said = transfer.on(trouble, 0)
    gone = {Side.TARGET} if isinstance(trouble, tr.Died) else set()
    assert {action.side for action in said if isinstance(action, tr.Release)} == set(Side) - gone
    assert [action.failure for action in said if isinstance(action, tr.Announce)] == [failure]
    for late in (*FORWARD, tr.Committed(7), trouble, tr.Cancelled(), tr.Tick()):
        assert transfer.on(late, 10 * DEADLINE) == []
    assert transfer.state is State.ABORTED
    for side in Side:
        transfer.on(tr.Freed(side), 0)
    assert transfer.ended


@pytest.mark.parametrize("reached", range(2, len(FORWARD) + 1))
@pytest.mark.parametrize(
    "stranger",
    [tr.Reserved(6), tr.Moving(6), tr.Moved(6), tr.Committed(6), tr.MoveFailed(6), tr.RenewRefused(Side.TARGET, 6)],
)
def test_what_belongs_to_another_epoch_changes_nothing(reached, stranger):
    transfer = machine(*FORWARD[:reached])
    before = transfer.state, transfer.epoch, transfer.moving
    assert transfer.on(stranger, 0) == []
    assert (transfer.state, transfer.epoch, transfer.moving) == before


def test_a_refused_reservation_leaves_nothing_to_free_on_the_target():
    transfer = machine(tr.Start())
    said = transfer.on(tr.Refused(Step.RESERVE, "no_space"), 0)
    assert said == [tr.Release(Side.SOURCE, 0), tr.Announce(Failure.REFUSED, "reserve: no_space")]


def test_an_unanswered_reservation_may_have_been_granted_so_the_target_is_freed_too():
    said = machine(tr.Start()).on(tr.Unanswered(Step.RESERVE), 0)
    assert tr.Release(Side.TARGET, 0) in said
    assert said[-1] == tr.Announce(Failure.UNANSWERED, "reserve")


def test_a_reservation_granted_after_the_abort_is_not_taken_up_again():
    transfer = machine(tr.Start(), tr.Cancelled())
    assert transfer.on(tr.Reserved(7, "there", b"key"), 0) == []
    assert transfer.state is State.ABORTED


def test_bytes_that_arrived_are_committed_although_the_source_died_since():
    transfer = machine(*FORWARD)
    assert transfer.on(tr.Died(Side.SOURCE), 0) == []
    assert transfer.on(tr.Committed(7), 0) == [tr.Announce()]
    assert transfer.ended


def test_a_source_that_is_already_sending_cannot_be_unanswered_any_more():
    transfer = machine(*FORWARD[:4], tr.Moving(7))
    assert transfer.on(tr.Unanswered(Step.MOVE), 0) == []
    assert transfer.state is State.MOVING


def test_a_source_whose_prefill_failed_ends_the_transfer_before_it_was_told_to_move():
    said = machine(*FORWARD[:2]).on(tr.MoveFailed(0, "prefill"), 0)
    assert said[-1] == tr.Announce(Failure.MOVE_FAILED, "prefill")


def test_the_deadline_ends_a_transfer_that_is_under_way_but_not_one_that_only_waits_for_its_commit():
    assert machine(*FORWARD[:4]).on(tr.Tick(), DEADLINE)[-1] == tr.Announce(Failure.DEADLINE, "moving")
    committing = Transfer(deadline_ns=LEASE - 1, lease_ns=LEASE)
    for event in FORWARD:
        committing.on(event, 0)
    committing.on(tr.Tick(), LEASE - 1)
    assert committing.state is State.COMMITTING


def test_leases_are_renewed_three_times_a_lease_and_lost_only_when_a_whole_lease_went_by():
    transfer = machine(*FORWARD[:2])
    assert transfer.on(tr.Tick(), LEASE // 3 - 1) == []
    assert transfer.on(tr.Tick(), LEASE // 3) == [tr.Renew(Side.TARGET, 7)]
    transfer.on(tr.Renewed(Side.TARGET, 7), LEASE // 3)
    assert transfer.on(tr.Tick(), LEASE + 1) == [tr.Renew(Side.TARGET, 7)]
    said = transfer.on(tr.Tick(), LEASE + LEASE // 3)
    assert said[-1] == tr.Announce(Failure.LEASE_LOST, "target: not renewed in time")


def test_the_source_is_renewed_only_from_when_it_has_something_to_keep():
    waiting, computed = machine(*FORWARD[:2]), machine(*FORWARD[:3])
    assert waiting.on(tr.Tick(), LEASE // 3) == [tr.Renew(Side.TARGET, 7)]
    assert set(computed.on(tr.Tick(), LEASE // 3)) == {tr.Renew(Side.TARGET, 7), tr.Renew(Side.SOURCE, 7)}


def test_a_side_that_knows_no_lease_any_more_ends_the_transfer():
    said = machine(*FORWARD[:3]).on(tr.RenewRefused(Side.TARGET, 7, "fenced"), 0)
    assert said[-1] == tr.Announce(Failure.LEASE_LOST, "target: fenced")


def test_the_wire_is_used_only_by_what_has_bytes_to_send():
    assert not machine(*FORWARD[:3]).on_the_wire
    assert machine(*FORWARD[:4]).on_the_wire
    assert not machine(tr.Start(), tr.Reserved(7), tr.Go(), tr.MoveTaken()).on_the_wire
    assert machine(tr.Start(), tr.Reserved(7), tr.Go(), tr.Moving(7)).on_the_wire
    assert not machine(*FORWARD).on_the_wire


def test_a_rejected_plan_frees_its_source_and_never_asks_the_target():
    said = machine().on(tr.Reject(Failure.LAYOUT, "tp 4 against 1"), 0)
    assert said == [tr.Release(Side.SOURCE, 0), tr.Announce(Failure.LAYOUT, "tp 4 against 1")]


def test_a_successor_finishes_what_was_committed_and_frees_what_was_not():
    done = machine()
    assert done.on(tr.Adopt(leased=True, committed=True, epoch=7), 0) == [tr.Announce(), tr.Release(Side.SOURCE, 7)]
    half = machine()
    assert half.on(tr.Adopt(leased=True, epoch=7), 0) == [
        tr.Release(Side.TARGET, 7),
        tr.Release(Side.SOURCE, 7),
        tr.Announce(Failure.COORDINATOR_LOST),
    ]
    nothing = machine()
    assert nothing.on(tr.Adopt(leased=False), 0)[0] == tr.Release(Side.SOURCE, 0)
    assert nothing.hold(Side.TARGET) is Hold.NOTHING


def test_only_what_nothing_has_replaced_is_worth_repeating():
    transfer = machine(tr.Start())
    assert transfer.wants(tr.Reserve())
    transfer.on(tr.Cancelled(), 0)
    assert not transfer.wants(tr.Reserve())
    assert transfer.wants(tr.Release(Side.TARGET, 0))
    transfer.on(tr.Freed(Side.TARGET), 0)
    assert not transfer.wants(tr.Release(Side.TARGET, 0))


def test_a_lease_must_last():
    with pytest.raises(ValueError, match="lease_ns"):
        Transfer(deadline_ns=0, lease_ns=0)
