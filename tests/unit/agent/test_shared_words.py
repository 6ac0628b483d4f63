"""The words that agent and beating child share."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_agent.beats.shared import SharedWords
from quartet_core.heartbeat import BeatWorker

workers_lists = st.lists(
    st.builds(BeatWorker, st.integers(0, 255), st.integers(0, 65535), st.integers(0, 2**32 - 1)), max_size=255
)


@pytest.fixture
def both_sides():
    fd = SharedWords.create()
    agent, child = SharedWords(fd), SharedWords(fd)
    yield agent, child
    agent.close()
    child.close()
    os.close(fd)


@given(history=st.lists(workers_lists, min_size=1, max_size=5))
def test_the_child_reads_exactly_what_the_agent_wrote_last(history):
    fd = SharedWords.create()
    agent, child = SharedWords(fd), SharedWords(fd)
    try:
        for workers in history:
            agent.write(workers)
            assert child.workers() == workers
            assert len(child.raw()) == 8 * len(workers)
    finally:
        agent.close()
        child.close()
        os.close(fd)


def test_a_sequence_is_taken_once_and_seen_by_the_agent(both_sides):
    agent, child = both_sides
    assert agent.sequence == 0
    assert [child.begin(), child.begin()] == [1, 2]
    assert agent.sequence == 2


def test_more_workers_than_a_beat_carries_are_refused(both_sides):
    agent, _ = both_sides
    with pytest.raises(ValueError, match="255"):
        agent.write([BeatWorker(0, 0, 0)] * 256)


def test_counts_add_up(both_sides):
    agent, child = both_sides
    child.count(2, 1)
    child.count(2, 0)
    assert (agent.sent, agent.failed) == (4, 1)
