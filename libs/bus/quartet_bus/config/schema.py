"""What may stand in ``quartet.toml``: one struct a section, one field a key, units in the names.

An unknown key, a wrong type or a value out of range stops a service at start (``quartet_bus.config.load``). Every
service reads the whole file, so that one file describes a fleet; what differs between hosts goes into a second file
or into ``QUARTET_<SECTION>__<KEY>``.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

Port = Annotated[int, Meta(ge=0, le=65535)]
# Upper bounds are far above what anybody wants, and low enough that a slip is refused at start, instead of being
# met as a full memory.
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
CountOrZero = Annotated[int, Meta(ge=0, le=1_000_000)]
Tokens = Annotated[int, Meta(ge=1, le=1_000_000_000)]
TokensOrZero = Annotated[int, Meta(ge=0, le=1_000_000_000)]
Bytes = Annotated[int, Meta(ge=1, le=1 << 40)]
BytesOrZero = Annotated[int, Meta(ge=0, le=1 << 40)]
StoreBytes = Annotated[int, Meta(ge=0, le=1 << 44)]
PerMinute = Annotated[int, Meta(ge=0, le=1_000_000_000_000)]
Milliseconds = Annotated[int, Meta(ge=1, le=7 * 24 * 3600 * 1000)]
MillisecondsOrZero = Annotated[int, Meta(ge=0, le=7 * 24 * 3600 * 1000)]
NumaNode = Annotated[int, Meta(ge=-1, le=1023, description="a NUMA node's number, or -1 where it is not known")]
PositiveFloat = Annotated[float, Meta(gt=0)]
NotNegativeFloat = Annotated[float, Meta(ge=0)]
HexKey = Annotated[
    str, Meta(pattern="^([0-9a-fA-F]{2}){1,32}$", description="1 to 32 bytes in hex (2 to 64 digits, an even number)")
]


class Section(Struct, forbid_unknown_fields=True):
    """A table of the file."""


class ServiceSection(Section):
    """What every process needs. ``instance`` "" takes a random name; ``http_port`` 0 takes a free port."""

    instance: str = ""
    http_host: str = "127.0.0.1"
    http_port: Port = 0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    stop_timeout_ms: Milliseconds = 10_000


class NatsSection(Section):
    """How to reach the broker. ``connect_timeout_ms`` 0 waits for ever, saying so once a second."""

    url: str = "nats://127.0.0.1:4222"
    user: str = ""
    password: str = ""
    credentials_file: str = ""
    connect_timeout_ms: MillisecondsOrZero = 30_000
    outgoing_bytes: Bytes = 64 * 1024 * 1024


class FleetSection(Section):
    """Heartbeats and verdicts. ``targets`` (``host:port``) replaces multicast by unicast.

    ``interface`` is an address, a name, or "" for the system's choice. ``master_keys`` are hex: the first signs, all
    are believed; they may stand in ``master_keys_file`` instead, one a line, which agents read again when it changes.
    ``beat_scheduling`` realtime has beats go before all other work of the host, which needs CAP_SYS_NICE or
    RLIMIT_RTPRIO; auto does so where it may.
    """

    multicast_group: str = "239.7.7.7"
    port: Port = 7447
    interface: str = "127.0.0.1"
    multicast_ttl: Annotated[int, Meta(ge=0, le=255)] = 0
    targets: tuple[str, ...] = ()
    beat_interval_us: Annotated[int, Meta(ge=1, le=60_000_000)] = 500
    beat_scheduling: Literal["auto", "realtime", "normal"] = "auto"
    receive_batch_ms: NotNegativeFloat = 2.0
    receive_buffer_bytes: Bytes = 8 * 1024 * 1024
    ring_path: str = ""
    ring_bytes: Bytes = 4 * 1024 * 1024
    delta_interval_ms: PositiveFloat = 1.0
    stamp_interval_ms: PositiveFloat = 50.0
    snapshot_interval_ms: PositiveFloat = 250.0
    suspect_ms: PositiveFloat = 10.0
    dead_ms: PositiveFloat = 100.0
    frozen_ms: PositiveFloat = 1000.0
    inventory_interval_ms: PositiveFloat = 2000.0
    master_keys: tuple[HexKey, ...] = ()
    master_keys_file: str = ""


class ModelSection(Section):
    """A model as clients name it. ``spec`` is its name in the catalogue; targets are its default SLO.

    ``tokenizer`` is a directory on the gateway's host with ``tokenizer.json`` and, for chat, the model's template, as
    it comes with the weights: with it, gateways sketch the tokens that an engine will see.
    """

    spec: str
    ttft_ms: PositiveFloat = 2000.0
    tpot_ms: PositiveFloat = 100.0
    sketch: Literal["tokens", "text"] = "text"
    tokenizer: str = ""
    isolation: bool = False
    max_tokens: Tokens = 1024
    base: str = ""


class RouterSection(Section):
    """Routing. ``policies`` are import paths of the policies that may be chosen; ``policy`` is the one at start.

    Uncached prompts above ``long_prompt_tokens`` are not given to workers at a limit (heat, power, PCIe, memory), and
    above ``long_context_tokens`` to no other than ``long_context_classes``, if any such worker is there.

    A split takes two workers and a link: it must cost less than ``split_margin`` of the best plan for one worker.

    While ``long_prefill_share`` of a model's workers have prefills of more than ``long_prefill_ms`` ahead, further ones
    go to the same workers, so that all other requests find one without; share 1 contains nothing.
    """

    policy: str = "finish-time"
    policies: tuple[str, ...] = (
        "quartet_core.policy.finish_time:FinishTime",
        "quartet_core.policy.decision_matrix:DecisionMatrix",
        "quartet_core.policy.round_robin:RoundRobin",
        "quartet_core.policy.least_loaded:LeastLoaded",
        "quartet_core.policy.prefix_aware:PrefixAware",
        "quartet_core.policy.block_cost:BlockCost",
    )
    kappa: NotNegativeFloat = 1.0
    split_margin: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.7
    split: bool = True
    fetch: bool = True
    split_without_prefill_worker: Literal["whole", "error"] = "whole"
    long_prompt_tokens: Tokens = 4096
    long_context_tokens: Tokens = 65_536
    long_context_classes: tuple[str, ...] = ()
    long_prefill_ms: PositiveFloat = 3000.0
    long_prefill_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.5
    dispatch_ack_ms: PositiveFloat = 250.0
    max_tries: Annotated[int, Meta(ge=1, le=32)] = 3
    hold_max_ms: NotNegativeFloat = 2000.0
    hold_ahead_chunks: NotNegativeFloat = 2.0
    hold_max_bytes: BytesOrZero = 16 * 1024 * 1024
    hold_max_requests: CountOrZero = 4096
    body_max_bytes: BytesOrZero = 32 * 1024 * 1024
    affinity_rows: Annotated[int, Meta(ge=8, le=1 << 24)] = 1 << 17
    affinity_hashes: Annotated[int, Meta(ge=1, le=8)] = 4
    explain_last: CountOrZero = 1024
    max_workers: Annotated[int, Meta(ge=1, le=100_000)] = 10_000


class LinkSection(Section):
    """A link class's planning values, until measurement refines them."""

    gb_per_s: PositiveFloat
    setup_ms: NotNegativeFloat


class KvSection(Section):
    """KV transfers. ``listen`` is where an agent's movers take bytes (port 0: any); ``grpc`` the coordinator's door.

    ``movers`` are an agent's ways of carrying bytes, the preferred first; each pair of agents takes the first that both
    have and that reaches from the one to the other. At most ``transfers_per_link`` send at once on a directed link, and
    ``transfers_per_root`` into or out of one PCIe root complex. ``checksums`` is of chunks, and must be alike on all
    agents.

    ``pool`` turns the virtual VRAM pool on (docs/pool.md), on agents and coordinators alike. A worker pages prefixes
    out once a smaller share of its KV blocks than ``page_low`` is empty, until ``page_high`` is; only prefixes of
    ``page_min_tokens`` that were idle for ``page_min_idle_ms``, and at most ``page_transfers`` at once from a worker. A
    page is expected to be kept for ``page_horizon_ms``. One that comes back and goes again within ``page_cycle_ms``
    must be idle for as long before the next time, and for twice as long after each further time. ``store_bytes`` of
    host memory are lent to the pool by an agent: shared equally among the models (and layouts) that its engines have.
    """

    listen: str = "127.0.0.1:0"
    movers: Annotated[tuple[Literal["shm", "nixl", "mooncake", "tcp"], ...], Meta(min_length=1)] = ("shm", "tcp")
    checksums: bool = True
    mooncake_protocol: Literal["tcp", "rdma"] = "tcp"
    grpc: str = "127.0.0.1:7451"
    lease_ms: PositiveFloat = 5000.0
    chunk_bytes: Bytes = 1024 * 1024
    transfers_per_link: Count = 4
    transfers_per_root: Count = 8
    coordinator_silence_ms: PositiveFloat = 500.0
    links_interval_ms: PositiveFloat = 100.0
    links: dict[str, LinkSection] = field(default_factory=dict)
    pool: bool = False
    page_low: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.05
    page_high: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.15
    page_min_tokens: Tokens = 1024
    page_min_idle_ms: NotNegativeFloat = 2000.0
    page_transfers: Annotated[int, Meta(ge=1, le=64)] = 2
    page_horizon_ms: PositiveFloat = 600_000.0
    page_cycle_ms: PositiveFloat = 30_000.0
    store_bytes: StoreBytes = 0


class PrefetchSection(Section):
    """The predictor. It watches before it acts: ``min_requests`` and ``min_seen_s`` must have passed."""

    grpc: str = "127.0.0.1:7452"
    tick_ms: PositiveFloat = 1000.0
    horizons_s: tuple[float, ...] = (25.0, 300.0, 1800.0)
    act: bool = False
    min_requests: CountOrZero = 200
    min_seen_s: NotNegativeFloat = 7200.0
    max_models: Count = 1000


class LimitSection(Section):
    """What a tenant may use in a minute, at all gateways together; 0 is no limit."""

    requests_per_minute: PerMinute = 0
    tokens_per_minute: PerMinute = 0


class TenantsFile(Section):
    """What stands in ``gateway.tenants_file``: keys and limits, as in ``[gateway]``."""

    keys: dict[str, str] = field(default_factory=dict)
    limits: dict[str, LimitSection] = field(default_factory=dict)


class GatewaySection(Section):
    """The HTTP door. Without ``keys`` (SHA-256 of an API key in hex → tenant) every caller is ``anonymous_tenant``.

    ``limits`` are by tenant; ``default_limit`` is for those that have none. ``tenants_file`` is read again whenever it
    changes; what it says is added to ``keys`` and ``limits``, and wins over them. ``cors_origins`` are the web pages'
    origins that browsers may call from (``*``: any). With ``reuse_port`` several gateways of one host listen together.

    A client with more than ``slow_client_bytes`` unread has ``slow_client_ms`` to catch up. A request's body must be
    there within ``body_timeout_ms``, and all bodies whose answers have not begun must fit into ``open_bodies_bytes``. A
    connection without a request is closed after ``idle_timeout_ms``. A request line or a header field has at most
    ``max_header_bytes``. Told to stop, a gateway is not ready for ``drain_notice_ms`` before it stops to listen.
    """

    listen: str = "127.0.0.1:8080"
    reuse_port: bool = False
    keys: dict[str, str] = field(default_factory=dict)
    limits: dict[str, LimitSection] = field(default_factory=dict)
    default_limit: LimitSection = field(default_factory=LimitSection)
    tenants_file: str = ""
    anonymous_tenant: str = "public"
    cors_origins: tuple[str, ...] = ()
    max_header_bytes: Annotated[int, Meta(ge=256, le=1 << 20)] = 8190
    drain_notice_ms: MillisecondsOrZero = 0
    max_body_bytes: Bytes = 7 * 1024 * 1024
    open_bodies_bytes: Bytes = 256 * 1024 * 1024
    max_streams: Count = 4096
    request_timeout_ms: Milliseconds = 600_000
    slow_client_bytes: Bytes = 1024 * 1024
    slow_client_ms: Milliseconds = 10_000
    body_timeout_ms: Milliseconds = 30_000
    idle_timeout_ms: Milliseconds = 75_000


class AdminSection(Section):
    """The gRPC door."""

    grpc: str = "127.0.0.1:7450"
    gather_ms: PositiveFloat = 500.0


class CostSection(Section):
    """Prices in dollars per GPU hour that replace the catalogue's."""

    price_per_hour: dict[str, float] = field(default_factory=dict)


class EngineSection(Section):
    """One engine of a host, or ``count`` equal simulated ones on consecutive GPUs from ``first_gpu`` on.

    ``kv_tokens`` 0 takes what the engine says, or else what the catalogue says fits. ``time_scale`` 2 makes a simulated
    engine twice as slow; with ``overlap`` its KV leaves chunk by chunk while a prompt is computed, without, afterwards,
    as of an unmodified engine. ``adapters`` are LoRA adapters it serves, each a ``[models.*]`` of its own whose
    ``base`` is ``model``. ``embeddings`` says that it answers ``/v1/embeddings``. ``root`` is a name for the PCIe root
    complex of its GPUs, the same for all that share one, ``numa`` their NUMA node; left out, they are what ``gpus`` say
    of the first of them.

    Of a server (any kind but simulated): ``url`` is where it listens, without ``/v1``. ``served_model`` is its name for
    the model, "" where that is ``model``. The key in ``api_key`` (or in the file) goes with every call, also probes.
    ``kv_events`` "auto" asks the engine where it publishes them; else ZMQ endpoints separated by commas, one a
    data-parallel rank, or "off". ``kv_connector`` names the engine's connector for prefill and decode apart; two
    workers pair when it is the same. ``kv_pages`` is the socket of our connector in a vLLM engine, by which its KV is
    paged, lent and split instead. ``data_parallel`` ranks of one server are as many workers, on consecutive GPUs, and
    requests name theirs; with 1, all that it has are one worker. ``adapter_paths`` are where the engine finds adapters
    that are loaded at run time.

    A server is lost when it does not answer ``probes_lost`` probes in a row, each within ``probe_timeout_ms``, or at
    once when nobody listens; a job fails when nothing was heard of it for ``silence_ms``.
    """

    kind: Literal["simulated", "vllm", "sglang", "openai"]
    model: str
    hardware: str
    precision: str = "fp8"
    tp: Count = 1
    count: Count = 1
    first_gpu: CountOrZero = 0
    role: Literal["both", "prefill", "decode"] = "both"
    max_batch: Count = 256
    chunk_tokens: Tokens = 2048
    kv_tokens: TokensOrZero = 0
    time_scale: PositiveFloat = 1.0
    overlap: bool = True
    adapters: tuple[str, ...] = ()
    embeddings: bool = False
    root: str = ""
    numa: NumaNode = -1
    url: Annotated[str, Meta(pattern="^$|^https?://[^/]+$", description="http://host:port, without a path")] = ""
    served_model: str = ""
    api_key: str = ""
    api_key_file: str = ""
    kv_events: str = "auto"
    kv_replay: str = ""
    kv_connector: str = ""
    data_parallel: Count = 1
    kv_pages: str = ""
    adapter_paths: dict[str, str] = field(default_factory=dict)
    connect_timeout_ms: Milliseconds = 2000
    probe_interval_ms: Milliseconds = 500
    probe_timeout_ms: Milliseconds = 3000
    probes_lost: Annotated[int, Meta(ge=1, le=100)] = 3
    silence_ms: Milliseconds = 300_000


class GpuSection(Section):
    """One card of this host, as ``quartet detect --toml`` writes it. ``root`` names the host bridge it is below.

    ``numa`` is -1 where the host does not say; generation and width of its PCIe link are the most it can do, 0 unknown.
    """

    index: CountOrZero
    hardware: str = ""
    pci: str = ""
    uuid: str = ""
    root: str = ""
    numa: NumaNode = -1
    pcie_gen: Annotated[int, Meta(ge=0, le=7)] = 0
    pcie_width: Annotated[int, Meta(ge=0, le=32)] = 0


class NicSection(Section):
    """One NIC of this host, as ``quartet detect --toml`` writes it. ``gbit_per_s`` 0 means unknown."""

    name: str
    pci: str = ""
    root: str = ""
    numa: NumaNode = -1
    gbit_per_s: NotNegativeFloat = 0.0
    rdma: str = ""


class AgentSection(Section):
    """One host: its name, where it stands, how it is wired, its engines, its cards and NICs.

    Without ``gpus`` and ``nics`` an agent with real engines looks for itself; given, they are believed. ``fabrics`` are
    the links it has, ``nic_numa`` the NUMA node of the NIC that KV leaves by; left out, the first of ``nics`` says it.
    """

    node: str = ""
    zone: str = ""
    fabrics: tuple[str, ...] = ("TCP",)
    nic_numa: NumaNode = -1
    max_running: Count = 4096
    engines: tuple[EngineSection, ...] = ()
    gpus: tuple[GpuSection, ...] = ()
    nics: tuple[NicSection, ...] = ()


Share = Annotated[float, Meta(gt=0, le=1)]


class TelemetrySection(Section):
    """How cards and NICs fare, once a second beside the beats, and when that shows in a worker's word.

    ``source`` auto is NVML where an engine of this host is real, simulated where all are. A read that takes longer than
    ``read_timeout_ms`` makes the telemetry degraded. What the limits mean, and where their values come from, is said in
    ``quartet_core.strain.StrainLimits`` and ``quartet_core.contention.ContentionLimits``, whose names they bear.
    """

    source: Literal["auto", "nvml", "simulated", "none"] = "auto"
    interval_ms: Milliseconds = 1000
    read_timeout_ms: Milliseconds = 3000
    power_clock_share: Share = 0.75
    cool_margin_c: NotNegativeFloat = 5.0
    pcie_high: Share = 0.75
    pcie_low: Share = 0.55
    replays_per_s: PositiveFloat = 10.0
    raise_readings: Count = 3
    clear_readings: Count = 5
    contention_window: Annotated[int, Meta(ge=60, le=3600)] = 300
    contention_t: PositiveFloat = 5.0
    contention_slowdown: Annotated[float, Meta(ge=1.06)] = 1.15


class Config(Section):
    """The whole file. ``hardware`` and ``specs`` change the catalogue's classes and models, or add to them."""

    service: ServiceSection = field(default_factory=ServiceSection)
    nats: NatsSection = field(default_factory=NatsSection)
    fleet: FleetSection = field(default_factory=FleetSection)
    hardware: dict[str, dict[str, Any]] = field(default_factory=dict)
    specs: dict[str, dict[str, Any]] = field(default_factory=dict)
    models: dict[str, ModelSection] = field(default_factory=dict)
    router: RouterSection = field(default_factory=RouterSection)
    kv: KvSection = field(default_factory=KvSection)
    prefetch: PrefetchSection = field(default_factory=PrefetchSection)
    gateway: GatewaySection = field(default_factory=GatewaySection)
    admin: AdminSection = field(default_factory=AdminSection)
    cost: CostSection = field(default_factory=CostSection)
    agent: AgentSection = field(default_factory=AgentSection)
    telemetry: TelemetrySection = field(default_factory=TelemetrySection)
