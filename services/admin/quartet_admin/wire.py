"""From what the service knows to what gRPC carries. Words become units here, once."""

from msgspec import structs

from quartet_admin.cost import Column, Line
from quartet_admin.fleet import NodeView, WorkerView, verdict_of
from quartet_admin.telemetry import TelemetryView
from quartet_bus.messages import RequestEvent, Role
from quartet_core import word as words
from quartet_core.verdict import Verdict
from quartet_rpc.v1 import admin_pb2 as pb

ROLES = {
    Role.BOTH: pb.ROLE_BOTH,
    Role.PREFILL: pb.ROLE_PREFILL,
    Role.DECODE: pb.ROLE_DECODE,
    Role.STORE: pb.ROLE_STORE,
}
VERDICTS = {
    Verdict.UP: pb.VERDICT_UP,
    Verdict.SUSPECT: pb.VERDICT_SUSPECT,
    Verdict.FROZEN: pb.VERDICT_FROZEN,
    Verdict.DEAD: pb.VERDICT_DEAD,
}
COLUMNS = {
    pb.COST_KEY_MODEL: Column.MODEL,
    pb.COST_KEY_TENANT: Column.TENANT,
    pb.COST_KEY_HARDWARE: Column.HARDWARE,
}

_NS_PER_MS = 1e6


def state(word: int) -> pb.WorkerState:
    """A state word in units."""
    drift = words.DRIFT.of(word)
    unusable = drift == words.DRIFT_UNUSABLE_LEVEL
    return pb.WorkerState(
        free_kv_percent=100.0 * words.free_kv_fraction(words.FREE_KV.of(word)),
        queued_prefill_ms=words.queue_ms(words.QUEUE.of(word)),
        running=words.batch_size(words.BATCH.of(word)),
        # infinity is no number to put into a table: the flag says it
        drift=words.drift_ratio(drift - 1 if unusable else drift),
        unusable=unusable,
        accepting=bool(words.ACCEPTING.of(word)),
        throttled=bool(words.THROTTLED.of(word)),
        congested=bool(words.CONGESTED.of(word)),
        pressed=bool(words.PRESSED.of(word)),
        fault=bool(words.FAULT.of(word)),
        word=word & words.STATE_MASK,
    )


def worker(view: WorkerView) -> pb.Worker:
    """A worker with its state, if any."""
    info = view.info
    verdict = verdict_of(view)
    return pb.Worker(
        id=info.id,
        node=view.node,
        hardware=info.hardware,
        model=info.model,
        precision=info.precision,
        tp=info.tp,
        gpus=info.gpus,
        role=ROLES[info.role],
        cordoned=info.cordoned,
        incarnation=info.incarnation,
        engine=info.engine,
        engine_version=info.engine_version,
        kv_tokens=info.kv_tokens,
        max_context=info.max_context,
        capabilities=info.capabilities,
        verdict=pb.VERDICT_UNSPECIFIED if verdict is None else VERDICTS[verdict],
        state=None if view.state is None else state(view.state.state),
    )


def node(view: NodeView) -> pb.Node:
    """A node with the ages of what was last heard of it."""
    inventory = view.inventory
    return pb.Node(
        name=inventory.node,
        zone=inventory.zone,
        incarnation=inventory.incarnation,
        agent_version=inventory.agent_version,
        kv_address=inventory.kv_address,
        resident=inventory.resident,
        last_beat_age_ms=None if view.beat_age_ns is None else view.beat_age_ns / _NS_PER_MS,
        inventory_age_ms=view.inventory_age_ns / _NS_PER_MS,
    )


def telemetry(view: TelemetryView) -> pb.NodeTelemetry:
    """How one node's cards and NICs fare. The messages of gRPC have the fields of the bus's, by name."""
    told = view.told
    return pb.NodeTelemetry(
        node=told.node,
        source=told.source,
        degraded=told.degraded,
        age_ms=told.age_ms + view.age_ns / _NS_PER_MS,
        gpus=[pb.GpuTelemetry(**structs.asdict(gpu)) for gpu in told.gpus],
        nics=[pb.NicTelemetry(**structs.asdict(nic)) for nic in told.nics],
        alerts=[pb.RootAlert(**structs.asdict(alert)) for alert in told.alerts],
    )


def cost_line(line: Line) -> pb.CostLine:
    """Sums of one group."""
    return pb.CostLine(
        model=line.model,
        tenant=line.tenant,
        hardware=line.hardware,
        requests=line.requests,
        failed=line.failed,
        prompt_tokens=line.prompt_tokens,
        cached_tokens=line.cached_tokens,
        output_tokens=line.output_tokens,
        gpu_seconds=line.gpu_ms / 1000.0,
        dollars=line.dollars,
        joules=line.joules,
        dollars_per_million_tokens=line.dollars_per_million_tokens,
    )


def decision(event: RequestEvent, dropped: int) -> pb.RoutingDecision:
    """What a router did with a request; ``dropped`` decisions before it were missed."""
    return pb.RoutingDecision(
        phase=event.phase.value,
        request_id=event.stream.id,
        attempt=event.stream.attempt,
        try_number=event.stream.try_,
        tenant=event.tenant,
        model=event.model,
        router=event.router,
        worker=event.worker,
        reason=event.reason,
        code=event.code,
        prompt_tokens=event.prompt_tokens,
        cached_tokens=event.cached_tokens,
        waited_ms=event.waited_ms,
        predicted_ttft_ms=event.predicted_ttft_ms,
        predicted_total_ms=event.predicted_total_ms,
        dropped=dropped,
    )
