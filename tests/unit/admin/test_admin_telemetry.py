"""The admin's table of telemetry: the newest word of each agent, and nothing old."""

from quartet_admin.telemetry import KEEP_NS, TelemetryTable
from quartet_bus.messages import NodeTelemetry

SECOND_NS = 1_000_000_000


def told(node: str, number: int, incarnation: int = 1) -> NodeTelemetry:
    return NodeTelemetry(node=node, incarnation=incarnation, number=number, source="simulated")


def numbers(table: TelemetryTable, node: str = "", now_ns: int = 0) -> dict[str, int]:
    return {view.told.node: view.told.number for view in table.views(node, now_ns)}


def test_the_newest_word_of_each_agent_is_kept_and_a_restarted_agent_begins_anew():
    table = TelemetryTable(10)
    for message in (told("b", 1), told("a", 2), told("a", 3), told("a", 2), told("b", 7)):
        table.heard(message, 0)
    assert numbers(table) == {"a": 3, "b": 7}
    assert numbers(table, "b") == {"b": 7}
    table.heard(told("a", 1, incarnation=2), SECOND_NS)
    assert numbers(table) == {"a": 1, "b": 7}
    assert [view.age_ns for view in table.views("", 3 * SECOND_NS)] == [2 * SECOND_NS, 3 * SECOND_NS]


def test_what_was_not_heard_for_a_minute_is_gone():
    table = TelemetryTable(10)
    table.heard(told("a", 1), 0)
    table.heard(told("b", 1), SECOND_NS)
    table.forget(KEEP_NS + 1)
    assert numbers(table) == {"b": 1}


def test_more_nodes_than_there_is_room_for_forget_the_longest_unheard():
    table = TelemetryTable(2)
    for now_s, node in enumerate("abac"):
        table.heard(told(node, now_s), now_s)
    assert sorted(numbers(table)) == ["a", "c"]
