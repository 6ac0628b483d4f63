"""How the cards and NICs of the fleet fare: the last word of every agent, and how old it is."""

from collections import OrderedDict
from collections.abc import Iterator

from msgspec import Struct

from quartet_bus.messages import NodeTelemetry

KEEP_NS = 60 * 1_000_000_000
"""An agent says it once a second; what is a minute old is no news of anything."""


class TelemetryView(Struct, frozen=True):
    """One node's telemetry. ``age_ns`` is since it was heard here; the reading was older by its own ``age_ms``."""

    told: NodeTelemetry
    age_ns: int


class TelemetryTable:
    """The newest telemetry of at most ``max_nodes`` nodes; of more, those heard longest ago are forgotten."""

    def __init__(self, max_nodes: int) -> None:
        self._max_nodes = max_nodes
        self._nodes: OrderedDict[str, tuple[NodeTelemetry, int]] = OrderedDict()  # longest unheard first

    def heard(self, told: NodeTelemetry, now_ns: int) -> None:
        """An agent said how its host fares. What overtook a later word of the same agent is not news."""
        known = self._nodes.get(told.node)
        if known is not None and known[0].incarnation == told.incarnation and known[0].number >= told.number:
            return
        self._nodes[told.node] = (told, now_ns)
        self._nodes.move_to_end(told.node)
        if len(self._nodes) > self._max_nodes:
            self._nodes.popitem(last=False)

    def forget(self, now_ns: int) -> None:
        """Drop what is too old."""
        while self._nodes and now_ns - next(iter(self._nodes.values()))[1] > KEEP_NS:
            self._nodes.popitem(last=False)

    def views(self, node: str, now_ns: int) -> Iterator[TelemetryView]:
        """Of ``node``, or of all by name when it is ""."""
        for name in sorted(self._nodes):
            if node in ("", name):
                told, heard_ns = self._nodes[name]
                yield TelemetryView(told, now_ns - heard_ns)
