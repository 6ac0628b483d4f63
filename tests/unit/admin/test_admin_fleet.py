"""The fleet table: what there is, how it fares, and whose word counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_admin.fleet import KEEP_COLLECTOR_NS, KEEP_NODE_NS, FleetTable, verdict_of
from quartet_bus.messages import (
    FleetDelta,
    FleetSnapshot,
    KvLayout,
    NodeInventory,
    NodeStamp,
    WorkerInfo,
    WorkerState,
)
from quartet_core.verdict import Verdict

LAYOUT = KvLayout(16, 131_072, "bf16")


def info(name, ordinal=0, incarnation=1, **changes):
    fields = {
        "hardware": "H100_SXM5",
        "model": "llama",
        "precision": "fp8",
        "tp": 1,
        "gpus": (ordinal,),
        "kv_tokens": 100_000,
        "max_context": 8192,
        "max_batch": 256,
        "chunk_tokens": 2048,
        "layout": LAYOUT,
        "engine": "simulated",
    }
    return WorkerInfo(name, ordinal, incarnation, **(fields | changes))


def inventory(node, *workers, incarnation=1):
    return NodeInventory(node, incarnation, 1, workers)


def state(worker, beat=1, verdict=Verdict.UP, incarnation=1, word=0):
    return WorkerState(worker, incarnation, word, beat, verdict)


def snapshot(collector, *states, stamps=(), number=1, incarnation=1):
    return FleetSnapshot(collector, incarnation, number, states, stamps)


def delta(collector, *changes, stamps=(), number=1, incarnation=1):
    return FleetDelta(collector, incarnation, number, changes, stamps)


@pytest.fixture
def table():
    fleet = FleetTable(100)
    fleet.announced(inventory("n1", info("n1-1", 1), info("n1-0", 0)), 0)
    return fleet


def test_workers_come_by_node_and_ordinal_without_a_state_until_a_collector_spoke(table):
    table.announced(inventory("a", info("a-0")), 0)
    assert [(view.node, view.info.id, view.state) for view in table.workers()] == [
        ("a", "a-0", None),
        ("n1", "n1-0", None),
        ("n1", "n1-1", None),
    ]
    assert verdict_of(table.worker("a-0")) is None


def test_a_delta_changes_one_worker_and_a_snapshot_replaces_all(table):
    table.snapshot(snapshot("c", state("n1-0"), state("n1-1")), 0)
    table.delta(delta("c", state("n1-0", 2, Verdict.SUSPECT)), 1)
    assert verdict_of(table.worker("n1-0")) is Verdict.SUSPECT
    assert verdict_of(table.worker("n1-1")) is Verdict.UP
    table.snapshot(snapshot("c", state("n1-0", 3)), 2)
    assert verdict_of(table.worker("n1-0")) is Verdict.UP
    assert table.worker("n1-1").state is None


def test_a_state_of_another_incarnation_is_not_the_workers(table):
    table.snapshot(snapshot("c", state("n1-0", incarnation=7)), 0)
    assert table.worker("n1-0").state is None


words = st.lists(st.tuples(st.sampled_from("xyz"), st.integers(0, 3), st.sampled_from(list(Verdict))), max_size=20)


@given(words)
def test_the_later_beat_counts_and_of_equal_beats_the_more_alive_word(history):
    table = FleetTable(100)
    table.announced(inventory("n1", info("n1-0")), 0)
    last = {}
    for collector, beat, verdict in history:
        table.delta(delta(collector, state("n1-0", beat, verdict)), 0)
        last[collector] = (beat, -verdict)
    expected = max(last.values(), default=None)
    believed = table.worker("n1-0").state
    assert (believed and (believed.beat, -believed.verdict)) == expected


def test_a_word_counts_with_its_collectors_newest_stamp(table):
    table.snapshot(snapshot("hears", state("n1-0", 5), stamps=(NodeStamp("n1", 1, 900, 0),)), 0)
    table.delta(delta("lost", state("n1-0", 850, Verdict.DEAD)), 1)
    assert verdict_of(table.worker("n1-0")) is Verdict.UP


def test_a_collector_that_started_anew_is_believed_from_its_beginning(table):
    table.snapshot(snapshot("c", state("n1-0", 900, Verdict.DEAD)), 0)
    table.delta(delta("c", state("n1-0", 5), incarnation=2), 1)
    assert verdict_of(table.worker("n1-0")) is Verdict.UP


def test_a_silent_collector_is_forgotten_with_its_words(table):
    table.snapshot(snapshot("c", state("n1-0", 900, Verdict.DEAD)), 0)
    table.snapshot(snapshot("d", state("n1-0", 5)), KEEP_COLLECTOR_NS)
    table.forget(KEEP_COLLECTOR_NS + 1)
    assert table.collectors() == ["d"]
    assert verdict_of(table.worker("n1-0")) is Verdict.UP


def test_a_beats_age_counts_from_when_it_was_first_heard_of(table):
    stamp = NodeStamp("n1", 1, 10, 0)
    assert table.nodes(5)[0].beat_age_ns is None
    table.delta(delta("c", stamps=(stamp,)), 100)
    table.delta(delta("c", stamps=(stamp,), number=2), 150)  # the same beat again: it got no younger
    assert table.nodes(200)[0].beat_age_ns == 100
    table.delta(delta("c", stamps=(NodeStamp("n1", 1, 11, 0),), number=3), 210)
    assert table.nodes(220)[0].beat_age_ns == 10


def test_a_node_that_leaves_takes_its_workers_along(table):
    table.announced(inventory("n2", info("n2-0")), KEEP_NODE_NS)
    table.forget(KEEP_NODE_NS + 1)
    assert [view.info.id for view in table.workers()] == ["n2-0"]
    assert table.worker("n1-0") is None


def test_an_inventory_replaces_the_one_before(table):
    table.announced(inventory("n1", info("n1-0", incarnation=2), incarnation=2), 1)
    assert [view.info.incarnation for view in table.workers()] == [2]
    assert table.worker("n1-1") is None


def test_a_worker_that_moved_is_where_it_was_announced_last(table):
    table.announced(inventory("n2", info("n1-0")), 1)
    assert [(view.node, view.info.id) for view in table.workers()] == [("n1", "n1-1"), ("n2", "n1-0")]
    table.announced(inventory("n1", info("n1-1", 1)), 2)
    assert table.worker("n1-0").node == "n2"


def test_a_fleet_beyond_the_size_of_the_table_is_not_taken_in():
    table = FleetTable(3)
    table.announced(inventory("n1", info("n1-0"), info("n1-1", 1)), 0)
    table.announced(inventory("n2", info("n2-0"), info("n2-1", 1)), 0)
    assert [view.info.id for view in table.workers()] == ["n1-0", "n1-1"]
    table.announced(inventory("n1", info("n1-0")), 0)
    table.announced(inventory("n2", info("n2-0"), info("n2-1", 1)), 0)
    assert len(list(table.workers())) == 3


def test_a_verdict_of_a_newer_collector_is_unknown_not_fatal(table):
    table.delta(delta("c", WorkerState("n1-0", 1, 0, 1, 9)), 0)
    assert verdict_of(table.worker("n1-0")) is None
