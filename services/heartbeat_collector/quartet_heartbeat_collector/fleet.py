"""What this collector believes about the fleet, and what of it is new and not yet said.

Joins roster (who may speak), board (what the newest beats say) and verdicts (who is alive). It has no clock, socket or
bus: times are handed in, changes and states are handed out.
"""

from collections.abc import Iterable, Iterator

from quartet_bus.config.schema import FleetSection
from quartet_bus.messages import NodeInventory, NodeStamp, WorkerState
from quartet_core.verdict import MassSilence, Verdict, VerdictBoard, VerdictLimits
from quartet_core.word import BATCH, EPOCH, QUEUE, STATE_MASK, epoch_of, steps_of
from quartet_heartbeat_collector.batch import BeatBatch
from quartet_heartbeat_collector.board import Drop, Entry, FleetBoard
from quartet_heartbeat_collector.roster import Node, Outcome, Roster, Worker

_MS = 1_000_000
_BUSY_MASK = QUEUE.mask | BATCH.mask
_EPOCHS = EPOCH.levels


def limits_of(fleet: FleetSection) -> VerdictLimits:
    """The limits of verdicts as configured.

    One tick ages nobody by more than ``suspect_ms``: what lies further back, this collector slept through.
    """
    return VerdictLimits(
        beat_ns=fleet.beat_interval_us * 1000,
        suspect_floor_ns=round(fleet.suspect_ms * _MS),
        dead_ns=round(fleet.dead_ms * _MS),
        frozen_floor_ns=round(fleet.frozen_ms * _MS),
        tick_ns=round(fleet.suspect_ms * _MS / 2),
    )


class Fleet:
    """Nodes, workers and their verdicts.

    ``foreign_entries`` counts words of workers or worker incarnations that nobody announced: they change nothing.
    ``outcomes`` counts inventories by what they meant.
    """

    def __init__(self, limits: VerdictLimits, master_keys: Iterable[bytes] = ()) -> None:
        self.board = FleetBoard(limits.beat_ns)
        self.foreign_entries = 0
        self.outcomes = dict.fromkeys(Outcome, 0)
        self._limits = limits
        self._roster = Roster(limits.max_nodes, master_keys)
        self._verdicts = VerdictBoard(limits)
        self._changes: dict[tuple[str, int], WorkerState] = {}
        self._stale_epochs: dict[str, None] = {}
        self._strangers = 0
        self._met: set[str] = set()  # nodes whose present incarnation the verdicts know
        self._judged: set[str] = set()  # nodes of which there is a verdict, or was one

    @property
    def nodes(self) -> dict[str, Node]:
        """All announced nodes by name; what was heard of them is as of the last ``settle``."""
        return self._roster.nodes

    @property
    def alarm(self) -> MassSilence | None:
        """Set while half of eight or more nodes are silent at once."""
        return self._verdicts.alarm

    @property
    def changed(self) -> bool:
        """Whether there is anything to say."""
        return bool(self._changes)

    def verdict(self, node: Node, worker: Worker | None = None) -> Verdict:
        """The verdict on a node or one of its workers; a node that was never heard is dead."""
        found = self._verdicts.verdict(node.name, None if worker is None else worker.ordinal)
        return Verdict.DEAD if found is None or node.sequence < 0 else found

    def verdicts(self, node: Node) -> Iterator[tuple[Worker, Verdict]]:
        """All workers of ``node``, each with the verdict on it."""
        verdict, frozen = self.verdict(node), self._verdicts.frozen(node.name)
        for worker in node.workers.values():
            yield worker, Verdict.FROZEN if worker.ordinal in frozen and node.sequence >= 0 else verdict

    def announce(self, inventory: NodeInventory, now_ns: int) -> Outcome:
        """Take an inventory. Workers that are gone with it are dead at once."""
        outcome, node, gone = self._roster.announce(inventory, now_ns, self._is_dead)
        self.outcomes[outcome] += 1
        if node is None or outcome in (Outcome.LATE, Outcome.DUPLICATE, Outcome.FULL):
            return outcome
        for worker in gone:
            self._say(node, worker, Verdict.DEAD)
        if outcome is not Outcome.KNOWN:
            self.board.admit(node, now_ns, fresh=outcome is Outcome.NEW)
        if outcome is Outcome.NEW:
            self._met.discard(node.name)
            self._judged.discard(node.name)
        return outcome

    def hear(self, batch: BeatBatch, now_ns: int) -> None:
        """Take a batch of beats that has just arrived."""
        strangers = self.board.dropped[Drop.UNKNOWN_NODE] + self.board.dropped[Drop.INCARNATION]
        entries = self.board.take(batch, now_ns)
        self._strangers += self.board.dropped[Drop.UNKNOWN_NODE] + self.board.dropped[Drop.INCARNATION] - strangers
        if any(entry.node.name not in self._met for entry in entries):
            self._tell()  # verdicts note words only of nodes they know
        for entry in entries:
            self._take_word(entry, now_ns)

    def settle(self, now_ns: int) -> None:
        """Bring nodes, verdicts and the count of what was lost up to date: nobody needs them so with each batch."""
        self.board.settle(now_ns)
        self._tell()

    def note_steps(self, now_ns: int) -> None:
        """Tell the verdicts whose engines have stepped. Once in a while is enough: frozen means a second or more."""
        stepped = []
        for node, ordinal, incarnation, counter in self.board.steps():
            worker = node.workers.get(ordinal)
            if worker is not None and worker.queued and worker.announced == incarnation:
                stepped.append((worker.key, worker.incarnation, counter))
        self._verdicts.stepped(stepped, now_ns)

    def tick(self, now_ns: int) -> None:
        """Judge everybody. Read what has arrived before."""
        self._tell()
        for change in self._verdicts.tick(now_ns):
            node = self._roster.nodes.get(str(change.node))
            if node is None or node.incarnation != change.incarnation:
                continue
            self._judged.add(node.name)
            for worker in node.workers.values():
                if change.ordinal is None or worker.ordinal == change.ordinal:
                    self._say(node, worker, self.verdict(node, worker))

    def drop_forgotten(self, now_ns: int) -> list[str]:
        """Forget nodes that are dead and were not announced for as long as the dead are kept; return their names."""
        gone = [
            node.name
            for node in self._roster.nodes.values()
            if now_ns - node.announced_ns >= self._limits.keep_dead_ns and self._is_dead(node.name)
        ]
        for name in gone:
            self._roster.forget(name)
            self.board.forget(name)
            self._verdicts.forget(name)
            self._met.discard(name)
            self._judged.discard(name)
        return gone

    def take_changes(self) -> tuple[WorkerState, ...]:
        """What is new since the last call; of several changes of a worker the last."""
        changes = tuple(self._changes.values())
        self._changes.clear()
        return changes

    def take_unannounced(self) -> tuple[list[str], bool]:
        """Nodes whose words say that their inventory is newer than ours, and whether strangers were heard."""
        stale, strangers = list(self._stale_epochs), self._strangers > 0
        self._stale_epochs.clear()
        self._strangers = 0
        return stale, strangers

    def stamps(self) -> tuple[NodeStamp, ...]:
        """The newest beat of every node that is not dead, as of the last ``settle``."""
        return tuple(
            NodeStamp(node.name, node.incarnation, node.sequence, node.emit_ns)
            for node in self._roster.nodes.values()
            if self.verdict(node) is not Verdict.DEAD
        )

    def states(self) -> tuple[WorkerState, ...]:
        """Every worker that was ever heard, the dead included.

        Those of a node that was heard and not judged yet (for the first time, or of a new agent) are left out: they are
        not dead, which would cost them the requests that routers have sent there since they were announced.
        """
        return tuple(
            self._state(node, worker, verdict)
            for node in self._roster.nodes.values()
            if node.name in self._judged
            for worker, verdict in self.verdicts(node)
            if worker.state is not None
        )

    def _tell(self) -> None:
        """Tell nodes and verdicts who was heard since the last time."""
        told = self.board.tell()
        self._verdicts.heard_all([(node.name, node.incarnation, node.sequence, node.heard_ns) for node in told])
        if len(self._met) < len(self._roster.nodes):
            self._met.update(node.name for node in told)

    def _announced(self, entry: Entry) -> Worker | None:
        worker = entry.node.workers.get(entry.ordinal)
        return worker if worker is not None and worker.announced == entry.incarnation else None

    def _take_word(self, entry: Entry, now_ns: int) -> None:
        node, word = entry.node, entry.word
        if epoch_of(word) != node.epoch % _EPOCHS:
            self._stale_epochs[node.name] = None
        worker = self._announced(entry)
        if worker is None:
            self.foreign_entries += 1
            return
        queued = bool(word & _BUSY_MASK)
        if queued or worker.queued:
            worker.queued = queued
            self._owe(entry, worker, now_ns)
        state = word & STATE_MASK
        if state != worker.state:
            worker.state = state
            verdict = self.verdict(node, worker)
            # A node that was dead until this beat is told with its next verdict, a tick away.
            if verdict is not Verdict.DEAD:
                self._say(node, worker, verdict)

    def _owe(self, entry: Entry, worker: Worker, now_ns: int) -> None:
        self._verdicts.steps(
            worker.key,
            steps_of(entry.word),
            worker.queued,
            now_ns,
            predicted_step_ns=worker.step_ns,
            incarnation=worker.incarnation,
        )

    def _say(self, node: Node, worker: Worker, verdict: Verdict) -> None:
        if worker.state is not None:
            self._changes[worker.id, worker.incarnation] = self._state(node, worker, verdict)

    def _state(self, node: Node, worker: Worker, verdict: Verdict) -> WorkerState:
        state = worker.state or 0
        return WorkerState(worker.id, worker.incarnation, state, max(node.sequence, 0), int(verdict))

    def _is_dead(self, name: str) -> bool:
        return self._verdicts.verdict(name) in (None, Verdict.DEAD)
