import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_core import word as w

LEVELS = {field.name: st.integers(0, field.levels - 1) for field in w.FIELDS[:4]}
FLAGS = {field.name: st.booleans() for field in w.FIELDS[4:]}


@given(st.fixed_dictionaries({**LEVELS, **FLAGS, "steps": st.integers(0, 2**40), "epoch": st.integers(0, 2**40)}))
def test_every_field_of_a_packed_word_reads_back(values):
    word = w.pack(**values)
    assert 0 <= word <= w.WORD_MASK
    for field in w.FIELDS:
        assert field.of(word) == values[field.name]
    assert w.steps_of(word) == values["steps"] % 16
    assert w.epoch_of(word) == values["epoch"] % 16


def test_the_state_fields_fill_the_low_24_bits_without_overlap():
    covered = 0
    for field in w.FIELDS:
        assert covered & field.mask == 0
        covered |= field.mask
    assert covered == w.STATE_MASK


def test_the_bits_are_where_the_contract_says():
    word = w.pack(free_kv=0xF, queue=1, batch=2, drift=3, accepting=True, fault=True, steps=5, epoch=9)
    assert word == 0xF | 1 << 4 | 2 << 10 | 3 << 16 | 1 << 19 | 1 << 23 | 5 << 24 | 9 << 28


@pytest.mark.parametrize(("name", "level"), [("free_kv", 16), ("queue", 64), ("batch", -1), ("drift", 8)])
def test_a_level_that_does_not_exist_is_refused_by_name(name, level):
    levels = {"free_kv": 0, "queue": 0, "batch": 0, "drift": 0, name: level}
    with pytest.raises(ValueError, match=name):
        w.pack(**levels, accepting=True)


@given(st.integers(0, w.WORD_MASK), st.sampled_from(w.FIELDS), st.data())
def test_putting_a_field_changes_that_field_alone(word, field, data):
    level = data.draw(st.integers(0, field.levels - 1))
    after = field.put(word, level)
    assert field.of(after) == level
    assert after & ~field.mask == word & ~field.mask


SCALES = [
    (w.FREE_KV, w.free_kv_level, w.free_kv_fraction, 1.0),
    (w.QUEUE, w.queue_level, w.queue_ms, 400_000.0),
    (w.BATCH, w.batch_level, w.batch_size, 3000),
    (w.DRIFT, w.drift_level, w.drift_ratio, 20.0),
]
BY_NAME = pytest.mark.parametrize(
    ("field", "level_of", "value_of", "top"), SCALES, ids=lambda x: getattr(x, "name", "")
)


@BY_NAME
def test_a_level_s_value_has_that_level(field, level_of, value_of, top):
    assert [level_of(value_of(level)) for level in range(field.levels)] == list(range(field.levels))


@BY_NAME
@given(data=st.data())
def test_more_is_never_a_lower_level(field, level_of, value_of, top, data):
    value = st.integers(-5, top) if isinstance(top, int) else st.floats(-1.0, top)
    low, high = sorted((data.draw(value), data.draw(value)))
    assert 0 <= level_of(low) <= level_of(high) < field.levels


@given(st.floats(0.0, 1.0))
def test_free_memory_is_never_overestimated(fraction):
    assert w.free_kv_fraction(w.free_kv_level(fraction)) <= fraction


def test_free_memory_is_finer_near_empty_and_whole_at_the_top():
    steps = [w.free_kv_fraction(level + 1) - w.free_kv_fraction(level) for level in range(15)]
    assert max(steps[:5]) < min(steps[-5:])
    assert w.free_kv_fraction(15) == 1.0


@given(st.floats(0.0, 170_000.0))
def test_a_queue_is_told_within_a_tenth_of_itself_and_two_milliseconds(ms):
    assert abs(w.queue_ms(w.queue_level(ms)) - ms) <= 0.1 * (ms + 2.0)


@given(st.floats(0.0, 400_000.0))
def test_a_queue_lies_within_the_bounds_of_its_level(ms):
    low, high = w.queue_bounds_ms(w.queue_level(ms))
    assert low <= ms < high


def test_queues_reach_two_minutes_and_an_empty_one_is_nothing():
    assert w.queue_ms(0) == 0.0
    assert w.queue_bounds_ms(63)[0] >= 120_000.0


@given(st.integers(0, 5000))
def test_a_batch_lies_within_the_bounds_of_its_level(n):
    low, high = w.batch_bounds(w.batch_level(n))
    assert low <= n
    assert high is None or n < high


def test_small_batches_are_exact_and_large_ones_reach_1024():
    assert [w.batch_size(w.batch_level(n)) for n in range(32)] == list(range(32))
    assert w.batch_size(63) >= 1024


@given(st.integers(32, 1024))
def test_a_large_batch_is_told_within_an_eighth(n):
    assert abs(w.batch_size(w.batch_level(n)) - n) <= n / 8


def test_drift_goes_from_one_to_five_and_then_to_unusable():
    assert w.drift_ratio(0) == 1.0
    assert w.drift_ratio(6) == 5.0
    assert w.drift_ratio(w.DRIFT_UNUSABLE_LEVEL) == math.inf
    assert w.drift_level(0.4) == 0
    assert w.drift_level(6.0) == w.DRIFT_UNUSABLE_LEVEL


def test_what_is_not_a_number_is_the_worst_there_is():
    assert w.free_kv_level(math.nan) == 0
    assert w.queue_level(math.nan) == 63
    assert w.drift_level(math.nan) == w.DRIFT_UNUSABLE_LEVEL
