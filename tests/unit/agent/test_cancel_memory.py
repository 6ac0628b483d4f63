"""Cancels that come before what they cancel."""

from hypothesis import given
from hypothesis import strategies as st

from quartet_agent.cancels import CancelMemory, matches
from quartet_bus.messages import Cancel, StreamId

tenants = st.sampled_from(["", "a", "b"])
numbers = st.integers(0, 2)


@given(
    cancels=st.lists(
        st.builds(Cancel, st.sampled_from("xy"), numbers, numbers, st.just("client"), tenants), max_size=8
    ),
    tenant=st.sampled_from(["a", "b"]),
    stream=st.builds(StreamId, st.sampled_from("xy"), st.integers(1, 2), st.integers(1, 2)),
)
def test_memory_answers_as_a_scan_of_all_cancels_would(cancels, tenant, stream):
    memory = CancelMemory()
    for cancel in cancels:
        memory.remember(cancel, 100.0)
    assert memory.covers(tenant, stream, 105.0) is any(matches(cancel, tenant, stream) for cancel in cancels)


def test_a_cancel_is_forgotten_after_ten_seconds():
    memory = CancelMemory()
    memory.remember(Cancel("x"), 100.0)
    assert memory.covers("a", StreamId("x"), 109.9)
    assert not memory.covers("a", StreamId("x"), 110.0)


def test_memory_is_bounded_and_forgets_the_oldest_first():
    memory = CancelMemory(max_remembered=3)
    for name in "abcd":
        memory.remember(Cancel(name), 100.0)
    assert len(memory) == 3
    assert not memory.covers("t", StreamId("a"), 101.0)
    assert memory.covers("t", StreamId("d"), 101.0)


def test_another_tenants_cancel_means_nothing():
    cancel = Cancel("x", tenant="mallory")
    assert not matches(cancel, "alice", StreamId("x"))
    assert matches(cancel, "mallory", StreamId("x", 3, 2))


def test_a_try_is_cancelled_alone():
    cancel = Cancel("x", 1, 2)
    assert matches(cancel, "", StreamId("x", 1, 2))
    assert not matches(cancel, "", StreamId("x", 1, 1))
    assert not matches(cancel, "", StreamId("x", 2, 2))
