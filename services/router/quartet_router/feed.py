"""The feed: fleet state, inventories, affinity and links as they arrive, and asking for what is missing."""

import array
import sys
from collections.abc import Callable

from quartet_bus import subjects
from quartet_bus.messages import (
    AffinityUpdate,
    ControlRequest,
    FleetDelta,
    FleetSnapshot,
    LinkTable,
    NodeInventory,
    NodeStamp,
    WorkerState,
)
from quartet_bus.metrics import Metrics
from quartet_bus.subjects import Topic
from quartet_core.linkbook import LinkBook, PricedLink
from quartet_core.routing import Routing

Say = Callable[[Topic[ControlRequest], ControlRequest], None]

_ASK_PAUSE_MS = 500.0

_UNHEARD_S = 3
"""For so long a worker that was just announced is taken for up without any beat heard of it."""

_COLLECTOR_SILENCE_MS = 2000.0
"""Collectors say a snapshot a few times a second: one silent for so long is gone."""


class Feed:
    """Keeps a ``Routing`` in step with the bus. ``lost`` is called with each worker whose requests are lost."""

    def __init__(
        self, routing: Routing, links: LinkBook, say: Say, metrics: Metrics, lost: Callable[[str], None],
        *, rows: int, hashes: int, node_silence_ms: float,
    ) -> None:  # fmt: skip
        self._routing = routing
        self._links = links
        self._say = say
        self._lost = lost
        self._rows = rows
        self._hashes = hashes
        self._numbers: dict[str, tuple[int, int]] = {}  # collector → (incarnation, last delta)
        self._affinity: dict[str, tuple[int, int]] = {}  # worker → (incarnation, last update)
        self._asked_ms: dict[str, float] = {}
        self._heard_ms: dict[str, float] = {}  # collector → its last word
        self._nodes_ms: dict[str, float] = {}  # node → its last inventory
        self._unheard: dict[str, int] = {}  # worker → seconds in which collectors spoke, and not of it
        self._node_silence_ms = node_silence_ms
        self._newest_ms = 0.0
        self._gaps = metrics.counter("fleet_gaps", "Deltas or affinity updates missed, by kind.", ("kind",))
        self._refused = metrics.counter("workers_refused", "Announced workers that cannot be routed to.", ("reason",))

    def ask_all(self) -> None:
        """Have every node and collector say all it knows: what a router does when it starts."""
        self._say(subjects.control("agent", "_all", "inventory"), ControlRequest())
        self._say(subjects.control("agent", "_all", "affinity"), ControlRequest())
        self._say(subjects.control("collector", "_all", "snapshot"), ControlRequest())

    def age_ms(self, now_ms: float) -> float:
        """How long no collector has said anything; 0 before the first word. Stale state is told, and still used:
        routers that stop at it stop all at once."""
        return max(0.0, now_ms - self._newest_ms) if self._newest_ms else 0.0

    def inventory(self, message: NodeInventory, now_ms: float) -> list[str]:
        """A node's static facts; return what was refused of it, for the log."""
        self._nodes_ms[message.node] = now_ms
        names = {slot: w.id for slot, w in enumerate(self._routing.fleet.workers) if w is not None}
        fabrics = {link.kind: link.gb_per_s for link in message.links}
        vacated, refused = self._routing.learn(message.node, message.workers, now_ms, fabrics)
        for slot in vacated:
            self._affinity.pop(names[slot], None)
            self._lost(names[slot])
        if any(worker.id not in self._affinity for worker in message.workers):
            self._ask("agent", message.node, "affinity", now_ms)
        for error in refused:
            self._refused.labels(type(error).__name__).inc()
        return [str(error) for error in refused]

    def delta(self, message: FleetDelta, now_ms: float) -> None:
        """What changed; a gap asks its collector for everything."""
        known = self._numbers.get(message.collector)
        if known != (message.incarnation, message.number - 1):
            if known is not None and known[0] == message.incarnation and message.number <= known[1]:
                return  # a duplicate or an overtaken one: the snapshot that overtook it knows more
            self._gaps.labels("delta").inc()
            self._ask("collector", message.collector, "snapshot", now_ms)
        self._numbers[message.collector] = (message.incarnation, message.number)
        self._states(message.collector, message.changes, message.stamps, now_ms)

    def snapshot(self, message: FleetSnapshot, now_ms: float) -> None:
        """Everything one collector knows."""
        known = self._numbers.get(message.collector)
        if known is None or known[0] != message.incarnation or known[1] < message.number:
            self._numbers[message.collector] = (message.incarnation, message.number)
        self._states(message.collector, message.workers, message.stamps, now_ms)

    def affinity(self, message: AffinityUpdate, now_ms: float) -> None:
        """Which prefixes a worker gained or lost; a gap asks for its full set."""
        routing = self._routing
        slot = routing.fleet.slot_of(message.worker)
        if slot is None:
            return
        worker = routing.fleet.at(slot)
        if (message.rows, message.hashes) != (self._rows, self._hashes):
            self._gaps.labels("affinity_shape").inc()
            return
        if worker.incarnation != message.incarnation:
            return
        if message.full:
            routing.affinity.replace(slot, _rows(message.on))
            self._affinity[message.worker] = (message.incarnation, message.number)
            return
        known = self._affinity.get(message.worker)
        if known is None or known != (message.incarnation, message.number - 1):
            if known is not None and known[0] == message.incarnation and message.number <= known[1]:
                return
            self._gaps.labels("affinity").inc()
            self._ask("agent", worker.node, "affinity", now_ms)
            return
        self._affinity[message.worker] = (message.incarnation, message.number)
        routing.affinity.turn_on(slot, _rows(message.on))
        routing.affinity.turn_off(slot, _rows(message.off))

    def links(self, message: LinkTable, now_ms: float) -> None:
        """The active coordinator's link table."""
        if not self._links.hear(message.term, message.coordinator, now_ms):
            return
        self._links.clear()
        for link in message.links:
            self._links.put(
                link.source, link.target, PricedLink(link.kind, link.gb_per_s, link.setup_ms, link.in_flight_bytes)
            )

    def tend(self, now_ms: float) -> list[str]:
        """About once a second: a collector that fell silent has no say any more, a worker that collectors never heard
        is doubted, a node that announces nothing is gone. Return the nodes that went."""
        for collector, heard_ms in list(self._heard_ms.items()):
            if now_ms - heard_ms > _COLLECTOR_SILENCE_MS:
                del self._heard_ms[collector]
                self._numbers.pop(collector, None)
                self._routing.fleet.forget_collector(collector)
        for worker in self._routing.fleet.workers:
            if worker is None:
                continue
            if worker.words or not self._heard_ms:
                self._unheard.pop(worker.id, None)
                continue
            self._unheard[worker.id] = self._unheard.get(worker.id, 0) + 1
            if self._unheard[worker.id] >= _UNHEARD_S:
                self._routing.doubt(worker.slot, now_ms)
        return self._forget_silent_nodes(now_ms)

    def _forget_silent_nodes(self, now_ms: float) -> list[str]:
        """Nodes whose inventories stopped while others' still come (else the broker is away, and everybody silent)."""
        if not self._nodes_ms or now_ms - max(self._nodes_ms.values()) > self._node_silence_ms:
            return []
        gone = [node for node, heard_ms in self._nodes_ms.items() if now_ms - heard_ms > self._node_silence_ms]
        for node in gone:
            del self._nodes_ms[node]
            names = [worker.id for worker in self._routing.fleet.workers if worker is not None and worker.node == node]
            self._routing.forget_node(node)
            for name in names:
                self._affinity.pop(name, None)
                self._lost(name)
        return gone

    def _states(
        self, collector: str, states: tuple[WorkerState, ...], stamps: tuple[NodeStamp, ...], now_ms: float
    ) -> None:
        self._heard_ms[collector] = self._newest_ms = now_ms
        hear = self._routing.hear
        for state in states:
            dead = hear(collector, state.worker, state.incarnation, state.state, state.beat, state.verdict, now_ms)
            if dead is not None:
                self._affinity.pop(state.worker, None)
                self._lost(state.worker)
        if stamps:
            for slot in self._routing.stamp(collector, ((stamp.node, stamp.sequence) for stamp in stamps), now_ms):
                worker = self._routing.fleet.at(slot).id
                self._affinity.pop(worker, None)
                self._lost(worker)

    def _ask(self, service: str, instance: str, verb: str, now_ms: float) -> None:
        name = f"{service}.{instance}.{verb}"
        if now_ms - self._asked_ms.get(name, -_ASK_PAUSE_MS) < _ASK_PAUSE_MS:
            return
        self._asked_ms[name] = now_ms
        self._say(subjects.control(service, instance, verb), ControlRequest())


def _rows(data: bytes) -> "array.array[int]":
    rows = array.array("I", data)
    if sys.byteorder == "big":
        rows.byteswap()
    return rows
