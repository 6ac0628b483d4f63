from hypothesis import given
from hypothesis import strategies as st

from quartet_core.planes import FleetPlanes, count, slots
from quartet_core.word import (
    ACCEPTING,
    BATCH,
    CONGESTED,
    DRIFT,
    DRIFT_UNUSABLE_LEVEL,
    FAULT,
    FIELDS,
    FREE_KV,
    PRESSED,
    QUEUE,
    STATE_MASK,
    THROTTLED,
    WORD_MASK,
)

HISTORY = st.lists(st.tuples(st.integers(0, 90), st.none() | st.integers(0, WORD_MASK)), max_size=60)


def replay(history):
    planes, words = FleetPlanes(), {}
    for slot, word in history:
        if word is None:
            planes.drop(slot)
            words.pop(slot, None)
        else:
            assert planes.set(slot, word) is (words.get(slot) != word & STATE_MASK)
            words[slot] = word & STATE_MASK
    return planes, words


@given(HISTORY)
def test_planes_answer_as_a_scan_of_all_words_would(history):
    planes, words = replay(history)
    assert set(slots(planes.occupied)) == set(words)
    assert len(planes) == len(words)
    for slot in range(91):
        assert planes.word(slot) == words.get(slot)
    for field in FIELDS:
        for level in range(field.levels):
            at = {slot for slot, word in words.items() if field.of(word) == level}
            at_most = {slot for slot, word in words.items() if field.of(word) <= level}
            assert set(slots(planes.level(field.name, level))) == at
            assert set(slots(planes.at_most(field.name, level))) == at_most


@given(HISTORY)
def test_what_every_decision_asks_is_answered_as_a_scan_of_all_words_would(history):
    planes, words = replay(history)
    busy = {slot: word for slot, word in words.items() if QUEUE.of(word) or BATCH.of(word)}
    for level in range(FREE_KV.levels + 1):
        below = {slot for slot, word in busy.items() if FREE_KV.of(word) < level}
        assert set(slots(planes.short_of[level])) == below
    assert set(slots(planes.sound)) == {
        slot for slot, word in words.items()
        if ACCEPTING.of(word) and not FAULT.of(word) and DRIFT.of(word) != DRIFT_UNUSABLE_LEVEL
    }  # fmt: skip
    assert set(slots(planes.strained)) == {
        slot for slot, word in words.items() if THROTTLED.of(word) or CONGESTED.of(word) or PRESSED.of(word)
    }


@given(HISTORY, st.integers(0, 2**91 - 1))
def test_a_split_has_every_worker_once_at_its_level_lowest_first(history, mask):
    planes, words = replay(history)
    for field in FIELDS:
        parts = planes.split(field.name, mask)
        assert [level for level, _ in parts] == sorted({field.of(w) for s, w in words.items() if mask >> s & 1})
        assert sum(part for _, part in parts) == planes.occupied & mask
        for level, part in parts:
            assert part & ~planes.level(field.name, level) == 0


def test_liveness_bits_change_nothing():
    planes = FleetPlanes()
    assert planes.set(3, 0x00123456)
    assert not planes.set(3, 0xFF123456)
    assert planes.word(3) == 0x123456


def test_levels_out_of_range_hold_nobody_or_everybody():
    planes = FleetPlanes()
    planes.set(1, 0)
    assert planes.level("queue", -1) == planes.level("queue", 64) == 0
    assert planes.at_most("queue", -1) == planes.at_most("queue", -2) == 0
    assert planes.at_most("queue", 1000) == planes.occupied


@given(st.sets(st.integers(0, 20_000)))
def test_slots_of_a_plane_come_once_and_in_order(members):
    plane = sum(1 << slot for slot in members)
    assert list(slots(plane)) == sorted(members)
    assert count(plane) == len(members)
