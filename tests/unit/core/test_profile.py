"""A profile tells times: more work never takes less of them, and cutting work up costs what it says."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_core.catalogue import builtin
from quartet_core.profile import Profile

PROFILES = builtin().profiles
profiles = st.sampled_from(sorted(PROFILES)).map(PROFILES.__getitem__)
tokens = st.integers(1, 131_072)
batch = st.floats(1, 256)
context = st.floats(0, 131_072)


def small(**changes: object) -> Profile:
    plain = Profile(5.0, 0.02, 1e-6, (1, 9), (0, 1000), ((4.0, 6.0), (8.0, 26.0)), overhead_ms=1.0)
    return msgspec.structs.replace(plain, **changes)


@given(profiles, st.integers(0, 131_072), tokens, tokens)
def test_prefill_in_two_chunks_takes_one_constant_more_than_in_one(profile, cached, first, second):
    in_one = profile.prefill_ms(cached, first + second)
    in_two = profile.prefill_ms(cached, first) + profile.prefill_ms(cached + first, second)
    assert in_two - profile.a_ms == pytest.approx(in_one, rel=1e-9)


@given(profiles, st.integers(0, 131_072), tokens, st.integers(1, 1000))
def test_more_new_or_more_cached_tokens_take_longer_to_prefill(profile, cached, new, more):
    assert profile.prefill_ms(cached, new + more) > profile.prefill_ms(cached, new)
    assert profile.prefill_ms(cached + more, new) >= profile.prefill_ms(cached, new)


@given(profiles, batch, context, st.floats(0, 64), st.floats(0, 8192))
def test_a_bigger_batch_or_longer_contexts_never_step_faster(profile, batch, context, more_batch, more_context):
    before = profile.step_ms_at(batch, context)
    assert profile.step_ms_at(batch + more_batch, context) >= before * (1 - 1e-9)
    assert profile.step_ms_at(batch, context + more_context) >= before * (1 - 1e-9)
    assert before >= profile.weight_read_ms * (1 - 1e-9)


@given(profiles, st.integers(0, 8192), st.integers(0, 32_768), st.integers(0, 200), context)
def test_an_iteration_takes_at_least_its_chunk_and_at_least_its_step_but_reads_weights_once(
    profile, new, cached, batch, context
):
    both = profile.iteration_ms(new, cached, batch, context)
    chunk = profile.prefill_ms(cached, new)
    step = profile.step_ms_at(batch, context)
    assert both >= max(chunk, step) * (1 - 1e-9)
    assert both <= max(chunk, profile.weight_read_ms if new else 0.0) + step + 1e-9


def test_the_table_is_met_at_its_points_and_linear_between_and_beyond():
    profile = small()
    assert profile.step_ms_at(1, 0) == 4.0
    assert profile.step_ms_at(9, 1000) == 26.0
    assert profile.step_ms_at(5, 500) == pytest.approx((4.0 + 6.0 + 8.0 + 26.0) / 4)
    assert profile.step_ms_at(17, 1000) == pytest.approx(46.0)
    assert profile.step_ms_at(1, 2000) == pytest.approx(8.0)


def test_nothing_to_do_takes_no_time():
    profile = small()
    assert profile.step_ms_at(0, 500) == 0.0
    assert profile.prefill_ms(100, 0) == 0.0
    assert profile.iteration_ms(0, 0, 0, 0) == 0.0


def test_a_tiny_chunk_still_reads_all_weights():
    profile = small(a_ms=1.0)
    assert profile.prefill_ms(0, 10) < profile.weight_read_ms
    assert profile.chunk_ms(10) == profile.weight_read_ms


def test_decodes_beside_a_chunk_add_only_what_they_take_above_the_weight_read():
    profile = small()
    assert profile.iteration_ms(1000, 0, 9, 1000) == pytest.approx(profile.prefill_ms(0, 1000) + 26.0 - 4.0)


def test_scaling_moves_prefill_by_compute_and_steps_by_bandwidth_and_leaves_overhead():
    scaled = small().scaled(compute=2.0, bandwidth=5.0, source="made up")
    assert (scaled.a_ms, scaled.b_ms_per_token) == (3.0, 0.01)
    assert scaled.step_ms[1] == pytest.approx((7.0 / 5 + 1, 25.0 / 5 + 1))
    assert scaled.estimated
    assert scaled.error is None
    assert scaled.source == "made up"


@pytest.mark.parametrize("ratio", [0.0, -1.0])
def test_scaling_by_nothing_is_refused(ratio):
    with pytest.raises(ValueError, match="positive"):
        small().scaled(compute=ratio, bandwidth=1.0, source="")
    with pytest.raises(ValueError, match="positive"):
        small().scaled(compute=1.0, bandwidth=ratio, source="")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"b_ms_per_token": -0.1}, "b_ms_per_token"),
        ({"batches": (1,), "step_ms": ((4.0, 6.0),)}, "at least two"),
        ({"batches": (9, 1)}, "must rise"),
        ({"batches": (0, 9)}, "at least 1"),
        ({"contexts": (5, 5)}, "must rise"),
        ({"step_ms": ((4.0, 6.0),)}, "2 rows of 2"),
        ({"step_ms": ((4.0,), (8.0,))}, "2 rows of 2"),
        ({"step_ms": ((0.0, 6.0), (8.0, 26.0))}, "positive"),
        ({"step_ms": ((4.0, 3.0), (8.0, 26.0))}, "must not fall"),
        ({"step_ms": ((4.0, 6.0), (3.0, 26.0))}, "must not fall"),
    ],
)
def test_a_profile_that_makes_no_sense_is_refused(changes, complaint):
    table = {name: getattr(small(), name) for name in Profile.__struct_fields__} | changes
    with pytest.raises(ValueError, match=complaint):
        Profile(**table)
    with pytest.raises(msgspec.ValidationError, match=complaint):
        msgspec.json.decode(msgspec.json.encode(table), type=Profile)


@given(profiles)
def test_a_profile_survives_json(profile):
    assert msgspec.json.decode(msgspec.json.encode(profile), type=Profile) == profile
