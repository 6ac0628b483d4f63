"""The fleet as a router sees it: slots, kinds, state planes, and who may do what.

Workers that share every static fact a decision reads (class, model, precision, TP, sizes, layout) are one *kind*; what
tells workers of a kind apart is their quantized state. Slots are private to the process and are given again only
after the affinity column of their last owner was swept.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from quartet_core.catalogue import HardwareClass
from quartet_core.links import Place
from quartet_core.pairing import EXPORT, OVERLAP, STORE, LayoutFacts, Replica, lacking, place_of, why_not_pair
from quartet_core.planes import FleetPlanes
from quartet_core.profile import Profile
from quartet_core.sightings import Sightings
from quartet_core.verdict import Verdict
from quartet_core.word import DRIFT, pack

IDLE_WORD = pack(free_kv=15, queue=0, batch=0, drift=0, accepting=True)
"""What a worker is taken for until its first beat: usable at once."""


class WorkerFacts(Replica, Protocol):
    """The static facts of a worker, as its node announces them (``quartet_bus.messages.WorkerInfo``)."""

    @property
    def id(self) -> str: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def hardware(self) -> str: ...
    @property
    def tp(self) -> int: ...
    @property
    def kv_tokens(self) -> int: ...
    @property
    def max_context(self) -> int: ...
    @property
    def max_batch(self) -> int: ...
    @property
    def chunk_tokens(self) -> int: ...
    @property
    def role(self) -> str: ...
    @property
    def cordoned(self) -> bool: ...
    @property
    def adapters(self) -> tuple[str, ...]: ...
    @property
    def root(self) -> str: ...


class Kind(Struct):
    """Workers that no static fact tells apart; ``facts`` are those of the first of them.

    ``ahead_ms`` is how much prefill work is kept ahead at each. ``plane`` is where they are.
    """

    index: int
    hardware: str
    model: str
    precision: str
    tp: int
    profile: Profile
    kv_tokens: int
    max_context: int
    max_batch: int
    chunk_tokens: int
    layout: LayoutFacts
    long_context: bool
    facts: WorkerFacts
    ahead_ms: float
    plane: int = 0
    targets: int = 0
    """Bit k: kind k takes KV from this one."""
    overlaps: bool = False
    """Whether the KV of ended chunks leaves these workers while the next ones are computed."""

    @property
    def lends(self) -> bool:
        """Whether prefixes can be fetched from these workers: a handshake between engines moves whole prompts only."""
        return EXPORT in self.facts.capabilities

    @property
    def store(self) -> bool:
        """Whether these are host memory that only lends."""
        return self.facts.role == STORE


class Worker(Struct):
    """The occupant of a slot."""

    slot: int
    id: str
    node: str
    incarnation: int
    kind: Kind
    facts: WorkerFacts
    place: Place
    beat: int = 0
    words: dict[str, tuple[int, int, int]] = {}
    """By collector: the last (beat, −verdict, state) it said."""


class UnknownKind(Exception):
    """A worker whose hardware, model, precision and TP have no profile; it cannot be routed to."""

    def __init__(self, worker: str, why: str) -> None:
        super().__init__(f"worker {worker}: {why}")
        self.worker = worker


class FleetFull(Exception):
    """More workers than the router has slots."""

    def __init__(self, worker: str, slots: int) -> None:
        super().__init__(f"worker {worker}: all {slots} slots are taken ([router] max_workers)")
        self.worker = worker


ProfileOf = Callable[[WorkerFacts], Profile]
"""The profile of a worker; raises ``LookupError`` when there is none."""


class Fleet:
    """Slots and planes of all known workers.

    ``long_context`` names the hardware classes that long prompts go to. ``hold_ahead_chunks`` says how many prefill
    chunks of work a worker keeps ahead before requests wait at the router instead.
    """

    def __init__(
        self,
        profile_of: ProfileOf,
        hardware_of: Callable[[str], HardwareClass],
        *,
        max_workers: int,
        long_context: Iterable[str],
        hold_ahead_chunks: float = 2.0,
    ) -> None:
        self._profile_of = profile_of
        self._hardware_of = hardware_of
        self._max_workers = max_workers
        self._long_context = frozenset(long_context)
        self._hold_ahead_chunks = hold_ahead_chunks
        self._slots: dict[str, int] = {}
        self._nodes: dict[str, tuple[str, ...]] = {}
        self._free: list[int] = []
        self._sightings = Sightings()
        self.disputed: set[int] = set()
        """Slots of which collectors say different verdicts: who is believed may change with a stamp."""
        self._kinds: dict[tuple[object, ...], Kind] = {}
        self.workers: list[Worker | None] = []
        self.kinds: list[Kind] = []
        self.planes = FleetPlanes()
        self.revision = 0
        """Rises whenever it changes who serves what, lives, takes work, or may do which half: what rosters rest on."""
        self.serving: dict[str, int] = {}
        """Model or adapter name → plane of the workers that serve it."""
        self.kinds_of: dict[str, list[Kind]] = {}
        """Model or adapter name → the kinds of those workers, so far."""
        self.up = 0
        self.suspect = 0
        self.frozen = 0
        self.prefills = 0
        self.decodes = 0
        self.open = 0
        """Workers that orders allow new work: not cordoned."""
        self.stores: dict[str, int] = {}
        """Model name → plane of the stores that lend its prefixes. They are in none of the planes above but ``open``
        and those of verdicts: nothing is computed there."""

    def __len__(self) -> int:
        return len(self._slots)

    def slot_of(self, worker: str) -> int | None:
        """The slot of a worker, or None when it is unknown."""
        return self._slots.get(worker)

    def plane_of(self, workers: Iterable[str]) -> int:
        """The slots of those of ``workers`` that are known, as a plane."""
        plane = 0
        for worker in workers:
            slot = self._slots.get(worker)
            if slot is not None:
                plane |= 1 << slot
        return plane

    def at(self, slot: int) -> Worker:
        """The worker in an occupied slot. Raises ``LookupError`` when it is empty."""
        worker = self.workers[slot]
        if worker is None:
            raise LookupError(f"slot {slot} is empty")
        return worker

    def learn(
        self, node: str, facts: Sequence[WorkerFacts], fabrics: Mapping[str, float]
    ) -> tuple[list[int], list[int], list[Exception]]:
        """Take a node's inventory; return the slots that are new, the slots that were vacated, and what was refused.

        ``fabrics`` are the node's links to others and within it: class → GB/s.
        A worker whose incarnation or kind changed is vacated and learned anew: nothing of its past holds.
        """
        fresh: list[int] = []
        vacated: list[int] = []
        refused: list[Exception] = []
        names = tuple(fact.id for fact in facts)
        for name in self._nodes.get(node, ()):
            if name not in names:
                vacated.extend(self._vacate(name))
        self._nodes[node] = names
        for fact in facts:
            if fact.role != STORE:
                for name in (fact.model, *fact.adapters):  # known to the fleet, even if no worker can be routed to
                    self.serving.setdefault(name, 0)
                    self.kinds_of.setdefault(name, [])
            slot = self._slots.get(fact.id)
            if slot is not None:
                worker = self.at(slot)
                if worker.incarnation == fact.incarnation and self._same(worker, fact):
                    worker.place = self._place(node, fact, fabrics)
                    self._set_orders(worker, fact)
                    continue
                vacated.extend(self._vacate(fact.id))
            try:
                fresh.append(self._occupy(node, fact, fabrics))
            except (UnknownKind, FleetFull) as error:
                refused.append(error)
        return fresh, vacated, refused

    def hear(self, collector: str, worker: str, incarnation: int, state: int, beat: int, verdict: int) -> int | None:
        """Take a collector's word on a worker; return its slot if anything changed.

        Words on another incarnation than the announced one are ignored. Of several collectors ``Sightings`` says who
        is believed; a collector's newer word always replaces its older one.
        """
        slot = self._slots.get(worker)
        if slot is None:
            return None
        known = self.at(slot)
        if known.incarnation != incarnation:
            return None
        before = known.words.get(collector)
        if before is not None and beat < before[0]:
            return None
        known.words[collector] = (beat, -verdict, state)
        return self._believe(slot, known)

    def stamp(self, collector: str, node: str, sequence: int) -> None:
        """``collector`` has heard ``node`` up to beat ``sequence``; look at what is ``disputed`` again afterwards."""
        if node in self._nodes:
            self._sightings.note(collector, node, sequence)

    def settle(self, slot: int) -> int | None:
        """Decide anew whose word on ``slot`` is believed; return it if anything changed."""
        return self._believe(slot, self.at(slot))

    def forget_collector(self, collector: str) -> None:
        """A collector is gone: what it said last no longer counts where another one speaks."""
        self._sightings.forget_collector(collector)
        for slot, worker in enumerate(self.workers):
            if worker is not None and len(worker.words) > 1 and worker.words.pop(collector, None) is not None:
                self._believe(slot, worker)

    def _believe(self, slot: int, worker: Worker) -> int | None:
        words = worker.words
        if len(words) == 1:
            beat, alive, state = next(iter(words.values()))
            self.disputed.discard(slot)
        else:
            beat, alive, state = self._sightings.best(worker.node, words)
            if len({said for _, said, _ in words.values()}) > 1:
                self.disputed.add(slot)
            else:
                self.disputed.discard(slot)
        moved = beat != worker.beat
        worker.beat = beat
        sound = self.planes.sound
        changed = self.planes.set(slot, state)
        if self.planes.sound != sound:
            self.revision += 1
        if -alive != self.verdict(slot):
            self._set_verdict(slot, -alive)
            changed = True
        return slot if changed or moved else None

    def doubt(self, slot: int) -> None:
        """Use the worker only when nothing better is there, until a collector says more."""
        if self.up >> slot & 1:
            self._set_verdict(slot, Verdict.SUSPECT)

    def verdict(self, slot: int) -> int:
        """The verdict on a slot, a ``Verdict`` value."""
        bit = 1 << slot
        if self.up & bit:
            return Verdict.UP
        if self.suspect & bit:
            return Verdict.SUSPECT
        return Verdict.FROZEN if self.frozen & bit else Verdict.DEAD

    def forget_node(self, node: str) -> list[int]:
        """A node left the fleet; return its vacated slots."""
        vacated: list[int] = []
        self._sightings.forget_node(node)
        for name in self._nodes.pop(node, ()):
            vacated.extend(self._vacate(name))
        return vacated

    def recycle(self, slot: int) -> None:
        """A vacated slot may be given again: nothing of its last owner is left anywhere."""
        self._free.append(slot)

    def drift(self, slot: int) -> int:
        """The drift level of a slot."""
        return DRIFT.of(self.planes.word(slot) or 0)

    def _same(self, worker: Worker, fact: WorkerFacts) -> bool:
        return self._key(worker.facts) == self._key(fact) and worker.facts.adapters == fact.adapters

    @staticmethod
    def _key(fact: WorkerFacts) -> tuple[object, ...]:
        return (
            fact.hardware, fact.model, fact.precision, fact.tp, fact.kv_tokens, fact.max_context, fact.max_batch,
            fact.chunk_tokens, fact.capabilities, fact.layout.block_tokens, fact.layout.bytes_per_token,
            fact.layout.precision, fact.layout.revision, fact.layout.tp, fact.engine, fact.engine_version,
            fact.role == STORE,
        )  # fmt: skip

    def _kind(self, fact: WorkerFacts) -> Kind:
        key = self._key(fact)
        kind = self._kinds.get(key)
        if kind is not None:
            return kind
        try:
            profile = self._profile_of(fact)
        except LookupError as error:
            raise UnknownKind(fact.id, str(error)) from None
        kind = Kind(
            index=len(self.kinds),
            hardware=fact.hardware,
            model=fact.model,
            precision=fact.precision,
            tp=fact.tp,
            profile=profile,
            kv_tokens=fact.kv_tokens,
            max_context=fact.max_context,
            max_batch=fact.max_batch,
            chunk_tokens=fact.chunk_tokens,
            layout=fact.layout,
            long_context=fact.hardware in self._long_context,
            facts=fact,
            ahead_ms=self._hold_ahead_chunks * profile.prefill_ms(0, fact.chunk_tokens),
            overlaps=OVERLAP in fact.capabilities,
        )
        for other in [*self.kinds, kind]:
            for source, target in ((kind, other), (other, kind)):
                if why_not_pair(source.facts, target.facts) is None and lacking(source.facts, target.facts) is None:
                    source.targets |= 1 << target.index
        self.kinds.append(kind)
        self._kinds[key] = kind
        return kind

    def _place(self, node: str, fact: WorkerFacts, fabrics: Mapping[str, float]) -> Place:
        # A NIC's socket is left to the measured rate of its link; roots decide which path there is at all.
        hardware = self._hardware_of(fact.hardware)
        return place_of(node, fabrics, hardware, fact.tp, root=fact.root, host=fact.role == STORE)

    def _occupy(self, node: str, fact: WorkerFacts, fabrics: Mapping[str, float]) -> int:
        kind = self._kind(fact)
        if self._free:
            slot = self._free.pop(0)
        elif len(self.workers) < self._max_workers:
            slot = len(self.workers)
            self.workers.append(None)
        else:
            raise FleetFull(fact.id, self._max_workers)
        worker = Worker(slot, fact.id, node, fact.incarnation, kind, fact, self._place(node, fact, fabrics))
        self.workers[slot] = worker
        self._slots[fact.id] = slot
        bit = 1 << slot
        kind.plane |= bit
        if kind.store:
            self.stores[fact.model] = self.stores.get(fact.model, 0) | bit
        else:
            for name in (fact.model, *fact.adapters):
                self.serving[name] |= bit
                kinds = self.kinds_of[name]
                if kind not in kinds:
                    kinds.append(kind)
        self.planes.set(slot, IDLE_WORD)
        self.revision += 1
        self._set_verdict(slot, Verdict.UP)
        self._set_orders(worker, fact)
        return slot

    def _vacate(self, name: str) -> list[int]:
        slot = self._slots.pop(name, None)
        if slot is None:
            return []
        worker = self.at(slot)
        clear = ~(1 << slot)
        worker.kind.plane &= clear
        if worker.kind.store:
            self.stores[worker.facts.model] &= clear
        else:
            for served in (worker.facts.model, *worker.facts.adapters):
                self.serving[served] &= clear
        self._set_verdict(slot, Verdict.DEAD)
        self.prefills &= clear
        self.decodes &= clear
        self.open &= clear
        self.revision += 1
        self.planes.drop(slot)
        self.disputed.discard(slot)
        self.workers[slot] = None
        return [slot]

    def _set_verdict(self, slot: int, verdict: int) -> None:
        bit = 1 << slot
        self.revision += 1
        self.up &= ~bit
        self.suspect &= ~bit
        self.frozen &= ~bit
        if verdict == Verdict.UP:
            self.up |= bit
        elif verdict == Verdict.SUSPECT:
            self.suspect |= bit
        elif verdict == Verdict.FROZEN:
            self.frozen |= bit

    def _set_orders(self, worker: Worker, fact: WorkerFacts) -> None:
        worker.facts = fact
        self.revision += 1
        bit = 1 << worker.slot
        self.prefills = self.prefills | bit if fact.role not in ("decode", STORE) else self.prefills & ~bit
        self.decodes = self.decodes | bit if fact.role not in ("prefill", STORE) else self.decodes & ~bit
        self.open = self.open & ~bit if fact.cordoned else self.open | bit
