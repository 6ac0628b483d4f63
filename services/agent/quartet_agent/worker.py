"""One worker of this node: an engine replica, what operators said about it, and what it has been given to do."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from msgspec.structs import replace as replace_struct

from quartet_agent.engines.base import EngineAdapter
from quartet_bus.messages import KvLayout, Role, StreamId, WorkerInfo
from quartet_core import word

if TYPE_CHECKING:
    from quartet_agent.runs import Run

_PRESSED_BELOW = 0.03
"""Free share of KV memory under which a worker says that it is pressed: the next long prompt preempts somebody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What does not change while the worker runs.

    ``watts_per_gpu`` is its class's power when busy, ``pcie_gen`` the generation of its way to the host; 0 if unknown.
    """

    model: str
    hardware: str
    precision: str
    tp: int
    gpus: tuple[int, ...]
    kv_tokens: int
    max_context: int
    max_batch: int
    chunk_tokens: int
    layout: KvLayout
    engine: str
    engine_version: str = ""
    capabilities: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    step_ms: float = 0.0
    watts_per_gpu: float = 0.0
    pcie_gen: int = 0
    root: str = ""
    numa: int = -1


class HostedWorker:
    """A worker and its state in this agent. ``runs`` are the streams accepted and not ended, by tenant and stream."""

    def __init__(
        self, node: str, ordinal: int, incarnation: int, facts: WorkerFacts, adapter: EngineAdapter, role: Role
    ) -> None:
        self.id = f"{node}-{ordinal}"
        self.ordinal = ordinal
        self.incarnation = incarnation
        self.facts = facts
        self.adapter = adapter
        self.role = role
        self.cordoned = False
        self.draining = False
        self.runs: dict[tuple[str, StreamId], Run] = {}
        self._life = adapter.life.number
        self._capabilities = facts.capabilities
        self.unread_ms = 0.0
        """Predicted prefill of work accepted but not yet read into the engine: in the word from its acceptance on."""
        self.throttled = False
        self.congested = False
        """What telemetry says of its cards and its root complex; the engine may say so, too."""

    @property
    def up(self) -> bool:
        """Whether its engine runs: while it does not, this node has no such worker."""
        return self.adapter.life.up

    def follow(self, incarnation: int) -> bool:
        """Take over what the engine's present life says of itself; return whether it is a new one, whose worker is
        ``incarnation`` from now on."""
        life = self.adapter.life
        facts = self.facts
        layout = facts.layout
        if life.block_tokens:
            layout = replace_struct(layout, block_tokens=life.block_tokens)
        if life.kv_bytes_per_token:
            layout = replace_struct(layout, bytes_per_token=life.kv_bytes_per_token)
        model, _, _ = layout.revision.partition("/")
        layout = replace_struct(layout, revision=f"{model}/{life.kv_layout}" if life.kv_layout else model)
        self.facts = replace(
            facts,
            kv_tokens=life.kv_tokens or facts.kv_tokens,
            max_context=life.max_context or facts.max_context,
            layout=layout,
            engine_version=life.version or facts.engine_version,
            adapters=facts.adapters if life.adapters is None else life.adapters,
            capabilities=(*self._capabilities, *life.capabilities),
        )
        born = life.up and life.number != self._life
        if born:
            if self._life:
                self.incarnation = incarnation
            self._life = life.number
        return born

    @property
    def safe(self) -> bool:
        """Whether it can be taken away: it takes nothing new, and nothing is left."""
        return self.draining and not self.runs

    def serves(self, model: str) -> bool:
        """Whether requests for ``model`` (or one of the adapters loaded on it) are for this worker."""
        return model == self.facts.model or model in self.facts.adapters

    def info(self) -> WorkerInfo:
        """Its part of the node's inventory."""
        facts = self.facts
        return WorkerInfo(
            id=self.id,
            ordinal=self.ordinal,
            incarnation=self.incarnation,
            hardware=facts.hardware,
            model=facts.model,
            precision=facts.precision,
            tp=facts.tp,
            gpus=facts.gpus,
            kv_tokens=facts.kv_tokens,
            max_context=facts.max_context,
            max_batch=facts.max_batch,
            chunk_tokens=facts.chunk_tokens,
            layout=facts.layout,
            engine=facts.engine,
            engine_version=facts.engine_version,
            capabilities=facts.capabilities,
            role=self.role,
            cordoned=self.cordoned,
            adapters=facts.adapters,
            step_ms=facts.step_ms,
            root=facts.root,
            numa=facts.numa,
        )

    def word(self, *, accepting: bool, epoch: int) -> int:
        """Its state word just now."""
        load = self.adapter.load()
        return word.pack(
            free_kv=word.free_kv_level(load.free_kv_fraction),
            queue=word.queue_level(load.queued_prefill_ms + self.unread_ms),
            batch=word.batch_level(load.running),
            drift=word.drift_level(load.drift),
            accepting=accepting and not self.draining and self.up,
            throttled=load.throttled or self.throttled,
            congested=load.congested or self.congested,
            pressed=load.pressed or load.free_kv_fraction < _PRESSED_BELOW,
            fault=load.fault,
            steps=load.steps,
            epoch=epoch,
        )
