"""Transfers explored with the code that runs, the conductor and both lease tables; all of it: ``make explore``."""

from explore.pages import PageWorld
from explore.search import explore
from explore.world import World
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule


def test_without_faults_every_order_of_everything_ends_in_done():
    found = explore(0)
    assert (found.left, found.worlds) == (0, 1660)
    assert set(found.machine) == {"reserving", "reserved", "moving", "committing", "committed"}


def test_with_one_fault_early_in_the_story_nothing_leaks_and_everybody_hears():
    found = explore(1, limit=300)
    assert found.kinds["takeover"] > 0
    assert found.kinds["dies"] > 0
    assert found.kinds["double"] > 0


def test_page_outs_without_faults_end_with_the_page_elsewhere():
    found = explore(0, kind=PageWorld)
    assert found.left == 0
    assert found.kinds["use"] > 0
    assert set(found.machine) == {"reserving", "moving", "committing", "committed"}, "ready at once"


def test_page_outs_with_one_fault_early_in_the_story_leak_nothing_and_lose_no_page():
    found = explore(1, limit=400, kind=PageWorld)
    assert found.kinds["takeover"] > 0
    assert found.kinds["dies"] > 0


class LongStory(RuleBasedStateMachine):
    """Two or three transfers that fight for the same blocks and one link, and many faults."""

    kind = World

    @initialize(transfers=st.integers(1, 3), room=st.integers(1, 2), faults=st.integers(0, 8))
    def begins(self, transfers, room, faults):
        self.world = self.kind(faults, transfers=transfers, room=room)

    @precondition(lambda self: self.world.steps())
    @rule(data=st.data())
    def something_happens(self, data):
        self.world.step(*data.draw(st.sampled_from(self.world.steps())))

    @precondition(lambda self: not self.world.at_rest)
    @rule(data=st.data(), count=st.integers(1, 6))
    def all_goes_well_for_a_while(self, data, count):
        for _ in range(count):
            steps = [step for step in self.world.steps() if step[0] in self.kind.FREE]
            if steps:
                self.world.step(*data.draw(st.sampled_from(steps)))

    @rule()
    def nothing_happens(self):
        self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain()


TestLongStory = LongStory.TestCase
TestLongStory.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


class LongPages(LongStory):
    """Page-outs that meet each other, users, evictions and many faults."""

    kind = PageWorld

    @initialize(transfers=st.integers(1, 3), faults=st.integers(0, 8))
    def begins(self, transfers, faults):
        self.world = PageWorld(faults, transfers=transfers, room=transfers)


TestLongPages = LongPages.TestCase
TestLongPages.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
