from hypothesis import given
from hypothesis import strategies as st

from quartet_core.planes import FleetPlanes, count, slots
from quartet_core.word import FIELDS, FREE_KV, STATE_MASK, WORD_MASK

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
def test_whoever_has_short_of_than_a_level_is_known_without_looking_at_the_lower_ones(history):
    planes, words = replay(history)
    for level in range(FREE_KV.levels + 1):
        below = {slot for slot, word in words.items() if FREE_KV.of(word) < level}
        assert set(slots(planes.short_of[level])) == below


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
