"""The collector: hears beats and inventories, says what changed in the fleet."""

import random
from collections.abc import Callable, Sequence

import msgspec

from quartet_bus import subjects
from quartet_bus.bus import Bus
from quartet_bus.config.keys import MasterKeys
from quartet_bus.config.schema import Config
from quartet_bus.messages import ControlReply, ControlRequest, FleetDelta, FleetSnapshot, NodeInventory, NodeStamp
from quartet_bus.ring import RecordTooLarge, RingWriter
from quartet_bus.service import Service
from quartet_bus.subjects import Topic
from quartet_core.heartbeat import Beat
from quartet_heartbeat_collector.batch import BeatBatch, from_beats
from quartet_heartbeat_collector.fleet import Fleet, limits_of
from quartet_heartbeat_collector.metrics import CollectorMetrics
from quartet_heartbeat_collector.roster import Outcome

_STEPS_INTERVAL_S = 0.2
"""How often the verdicts are told whose engines stepped: a fifth of the shortest time that means frozen."""

_COUNT_INTERVAL_S = 1.0
"""How often metrics are brought up to date: a pass over the fleet for whoever scrapes them every few seconds."""

_ASK_INTERVAL_NS = 200_000_000
"""Inventories are asked for at most so often: agents also say them by themselves every few seconds."""

_SNAPSHOT_SHORTEST_NS = 20_000_000
"""However many ask for a snapshot, all get the same one."""

_encode = msgspec.msgpack.Encoder().encode


class CollectorService(Service):
    """Hears beats (from its edge) and inventories; says deltas, stamps and snapshots; owns the verdicts.

    ``ring`` is where deltas also go, if an edge attached one. ``receive`` is called before everybody is judged, so
    that what has arrived is read first. ``trouble`` is why nothing can be received just now, set by the edge, as is
    ``kernel_drops``, the count of datagrams that the kernel had no room for.
    """

    name = "collector"

    def __init__(self, bus: Bus, config: Config, *, instance: str, random: random.Random) -> None:
        super().__init__(bus, config, instance=instance, random=random)
        fleet = config.fleet
        self.incarnation = random.getrandbits(48) + 1
        self.ring: RingWriter | None = None
        self.receive: Callable[[], None] | None = None
        self.kernel_drops: Callable[[], int] = int
        self.trouble: str | None = None
        self.counts = CollectorMetrics(self.metrics)
        self.fleet = Fleet(limits_of(fleet), MasterKeys(fleet).keys)
        self._number = 0
        self._delta_interval_ns = round(fleet.delta_interval_ms * 1e6)
        self._batch_ns = round(fleet.receive_batch_ms * 1e6)
        self._read_ns = 0
        self._said_ns = 0
        self._flush_due = False
        self._asked_ns = -_ASK_INTERVAL_NS
        self._snapshot_ns = 0
        self._snapshot_due = False
        self._alarmed = False
        self._started = False
        self._delta = Topic(subjects.fleet_delta().subject, bytes)

    async def start(self) -> None:
        """Hear inventories, ask for all of them, and begin to judge."""
        await super().start()
        fleet = self.config.fleet
        await self.hear(subjects.inventory_all(), self._on_inventory)
        await self.controls({"snapshot": self._on_snapshot_wanted, "status": self._on_status})
        self.every(fleet.suspect_ms / 2000, self._tick)
        self.every(fleet.stamp_interval_ms / 1000, self._stamp)
        self.every(fleet.snapshot_interval_ms / 1000, self._snapshot)
        self.every(_STEPS_INTERVAL_S, self._note_steps)
        self.every(_COUNT_INTERVAL_S, self._count)
        self._ask_inventories()
        self._started = True

    def not_ready(self) -> str | None:
        """Ready once started unless in ``trouble``: a fleet without agents is a fleet, and is told as one."""
        return self.trouble if self._started else "not started"

    def read(self) -> None:
        """Have the edge hand over what has arrived."""
        self._read_ns = self.now_ns()
        if self.receive is not None:
            self.receive()

    def heard(self, batch: BeatBatch) -> None:
        """Datagrams have just arrived."""
        self.fleet.hear(batch, self.now_ns())
        self._flush_soon()

    def heard_beats(self, beats: Sequence[Beat]) -> None:
        """Beats of a fleet that shares this process; their tags were never made, and are not checked."""
        self.heard(from_beats(beats))

    # Hearing

    def _on_inventory(self, inventory: NodeInventory) -> None:
        outcome = self.fleet.announce(inventory, self.now_ns())
        if outcome is Outcome.DUPLICATE:
            self.log.warning(
                "a former agent of this node speaks: a second agent with its name?",
                node=inventory.node,
                incarnation=inventory.incarnation,
            )
        elif outcome is Outcome.FULL:
            self.log.error("no room for another node", node=inventory.node, nodes=len(self.fleet.nodes))
        elif outcome is Outcome.NEW:
            self.log.info("node announced", node=inventory.node, workers=len(inventory.workers))
        self._flush_soon()

    def _on_snapshot_wanted(self, _: ControlRequest) -> ControlReply:
        wait_ns = self._snapshot_ns + _SNAPSHOT_SHORTEST_NS - self.now_ns()
        if wait_ns <= 0:
            self._snapshot()
        elif not self._snapshot_due:
            self._snapshot_due = True
            self.later(wait_ns / 1e9, self._snapshot)
        return ControlReply(True)

    def _on_status(self, _: ControlRequest) -> ControlReply:
        return ControlReply(True, payload=msgspec.json.encode(self.status()))

    def status(self) -> dict[str, object]:
        """Counts and the nodes' verdicts, for operators."""
        board, now_ns = self.fleet.board, self.now_ns()
        self.fleet.settle(now_ns)
        return {
            "incarnation": self.incarnation,
            "number": self._number,
            "received": board.received,
            "taken": board.taken,
            "superseded": board.superseded,
            "dropped": {str(reason): number for reason, number in board.dropped.items()},
            "lost": board.lost,
            "resumed": board.sequences.resumed,
            "kernel_drops": self.kernel_drops(),
            "ring_records": self.ring.records if self.ring else 0,
            "nodes": [
                {
                    "node": node.name,
                    "verdict": self.fleet.verdict(node).name.lower(),
                    "incarnation": node.incarnation,
                    "sequence": node.sequence,
                    "age_ms": (now_ns - node.heard_ns) / 1e6 if node.sequence >= 0 else None,
                    "lost": node.lost,
                    "workers": len(node.workers),
                }
                for node in self.fleet.nodes.values()
            ],
        }

    # In time

    def _tick(self) -> None:
        # After a pause of this process timers come in any order. Otherwise the last batch is young enough.
        if self.now_ns() - self._read_ns >= self._batch_ns:
            self.read()
        self.fleet.tick(self.now_ns())
        self._watch_alarm()
        self._ask_for_what_is_missing()
        self._flush_soon()

    def _note_steps(self) -> None:
        self.fleet.note_steps(self.now_ns())

    def _stamp(self) -> None:
        self.fleet.settle(self.now_ns())
        stamps = self.fleet.stamps()
        if stamps or self.fleet.changed:
            self._say_delta(stamps)

    def _snapshot(self) -> None:
        now_ns = self.now_ns()
        self.fleet.settle(now_ns)
        # What is not said yet is in the snapshot; saying it first keeps "after delta number" true.
        if self.fleet.changed:
            self._say_delta(())
        self._snapshot_ns, self._snapshot_due = now_ns, False
        states, stamps = self.fleet.states(), self.fleet.stamps()
        snapshot = FleetSnapshot(self.instance, self.incarnation, self._number, states, stamps)
        self.say(subjects.fleet_snapshot(), snapshot)
        self.counts.snapshots.inc()
        for name in self.fleet.drop_forgotten(now_ns):
            self.log.info("node forgotten", node=name)

    def _count(self) -> None:
        now_ns = self.now_ns()
        self.fleet.settle(now_ns)
        self.counts.update(self.fleet, now_ns)

    # Saying

    def _flush_soon(self) -> None:
        """Say what changed, now or as soon as the interval allows."""
        if self._flush_due or not self.fleet.changed:
            return
        wait_ns = self._said_ns + self._delta_interval_ns - self.now_ns()
        if wait_ns <= 0:
            self._say_delta(())
        else:
            self._flush_due = True
            self.later(wait_ns / 1e9, self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        if self.fleet.changed:
            self._say_delta(())

    def _say_delta(self, stamps: tuple[NodeStamp, ...]) -> None:
        changes = self.fleet.take_changes()
        self._number += 1
        self._said_ns = self.now_ns()
        data = _encode(FleetDelta(self.instance, self.incarnation, self._number, changes, stamps))
        if self.ring is not None:
            # First the ring: whoever shares it waits for nothing else.
            try:
                self.ring.append(data)
                self.counts.ring_records.inc()
            except RecordTooLarge:
                # Its readers see the gap in numbers and take the next snapshot.
                self.counts.ring_refused.inc()
        self.say(self._delta, data)
        self.counts.deltas.inc()
        self.counts.changes.inc(len(changes))

    def _ask_inventories(self) -> None:
        self._asked_ns = self.now_ns()
        self.say(subjects.control("agent", "_all", "inventory"), ControlRequest())

    def _ask_for_what_is_missing(self) -> None:
        if self.now_ns() - self._asked_ns < _ASK_INTERVAL_NS:
            return
        stale, strangers = self.fleet.take_unannounced()
        if strangers:
            self._ask_inventories()
        elif stale:
            self._asked_ns = self.now_ns()
            for node in stale:
                self.say(subjects.control("agent", node, "inventory"), ControlRequest())

    def _watch_alarm(self) -> None:
        alarm = self.fleet.alarm
        if alarm is not None and not self._alarmed:
            self.log.error("half of the fleet fell silent at once", silent=alarm.silent, known=alarm.known)
        elif alarm is None and self._alarmed:
            self.log.info("the fleet is heard again")
        self._alarmed = alarm is not None
