"""Every message that crosses the bus, declared once.

Messages are msgpack; structs on the fleet's hot subjects are arrays on the wire (fields may only be appended), the rest
are maps (fields may only be added with a default). Request bodies and stream frames are JSON and live in
``quartet_core.openai`` and ``quartet_bus.frames``. Which message travels on which subject is said by
``quartet_bus.subjects`` alone.

Times are milliseconds unless a name says otherwise. Deadlines travel as *remaining* milliseconds, because two hosts'
clocks are never compared; ``emit_ns`` is an opaque stamp of its author's clock.

Numbers have ranges, checked when a message is decoded and nowhere else: one that is out of range (or NaN, or infinite)
makes the whole message unreadable, which the service base counts, and no table is half changed by it. They keep out
what would break whoever reads it, a negative count or a sum that is NaN for ever; what is merely implausible passes.
"""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct, field

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""Tokens, bytes, sequences, epochs, terms: as large as msgspec can check, and room in a u64."""

Count32 = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
"""What has 32 bits in a beat or over gRPC: a worker's or an agent's incarnation, TP, tries, state words."""

Ordinal = Annotated[int, Meta(ge=0, le=255)]
"""Place of a worker on its node; a byte in a beat."""

Small = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
"""A signed number that people choose: a priority, or whole milliseconds, which may be past."""

NumaNode = Annotated[int, Meta(ge=-1, le=1023)]
"""A NUMA node of a host, -1 where nobody said."""

Amount = Annotated[float, Meta(ge=0.0, le=1e18)]
"""A duration, rate or energy that cannot be below zero; finite, and so is the sum of any number of them."""

Finite = Annotated[float, Meta(ge=-1e18, le=1e18)]
"""A remaining time, or a difference of clock readings: a moment late it may be below zero."""

Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
"""A probability."""

ContentId = int
"""The 64-bit name of a KV block (``PageManifest``). Compared and never counted with, so it has no range (which msgspec
could not check of a u64)."""


class Role(StrEnum):
    """What a worker does of a request. ``BOTH`` as a worker's role means that it takes either half.

    ``STORE`` is the role of host memory that keeps paged KV: it takes no request, and only lends.
    """

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"
    STORE = "store"


class StreamId(Struct, frozen=True, array_like=True):
    """One try at one request: ``attempt`` counts the client's sends, ``try_`` that router's dispatches, both from 1."""

    id: str
    attempt: Count32 = 1
    try_: Count32 = 1


# Fleet ---------------------------------------------------------------------------------------------------------------


class KvLayout(Struct, frozen=True):
    """How a worker's KV cache lies in memory; two workers exchange KV only if all of it but ``tp`` is equal."""

    block_tokens: Count32
    bytes_per_token: Count
    precision: str
    revision: str = ""
    tp: Count32 = 1


class WorkerInfo(Struct, frozen=True):
    """Static facts of one routable engine replica.

    ``capabilities`` are any of export, import, reserve, page, embeddings, and ``handshake:<connector>``. ``role`` is
    what operators allow it to do. ``step_ms`` is the engine's step at an empty batch, for the frozen verdict. ``root``
    is the PCIe root complex of its GPUs and ``numa`` their NUMA node, "" and -1 where the host's configuration does not
    say.
    """

    id: str
    ordinal: Ordinal
    incarnation: Count32
    hardware: str
    model: str
    precision: str
    tp: Count32
    gpus: tuple[Count32, ...]
    kv_tokens: Count
    max_context: Count32
    max_batch: Count32
    chunk_tokens: Count32
    layout: KvLayout
    engine: str
    engine_version: str = ""
    capabilities: tuple[str, ...] = ()
    role: Role = Role.BOTH
    cordoned: bool = False
    adapters: tuple[str, ...] = ()
    step_ms: Amount = 0.0
    root: str = ""
    numa: NumaNode = -1


class LinkInfo(Struct, frozen=True):
    """One way KV can leave or enter this node; ``peer`` "" is any other node. Rates in decimal gigabytes per second.

    ``numa`` is the NUMA node of its NIC, -1 where nobody said.
    """

    kind: str
    gb_per_s: Amount
    setup_ms: Amount
    peer: str = ""
    numa: NumaNode = -1


class NodeInventory(Struct):
    """All static facts of one node, on change, on request, and every few seconds.

    ``incarnation`` is the agent's; ``epoch`` counts its inventories and is mirrored mod 16 in the words. ``kv_address``
    is ``host:port`` of the node's KV mover, "" when it has none.
    """

    node: str
    incarnation: Count32
    epoch: Count
    workers: tuple[WorkerInfo, ...]
    zone: str = ""
    links: tuple[LinkInfo, ...] = ()
    kv_address: str = ""
    agent_version: str = ""
    resident: tuple[str, ...] = ()


class GpuTelemetry(Struct, frozen=True, kw_only=True):
    """One card, as ``quartet_core.readings.GpuReading``; None is what the card does not tell.

    ``workers`` run on it. ``throttled`` and ``congested`` are what the rules made of its last readings, and stand in
    the workers' words.
    """

    index: Count32
    workers: tuple[str, ...] = ()
    root: str = ""
    temperature_c: Finite | None = None
    power_w: Amount | None = None
    power_limit_w: Amount | None = None
    sm_mhz: Amount | None = None
    sm_max_mhz: Amount | None = None
    memory_mhz: Amount | None = None
    busy_share: Fraction | None = None
    memory_used_bytes: Count | None = None
    reasons: tuple[str, ...] = ()
    pcie_rx_gb_per_s: Amount | None = None
    pcie_tx_gb_per_s: Amount | None = None
    pcie_gen: Count32 | None = None
    pcie_width: Count32 | None = None
    replays: Count | None = None
    throttled: bool = False
    congested: bool = False


class NicTelemetry(Struct, frozen=True, kw_only=True):
    """One NIC. Rates are since the message before; None in the first one, and after its counters began anew."""

    name: str
    root: str = ""
    gbit_per_s: Amount | None = None
    rx_gb_per_s: Amount | None = None
    tx_gb_per_s: Amount | None = None
    rx_bytes: Count = 0
    tx_bytes: Count = 0
    rx_dropped: Count = 0
    errors: Count = 0


class RootAlert(Struct, frozen=True, kw_only=True):
    """A root complex that is congested: ``worker`` is slower while ``nic``, which shares it, is busy.

    ``correlation`` is of ranks, ``t`` its size over what chance makes of it; drifts are means.
    """

    root: str
    worker: str
    nic: str
    correlation: Finite
    t: Finite
    drift_busy: Amount
    drift_quiet: Amount


class NodeTelemetry(Struct, kw_only=True):
    """How one node's cards and NICs fare, once a second. Never routed by: what matters is in the workers' words.

    ``source`` is where the numbers come from, "nvml" or "simulated". ``degraded`` says why some or all of them are
    missing or old, "" when none is; ``age_ms`` is how old the reading was when this was said.
    """

    node: str
    incarnation: Count32
    number: Count
    source: str
    degraded: str = ""
    age_ms: Amount = 0.0
    gpus: tuple[GpuTelemetry, ...] = ()
    nics: tuple[NicTelemetry, ...] = ()
    alerts: tuple[RootAlert, ...] = ()


class WorkerState(Struct, frozen=True, array_like=True):
    """One worker as a collector believes it: state bits 0-23, the beat that said so, and a verdict.

    ``verdict`` is a ``quartet_core.verdict.Verdict``: 0 up, 1 suspect, 2 frozen, 3 dead.
    """

    worker: str
    incarnation: Count32
    state: Count32
    beat: Count
    verdict: Ordinal


class NodeStamp(Struct, frozen=True, array_like=True):
    """The newest beat of one node: agent incarnation, sequence, and the node's own clock when it was sent.

    ``emit_ns`` is passed on as the node said it, and has no range: one node's odd clock must not cost others a delta.
    """

    node: str
    incarnation: Count32
    sequence: Count
    emit_ns: int


class FleetDelta(Struct, array_like=True):
    """What changed since delta ``number - 1`` of this collector incarnation; a gap in numbers asks for a snapshot."""

    collector: str
    incarnation: Count
    number: Count
    changes: tuple[WorkerState, ...] = ()
    stamps: tuple[NodeStamp, ...] = ()


class FleetSnapshot(Struct, array_like=True):
    """The full set after delta ``number``."""

    collector: str
    incarnation: Count
    number: Count
    workers: tuple[WorkerState, ...] = ()
    stamps: tuple[NodeStamp, ...] = ()


class AffinityUpdate(Struct, array_like=True):
    """Rows of the affinity table that turned on or off for one worker; ``full`` replaces all that was known of it.

    ``on`` and ``off`` are little-endian u32 row numbers. ``number`` counts updates of this incarnation: a gap asks for
    the full set. A router whose ``rows`` or ``hashes`` differ ignores the update and counts it.
    """

    worker: str
    incarnation: Count32
    number: Count
    rows: Count32
    hashes: Count32
    on: bytes = b""
    off: bytes = b""
    full: bool = False


# Requests ------------------------------------------------------------------------------------------------------------


class Split(Struct, frozen=True):
    """The other end of a transfer of a request's KV, as each end is told of it: of the first ``tokens`` tokens."""

    transfer: str
    peer: str
    peer_incarnation: Count32
    tokens: Count


class Run(Struct):
    """Dispatch to the worker that answers: prefill and decode, or (with ``split``) decode once the KV is committed.

    ``inbox`` is the client's reply subject. ``body`` is the client's JSON, unchanged. ``incarnation`` is the worker's
    at decision time: another one refuses with ``fenced``. ``deadline_ms`` is what remains, 0 for none.

    ``fetch`` (never together with ``split``) names the worker that lends the KV of the prompt's first ``tokens``
    tokens, a whole number of KV blocks. It is waited for as long as ``fetch_wait_ms`` after acceptance; if it does not
    come, the worker computes the whole prompt, and nothing fails.
    """

    stream: StreamId
    tenant: str
    model: str
    worker: str
    incarnation: Count32
    inbox: str
    body: bytes
    router: str
    prompt_tokens: Count
    deadline_ms: Small = 0
    ttft_ms: Amount = 0.0
    tpot_ms: Amount = 0.0
    predicted_ttft_ms: Finite = 0.0
    predicted_prefill_ms: Finite = 0.0
    predicted_total_ms: Finite = 0.0
    waited_ms: Finite = 0.0
    priority: Small = 0
    session: str = ""
    salt: bytes = b""
    split: Split | None = None
    fetch: Split | None = None
    fetch_wait_ms: Finite = 0.0


class Prefill(Struct):
    """Have the KV of the prompt's first ``split.tokens`` tokens, and keep it for ``split.transfer``.

    All of the prompt is a split's first half, and is computed. Less is a prefix that another worker fetches: it should
    be in the cache, and what is not is computed.
    """

    stream: StreamId
    tenant: str
    model: str
    worker: str
    incarnation: Count32
    body: bytes
    router: str
    prompt_tokens: Count
    split: Split
    deadline_ms: Small = 0
    predicted_prefill_ms: Finite = 0.0
    salt: bytes = b""


class Cancel(Struct):
    """End a request: one try, or (``try_`` 0) every try of the attempt, or (``attempt`` 0 too) the whole request.

    ``tenant`` is said by routers, to a worker; on ``cancel.<tenant>`` the subject says it, and this field is not read.
    """

    id: str
    attempt: Count32 = 0
    try_: Count32 = 0
    reason: str = "client"
    tenant: str = ""


class Phase(StrEnum):
    """Where a request is. Routers say the first three, agents the others."""

    HELD = "held"
    DISPATCHED = "dispatched"
    REJECTED = "rejected"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    PREFILLED = "prefilled"
    FIRST_TOKEN = "first_token"
    END = "end"


class RequestEvent(Struct):
    """One step in a request's life, with the timings known by then.

    ``beat`` is the sequence of the first beat of agent ``agent_incarnation`` that includes the event, so that a ledger
    knows whether the worker's own word already counts it. ``status`` on END is ok, cancelled or error; ``code`` an
    HTTP status. ``reason`` is a short machine-readable cause. ``gpu_ms`` is this request's share of its worker's busy
    time, all GPUs of the worker together; ``joules`` its share of the energy.
    """

    phase: Phase
    stream: StreamId
    tenant: str
    model: str
    worker: str = ""
    incarnation: Count32 = 0
    role: Role = Role.BOTH
    hardware: str = ""
    agent_incarnation: Count32 = 0
    beat: Count = 0
    router: str = ""
    reason: str = ""
    status: str = ""
    code: Count32 = 0
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    output_tokens: Count = 0
    transferred_tokens: Count = 0
    verified_blocks: Count = 0
    waited_ms: Finite = 0.0
    queue_ms: Finite = 0.0
    ttft_ms: Finite = 0.0
    e2e_ms: Finite = 0.0
    predicted_ttft_ms: Finite = 0.0
    predicted_total_ms: Finite = 0.0
    gpu_ms: Amount = 0.0
    joules: Amount = 0.0


class LedgerAction(StrEnum):
    """What a router did to its ledger."""

    DISPATCHED = "dispatched"
    RESERVED = "reserved"
    ENDED = "ended"


class LedgerNote(Struct, array_like=True):
    """One entry of the shared ledger: predicted work put on (or taken off) a worker by a router.

    RESERVED is a held request that will go to ``worker``; it expires by itself after ``expires_ms``.
    """

    router: str
    action: LedgerAction
    stream: StreamId
    tenant: str
    worker: str
    incarnation: Count32
    role: Role = Role.BOTH
    prefill_ms: Amount = 0.0
    prompt_tokens: Count = 0
    total_ms: Amount = 0.0
    expires_ms: Finite = 0.0
    tpot_ms: Amount = 0.0


# KV ------------------------------------------------------------------------------------------------------------------


class TransferReason(StrEnum):
    """Why KV moves."""

    SPLIT = "split"
    FETCH = "fetch"
    PAGE_OUT = "page_out"
    PAGE_IN = "page_in"


class TransferPlan(Struct):
    """KV of ``tokens`` prompt tokens shall go from ``source`` to ``target``. ``kv_bytes`` is the model's full size."""

    transfer: str
    reason: TransferReason
    stream: StreamId
    model: str
    source: str
    source_incarnation: Count32
    target: str
    target_incarnation: Count32
    tokens: Count
    kv_bytes: Count
    deadline_ms: Finite
    predicted_ms: Finite = 0.0
    link: str = ""
    router: str = ""
    tenant: str = ""


class HandshakeVerb(StrEnum):
    """What agents say to each other where engines hand KV over by themselves. The prefill's agent says the first,
    second and last, the decode's the others."""

    PARAMETERS = "parameters"
    FAILED = "failed"
    TAKEN = "taken"
    REFUSED = "refused"
    UNWANTED = "unwanted"


class Handshake(Struct):
    """One word about a split whose KV goes from engine to engine, on ``worker.<id>.kv``.

    PARAMETERS: the prompt is computed, and ``parameters`` are for the decode's engine, unchanged. FAILED: it came to
    nothing. TAKEN: the decode's engine has them, and fetches. REFUSED: nobody here waits for them. UNWANTED: nobody
    will ever fetch what they name, so free it; ``body`` is the request, which that takes.
    """

    verb: HandshakeVerb
    transfer: str
    stream: StreamId
    tenant: str
    model: str
    worker: str
    incarnation: Count32
    peer: str
    peer_incarnation: Count32
    parameters: bytes = b""
    body: bytes = b""
    salt: bytes = b""
    reason: str = ""


class KvVerb(StrEnum):
    """What a coordinator asks of an agent's KV pool."""

    RESERVE = "reserve"
    MOVE = "move"
    COMMIT = "commit"
    RELEASE = "release"
    RENEW = "renew"
    LEASES = "leases"
    PAGE = "page"
    HELD = "held"


class KvCommand(Struct):
    """A coordinator's command; ``term`` fences commands of coordinators that were replaced.

    RESERVE leases blocks for ``tokens`` on ``worker`` and answers with epoch, address and secret. MOVE tells the source
    to send what is computed of the prompt, and the rest as it comes to be: to ``address``, presenting ``secret`` first,
    charging the link at ``gb_per_s`` after ``setup_ms`` for ``kv_bytes``. COMMIT makes the blocks readable on the
    target. RELEASE frees either side.

    PAGE has the idle blocks of ``prefix`` on ``worker`` kept for a page-out, and answers with how many tokens they are
    and with their ``manifest``, which goes with the RESERVE of the same transfer. RENEW and RELEASE are for it, too: a
    RELEASE that says ``committed`` tells the source that its page is elsewhere, so that its own blocks may go. HELD
    asks ``worker`` how many leading ``tokens`` of a page's ``manifest`` it has already.
    """

    verb: KvVerb
    transfer: str
    term: Count
    coordinator: str
    worker: str = ""
    incarnation: Count32 = 0
    stream: StreamId | None = None
    reason: TransferReason = TransferReason.SPLIT
    tokens: Count = 0
    kv_bytes: Count = 0
    epoch: Count = 0
    lease_ms: Amount = 0.0
    address: str = ""
    secret: bytes = b""
    link: str = ""
    gb_per_s: Amount = 0.0
    setup_ms: Amount = 0.0
    prefix: ContentId = 0
    manifest: bytes = b""
    committed: bool = False


class KvLease(Struct):
    """Blocks promised to a transfer on one worker."""

    transfer: str
    worker: str
    incarnation: Count32
    epoch: Count
    tokens: Count
    state: str
    remaining_ms: Finite


class KvReply(Struct):
    """An agent's answer to a ``KvCommand``. ``reason`` names why ``ok`` is false, for example fenced or no_space.

    ``term`` goes with the reason old_term: the highest one this agent obeyed. ``tokens`` and ``manifest`` (a
    ``PageManifest`` in msgpack, which no coordinator reads) answer a PAGE, ``tokens`` a HELD.
    """

    ok: bool
    transfer: str = ""
    reason: str = ""
    epoch: Count = 0
    address: str = ""
    secret: bytes = b""
    leases: tuple[KvLease, ...] = ()
    term: Count = 0
    tokens: Count = 0
    manifest: bytes = b""


class PageManifest(Struct, frozen=True, array_like=True):
    """What the blocks of a page-out are, so that its target can find them again: one content id for each, in order.

    A content id is the name that the engine's own prefix cache has for a full block behind all blocks before it: 64
    bits that mean something to engines of the same kind alone. ``rungs`` are (block index, rung hash) of the ladder's
    rungs that end in these blocks. ``idle_ms`` is how long they had not been used, ``uses`` how often they had been.
    """

    contents: tuple[ContentId, ...]
    rungs: tuple[tuple[Count32, int], ...] = ()
    idle_ms: Amount = 0.0
    uses: Count32 = 0


class ColdPrefix(Struct, frozen=True, array_like=True):
    """A cached prefix of ``tokens`` tokens (whole blocks) that nobody has used for ``idle_ms``.

    ``prefix`` is the content id of its last block. ``uses`` counts how often it was taken from the cache. ``paged`` is
    the deepest prefix of it that was paged out from here before, 0 for none: it came back since.
    """

    prefix: ContentId
    tokens: Count
    idle_ms: Amount
    uses: Count32 = 0
    paged: ContentId = 0


class PoolState(Struct, frozen=True, array_like=True):
    """One worker's KV as the virtual VRAM pool sees it, in blocks: empty, idle (cached, used by nobody), referenced.

    ``pressed`` says that too few are empty; ``cold`` are then its coldest prefixes, the coldest first. ``returns`` and
    ``losses`` count, since the state before, prefixes that were used again, and that were evicted, by how long they had
    been idle (``quartet_core.reuse``). The other counts are since the worker's start: blocks that came by page-outs
    and were kept, that left by them and were dropped here, and of the former those that were found by requests.
    """

    worker: str
    incarnation: Count32
    total_blocks: Count
    empty_blocks: Count
    idle_blocks: Count
    pressed: bool = False
    cold: tuple[ColdPrefix, ...] = ()
    returns: tuple[Count32, ...] = ()
    losses: tuple[Count32, ...] = ()
    in_blocks: Count = 0
    out_blocks: Count = 0
    hit_blocks: Count = 0
    hit_tokens: Count = 0


class KvPressure(Struct):
    """How full the KV of a node's workers is: once a second, and four times while one of them is pressed."""

    node: str
    incarnation: Count32
    pools: tuple[PoolState, ...] = ()


class TransferReport(Struct):
    """How a transfer stands; on ``kv.progress``, ``kv.done`` and ``kv.failed``.

    ``state`` is a ``quartet_core.transfer.State`` value. ``wire_bytes`` crossed a socket, ``kv_bytes`` were charged.
    ``took_ms`` is how long bytes flowed; ``overlap_ms`` of it passed while the source still computed, and waits for
    more to be computed are in neither. ``computing`` says that it still does; when it is through, ``left_bytes`` of
    ``kv_bytes`` were not over yet.
    """

    transfer: str
    stream: StreamId
    reason: TransferReason
    state: str
    source: str
    target: str
    epoch: Count = 0
    tokens: Count = 0
    wire_bytes: Count = 0
    kv_bytes: Count = 0
    took_ms: Finite = 0.0
    predicted_ms: Finite = 0.0
    link: str = ""
    detail: str = ""
    router: str = ""
    overlap_ms: Finite = 0.0
    computing: bool = False
    left_bytes: Count = 0


class LinkState(Struct, frozen=True, array_like=True):
    """One directed link between two nodes as the coordinator measures it."""

    source: str
    target: str
    kind: str
    gb_per_s: Amount
    setup_ms: Amount
    in_flight_bytes: Count = 0
    transfers: Count32 = 0


class LinkTable(Struct):
    """Link state at 10 Hz. The coordinator with the highest (term, id) is the active one.

    ``links`` are those that are measured or busy; what any other costs, its class says (`quartet_core.links`). A row
    with source and target "" replaces the figures of its class.
    """

    term: Count
    coordinator: str
    links: tuple[LinkState, ...] = ()


# Control and prefetch ------------------------------------------------------------------------------------------------


class ControlRequest(Struct):
    """An operator's wish, on ``ctl.<service>.<id>.<verb>``; ``argument`` and ``worker`` as the verb needs."""

    worker: str = ""
    argument: str = ""


class ControlReply(Struct):
    """Its answer: ``ok``, or a reason. ``payload`` is JSON whose shape the verb defines."""

    ok: bool
    service: str = ""
    instance: str = ""
    reason: str = ""
    payload: bytes = b"{}"


class QuotaClaim(Struct, frozen=True, array_like=True):
    """What one gateway used and took of one limit, and what it was asked for (``quartet_core.quota.Claim``)."""

    used: Count = 0
    taken: Count = 0
    asked: Count = 0
    wanted: Count = 0


class TenantClaim(Struct, frozen=True, array_like=True):
    """What one gateway claims of a tenant's two limits; all zero where there is none."""

    requests: QuotaClaim = QuotaClaim()
    tokens: QuotaClaim = QuotaClaim()


class GatewayLife(Struct):
    """A gateway's word, once a second, that it lives; ``leaving`` is its last one.

    ``gateway`` is a name that no other life of a gateway has. ``claims`` are by tenant, and only of tenants that have
    limits and were heard of in the last minute.
    """

    gateway: str
    claims: dict[str, TenantClaim] = field(default_factory=dict)
    leaving: bool = False


class PrefetchVerb(StrEnum):
    """What a predictor asks for weights."""

    LOAD = "load"
    WARM = "warm"
    RELEASE = "release"


class PrefetchCommand(Struct):
    """Have ``model`` ready on this node within ``deadline_ms``, because it will be needed with ``confidence``."""

    verb: PrefetchVerb
    model: str
    hardware: str
    weight_bytes: Count
    deadline_ms: Finite
    confidence: Fraction
    predictor: str = ""


class ModelForecast(Struct, frozen=True):
    """Demand for a model on a hardware class: chance of at least one request within ``horizon_s``, expected load."""

    model: str
    hardware: str
    horizon_s: Amount
    probability: Fraction
    requests_per_s: Amount
    prompt_tokens_per_s: Amount = 0.0
    output_tokens_per_s: Amount = 0.0
    state: Count32 = 0


class Forecast(Struct):
    """All forecasts of one tick."""

    predictor: str
    number: Count
    seen: Count
    models: tuple[ModelForecast, ...] = field(default_factory=tuple)
