"""Every subject of the bus, as functions that return a topic: the subject and the one type that travels on it.

``infer`` and ``gateway`` carry the client's JSON unchanged and inboxes carry JSON frames; their topics have the type
``bytes``, which is passed through undecoded.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar
from urllib.parse import unquote

from quartet_bus.bus import LogSpec
from quartet_bus.messages import (
    AffinityUpdate,
    Cancel,
    ControlRequest,
    FleetDelta,
    FleetSnapshot,
    Forecast,
    GatewayLife,
    Handshake,
    KvCommand,
    KvPressure,
    LedgerNote,
    LinkTable,
    NodeInventory,
    NodeTelemetry,
    Phase,
    PrefetchCommand,
    Prefill,
    RequestEvent,
    Run,
    TransferPlan,
    TransferReport,
)

PREFIX = "quartet.v1"
_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Topic(Generic[T]):
    """A subject (or, with ``*`` or ``>``, a set of them) and the type of the message on it."""

    subject: str
    kind: type[T]


def token(text: str) -> str:
    """``text`` as one subject token: every byte outside ``[A-Za-z0-9_-]`` percent-encoded.

    Raises ``ValueError`` for an empty text, which NATS cannot carry as a token.
    """
    if not text:
        raise ValueError("a subject token must not be empty")
    if _PLAIN.issuperset(text):
        return text
    return "".join(c if c in _PLAIN else "".join(f"%{byte:02X}" for byte in c.encode()) for c in text)


def text_of(subject: str, index: int) -> str:
    """The decoded token at ``index`` behind the prefix: ``text_of("quartet.v1.infer.a.b", 1)`` is ``"a"``."""
    token = subject.split(".", index + 3)[index + 2]
    return _unquoted(token) if "%" in token else token


@lru_cache(maxsize=256)
def _unquoted(token: str) -> str:
    return unquote(token)


def inbox_prefix(tenant: str) -> str:
    """The only prefix under which a tenant's clients may be answered."""
    return f"_INBOX.{token(tenant)}."


# Requests


def infer(tenant: str, model: str) -> Topic[bytes]:
    """A client's request to any router."""
    return Topic(f"{PREFIX}.infer.{token(tenant)}.{token(model)}", bytes)


def infer_all() -> Topic[bytes]:
    """All clients' requests."""
    return Topic(f"{PREFIX}.infer.*.*", bytes)


def gateway(tenant: str, model: str) -> Topic[bytes]:
    """A gateway's request to any router, whose trusted headers count."""
    return Topic(f"{PREFIX}.gateway.{token(tenant)}.{token(model)}", bytes)


def gateway_all() -> Topic[bytes]:
    """All gateways' requests."""
    return Topic(f"{PREFIX}.gateway.*.*", bytes)


def cancel(tenant: str) -> Topic[Cancel]:
    """A client's word that it no longer wants an answer, to all routers and agents."""
    return Topic(f"{PREFIX}.cancel.{token(tenant)}", Cancel)


def cancel_all() -> Topic[Cancel]:
    """All clients' cancels."""
    return Topic(f"{PREFIX}.cancel.*", Cancel)


def worker_run(worker: str) -> Topic[Run]:
    """Dispatch to the worker that answers."""
    return Topic(f"{PREFIX}.worker.{token(worker)}.run", Run)


def worker_prefill(worker: str) -> Topic[Prefill]:
    """Dispatch of a split's first half."""
    return Topic(f"{PREFIX}.worker.{token(worker)}.prefill", Prefill)


def worker_kv(worker: str) -> Topic[Handshake]:
    """What the other half's agent says of KV that engines hand over by themselves."""
    return Topic(f"{PREFIX}.worker.{token(worker)}.kv", Handshake)


def worker_cancel(worker: str) -> Topic[Cancel]:
    """End a request on one worker."""
    return Topic(f"{PREFIX}.worker.{token(worker)}.cancel", Cancel)


def routed() -> Topic[LedgerNote]:
    """The ledger that routers share."""
    return Topic(f"{PREFIX}.routed", LedgerNote)


def request_event(phase: Phase) -> Topic[RequestEvent]:
    """One phase of every request's life."""
    return Topic(f"{PREFIX}.event.request.{phase.value}", RequestEvent)


def request_events() -> Topic[RequestEvent]:
    """All phases of all requests."""
    return Topic(f"{PREFIX}.event.request.*", RequestEvent)


def inbox(subject: str) -> Topic[bytes]:
    """A client's inbox, where frames go."""
    return Topic(subject, bytes)


def cancel_raw() -> Topic[bytes]:
    """All clients' cancels, undecoded: the tenant is in the subject alone."""
    return Topic(cancel_all().subject, bytes)


# Fleet


def fleet_delta() -> Topic[FleetDelta]:
    """What changed in the fleet."""
    return Topic(f"{PREFIX}.fleet.delta", FleetDelta)


def fleet_delta_raw() -> Topic[bytes]:
    """The same, undecoded: a router that reads a ring has each delta already."""
    return Topic(fleet_delta().subject, bytes)


def fleet_snapshot() -> Topic[FleetSnapshot]:
    """The whole fleet."""
    return Topic(f"{PREFIX}.fleet.snapshot", FleetSnapshot)


def inventory(node: str) -> Topic[NodeInventory]:
    """Static facts of one node."""
    return Topic(f"{PREFIX}.node.{token(node)}.inventory", NodeInventory)


def inventory_all() -> Topic[NodeInventory]:
    """Static facts of all nodes."""
    return Topic(f"{PREFIX}.node.*.inventory", NodeInventory)


def telemetry(node: str) -> Topic[NodeTelemetry]:
    """How the cards and NICs of one node fare."""
    return Topic(f"{PREFIX}.node.{token(node)}.telemetry", NodeTelemetry)


def telemetry_all() -> Topic[NodeTelemetry]:
    """How the cards and NICs of all nodes fare."""
    return Topic(f"{PREFIX}.node.*.telemetry", NodeTelemetry)


def affinity(worker: str) -> Topic[AffinityUpdate]:
    """Which prefixes one worker holds."""
    return Topic(f"{PREFIX}.affinity.{token(worker)}", AffinityUpdate)


def affinity_all() -> Topic[AffinityUpdate]:
    """Which prefixes all workers hold."""
    return Topic(f"{PREFIX}.affinity.*", AffinityUpdate)


# KV


def kv_plan() -> Topic[TransferPlan]:
    """A transfer that somebody wants."""
    return Topic(f"{PREFIX}.kv.plan", TransferPlan)


def kv_progress() -> Topic[TransferReport]:
    """A transfer on its way: the source says moving and moved."""
    return Topic(f"{PREFIX}.kv.progress", TransferReport)


def kv_done() -> Topic[TransferReport]:
    """A transfer that was committed."""
    return Topic(f"{PREFIX}.kv.done", TransferReport)


def kv_failed() -> Topic[TransferReport]:
    """A transfer that was refused or aborted; both sides are freed."""
    return Topic(f"{PREFIX}.kv.failed", TransferReport)


def kv_links() -> Topic[LinkTable]:
    """Link state, and who the active coordinator is."""
    return Topic(f"{PREFIX}.kv.links", LinkTable)


def kv_pressure() -> Topic[KvPressure]:
    """How full workers' KV is, and what of it could be paged out; agents to coordinators."""
    return Topic(f"{PREFIX}.kv.pressure", KvPressure)


def kv_command(node: str) -> Topic[KvCommand]:
    """A coordinator's request to one agent, answered with ``KvReply``."""
    return Topic(f"{PREFIX}.kv.cmd.{token(node)}", KvCommand)


# Control and prefetch


def control(service: str, instance: str, verb: str) -> Topic[ControlRequest]:
    """An operator's request to one instance, answered with ``ControlReply``. Instance ``_all`` reaches every one."""
    return Topic(f"{PREFIX}.ctl.{token(service)}.{token(instance)}.{token(verb)}", ControlRequest)


def control_all(service: str, instance: str) -> Topic[ControlRequest]:
    """Every verb for one instance."""
    return Topic(f"{PREFIX}.ctl.{token(service)}.{token(instance)}.*", ControlRequest)


def gateway_life() -> Topic[GatewayLife]:
    """Which gateways live, and what each has taken of the tenants' limits."""
    return Topic(f"{PREFIX}.gateways", GatewayLife)


def prefetch(node: str) -> Topic[PrefetchCommand]:
    """A predictor's word to one agent."""
    return Topic(f"{PREFIX}.prefetch.{token(node)}", PrefetchCommand)


def forecast() -> Topic[Forecast]:
    """Expected demand per model and hardware class."""
    return Topic(f"{PREFIX}.forecast", Forecast)


def request_ends_log() -> LogSpec:
    """The kept log of ended requests, both halves of split ones, from which costs are replayed after a restart."""
    return LogSpec(
        name="QUARTET_REQUEST_ENDS",
        subjects=(request_event(Phase.END).subject,),
        max_age_s=31 * 86400.0,
        max_bytes=256 * 1024 * 1024,
    )
