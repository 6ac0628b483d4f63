from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_core import heartbeat
from quartet_core.heartbeat import Beat, BeatWorker, MalformedBeat, node_hash, node_key
from quartet_core.verdict import Verdict, VerdictLimits
from quartet_core.word import EPOCH, STATE_MASK
from quartet_heartbeat_collector.batch import from_beats
from quartet_heartbeat_collector.fleet import Fleet
from quartet_heartbeat_collector.roster import Outcome

MS = 1_000_000
LIMITS = VerdictLimits(tick_ns=5 * MS)


@pytest.fixture
def fleet(inventory):
    """One node ``a`` with workers 0 and 1, announced and never heard."""
    fleet = Fleet(LIMITS)
    assert fleet.announce(inventory("a"), 0) is Outcome.NEW
    return fleet


def _accounted(board):
    return board.taken + board.superseded + board.dropped.total()


def _node(fleet, name="a"):
    """The node, told all that was heard of it."""
    fleet.settle(0)
    return fleet.nodes[name]


def _live(fleet, beats, at_ns=0):
    """Hear one beat and be judged, so that the node is up and nothing is left to say."""
    fleet.hear(from_beats(beats), at_ns)
    fleet.tick(at_ns)
    return fleet.take_changes()


def test_the_first_beat_tells_all_workers_as_up(fleet, beat, state_word):
    idle, busy = state_word(), state_word(batch=7, queue=3)
    changes = _live(fleet, [beat("a", 5, idle, busy)])
    assert [(c.worker, c.incarnation, c.state, c.beat, c.verdict) for c in changes] == [
        ("a-0", 1, idle & STATE_MASK, 5, Verdict.UP),
        ("a-1", 1, busy & STATE_MASK, 5, Verdict.UP),
    ]


def test_a_node_that_was_just_heard_is_not_told_as_dead_before_it_is_judged(fleet, inventory, beat, state_word):
    """A snapshot between its first beat and the next tick."""
    for incarnation in (1, 2):  # a new agent under the same name is as new
        fleet.announce(inventory("a", incarnation, epoch=incarnation), 0)
        fleet.hear(from_beats([beat("a", 1, state_word(), state_word(), incarnation=incarnation)]), MS)
        fleet.settle(MS)
        assert fleet.states() == ()
        fleet.tick(2 * MS)
        assert [(state.worker, state.verdict) for state in fleet.states()] == [("a-0", Verdict.UP), ("a-1", Verdict.UP)]


def test_a_beat_that_changes_no_state_is_not_told(fleet, beat, state_word):
    _live(fleet, [beat("a", 1, state_word(), state_word())])
    fleet.hear(from_beats([beat("a", 2, state_word(steps=9), state_word(steps=3))]), MS)
    assert not fleet.changed
    fleet.settle(MS)
    assert fleet.stamps()[0].sequence == 2


def test_only_the_worker_whose_state_changed_is_told_with_the_beat_that_said_so(fleet, beat, state_word):
    _live(fleet, [beat("a", 1, state_word(), state_word())])
    fleet.hear(from_beats([beat("a", 4, state_word(), state_word(batch=1))]), MS)
    (change,) = fleet.take_changes()
    assert (change.worker, change.beat, change.state) == ("a-1", 4, state_word(batch=1) & STATE_MASK)


def test_the_newest_beat_of_a_batch_counts_whatever_the_order_of_arrival(fleet, beat, state_word):
    _live(fleet, [beat("a", 1, state_word(), state_word())])
    words = [state_word(batch=size) for size in range(5)]
    batch = [beat("a", 2 + size, words[size], state_word()) for size in (3, 4, 0, 2)]
    fleet.hear(from_beats(batch), MS)
    (change,) = fleet.take_changes()
    assert (change.beat, change.state) == (6, words[4] & STATE_MASK)
    assert (fleet.board.taken, fleet.board.superseded) == (2, 3)
    fleet.settle(MS)
    assert fleet.board.lost == 1  # beat 3


def test_a_replayed_beat_changes_nothing_and_is_counted(fleet, beat, state_word):
    _live(fleet, [beat("a", 7, state_word(), state_word())])
    for sequence in (7, 6, 0):
        fleet.hear(from_beats([beat("a", sequence, state_word(batch=9), state_word())]), MS)
    assert not fleet.changed
    assert fleet.board.dropped["replay"] == 3


def test_a_replayed_beat_keeps_nobody_alive(fleet, beat, state_word):
    _live(fleet, [beat("a", 7, state_word(), state_word())])
    for now_ns in range(0, 300 * MS, 2 * MS):
        fleet.hear(from_beats([beat("a", 7, state_word(), state_word())]), now_ns)
        fleet.tick(now_ns)
    assert fleet.verdict(fleet.nodes["a"]) is Verdict.DEAD


@pytest.mark.parametrize("forged", [2**64 - 1, 2**63, 2**63 - 1, 20_000])
def test_one_forged_beat_far_ahead_changes_nothing_and_the_node_stays_up(fleet, beat, state_word, forged):
    _live(fleet, [beat("a", 1000, state_word(), state_word())])
    for number in range(1, 200):
        now_ns = number * 2 * MS
        if number == 20:
            fleet.hear(from_beats([beat("a", forged, state_word(batch=9), state_word())]), now_ns)
        fleet.hear(from_beats([beat("a", 1000 + 4 * number, state_word(), state_word())]), now_ns)
        fleet.tick(now_ns)
    assert fleet.take_changes() == ()
    assert fleet.board.dropped["jump"] == 1
    assert fleet.board.dropped["replay"] == 0
    assert fleet.nodes["a"].sequence == 1000 + 4 * 199
    assert fleet.verdict(fleet.nodes["a"]) is Verdict.UP


def test_a_forged_beat_before_a_nodes_first_has_to_be_one_that_a_node_could_reach(fleet, beat, state_word):
    fleet.hear(from_beats([beat("a", 2**40 + 1, state_word(), state_word())]), 0)
    assert fleet.board.dropped["jump"] == 1
    assert [change.beat for change in _live(fleet, [beat("a", 3, state_word(), state_word())])] == [3, 3]


def _beat_until_taken(fleet, make, at_most_ms):
    """Beat every millisecond as an agent would, two sequences further each time; return when one was taken."""
    before = fleet.board.taken
    for at_ms in range(1, at_most_ms):
        fleet.hear(make(2 * at_ms), at_ms * MS)
        fleet.tick(at_ms * MS)
        if fleet.board.taken > before:
            return at_ms
    return at_most_ms


@pytest.mark.parametrize("jumps", [1, 20])
def test_forged_jumps_that_are_taken_silence_a_node_for_less_than_it_takes_to_be_dead(fleet, beat, state_word, jumps):
    word = state_word()
    _live(fleet, [beat("a", 0, word, word)])
    for number in range(1, jumps + 1):
        fleet.hear(from_beats([beat("a", 10_000 * number, word, word)]), 0)
    assert (fleet.board.taken, fleet.board.dropped["jump"]) == (2, jumps - 1)
    assert _beat_until_taken(fleet, lambda sequence: from_beats([beat("a", sequence, word, word)]), 10_000) <= 55
    assert fleet.board.sequences.resumed == 1
    assert fleet.verdict(fleet.nodes["a"]) is not Verdict.DEAD


def test_a_forged_first_beat_silences_a_node_no_longer_than_any_other(fleet, beat, state_word):
    word = state_word()
    _live(fleet, [beat("a", 2**40, word, word)])
    assert _beat_until_taken(fleet, lambda sequence: from_beats([beat("a", sequence, word, word)]), 10_000) <= 55


@pytest.mark.parametrize(
    "sequences",
    [[7] * 200, list(range(200, 0, -1)), [1, 50_000] * 100, [number * 1000 for number in range(200)]],
    ids=["one", "falling", "two", "too fast"],
)
def test_refused_beats_that_do_not_rise_as_a_nodes_would_stay_refused(fleet, beat, state_word, sequences):
    word = state_word()
    fleet.hear(from_beats([beat("a", 2**40, word, word)]), 0)
    for at_ms, sequence in enumerate(sequences):
        fleet.hear(from_beats([beat("a", sequence, word, word)]), at_ms * MS)
    assert (fleet.board.taken, fleet.board.sequences.resumed) == (1, 0)


def test_a_node_unheard_for_long_is_taken_again_at_once(fleet, beat, state_word):
    _live(fleet, [beat("a", 5, state_word(), state_word())])
    hour_ns = 3_600_000 * MS
    fleet.hear(from_beats([beat("a", 5 + hour_ns // 500_000, state_word(), state_word())]), hour_ns)
    assert fleet.board.dropped["jump"] == 0
    assert fleet.board.taken == 2


def test_a_pause_of_the_collector_makes_nobodys_beats_jumps_in_whichever_batch_they_come(inventory, beat, state_word):
    fleet = Fleet(LIMITS)
    for name in ("a", "b", "new"):
        fleet.announce(inventory(name), 0)
    word, pause_ms = state_word(), 60_000
    _live(fleet, [beat(name, 1, word, word) for name in ("a", "b")])
    fleet.settle(0)
    fleet.hear(from_beats([beat(name, 3, word, word) for name in ("a", "b")]), MS)
    for name in ("new", "a", "b"):
        fleet.hear(from_beats([beat(name, 2 * pause_ms, word, word)]), pause_ms * MS)
    assert (fleet.board.dropped["jump"], fleet.board.taken) == (0, 7)


def test_lost_beats_are_counted_from_gaps_but_not_from_what_was_said_before_we_listened(fleet, beat, state_word):
    word = state_word()
    _live(fleet, [beat("a", 1000, word, word)])
    assert fleet.board.lost == 0
    fleet.hear(from_beats([beat("a", 1001, word, word), beat("a", 1004, word, word)]), MS)
    fleet.hear(from_beats([beat("a", 1006, word, word)]), MS)
    assert _node(fleet).lost == 3
    assert fleet.board.lost == 3


def test_unknown_nodes_and_unannounced_incarnations_change_nothing(fleet, beat, state_word):
    _live(fleet, [beat("a", 1, state_word(), state_word())])
    other = state_word(batch=50)
    fleet.hear(from_beats([beat("ghost", 2, other)]), MS)
    fleet.hear(from_beats([beat("a", 2, other, other, incarnation=2)]), MS)
    fleet.hear(from_beats([beat("a", 3, other, other, engine=2)]), MS)
    fleet.hear(from_beats([beat("a", 4, state_word(), state_word(), other)]), MS)
    assert not fleet.changed
    assert +fleet.board.dropped == {"unknown_node": 1, "incarnation": 1}
    assert fleet.foreign_entries == 3
    assert fleet.take_unannounced() == ([], True)


def test_a_word_with_another_epoch_says_that_an_inventory_is_missing(fleet, beat, state_word):
    _live(fleet, [beat("a", 1, state_word(), state_word())])
    fleet.take_unannounced()
    fleet.hear(from_beats([beat("a", 2, state_word(epoch=1), state_word(epoch=1))]), MS)
    assert fleet.take_unannounced() == (["a"], False)
    assert fleet.take_unannounced() == ([], False)


def test_an_engine_that_restarted_counts_from_its_inventory_on_although_its_beats_came_first(
    fleet, inventory, beat, state_word
):
    _live(fleet, [beat("a", 1, state_word(), state_word())])
    restarted = Beat(node_hash("a"), 1, 2, 0, (BeatWorker(0, 1, state_word()), BeatWorker(1, 2, state_word(batch=3))))
    fleet.hear(from_beats([restarted]), MS)
    assert not fleet.changed
    assert fleet.announce(inventory("a", epoch=1, workers=((0, 1), (1, 2))), MS) is Outcome.CHANGED
    (gone,) = fleet.take_changes()
    assert (gone.worker, gone.incarnation, gone.verdict) == ("a-1", 1, Verdict.DEAD)
    again = Beat(node_hash("a"), 1, 3, 0, restarted.workers)
    fleet.hear(from_beats([again]), MS)
    (back,) = fleet.take_changes()
    assert (back.worker, back.incarnation, back.beat, back.verdict) == ("a-1", 2, 3, Verdict.UP)


def test_a_restarted_agent_starts_its_sequences_over(fleet, inventory, beat, state_word):
    _live(fleet, [beat("a", 9000, state_word(), state_word())])
    assert fleet.announce(inventory("a", 2), MS) is Outcome.NEW
    changes = _live(fleet, [beat("a", 0, state_word(batch=1), state_word(), incarnation=2)], MS)
    assert {(c.worker, c.beat) for c in changes} == {("a-0", 0), ("a-1", 0)}
    assert fleet.board.lost == 0


def _silence(fleet, from_ns, to_ns):
    """Tick through a silence; return the changes with the time they were told, in ms since ``from_ns``."""
    told = []
    for now_ns in range(from_ns, to_ns, 5 * MS // 2):
        fleet.tick(now_ns)
        told.extend(((now_ns - from_ns) / MS, change) for change in fleet.take_changes())
    return told


def test_a_silent_node_is_suspect_then_dead_within_150_ms_and_its_last_state_is_told(fleet, beat, state_word):
    _live(fleet, [beat("a", 3, state_word(), state_word(batch=2))])
    told = _silence(fleet, 0, 200 * MS)
    assert [(c.worker, c.verdict, c.beat) for _, c in told] == [
        ("a-0", Verdict.SUSPECT, 3),
        ("a-1", Verdict.SUSPECT, 3),
        ("a-0", Verdict.DEAD, 3),
        ("a-1", Verdict.DEAD, 3),
    ]
    assert told[0][0] <= 15
    assert 100 <= told[2][0] <= 150
    assert told[3][1].state == state_word(batch=2) & STATE_MASK
    assert fleet.stamps() == ()


def test_a_dead_node_that_beats_again_is_up_after_a_few_beats_with_what_it_says_now(fleet, beat, state_word):
    _live(fleet, [beat("a", 3, state_word(), state_word())])
    _silence(fleet, 0, 200 * MS)
    changes = []
    for step in range(5):
        now_ns = 200 * MS + step * MS
        fleet.hear(from_beats([beat("a", 500 + step, state_word(batch=4), state_word())]), now_ns)
        fleet.tick(now_ns)
        changes += fleet.take_changes()
    up = {c.worker: c for c in changes if c.verdict == Verdict.UP}
    assert up.keys() == {"a-0", "a-1"}
    assert up["a-0"].state == state_word(batch=4) & STATE_MASK
    assert Verdict.DEAD not in {c.verdict for c in changes}


def test_an_engine_that_does_not_step_is_frozen_until_it_does(fleet, beat, state_word):
    sequence, told = 0, []

    def run(ms, steps):
        nonlocal sequence
        for _ in range(ms // 2):
            sequence += 1
            word = state_word(queue=5, batch=1, steps=steps(sequence))
            idle = state_word()
            fleet.hear(from_beats([beat("a", sequence, word, idle)]), sequence * 2 * MS)
            if sequence % 10 == 0:
                fleet.note_steps(sequence * 2 * MS)
            fleet.tick(sequence * 2 * MS)
            told.extend((c.worker, Verdict(c.verdict)) for c in fleet.take_changes())

    run(1500, lambda n: n // 8)
    assert told == [("a-0", Verdict.UP), ("a-1", Verdict.UP)]
    told.clear()
    run(900, lambda n: 3)
    assert told == []
    run(400, lambda n: 3)
    assert told == [("a-0", Verdict.FROZEN)]
    run(100, lambda n: n // 8)
    assert told == [("a-0", Verdict.FROZEN), ("a-0", Verdict.UP)]


def test_a_collector_that_was_stopped_for_a_second_declares_nobody_dead(fleet, beat, state_word):
    _live(fleet, [beat("a", 1, state_word(), state_word())])
    fleet.hear(from_beats([beat("a", 2000, state_word(), state_word())]), 1000 * MS)
    fleet.tick(1000 * MS)
    assert not fleet.changed


def test_of_two_agents_with_one_name_the_second_counts_until_it_is_dead(fleet, inventory, beat, state_word):
    _live(fleet, [beat("a", 1, state_word(), state_word())])
    assert fleet.announce(inventory("a", 2), 0) is Outcome.NEW
    _live(fleet, [beat("a", 1, state_word(), state_word(), incarnation=2)])
    assert fleet.announce(inventory("a", 1), 0) is Outcome.DUPLICATE
    fleet.hear(from_beats([beat("a", 50, state_word(batch=9), state_word(), incarnation=1)]), MS)
    assert not fleet.changed
    _silence(fleet, MS, 200 * MS)
    assert fleet.announce(inventory("a", 1), 200 * MS) is Outcome.NEW


def test_a_late_inventory_changes_nothing(fleet, inventory):
    fleet.announce(inventory("a", epoch=5, workers=((0, 1),)), 0)
    assert fleet.announce(inventory("a", epoch=4), 0) is Outcome.LATE
    assert list(fleet.nodes["a"].workers) == [0]


def test_there_is_room_for_so_many_nodes_and_no_more(inventory):
    fleet = Fleet(VerdictLimits(max_nodes=2))
    outcomes = [fleet.announce(inventory(name), 0) for name in ("a", "b", "c", "a")]
    assert outcomes == [Outcome.NEW, Outcome.NEW, Outcome.FULL, Outcome.KNOWN]


def test_nodes_that_are_dead_and_unannounced_for_long_are_forgotten_and_their_room_is_used(inventory, beat, state_word):
    fleet = Fleet(VerdictLimits(tick_ns=5 * MS, keep_dead_ns=500 * MS))
    for name in ("a", "b", "c"):
        fleet.announce(inventory(name), 0)
    _live(fleet, [beat(name, 1, state_word(), state_word()) for name in ("a", "b", "c")])
    fleet.announce(inventory("b"), 400 * MS)
    _silence(fleet, 0, 1000 * MS)
    assert fleet.drop_forgotten(700 * MS) == ["a", "c"]
    assert [state.worker for state in fleet.states()] == ["b-0", "b-1"]
    fleet.hear(from_beats([beat("a", 2, state_word())]), 700 * MS)
    assert fleet.board.dropped["unknown_node"] == 1
    fleet.announce(inventory("d"), 700 * MS)
    changes = _live(fleet, [beat("d", 1, state_word(), state_word())], 1000 * MS)
    assert {change.worker for change in changes} == {"d-0", "d-1"}


class TestWithKeys:
    OLD, NEW = b"o" * 16, b"n" * 16

    @pytest.fixture
    def fleet(self, inventory):
        fleet = Fleet(LIMITS, [self.OLD, self.NEW])
        fleet.announce(inventory("a"), 0)
        return fleet

    @pytest.mark.parametrize("master", [OLD, NEW])
    def test_beats_made_with_either_master_key_count(self, fleet, beat, state_word, received, datagram, master):
        fleet.hear(received(datagram(beat("a", 1, state_word(), state_word()), node_key(master, "a"))), 0)
        assert (fleet.board.taken, fleet.board.dropped.total()) == (1, 0)

    @pytest.mark.parametrize("key", [None, node_key(b"x" * 16, "a"), node_key(NEW, "b")])
    def test_beats_without_the_nodes_key_change_nothing(self, fleet, beat, state_word, received, datagram, key):
        fleet.hear(received(datagram(beat("a", 1, state_word(), state_word()), key)), 0)
        fleet.tick(0)
        assert not fleet.changed
        assert +fleet.board.dropped == {"tag": 1}
        assert _accounted(fleet.board) == 1

    def test_recorded_beats_do_not_bring_a_node_back_that_has_keys(self, fleet, beat, state_word, received, datagram):
        key = node_key(self.OLD, "a")
        make = lambda sequence: received(datagram(beat("a", sequence, state_word(), state_word()), key))  # noqa: E731
        fleet.hear(make(5000), 0)
        fleet.tick(0)
        assert _beat_until_taken(fleet, make, 2000) == 2000
        assert fleet.verdict(fleet.nodes["a"]) is Verdict.DEAD

    def test_a_forged_newer_beat_does_not_hide_the_genuine_one_beside_it(
        self, fleet, beat, state_word, received, datagram
    ):
        key, busy = node_key(self.NEW, "a"), state_word(batch=30)
        genuine = [datagram(beat("a", n, state_word(batch=n), state_word()), key) for n in (1, 2)]
        forged = [datagram(beat("a", n, busy, busy)) for n in (1 << 30, 1 << 40)]
        fleet.hear(received(genuine[0], forged[0], genuine[1], forged[1]), 0)
        fleet.tick(0)
        changes = fleet.take_changes()
        first = changes[0]
        assert (first.worker, first.beat, first.state) == ("a-0", 2, state_word(batch=2) & STATE_MASK)
        assert +fleet.board.dropped == {"tag": 2}
        assert _accounted(fleet.board) == fleet.board.received == 4
        fleet.hear(received(datagram(beat("a", 3, busy, state_word()), key)), 0)
        assert fleet.changed


class _OneByOne:
    """The board as one would write it first: a datagram at a time, decoded by core."""

    def __init__(self, announced):
        self.announced = announced  # node hash -> incarnation
        self.next = dict.fromkeys(announced, 0)
        self.most = dict.fromkeys(announced, 2**40)  # all at one moment
        self.words = {}
        self.counts = Counter()

    def hear(self, datagrams):
        newest = {}
        for data in datagrams:
            try:
                beat = heartbeat.decode(data)
            except MalformedBeat as error:
                self.counts[str(error.reason)] += 1
                continue
            if beat.node not in self.announced:
                self.counts["unknown_node"] += 1
            elif beat.incarnation != self.announced[beat.node]:
                self.counts["incarnation"] += 1
            elif beat.sequence < self.next[beat.node]:
                self.counts["replay"] += 1
            elif beat.sequence > self.most[beat.node]:
                self.counts["jump"] += 1
            else:
                known = newest.get(beat.node)
                if known is None or known.sequence <= beat.sequence:
                    newest[beat.node] = beat
        for node, beat in newest.items():
            self.next[node] = beat.sequence + 1
            self.most[node] = min(self.most[node], beat.sequence + 10_000)
            for worker in beat.workers:
                if worker.ordinal < 2 and worker.incarnation == 1:
                    self.words[node, worker.ordinal] = worker.word & STATE_MASK


_NAMES = ("a", "b", "c", "ghost")
_entries = st.builds(BeatWorker, st.integers(0, 3), st.integers(1, 2), st.integers(0, EPOCH.mask - 1))
_beats = st.builds(
    Beat,
    st.sampled_from(_NAMES).map(node_hash),
    st.integers(1, 2),
    st.integers(0, 12),
    st.just(0),
    st.lists(_entries, max_size=4, unique_by=lambda entry: entry.ordinal).map(tuple),
)


@st.composite
def _mutated(draw):
    """A beat with one byte of its header changed."""
    data = bytearray(heartbeat.encode(draw(_beats)))
    data[draw(st.integers(0, heartbeat.WORKERS_OFFSET - 1))] = draw(st.integers(0, 255))
    return bytes(data)


_genuine = _beats.map(heartbeat.encode)
_datagrams = st.one_of(_genuine, _genuine, _mutated(), st.binary(max_size=60))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(_datagrams, max_size=12), max_size=6))
def test_whole_batches_do_what_one_beat_after_the_other_would(inventory, received, batches):
    fleet = Fleet(LIMITS)
    for name in _NAMES[:3]:
        fleet.announce(inventory(name), 0)
    simple = _OneByOne({node_hash(name): 1 for name in _NAMES[:3]})
    for datagrams in batches:
        fleet.hear(received(*datagrams), 0)
        simple.hear(datagrams)
    states = {
        (node.hash, worker.ordinal): worker.state
        for node in fleet.nodes.values()
        for worker in node.workers.values()
        if worker.state is not None
    }
    assert states == simple.words
    assert +fleet.board.dropped == simple.counts
    assert _accounted(fleet.board) == fleet.board.received == sum(map(len, batches))
    fleet.settle(0)
    assert {node.hash: node.sequence + 1 for node in fleet.nodes.values()} == simple.next
