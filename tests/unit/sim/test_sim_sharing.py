"""Links that transfers share equally."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_sim.sharing import SharedLink

FLOWS = st.lists(st.tuples(st.floats(0, 50), st.integers(1, 5_000_000)), min_size=1, max_size=12)


def ends(flows, gb_per_s=1.0):
    """When each flow of (begin, size) is done, told by the link."""
    link, found, waiting = SharedLink(gb_per_s), {}, sorted((begin, number) for number, (begin, _) in enumerate(flows))
    while waiting or link.flows:
        next_ms = link.next_ms()
        if waiting and (next_ms is None or waiting[0][0] <= next_ms):
            now_ms, number = waiting.pop(0)
            for done in link.finished(now_ms):
                found[done] = now_ms
            link.begin(number, flows[number][1], now_ms)
        else:
            for done in link.finished(next_ms):
                found[done] = next_ms
    return [found[number] for number in range(len(flows))]


def test_alone_a_transfer_has_all_of_the_link():
    assert ends([(0.0, 3_000_000)]) == [3.0]


def test_two_equal_ones_take_twice_as_long_and_a_small_one_is_hardly_held_up_by_a_large_one():
    assert ends([(0.0, 1_000_000), (0.0, 1_000_000)]) == [2.0, 2.0]
    assert ends([(0.0, 10_000_000), (0.0, 1_000_000)]) == [pytest.approx(11.0), pytest.approx(2.0)]


def test_whoever_leaves_leaves_its_share():
    link = SharedLink(1.0)
    link.begin("a", 2_000_000, 0.0)
    link.begin("b", 2_000_000, 0.0)
    link.withdraw("b", 1.0)
    assert link.next_ms() == pytest.approx(2.5)
    link.withdraw("nobody", 1.0)
    with pytest.raises(ValueError, match="under way"):
        link.begin("a", 1, 1.0)


@given(FLOWS)
def test_the_link_is_never_idle_while_there_is_work_and_never_quicker_than_it_is(flows):
    done = ends(flows)
    busy_until = 0.0
    for begin, size in sorted(flows):
        busy_until = max(busy_until, begin) + size / 1e6
    assert max(done) == pytest.approx(busy_until)  # whatever the order, all work takes as long as all work takes
    for (begin, size), end in zip(flows, done, strict=True):
        assert end >= begin + size / 1e6 - 1e-6
