"""The fleet as it was last heard of: inventories say what there is, collectors say how it fares.

Several collectors may speak of the same worker. Each one's words are kept apart, because numbers and incarnations are
its own; asked about a worker, the table lets the one that heard the later beat speak, and of two that heard the same
beat the one that thinks the worker more alive. All ages are on this process's clock, from when something was heard.
"""

from collections import OrderedDict
from collections.abc import Iterator

from msgspec import Struct, field

from quartet_bus.messages import FleetDelta, FleetSnapshot, NodeInventory, NodeStamp, WorkerInfo, WorkerState
from quartet_core.verdict import Verdict

KEEP_NODE_NS = 600 * 1_000_000_000
"""A node whose inventory was not heard for ten minutes has left the fleet."""

KEEP_COLLECTOR_NS = 5 * 1_000_000_000
"""A collector silent for so long is gone; it speaks at least every 50 ms."""

_MAX_COLLECTORS = 16


class WorkerView(Struct, frozen=True):
    """One worker: where it is, what it is, and its state, None until a collector spoke of this incarnation."""

    node: str
    info: WorkerInfo
    state: WorkerState | None


class NodeView(Struct, frozen=True):
    """One node. ``beat_age_ns`` counts from when its newest beat was heard of; None when none was."""

    inventory: NodeInventory
    inventory_age_ns: int
    beat_age_ns: int | None


class _Node(Struct):
    inventory: NodeInventory
    heard_ns: int


class _Stamp(Struct):
    stamp: NodeStamp
    heard_ns: int


class _Collector(Struct):
    incarnation: int
    heard_ns: int
    states: dict[str, WorkerState] = field(default_factory=dict)
    stamps: dict[str, _Stamp] = field(default_factory=dict)


class FleetTable:
    """Nodes, their workers, and what up to 16 collectors say of them; at most ``max_workers`` of either."""

    def __init__(self, max_workers: int) -> None:
        self._max_workers = max_workers
        self._nodes: OrderedDict[str, _Node] = OrderedDict()  # longest unheard first
        self._where: dict[str, str] = {}
        self._collectors: OrderedDict[str, _Collector] = OrderedDict()  # longest unheard first

    def announced(self, inventory: NodeInventory, now_ns: int) -> None:
        """A node said what it has. One that would exceed the table's size is not taken in."""
        known = self._nodes.get(inventory.node)
        before = len(known.inventory.workers) if known else 0
        if len(self._where) - before + len(inventory.workers) > self._max_workers:
            return
        if known is not None:
            self._forget_workers(known.inventory)
        self._nodes[inventory.node] = _Node(inventory, now_ns)
        self._nodes.move_to_end(inventory.node)
        for worker in inventory.workers:
            self._where[worker.id] = inventory.node

    def snapshot(self, snapshot: FleetSnapshot, now_ns: int) -> None:
        """A collector said all it believes."""
        collector = self._collector(snapshot.collector, snapshot.incarnation, now_ns)
        collector.states = {state.worker: state for state in snapshot.workers[: self._max_workers]}
        self._stamp(collector, snapshot.stamps, now_ns)

    def delta(self, delta: FleetDelta, now_ns: int) -> None:
        """A collector said what changed. Whatever a lost delta held comes with the next snapshot, well within 1 s."""
        collector = self._collector(delta.collector, delta.incarnation, now_ns)
        for state in delta.changes:
            if state.worker in collector.states or len(collector.states) < self._max_workers:
                collector.states[state.worker] = state
        self._stamp(collector, delta.stamps, now_ns)

    def forget(self, now_ns: int) -> None:
        """Drop who has been silent for too long."""
        while self._nodes and now_ns - next(iter(self._nodes.values())).heard_ns > KEEP_NODE_NS:
            _, gone = self._nodes.popitem(last=False)
            self._forget_workers(gone.inventory)
        while self._collectors and now_ns - next(iter(self._collectors.values())).heard_ns > KEEP_COLLECTOR_NS:
            self._collectors.popitem(last=False)

    def collectors(self) -> list[str]:
        """The collectors that speak."""
        return sorted(self._collectors)

    def nodes(self, now_ns: int) -> list[NodeView]:
        """All nodes, by name."""
        return [self._node_view(self._nodes[name], now_ns) for name in sorted(self._nodes)]

    def workers(self) -> Iterator[WorkerView]:
        """All workers, by node and ordinal."""
        for name in sorted(self._nodes):
            for info in sorted(self._nodes[name].inventory.workers, key=lambda worker: worker.ordinal):
                if self._where.get(info.id) == name:
                    yield WorkerView(name, info, self._state(info))

    def worker(self, worker: str) -> WorkerView | None:
        """One worker, None when no node announces it."""
        node = self._where.get(worker)
        if node is None:
            return None
        for info in self._nodes[node].inventory.workers:
            if info.id == worker:
                return WorkerView(node, info, self._state(info))
        return None

    def _state(self, info: WorkerInfo) -> WorkerState | None:
        node, heard = self._where.get(info.id), []
        for collector in self._collectors.values():
            state = collector.states.get(info.id)
            if state is not None and state.incarnation == info.incarnation:
                # As in ``quartet_core.sightings``: a word counts with the newest beat that its collector stamped since.
                stamp = collector.stamps.get(node) if node is not None else None
                heard.append((max(state.beat, stamp.stamp.sequence if stamp else -1), -state.verdict, state))
        return max(heard, key=lambda each: each[:2])[2] if heard else None

    def _node_view(self, node: _Node, now_ns: int) -> NodeView:
        name, incarnation = node.inventory.node, node.inventory.incarnation
        heard = [
            stamp.heard_ns
            for collector in self._collectors.values()
            if (stamp := collector.stamps.get(name)) is not None and stamp.stamp.incarnation == incarnation
        ]
        return NodeView(node.inventory, now_ns - node.heard_ns, now_ns - max(heard) if heard else None)

    def _collector(self, name: str, incarnation: int, now_ns: int) -> _Collector:
        known = self._collectors.get(name)
        if known is None or known.incarnation != incarnation:
            known = self._collectors[name] = _Collector(incarnation, now_ns)
            while len(self._collectors) > _MAX_COLLECTORS:
                self._collectors.popitem(last=False)
        known.heard_ns = now_ns
        self._collectors.move_to_end(name)
        return known

    def _stamp(self, collector: _Collector, stamps: tuple[NodeStamp, ...], now_ns: int) -> None:
        for stamp in stamps:
            known = collector.stamps.get(stamp.node)
            if known is None:
                if len(collector.stamps) < self._max_workers:
                    collector.stamps[stamp.node] = _Stamp(stamp, now_ns)
            elif (known.stamp.incarnation, known.stamp.sequence) != (stamp.incarnation, stamp.sequence):
                known.stamp = stamp
                known.heard_ns = now_ns

    def _forget_workers(self, inventory: NodeInventory) -> None:
        for worker in inventory.workers:
            if self._where.get(worker.id) == inventory.node:
                del self._where[worker.id]


def verdict_of(view: WorkerView) -> Verdict | None:
    """What is believed of a worker; None when no collector spoke of it, or with a verdict we do not know."""
    if view.state is None:
        return None
    try:
        return Verdict(view.state.verdict)
    except ValueError:  # a newer collector's
        return None
