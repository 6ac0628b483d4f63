"""What the agent asks of an engine: one adapter per worker, whatever runs behind it.

The agent submits work, and hears of it in batches of events, all in its own loop; adapters that talk to a server do so
in tasks of their own. An adapter never speaks to the bus, and never decides about a request: it has no deadline, no
retry and no queue policy but the engine's.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from msgspec import Struct

from quartet_agent.engines.pools import KvPool, PagePool
from quartet_bus.messages import Role
from quartet_core.openai import Inference, Refused


class Work(Struct, frozen=True):
    """One job for an engine. ``job`` is unique while it runs; ``answer_id`` is what the client sees as the answer's id.

    ``role`` BOTH is a whole request; with a ``transfer``, that committed lease has the KV of the prompt's first part,
    which is used as far as it is right, and never makes the job fail. PREFILL computes the KV of the prompt's first
    ``prefix_tokens`` tokens (0: of all) as far as it is not cached, and keeps it under ``transfer``; DECODE reads it
    from the committed lease ``transfer``. ``default_max_tokens`` holds where the body sets no limit. ``salt`` isolates
    the job's prefixes from those of other salts. ``prompt_tokens`` and ``prefill_ms`` are what its router took the
    prompt for and what it predicted, the cached part left out; 0: nothing. ``parameters`` are what the engine that
    prefilled said to the one that decodes (``Prefilled``).
    """

    job: str
    answer_id: str
    model: str
    body: bytes
    inference: Inference
    role: Role
    default_max_tokens: int
    salt: bytes = b""
    transfer: str = ""
    prefix_tokens: int = 0
    prompt_tokens: int = 0
    prefill_ms: float = 0.0
    parameters: bytes = b""


class Usage(Struct, frozen=True):
    """What a job came to. ``verified_blocks`` are the received KV blocks that were found to be the prompt's own.

    ``busy_ms`` is the job's share of the engine's busy time. Of a whole request that was given a transfer,
    ``transferred_tokens`` of the prompt came by it and were used (``cached_tokens`` were here before), and
    ``dropped_blocks`` came in vain.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    verified_blocks: int = 0
    busy_ms: float = 0.0
    transferred_tokens: int = 0
    dropped_blocks: int = 0


class FirstToken(Struct, frozen=True):
    """The job's first token was computed; ``queue_ms`` is how long it waited before the engine took it up.

    ``transferred_tokens`` as in ``Usage``.
    """

    job: str
    cached_tokens: int = 0
    queue_ms: float = 0.0
    transferred_tokens: int = 0


class Output(Struct, frozen=True):
    """The next JSON object for the client, as the engine wrote it."""

    job: str
    data: bytes


class Prefilled(Struct, frozen=True):
    """The KV of a PREFILL job is complete and kept under its transfer, until that is released.

    ``parameters``: the engine hands its KV over by a handshake of its own, and this is what the other one must be told.
    """

    job: str
    usage: Usage
    queue_ms: float = 0.0
    parameters: bytes = b""


class Computed(Struct, frozen=True):
    """A part of a PREFILL job's prompt, its first ``tokens`` tokens, has its KV, and more is to come.

    Said only by engines that export what they have while they compute the rest (capability ``overlap``).
    """

    job: str
    tokens: int


class Finished(Struct, frozen=True):
    """The job is done; nothing more comes for it."""

    job: str
    usage: Usage


class Failed(Struct, frozen=True):
    """The job ended without being done; nothing more comes for it. ``reason`` is short and machine-readable.

    ``elsewhere``: nothing is wrong with the request, so that another worker may do it, if no output was told yet.
    """

    job: str
    reason: str
    error: Refused
    usage: Usage = Usage()
    elsewhere: bool = False


EngineEvent = FirstToken | Output | Computed | Prefilled | Finished | Failed
Listener = Callable[[Sequence[EngineEvent]], None]


class EngineLoad(Struct, frozen=True):
    """What goes into the worker's state word. ``queued_prefill_ms`` is predicted time; ``running`` sequences decode.

    ``drift`` is observed over predicted time. ``steps`` counts engine steps, and moves whenever the engine does.
    """

    free_kv_fraction: float
    queued_prefill_ms: float
    running: int
    waiting: int
    steps: int
    busy_ms: float = 0.0
    drift: float = 1.0
    throttled: bool = False
    congested: bool = False
    pressed: bool = False
    fault: bool = False


class Life(Struct, frozen=True):
    """One life of an engine, from its first answer until it is lost. ``number`` counts them.

    The rest is what it told of itself, 0, "" or None where it said nothing.
    """

    number: int = 1
    up: bool = True
    version: str = ""
    kv_tokens: int = 0
    block_tokens: int = 0
    max_context: int = 0
    adapters: tuple[str, ...] | None = None
    capabilities: tuple[str, ...] = ()
    """What it can do beyond what the configuration says; may change while it lives, as may the two below."""
    kv_bytes_per_token: int = 0
    kv_layout: str = ""
    """What must be equal where its KV goes, besides what the configuration says of both ends."""


_ONLY_LIFE = Life()


class Finding(Struct, frozen=True):
    """Something an operator should know about an engine: ``code`` for machines, the rest for people."""

    code: str
    text: str
    remedy: str = ""


class Diagnosis(Struct):
    """How an engine is seen. ``affinity`` says how its cached prefixes are known: simulated, events, traffic.

    ``ranks`` is how many data-parallel ranks are one worker here, 0 where the engine tells of none.
    """

    kind: str
    up: bool
    url: str = ""
    version: str = ""
    why_down: str = ""
    metrics: str = ""
    degraded: tuple[str, ...] = ()
    affinity: str = "simulated"
    ranks: int = 1
    events: dict[str, int] = {}
    prompts: dict[str, int] = {}
    pages: dict[str, int] = {}
    findings: list[Finding] = []


class CannotLoad(Exception):
    """An adapter could not be loaded or unloaded; the text says why."""


class EngineAdapter(ABC):
    """One engine replica. All methods are called from the agent's loop, after ``start`` and before ``stop``."""

    @abstractmethod
    async def start(self, listener: Listener) -> None:
        """Called once; ``listener`` gets every batch of events from now on. Raises ``OSError`` when it cannot run."""

    @abstractmethod
    async def stop(self) -> None:
        """Called once, when every job has ended or been cancelled: no event comes afterwards."""

    @abstractmethod
    def submit(self, work: Work) -> None:
        """Called for each accepted request, once its prompt was read (and, with a lease to read, that is committed).

        Raises ``Refused`` when this engine will never do it, ``BlocksFenced`` when the lease is not as it must be; then
        no event comes for the job.
        """

    @abstractmethod
    def cancel(self, job: str) -> float:
        """Called when nobody wants the job any more: no event comes for it afterwards.

        Returns its share of the engine's busy time so far, in ms; 0 when it had ended. Blocks that a DECODE job had
        taken over are freed; what a finished PREFILL job keeps is freed by releasing its transfer.
        """

    @abstractmethod
    def load(self) -> EngineLoad:
        """Called after every batch of events and some 20 times a second: cheap, and never stale."""

    @abstractmethod
    def drain_rungs(self) -> tuple[list[int], list[int]]:
        """Called every 20 ms: ladder rungs that became cached, and that were evicted, since the last call."""

    @property
    @abstractmethod
    def kv(self) -> KvPool | None:
        """The KV memory for transfers, or None when this engine takes part in none."""

    @property
    def pages(self) -> PagePool | None:
        """The prefix cache for the virtual VRAM pool, or None when nothing can be paged out of or into this engine."""
        return None

    @property
    def handshake(self) -> str:
        """The connector by which this engine hands KV to its like, "" when it has none."""
        return ""

    @property
    def life(self) -> Life:
        """The engine's present life. An engine that runs within the agent has one."""
        return _ONLY_LIFE

    def on_life(self, changed: Callable[[], None]) -> None:
        """Called once, before ``start``: have ``changed`` called whenever ``life`` is another one."""
        return

    def discharge(self, work: Work) -> None:
        """Called when nobody wants KV that another engine keeps for this one: have it freed there, in the background.

        ``work`` is the request, with the other engine's ``parameters``.
        """
        return

    @property
    def loadable(self) -> tuple[str, ...]:
        """Adapters of its model that this engine loads and unloads at run time."""
        return ()

    async def load_adapter(self, name: str) -> None:
        """Called for a prefetch command: load an adapter of this worker's model. Raises ``CannotLoad``."""
        raise CannotLoad(f"this engine loads no adapters at run time, so not {name!r}")

    async def unload_adapter(self, name: str) -> None:
        """Called for a prefetch command: forget an adapter. Raises ``CannotLoad``."""
        raise CannotLoad(f"this engine unloads no adapters at run time, so not {name!r}")

    def diagnose(self) -> Diagnosis:
        """Called for operators: how this engine is seen, and what is wrong with that."""
        return Diagnosis(kind="simulated", up=True)
