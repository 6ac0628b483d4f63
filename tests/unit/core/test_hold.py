"""The hold queue: earliest deadline first within a priority, bounded, and every hold ends."""

from hypothesis import given
from hypothesis import strategies as st

from quartet_core.hold import HoldQueue


def put(queue, number, *, model="m", priority=0, deadline=0.0, arrival=None, until=100.0, size=10):
    return queue.put(
        ("t", f"r{number}", 1), model, priority=priority, deadline_ms=deadline, now_ms=0.0, until_ms=until,
        arrival=number if arrival is None else arrival, body_bytes=size,
    )  # fmt: skip


def order(queue, model="m"):
    return [held.key[1] for held in queue.first(model, 100)]


def test_earliest_deadline_first_within_priority_and_first_come_among_equals():
    queue = HoldQueue(max_requests=10, max_bytes=1000)
    put(queue, 1, deadline=300.0)
    put(queue, 2, deadline=100.0)
    put(queue, 3, deadline=100.0)
    put(queue, 4, deadline=900.0, priority=1)
    assert order(queue) == ["r4", "r2", "r3", "r1"]


def test_who_is_looked_at_and_put_back_keeps_its_place():
    queue = HoldQueue(max_requests=10, max_bytes=1000)
    for number in (1, 2, 3):
        put(queue, number, deadline=100.0)
    queue.take(("t", "r1", 1))
    put(queue, 1, deadline=100.0)
    assert order(queue) == ["r1", "r2", "r3"]


def test_count_and_bytes_are_bounded():
    queue = HoldQueue(max_requests=2, max_bytes=25)
    assert put(queue, 1)
    assert not put(queue, 2, size=16)
    assert put(queue, 2, size=15)
    assert not put(queue, 3, size=0)
    assert queue.bytes == 25


def test_the_same_request_is_held_once():
    queue = HoldQueue(max_requests=10, max_bytes=1000)
    assert put(queue, 1)
    assert not put(queue, 1)
    assert queue.bytes == 10


def test_holds_are_due_at_their_time_and_not_before():
    queue = HoldQueue(max_requests=10, max_bytes=1000)
    put(queue, 1, until=50.0)
    put(queue, 2, until=60.0, model="other")
    assert queue.due(49.9) == []
    assert [held.key[1] for held in queue.due(50.0)] == ["r1"]
    assert [held.key[1] for held in queue.due(60.0)] == ["r1", "r2"]


def test_a_tenants_backlog_is_what_it_has_waiting():
    queue = HoldQueue(max_requests=10, max_bytes=1000)
    for number in (1, 2):
        queue.put(
            ("t", f"r{number}", 1), "m", priority=0, deadline_ms=0.0, now_ms=0.0, until_ms=9.0, arrival=number,
            body_bytes=1, work_ms=40.0,
        )  # fmt: skip
    assert queue.backlog_ms("t") == 80.0
    assert queue.backlog_ms("other") == 0.0
    queue.take(("t", "r1", 1))
    queue.take(("t", "r2", 1))
    assert queue.backlog_ms("t") == 0.0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 8), st.integers(0, 3), st.floats(0, 1000)), max_size=60))
def test_the_queue_is_a_sorted_list_of_what_was_put_and_not_taken(history):
    queue, there = HoldQueue(max_requests=100, max_bytes=10_000), {}
    for number, (is_put, which, priority, deadline) in enumerate(history):
        if is_put and which not in there:
            assert put(queue, which, priority=priority, deadline=deadline, arrival=number, until=deadline)
            there[which] = (-priority, deadline, number)
        elif not is_put:
            assert (queue.take(("t", f"r{which}", 1)) is not None) is (which in there)
            there.pop(which, None)
    assert order(queue) == [f"r{which}" for which, _ in sorted(there.items(), key=lambda item: item[1])]
    assert len(queue) == len(there)
    assert queue.bytes == 10 * len(there)
    assert {held.key[1] for held in queue.due(1000.0)} == {f"r{which}" for which in there}
