"""Who is there: workers as their nodes announce them, and who of them is dead, as collectors say."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from quartet_bus.messages import NodeInventory, NodeStamp, Role, WorkerInfo, WorkerState
from quartet_core.catalogue import Catalogue, UnknownProfile
from quartet_core.links import Place
from quartet_core.pairing import place_of
from quartet_core.sightings import Sightings
from quartet_core.verdict import Verdict

WORD_COUNTS_NS = 2_000_000_000
"""A collector that said nothing of a worker for so long (eight snapshots) no longer has a say about it."""

NODE_COUNTS_NS = 60_000_000_000
"""A node whose inventory was not heard for so long (thirty intervals) is no part of the fleet."""


@dataclass(slots=True)
class Replica:
    """One worker: its facts, its node, and where its KV lies (None when nobody knows its hardware class)."""

    info: WorkerInfo
    node: str
    place: Place | None
    words: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Collector → (beat, verdict, when heard)."""
    dead: bool = False


Gone = tuple[str, int]
"""(worker, incarnation) that is no more."""


@dataclass(slots=True, frozen=True)
class Learned:
    """What an inventory told: the agent is new to us, and who is gone."""

    new_agent: bool
    gone: list[Gone]


class Roster:
    """All workers that inventories name. A node's newest inventory replaces what it said before."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._nodes: dict[str, NodeInventory] = {}
        self._heard_ns: dict[str, int] = {}
        self._workers: dict[str, Replica] = {}
        self._sightings = Sightings()

    @property
    def nodes(self) -> list[str]:
        """All nodes, the longest silent first."""
        return list(self._nodes)

    def find(self, worker: str) -> Replica | None:
        """The worker, or None when no inventory names it."""
        return self._workers.get(worker)

    def places(self, node: str) -> list[Place]:
        """The different places on a node, as far as they are known."""
        inventory = self._nodes[node]
        found = [self._workers[info.id].place for info in inventory.workers if info.id in self._workers]
        return list(dict.fromkeys(place for place in found if place is not None))

    def learn(self, inventory: NodeInventory, now_ns: int) -> Learned:
        """Take a node's inventory.

        An agent that restarted holds no lease of before, so its workers are gone even where their names live on. Nodes
        that were silent for ``NODE_COUNTS_NS`` are forgotten, their workers gone.
        """
        known = self._nodes.pop(inventory.node, None)
        new_agent = known is None or known.incarnation != inventory.incarnation
        self._nodes[inventory.node] = inventory  # at the end: the first of the dict is the longest silent
        self._heard_ns[inventory.node] = now_ns
        gone: list[Gone] = []
        if known is not None:
            now = {info.id: info.incarnation for info in inventory.workers}
            gone += self._drop(info for info in known.workers if new_agent or now.get(info.id) != info.incarnation)
        while now_ns - self._heard_ns[silent := next(iter(self._nodes))] > NODE_COUNTS_NS:
            gone += self._drop(self._nodes.pop(silent).workers)
            self._sightings.forget_node(silent)
            del self._heard_ns[silent]
        if new_agent or known is None or known.epoch != inventory.epoch:
            for info in inventory.workers:
                self._take(inventory, info)
        return Learned(new_agent, gone)

    def judge(self, collector: str, word: WorkerState, now_ns: int) -> Gone | None:
        """Take a collector's word on a worker; return it if this made it dead.

        Which of several collectors is believed is for ``Sightings`` to say.
        """
        replica = self._workers.get(word.worker)
        if replica is None or replica.info.incarnation != word.incarnation:
            return None
        words = replica.words
        words[collector] = (word.beat, word.verdict, now_ns)
        if len(words) > 1:
            for other in [name for name, (_, _, heard_ns) in words.items() if now_ns - heard_ns > WORD_COUNTS_NS]:
                del words[other]
        said = {name: (beat, -verdict, 0) for name, (beat, verdict, _) in words.items()}
        _, alive, _ = self._sightings.best(replica.node, said)
        was_dead, replica.dead = replica.dead, -alive >= Verdict.DEAD
        return (word.worker, word.incarnation) if replica.dead and not was_dead else None

    def stamp(self, collector: str, stamp: NodeStamp) -> None:
        """Take how far a collector has heard a node; what it said of the node's workers counts by that from now on."""
        if stamp.node in self._nodes:
            self._sightings.note(collector, stamp.node, stamp.sequence)

    def _take(self, inventory: NodeInventory, info: WorkerInfo) -> None:
        place = self._place(inventory, info)
        replica = self._workers.get(info.id)
        if replica is None or replica.node != inventory.node:
            self._workers[info.id] = Replica(info, inventory.node, place)
        else:
            replica.info, replica.place = info, place

    def _drop(self, workers: Iterable[WorkerInfo]) -> list[Gone]:
        gone = [(info.id, info.incarnation) for info in workers]
        for worker, incarnation in gone:
            replica = self._workers.get(worker)
            if replica is not None and replica.info.incarnation == incarnation:
                del self._workers[worker]
        return gone

    def _place(self, inventory: NodeInventory, info: WorkerInfo) -> Place | None:
        try:
            hardware = self._catalogue.hardware_class(info.hardware)
        except UnknownProfile:
            return None
        return place_of(
            inventory.node,
            {link.kind: link.gb_per_s for link in inventory.links},
            hardware,
            max(info.tp, len(info.gpus)),
            root=info.root,
            numa=info.numa,
            nic_numa=max((link.numa for link in inventory.links if not link.peer), default=-1),
            host=info.role is Role.STORE,
        )
