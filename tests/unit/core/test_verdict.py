import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_core.verdict import BoardFull, Change, Verdict, VerdictBoard, VerdictLimits

UP, SUSPECT, DEAD, FROZEN = Verdict.UP, Verdict.SUSPECT, Verdict.DEAD, Verdict.FROZEN
MS = 1_000_000
TICK = 2 * MS


class Fleet:
    """Nodes that beat once a tick into a board, unless told not to."""

    def __init__(self, nodes, limits=None):
        self.board = VerdictBoard(limits)
        self.now = 5_000 * MS
        self.beating = {f"n{i}" for i in range(nodes)}
        self.sequence = 0
        self.incarnation = dict.fromkeys(self.beating, 1)
        self.changes = []
        self.run(10)

    def run(self, ms):
        for _ in range(round(ms * MS / TICK)):
            self.now += TICK
            self.hear()
            self.tick()

    def hear(self):
        self.sequence += 4
        for node in sorted(self.beating):
            self.board.heard(node, self.sequence, self.now, incarnation=self.incarnation[node])

    def tick(self, ran_ns=None):
        changes = self.board.tick(self.now, ran_ns)
        self.changes += changes
        return changes

    def verdicts(self):
        return {node: self.board.verdict(node) for node in self.incarnation}

    def since(self):
        changes, self.changes = self.changes, []
        return [(change.node, change.ordinal, change.verdict) for change in changes]


def test_a_node_is_up_at_the_first_tick_after_its_first_beat():
    board = VerdictBoard()
    assert board.verdict("n") is None
    board.heard("n", 1, 0, incarnation=9)
    assert board.tick(0) == [Change("n", None, 9, 1, UP)]
    assert board.tick(TICK) == []


def test_a_silent_node_is_suspect_after_10_ms_and_dead_after_100():
    fleet = Fleet(3)
    fleet.since()
    fleet.beating.discard("n1")
    fleet.run(8)
    assert fleet.since() == []
    fleet.run(2)
    assert fleet.since() == [("n1", None, SUSPECT)]
    fleet.run(88)
    assert fleet.since() == []
    fleet.run(2)
    assert fleet.since() == [("n1", None, DEAD)]
    assert fleet.verdicts() == {"n0": UP, "n1": DEAD, "n2": UP}


def test_slow_beats_stretch_suspicion_to_three_of_them():
    limits = VerdictLimits(beat_ns=20 * MS)
    assert limits.suspect_after_ns == 60 * MS
    assert limits.dead_after_ns == 120 * MS


def test_a_verdict_names_the_last_beat_heard():
    board = VerdictBoard()
    board.heard("n", 77, 0, incarnation=3)
    board.tick(0)
    changes = [change for tick in range(1, 60) for change in board.tick(tick * TICK)]
    assert [(change.verdict, change.sequence, change.incarnation) for change in changes] == [
        (SUSPECT, 77, 3),
        (DEAD, 77, 3),
    ]


def test_a_dead_node_is_no_longer_dead_at_its_next_beat_and_up_when_it_goes_on_beating():
    fleet = Fleet(3)
    fleet.beating.discard("n1")
    fleet.run(120)
    fleet.since()
    fleet.beating.add("n1")
    fleet.run(2)
    assert fleet.since() == [("n1", None, SUSPECT)]
    fleet.run(4)
    assert fleet.since() == [("n1", None, UP)]


def test_a_node_that_is_heard_now_and_then_stays_suspect_instead_of_flapping():
    fleet = Fleet(3)
    fleet.since()
    fleet.beating.discard("n1")
    for _ in range(20):
        fleet.run(14)
        fleet.beating.add("n1")
        fleet.run(2)
        fleet.beating.discard("n1")
    assert fleet.since() == [("n1", None, SUSPECT)]


@pytest.mark.parametrize("ran_ns", [None, 1_000 * MS, 0])
def test_a_collector_paused_for_a_second_suspects_and_kills_nobody(ran_ns):
    fleet = Fleet(20)
    fleet.since()
    fleet.now += 1_000 * MS
    fleet.tick(ran_ns)
    fleet.run(50)
    assert fleet.since() == []


def test_a_pause_of_the_collector_delays_a_death_but_does_not_prevent_it():
    fleet = Fleet(3)
    fleet.beating.discard("n1")
    fleet.run(50)
    fleet.now += 1_000 * MS
    fleet.tick()
    assert fleet.board.verdict("n1") is SUSPECT
    fleet.run(60)
    assert fleet.board.verdict("n1") is DEAD


def test_time_that_the_collector_says_it_did_not_run_ages_nobody():
    fleet = Fleet(1)
    for _ in range(200):
        fleet.now += TICK
        fleet.tick(0)
    assert fleet.board.verdict("n0") is UP


def test_a_clock_that_jumps_back_kills_nobody_and_time_goes_on_when_it_has_caught_up():
    fleet = Fleet(3)
    fleet.since()
    fleet.now -= 500 * MS
    fleet.run(400)
    assert fleet.since() == []
    fleet.beating.discard("n1")
    fleet.run(100 + 120)
    assert fleet.board.verdict("n1") is DEAD


def test_half_of_eight_nodes_silent_at_once_are_suspect_with_an_alarm_and_not_dead():
    fleet = Fleet(8)
    fleet.beating -= {"n0", "n1", "n2", "n3"}
    fleet.run(500)
    assert sorted(fleet.verdicts().values()) == [UP] * 4 + [SUSPECT] * 4
    assert (fleet.board.alarm.silent, fleet.board.alarm.known) == (4, 8)


@pytest.mark.parametrize(("nodes", "silent"), [(7, 4), (8, 3), (20, 9)])
def test_fewer_than_half_or_half_of_a_few_are_dead_one_by_one(nodes, silent):
    fleet = Fleet(nodes)
    fleet.beating -= {f"n{i}" for i in range(silent)}
    fleet.run(110)
    assert sorted(fleet.verdicts().values()) == [UP] * (nodes - silent) + [DEAD] * silent
    assert fleet.board.alarm is None


def test_when_a_partition_heals_those_heard_a_moment_later_are_not_killed_on_the_way():
    fleet = Fleet(8)
    gone = {f"n{i}" for i in range(6)}
    fleet.beating -= gone
    fleet.run(400)
    fleet.beating |= {"n0", "n1", "n2", "n3"}
    fleet.run(20)
    assert fleet.board.alarm is None
    fleet.beating |= gone
    fleet.run(20)
    assert set(fleet.verdicts().values()) == {UP}
    assert DEAD not in {verdict for _, _, verdict in fleet.since()}


def test_those_that_stay_away_after_a_partition_are_dead_in_the_end():
    fleet = Fleet(8)
    fleet.beating -= {f"n{i}" for i in range(6)}
    fleet.run(400)
    fleet.beating |= {"n0", "n1", "n2", "n3"}
    fleet.run(110)
    assert [fleet.board.verdict(node) for node in ("n0", "n4", "n5")] == [UP, DEAD, DEAD]


def test_a_mass_silence_spares_for_a_bounded_time():
    fleet = Fleet(8, VerdictLimits(mass_hold_ns=1_000 * MS))
    fleet.beating -= {"n0", "n1", "n2", "n3"}
    fleet.run(900)
    assert DEAD not in fleet.verdicts().values()
    fleet.run(200)
    assert sorted(fleet.verdicts().values()) == [UP] * 4 + [DEAD] * 4


def test_a_new_incarnation_starts_anew_whatever_was_before():
    fleet = Fleet(3)
    fleet.beating.discard("n1")
    fleet.run(120)
    fleet.since()
    fleet.board.heard("n1", 1, fleet.now, incarnation=2)
    fleet.tick()
    assert fleet.since() == [("n1", None, UP)]
    fleet.board.heard("n0", 1, fleet.now, incarnation=2)
    fleet.tick()
    assert fleet.changes == [Change("n0", None, 2, 1, UP)]


# --- frozen


def test_a_worker_with_work_and_no_step_for_a_second_is_frozen_until_it_steps():
    fleet = Fleet(2)
    fleet.since()
    fleet.board.steps(("n0", 3), 5, True, fleet.now)
    fleet.run(998)
    assert fleet.since() == []
    fleet.run(4)
    assert fleet.since() == [("n0", 3, FROZEN)]
    assert fleet.board.verdict("n0", 3) is FROZEN
    assert fleet.board.verdict("n0") is fleet.board.verdict("n0", 4) is UP
    fleet.board.steps(("n0", 3), 6, True, fleet.now)
    fleet.run(2)
    assert fleet.since() == [("n0", 3, UP)]
    fleet.run(1_010)
    assert fleet.since() == [("n0", 3, FROZEN)]


def test_a_worker_without_work_owes_no_step():
    fleet = Fleet(1)
    fleet.since()
    fleet.board.steps(("n0", 0), 5, False, fleet.now)
    fleet.run(3_000)
    assert fleet.since() == []


def test_the_second_starts_when_work_comes_not_when_the_last_step_was():
    fleet = Fleet(1)
    fleet.board.steps(("n0", 0), 5, False, fleet.now)
    fleet.run(3_000)
    fleet.since()
    fleet.board.steps(("n0", 0), 5, True, fleet.now)
    fleet.run(990)
    assert fleet.since() == []


def test_a_worker_whose_work_was_cancelled_is_not_frozen_for_ever():
    fleet = Fleet(1)
    fleet.board.steps(("n0", 0), 5, True, fleet.now)
    fleet.run(1_100)
    fleet.since()
    fleet.board.steps(("n0", 0), 5, False, fleet.now)
    fleet.run(2)
    assert fleet.since() == [("n0", 0, UP)]


def test_slow_steps_are_given_three_times_their_prediction():
    fleet = Fleet(1)
    fleet.since()
    fleet.board.steps(("n0", 0), 5, True, fleet.now, predicted_step_ns=700 * MS)
    fleet.run(2_090)
    assert fleet.since() == []
    fleet.run(14)
    assert fleet.since() == [("n0", 0, FROZEN)]


def test_a_worker_that_keeps_stepping_is_never_frozen():
    fleet = Fleet(1)
    fleet.since()
    for counter in range(40):
        fleet.board.steps(("n0", 0), counter % 16, True, fleet.now)
        fleet.run(400)
    assert fleet.since() == []


def test_a_silent_node_s_workers_are_suspect_not_frozen_and_excused_when_it_is_heard_again():
    fleet = Fleet(8)
    fleet.since()
    fleet.board.steps(("n0", 0), 5, True, fleet.now)
    fleet.beating -= {"n0", "n1", "n2", "n3"}
    fleet.run(3_000)
    assert FROZEN not in {verdict for _, _, verdict in fleet.since()}
    fleet.beating |= {"n0", "n1", "n2", "n3"}
    fleet.run(900)
    assert FROZEN not in {verdict for _, _, verdict in fleet.since()}
    fleet.run(200)
    assert fleet.since() == [("n0", 0, FROZEN)]


def test_a_paused_collector_freezes_nobody():
    fleet = Fleet(1)
    fleet.board.steps(("n0", 0), 5, True, fleet.now)
    fleet.since()
    fleet.now += 5_000 * MS
    fleet.run(500)
    assert fleet.since() == []


def test_a_frozen_worker_is_told_again_after_its_node_s_verdict_and_death_covers_it():
    fleet = Fleet(3)
    fleet.board.steps(("n0", 0), 5, True, fleet.now)
    fleet.run(1_100)
    fleet.since()
    fleet.beating.discard("n0")
    fleet.run(50)
    assert fleet.since() == [("n0", None, SUSPECT), ("n0", 0, FROZEN)]
    fleet.run(60)
    assert fleet.since() == [("n0", None, DEAD)]
    assert fleet.board.verdict("n0", 0) is DEAD
    fleet.beating.add("n0")
    fleet.run(10)
    assert fleet.board.verdict("n0", 0) is UP


def test_a_restarted_engine_is_not_blamed_for_the_old_one():
    fleet = Fleet(1)
    fleet.board.steps(("n0", 0), 5, True, fleet.now, incarnation=1)
    fleet.run(900)
    fleet.board.steps(("n0", 0), 5, True, fleet.now, incarnation=2)
    fleet.since()
    fleet.run(900)
    assert fleet.since() == []


def test_the_board_is_bounded_and_makes_room_from_the_dead():
    fleet = Fleet(2, VerdictLimits(max_nodes=2))
    with pytest.raises(BoardFull, match="2 nodes"):
        fleet.board.heard("n9", 1, fleet.now)
    fleet.beating.discard("n1")
    fleet.run(120)
    fleet.board.heard("n9", 1, fleet.now)
    assert len(fleet.board) == 2
    assert fleet.board.verdict("n1") is None


def test_a_node_has_256_workers_at_most():
    fleet = Fleet(1)
    for ordinal in range(256):
        fleet.board.steps(("n0", ordinal), 0, False, fleet.now)
    with pytest.raises(BoardFull, match="256 workers"):
        fleet.board.steps(("n0", 256), 0, False, fleet.now)


def test_the_long_dead_are_forgotten():
    fleet = Fleet(2, VerdictLimits(keep_dead_ns=1_000 * MS))
    fleet.board.steps(("n1", 0), 1, True, fleet.now)
    fleet.beating.discard("n1")
    fleet.run(1_100)
    assert len(fleet.board) == 1
    fleet.board.steps(("n1", 0), 1, True, fleet.now)
    assert fleet.board.verdict("n1") is None


def test_a_forgotten_node_is_forgotten_with_its_workers():
    fleet = Fleet(2)
    fleet.board.steps(("n1", 0), 1, True, fleet.now)
    fleet.since()
    fleet.board.forget("n1")
    fleet.board.forget("never there")
    fleet.beating.discard("n1")
    fleet.run(1_200)
    assert fleet.since() == []


EVENTS = st.one_of(
    st.tuples(st.just("beat"), st.integers(0, 9), st.integers(0, 2)),
    st.tuples(st.just("steps"), st.integers(0, 9), st.integers(0, 15), st.booleans()),
    st.tuples(st.just("tick"), st.sampled_from([0, 1, 2, 5, 50, 1_000, -30])),
    st.tuples(st.just("run"), st.sampled_from([20, 110, 1_010])),
)


@given(st.lists(EVENTS, max_size=60))
def test_whoever_follows_the_changes_knows_every_verdict(events):
    board, now, sequence = VerdictBoard(), 0, 0
    nodes, workers = {}, {}

    def follow(changes):
        for change in changes:
            if change.ordinal is None:
                nodes[change.node] = change.verdict
                for worker in [worker for worker in workers if worker[0] == change.node]:
                    workers[worker] = change.verdict
            else:
                workers[change.node, change.ordinal] = change.verdict

    for kind, *what in events:
        if kind == "beat":
            sequence += 1
            board.heard(what[0], sequence, now, incarnation=what[1])
        elif kind == "steps":
            board.steps((what[0], 1), what[1], what[2], now)
        else:
            for _ in range(1 if kind == "tick" else what[0] // 4):
                now += what[0] * MS if kind == "tick" else 4 * MS
                follow(board.tick(now))
    follow(board.tick(now))
    for node, verdict in nodes.items():
        assert board.verdict(node) is verdict
        if (node, 1) in workers:
            assert board.verdict(node, 1) is workers[node, 1]
