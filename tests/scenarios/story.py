"""What a scenario file may say: one struct a table, so that a misspelt key fails instead of testing nothing."""

from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct, field


class Told(Struct, forbid_unknown_fields=True):
    """A table of a scenario file."""


class Source(Told, kw_only=True):
    """The public report: ``repository#number``, what happened there, and what its users expected."""

    report: str
    happened: str
    expected: str


class Node(Told, kw_only=True):
    """A host and its equal workers, ``<name>-0``, ``<name>-1``, …

    ``agent`` says who plays it. ``real`` is the whole agent with simulated engines, and needs every node to be real.
    The others are played: ``answers`` (after the times given here, else those that the router predicted), ``accepts``
    (and then waits for the script), ``mute`` (accepts, but the client hears nothing of it), ``silent`` (never a word),
    ``refuses`` (with ``reason``), ``fails`` (accepts, then its engine answers with ``status``). A played worker has not
    said a word until a step tells its state. A node that ``joins`` is announced by a step; one that is ``linked`` can
    exchange KV. ``time_scale`` slows a simulated engine down; ``beside`` are roles of further workers of a real node. A
    real agent's ``engine`` may be a server that speaks vLLM's, SGLang's or plain OpenAI's dialect (``wire_engine``):
    one token every ``token_ms``, none at all if it ``hangs``, its KV handed over by ``connector``. Its ``metrics`` have
    the names of that generation of vLLM; others who do not come by Quartet use ``kv_used_by_others`` of its KV memory.
    """

    name: str
    agent: Literal["real", "answers", "accepts", "mute", "silent", "refuses", "fails"] = "answers"
    hardware: str = "H100_SXM5"
    model: str = "llama-8b"
    precision: str = "fp8"
    count: int = 1
    tp: int = 1
    role: Literal["both", "prefill", "decode"] = "both"
    kv_tokens: int = 300_000
    max_context: int = 131_072
    linked: bool = False
    joins: bool = False
    reason: str = "full"
    status: int = 400
    first_token_after_ms: float | None = None
    ends_after_ms: float | None = None
    time_scale: float = 1.0
    beside: list[Literal["both", "prefill", "decode"]] = field(default_factory=list)
    engine: Literal["simulated", "vllm", "sglang", "openai"] = "simulated"
    token_ms: float = 10.0
    hangs: bool = False
    connector: str = ""
    metrics: Literal["current", "v1-early", "v0"] = "current"
    kv_used_by_others: float = 0.0


class Arrive(Told, kw_only=True):
    """``count`` requests, one every ``every_ms`` (0: at one moment).

    ``prompt`` lists its pieces in tokens: ``"system 2000 + own 300"`` begins with the same 2,000 tokens wherever
    ``system`` is named, and ends with 300 that no other request has. ``body`` is sent as it is instead. ``over`` http
    goes through the gateway's HTTP door. ``name`` is how later steps call them.
    """

    name: str = ""
    count: int = 1
    every_ms: float = 0.0
    prompt: str = "own 300"
    text: str = ""
    body: str = ""
    model: str = "llama-8b"
    tenant: str = "acme"
    max_tokens: int = 50
    stream: bool = True
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    deadline_ms: int = 0
    no_hold: bool = False
    priority: int = 0
    over: Literal["bus", "gateway", "http"] = "bus"
    path: str = "/v1/completions"


class State(Told, kw_only=True):
    """What a worker's heartbeats say from now on. ``worker`` may be a pattern. ``verdict`` is the collector's."""

    worker: str
    queue_ms: float = 0.0
    batch: int = 0
    free_kv: float = 1.0
    drift: float = 1.0
    accepting: bool = True
    throttled: bool = False
    congested: bool = False
    pressed: bool = False
    fault: bool = False
    verdict: Literal["up", "suspect", "frozen", "dead"] = "up"


class Caches(Told, kw_only=True):
    """A worker's agent says that its engine holds this prompt (under ``tenant``'s salt, if given)."""

    worker: str
    prompt: str
    tenant: str = ""


class Becomes(Told, kw_only=True):
    """A played node's agent behaves otherwise from now on."""

    node: str
    agent: Literal["answers", "accepts", "mute", "silent", "refuses", "fails"]


class Links(Told, kw_only=True):
    """The active coordinator says that these nodes are linked, at this rate."""

    sources: list[str]
    targets: list[str]
    gb_per_s: float = 46.6
    setup_ms: float = 0.4


class Renames(Told, kw_only=True):
    """A node's engine calls a metric otherwise from now on; ``to`` "": by its old name again."""

    node: str
    metric: str
    to: str = ""


class Flood(Told, kw_only=True):
    """Agents report ``prompts`` different cached prompts of ``tokens`` tokens each, in turn over the workers."""

    worker: str
    prompts: int
    tokens: int


class Expect(Told, kw_only=True):
    """What must hold after a step: of the requests of this step, or ``of`` a name, or else of all so far.

    Workers are named by patterns (``l40s-*``), ranges are ``[least, most]``, all times milliseconds.

    - Where they went, last: ``on`` (all of them, or how many by pattern), ``never_on`` in any try, ``most_on_one`` and
      ``least_on_one`` over all workers there are.
    - How: ``sent`` at all, ``tries`` each, ``retried_elsewhere`` (never twice to one worker), ``order`` of dispatch,
      ``was_held``, ``split`` in halves, ``cancelled_on`` exactly these workers.
    - What clients hear: ``answers`` by HTTP status (or ``open``), the error's ``code`` and ``param``, ``retry_after``,
      what an SSE stream ``ends_with``, when all are over (``within_ms``), when first tokens come (``first_token_ms``,
      ``slowest_first_token_ms``).
    - What routers thought: how many prompt tokens the worker was ``believed_cached``, and its engine ``really_cached``.
    - What is left: ``held`` now, ``ledger`` entries and ``flights`` of all routers, requests ``running`` on agents and
      ``on_engines`` (servers), how many of these saw a client go (``aborted``), the
      ``batch`` a worker is believed to run and its ``free_kv`` share, ``metrics`` of routers, gateway and real agents
      (a number, or ``"> number"``), who is ``ready``, the size of the affinity table.
    - What operators are told, of a real fleet: ``alarms`` in the agents' logs so far, and which workers the doctor
      calls ``degraded`` (with the names that it knows their metrics by).
    - What became of KV transfers, of a real fleet: how many were done ``moved_over`` each link class, why others were
      ``not_moved``, and how many leases on KV, of either side, real agents hold now (``leased``).
    """

    of: str = ""
    on: dict[str, int | tuple[int, int]] | str | None = None
    never_on: str | None = None
    most_on_one: int | None = None
    least_on_one: int | None = None
    tries: int | None = None
    retried_elsewhere: bool | None = None
    order: list[str] | None = None
    held: int | None = None
    was_held: int | None = None
    sent: int | None = None
    split: bool | None = None
    answers: dict[str, int] | None = None
    code: str | None = None
    param: str | None = None
    retry_after: bool | None = None
    ends_with: Literal["[DONE]", "an error event"] | None = None
    within_ms: float | None = None
    first_token_ms: tuple[float, float] | None = None
    slowest_first_token_ms: float | None = None
    believed_cached: tuple[int, int] | None = None
    really_cached: tuple[int, int] | None = None
    ledger: int | None = None
    flights: int | None = None
    running: int | None = None
    on_engines: int | None = None
    aborted: int | None = None
    batch: dict[str, tuple[float, float]] | None = None
    free_kv: dict[str, tuple[float, float]] | None = None
    alarms: int | None = None
    degraded: dict[str, str] | None = None
    cancelled_on: list[str] | None = None
    metrics: dict[str, float | str] | None = None
    ready: dict[str, bool] | None = None
    affinity_mib: float | None = None
    moved_over: dict[str, int] | None = None
    not_moved: dict[str, int] | None = None
    leased: int | None = None


class Step(Told, kw_only=True):
    """What happens, and what must then hold. ``story`` is for the reader.

    In this order: requests arrive; the fleet changes (``state``, ``caches``, ``links``, ``flood``, a node ``becomes``
    otherwise or ``joins``, workers restart, a real node ``dies``, an engine ``renames`` a metric); time passes; played
    workers say ``first_token``, ``ends`` or, of a former life, ``late_ends``; a coordinator says that
    ``transfers_fail``; clients leave, a proxy resubmits; all are answered.

    With ``patience_ms`` the expectation has that long to come true; without, it must hold at once.
    """

    story: str = ""
    arrive: Arrive | None = None
    state: State | None = None
    caches: Caches | None = None
    becomes: Becomes | None = None
    links: Links | None = None
    flood: Flood | None = None
    renames: Renames | None = None
    passes_ms: float | None = None
    first_token: str | None = None
    ends: str | None = None
    late_ends: str | None = None
    transfers_fail: str | None = None
    leaves: str | None = None
    resubmits: str | None = None
    restarts: str | None = None
    joins: str | None = None
    dies: str | None = None
    all_answered: bool = False
    patience_ms: float = 0.0
    expect: Expect | None = None


class Broker(Told, kw_only=True):
    """A service as a process and its NATS broker, which is up before it, after its first words, or never.

    The service must say these texts in this order, and end with ``exits`` if that is given.
    """

    service: str
    says: list[str]
    comes: Literal["before", "after its first words", "never"] = "before"
    jetstream: bool = True
    exits: int | None = None


class Scenario(Told, kw_only=True):
    """A file. ``real_time`` runs on the real clock, which HTTP needs; everything else takes no time at all.

    With ``broker`` the story is about that alone, and has no steps.
    """

    title: str
    source: Source
    routers: int = 1
    bus_delay_ms: float = 0.0
    real_time: bool = False
    router: dict[str, Any] = field(default_factory=dict)
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    hardware: dict[str, dict[str, Any]] = field(default_factory=dict)
    fleet: list[Node] = field(default_factory=list)
    step: list[Step] = field(default_factory=list)
    broker: Broker | None = None

    @property
    def real(self) -> bool:
        """Whether the agents are real."""
        return any(node.agent == "real" for node in self.fleet)


def read(path: Path) -> Scenario:
    """The scenario in a file. Raises ``msgspec.ValidationError`` where it says what nobody understands."""
    return msgspec.toml.decode(path.read_bytes(), type=Scenario)
