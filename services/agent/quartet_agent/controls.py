"""What operators may ask of an agent, and what they are told."""

from collections.abc import Callable, Mapping

import msgspec
from msgspec import Struct

from quartet_agent.affinity import AffinityAuthor
from quartet_agent.beats.words import WordBoard
from quartet_agent.engines.base import Diagnosis
from quartet_agent.inventory import InventoryAuthor
from quartet_agent.worker import HostedWorker
from quartet_bus.config.schema import Config
from quartet_bus.messages import ControlReply, ControlRequest, Role

_encode = msgspec.json.Encoder().encode

_WORKING_ROLES = (Role.BOTH, Role.PREFILL, Role.DECODE)
"""Those that an operator may give a worker."""


class WorkerStatus(Struct):
    """One worker in the answer to ``status``. ``safe``: drained, and nothing is left to finish."""

    id: str
    incarnation: int
    hardware: str
    model: str
    role: str
    cordoned: bool
    draining: bool
    safe: bool
    streams: int
    running: int
    waiting: int
    queued_prefill_ms: float
    free_kv: float
    steps: int
    busy_ms: float
    up: bool


class WorkerDiagnosis(Struct):
    """One worker in the answer to ``doctor``. ``sketch`` is how its model's prompts are sketched."""

    worker: str
    incarnation: int
    hardware: str
    model: str
    sketch: str
    engine: Diagnosis


class NodeDiagnosis(Struct):
    """The answer to ``doctor``. ``rows`` and ``hashes`` are the shape of the affinity filter that this agent fills."""

    node: str
    rows: int
    hashes: int
    workers: list[WorkerDiagnosis]


class NodeStatus(Struct):
    """The answer to ``status``. ``safe``: every worker is. ``arrivals`` and ``departures`` are KV leases held."""

    node: str
    incarnation: int
    safe: bool
    workers: list[WorkerStatus]
    arrivals: int
    departures: int
    resident: tuple[str, ...]
    loading: tuple[str, ...]


class Controls:
    """The verbs. A request for ``worker`` "" means every worker of the node."""

    def __init__(
        self,
        workers: Mapping[str, HostedWorker],
        board: WordBoard,
        inventory: InventoryAuthor,
        affinity: Mapping[str, AffinityAuthor],
        status: Callable[[list[WorkerStatus], bool], NodeStatus],
        config: Config,
    ) -> None:
        self._workers = workers
        self._board = board
        self._inventory = inventory
        self._affinity = affinity
        self._status = status
        self._config = config

    def handlers(self) -> dict[str, Callable[[ControlRequest], ControlReply]]:
        """Verb → what it does."""
        return {
            "inventory": self.inventory,
            "affinity": self.affinity,
            "status": self.status,
            "drain": lambda request: self._drain(request, draining=True),
            "resume": lambda request: self._drain(request, draining=False),
            "cordon": lambda request: self._cordon(request, cordoned=True),
            "uncordon": lambda request: self._cordon(request, cordoned=False),
            "role": self.role,
            "doctor": self.doctor,
        }

    def inventory(self, request: ControlRequest) -> ControlReply:
        """Announce the inventory now."""
        self._inventory.announce()
        return ControlReply(True)

    def affinity(self, request: ControlRequest) -> ControlReply:
        """Publish the full set of affinity rows."""
        workers = self._named(request)
        if workers is None:
            return self._unknown(request)
        for worker in workers:
            self._affinity[worker.id].say_all()
        return ControlReply(True)

    def status(self, request: ControlRequest) -> ControlReply:
        """How the node and its workers are."""
        workers = self._named(request)
        if workers is None:
            return self._unknown(request)
        told = [_status_of(worker) for worker in workers]
        return ControlReply(True, payload=_encode(self._status(told, all(worker.safe for worker in told))))

    def doctor(self, request: ControlRequest) -> ControlReply:
        """How each engine is seen, and why its cached prefixes are found or are not."""
        workers = self._named(request)
        if workers is None:
            return self._unknown(request)
        router, models = self._config.router, self._config.models
        told = [
            WorkerDiagnosis(
                worker.id, worker.incarnation, worker.facts.hardware, worker.facts.model,
                models[worker.facts.model].sketch, worker.adapter.diagnose(),
            )
            for worker in workers
        ]  # fmt: skip
        node = NodeDiagnosis(self._config.agent.node, router.affinity_rows, router.affinity_hashes, told)
        return ControlReply(True, payload=_encode(node))

    def role(self, request: ControlRequest) -> ControlReply:
        """Set what a worker is for: ``argument`` is both, prefill or decode. Streams under way go on."""
        workers = self._named(request)
        if workers is None:
            return self._unknown(request)
        role = next((role for role in _WORKING_ROLES if role == request.argument), None)
        if role is None:
            known = ", ".join(role.value for role in _WORKING_ROLES)
            return ControlReply(False, reason=f"no role {request.argument!r}; try: {known}")
        able = [worker for worker in workers if worker.role is not Role.STORE]
        if not able:
            return ControlReply(False, reason=f"{request.worker} is a store, and computes nothing")
        for worker in able:
            worker.role = role
        self._inventory_changed()
        return ControlReply(True)

    def _drain(self, request: ControlRequest, *, draining: bool) -> ControlReply:
        """Take nothing new and finish the old (``status`` then says safe); or take work again."""
        workers = self._named(request)
        if workers is None:
            return self._unknown(request)
        for worker in workers:
            worker.draining = draining
            self._board.touch(worker)
        self._board.write()
        told = [_status_of(worker) for worker in workers]
        return ControlReply(True, payload=_encode(self._status(told, all(worker.safe for worker in told))))

    def _cordon(self, request: ControlRequest, *, cordoned: bool) -> ControlReply:
        """Have routers send nothing new (what they send is still taken); or take that back."""
        workers = self._named(request)
        if workers is None:
            return self._unknown(request)
        for worker in workers:
            worker.cordoned = cordoned
        self._inventory_changed()
        return ControlReply(True)

    def _inventory_changed(self) -> None:
        self._inventory.changed()
        self._board.epoch = self._inventory.epoch
        self._board.touch_all()
        self._board.write()

    def _named(self, request: ControlRequest) -> list[HostedWorker] | None:
        if not request.worker:
            return list(self._workers.values())
        worker = self._workers.get(request.worker)
        return None if worker is None else [worker]

    def _unknown(self, request: ControlRequest) -> ControlReply:
        known = ", ".join(self._workers) or "none"
        return ControlReply(False, reason=f"no worker {request.worker!r} on this node; it has: {known}")


def _status_of(worker: HostedWorker) -> WorkerStatus:
    load = worker.adapter.load()
    return WorkerStatus(
        id=worker.id,
        incarnation=worker.incarnation,
        hardware=worker.facts.hardware,
        model=worker.facts.model,
        role=worker.role.value,
        cordoned=worker.cordoned,
        draining=worker.draining,
        safe=worker.safe,
        streams=len(worker.runs),
        running=load.running,
        waiting=load.waiting,
        queued_prefill_ms=load.queued_prefill_ms + worker.unread_ms,
        free_kv=load.free_kv_fraction,
        steps=load.steps,
        busy_ms=load.busy_ms,
        up=worker.up,
    )
