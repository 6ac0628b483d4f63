"""The figures of one pass, computed from what its client and its fleet saw."""

import math
from collections.abc import Iterable, Mapping

from msgspec import Struct

from quartet_bus.messages import RequestEvent, Role, TransferReport
from quartet_cli.demo.capacity import Pool, PoolCapacity
from quartet_cli.demo.outcome import Outcome
from quartet_cli.demo.witness import RouterStatus
from quartet_core.catalogue import HardwareClass
from quartet_core.cost import CostLedger


class Spread(Struct, frozen=True):
    """Percentiles in ms, by nearest rank; infinite (in JSON null) where it is a request that did not get so far."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


class Latency(Struct, frozen=True):
    """Latencies of a model's requests: with ``hardware`` "" of all of them, else of those answered right on a class."""

    model: str
    hardware: str
    requests: int
    ttft_ms: Spread
    tpot_ms: Spread
    e2e_ms: Spread


class ModelFigures(Struct, frozen=True):
    """One model's requests, and what its cards cost for a million tokens answered right: of prompt and output together,
    and of output alone. Counted are all GPU time in which requests came and, after the last, the busy part: idle cards
    would have had the next requests."""

    model: str
    sent: int
    right: int
    faults: int
    unfinished: int
    within_slo: int
    goodput_per_s: float
    usd_per_million_tokens: float | None
    usd_per_million_output_tokens: float | None


class PoolFigures(Struct, frozen=True):
    """A pool, or (``model`` "") a hardware class. ``used`` and ``busy`` are shares of the time in which requests came.

    ``used``: see ``quartet_cli.demo.capacity``; ``busy``: an engine iteration was under way, weighted by GPUs.
    """

    model: str
    hardware: str
    gpus: int
    used: float
    busy: float
    output_tokens: int
    usd_per_million_tokens: float | None


class RoutingFigures(Struct, frozen=True):
    """What the routers did."""

    decide_p50_us: float
    decide_p99_us: float
    dispatched: int
    splits: int
    holds: int
    affinity_hits: int
    retries: int
    cached_tokens: int


class KvFigures(Struct, frozen=True):
    """KV that moved. ``real_bytes`` crossed sockets, ``charged_bytes`` are the model's full size, which links took time
    for. ``verified_blocks`` were compared with the prompt's own before decode; ``unverified`` are ids of split requests
    that were answered without all of theirs being so."""

    transfers: int
    failed: int
    real_bytes: int
    charged_bytes: int
    verified_blocks: int
    unverified: tuple[str, ...]


class PassFigures(Struct, frozen=True):
    """All figures of one pass. ``seconds`` is how long requests came, ``took_s`` until the last one ended, and
    ``grace_s`` after the last arrival whatever went on was given up.

    ``faults`` are the first few things that went wrong, ``lag_p99_ms`` how late our own client sent.
    """

    policy: str
    seconds: float
    grace_s: float
    took_s: float
    sent: int
    right: int
    faulty: int
    unfinished: int
    within_slo: int
    output_tokens: int
    lag_p99_ms: float
    faults: tuple[str, ...]
    models: tuple[ModelFigures, ...]
    latencies: tuple[Latency, ...]
    pools: tuple[PoolFigures, ...]
    routing: RoutingFigures
    kv: KvFigures


class PassRecord(Struct):
    """What was seen of a pass. ``busy_ms`` is by worker's pool, summed, at the last arrival and at the end."""

    policy: str
    seconds: float
    grace_s: float
    took_s: float
    outcomes: list[Outcome]
    ends: list[RequestEvent]
    answers: dict[str, RequestEvent]
    moved: list[TransferReport]
    failed_moves: list[TransferReport]
    routers: list[RouterStatus]
    busy_arriving_ms: dict[Pool, float]
    busy_ms: dict[Pool, float]


class Targets(Struct, frozen=True):
    """A model's SLO."""

    ttft_ms: float
    tpot_ms: float


_SHOWN_FAULTS = 10


def spread(values: Iterable[float]) -> Spread:
    """Percentiles of ``values``; zeros when there are none."""
    ordered = sorted(values)
    if not ordered:
        return Spread()

    def rank(share: float) -> float:
        return ordered[math.ceil(share * len(ordered)) - 1]

    return Spread(rank(0.5), rank(0.9), rank(0.99))


def figures_of(
    record: PassRecord,
    pools: Mapping[Pool, PoolCapacity],
    hardware: Mapping[str, HardwareClass],
    targets: Mapping[str, Targets],
    block_tokens: int,
) -> PassFigures:
    """The figures of a pass."""
    right = [outcome for outcome in record.outcomes if not outcome.fault]
    good = [outcome for outcome in right if _within(outcome, targets[outcome.model])]
    unfinished = [outcome for outcome in record.outcomes if not outcome.answered]
    faulty = [outcome for outcome in record.outcomes if outcome.fault and outcome.answered]
    cost = _cost(record, pools, hardware)
    return PassFigures(
        policy=record.policy,
        seconds=record.seconds,
        grace_s=record.grace_s,
        took_s=record.took_s,
        sent=len(record.outcomes),
        right=len(right),
        faulty=len(faulty),
        unfinished=len(unfinished),
        within_slo=len(good),
        output_tokens=sum(outcome.tokens for outcome in right),
        lag_p99_ms=spread(outcome.lag_ms for outcome in record.outcomes).p99,
        faults=tuple(f"{outcome.id}: {outcome.fault}" for outcome in faulty[:_SHOWN_FAULTS]),
        models=tuple(_model(model, record, right, good, cost) for model in targets),
        latencies=tuple(_latencies(record, targets)),
        pools=tuple(_pools(record, pools, cost)),
        routing=_routing(record),
        kv=_kv(record, block_tokens),
    )


def _within(outcome: Outcome, target: Targets) -> bool:
    return outcome.first_ms <= target.ttft_ms and outcome.tpot_ms <= target.tpot_ms


def _model(model: str, record: PassRecord, right: list[Outcome], good: list[Outcome], cost: CostLedger) -> ModelFigures:
    outcomes = [outcome for outcome in record.outcomes if outcome.model == model]
    within = sum(outcome.model == model for outcome in good)
    rows = [row for row in cost.by_model_and_class() if row.model == model]
    usd = sum(row.usd for row in rows)
    tokens = sum(row.total_tokens for row in rows)
    output = sum(row.output_tokens for row in rows)
    return ModelFigures(
        model=model,
        sent=len(outcomes),
        right=sum(outcome.model == model for outcome in right),
        faults=sum(outcome.fault != "" and outcome.answered for outcome in outcomes),
        unfinished=sum(not outcome.answered for outcome in outcomes),
        within_slo=within,
        goodput_per_s=within / record.seconds,
        usd_per_million_tokens=usd / tokens * 1e6 if tokens else None,
        usd_per_million_output_tokens=usd / output * 1e6 if output else None,
    )


def _cost(record: PassRecord, pools: Mapping[Pool, PoolCapacity], hardware: Mapping[str, HardwareClass]) -> CostLedger:
    """Tokens of right answers, and the GPU time that counts, on the class where each was spent."""
    ledger = CostLedger(hardware)
    for outcome in record.outcomes:
        end = record.answers.get(outcome.id)
        if end is not None and not outcome.fault:
            ledger.add(
                end.model,
                end.hardware,
                requests=1,
                prompt_tokens=end.prompt_tokens,
                cached_tokens=end.cached_tokens,
                output_tokens=end.output_tokens,
            )
    for pool, capacity in pools.items():
        per_worker = capacity.gpus / capacity.workers / 1e3
        busy_s = record.busy_ms.get(pool, 0.0) * per_worker
        idle_s = capacity.gpus * record.seconds - record.busy_arriving_ms.get(pool, 0.0) * per_worker
        ledger.add(pool.model, pool.hardware, busy_gpu_s=busy_s, idle_gpu_s=max(0.0, idle_s))
    return ledger


def _latencies(record: PassRecord, models: Iterable[str]) -> Iterable[Latency]:
    classes = sorted({end.hardware for end in record.answers.values()})
    for model in models:
        of_model = [outcome for outcome in record.outcomes if outcome.model == model]
        for hardware in ("", *classes):
            chosen = [
                outcome
                for outcome in of_model
                if not hardware
                or (not outcome.fault and (end := record.answers.get(outcome.id)) and end.hardware == hardware)
            ]
            if chosen:
                yield Latency(
                    model=model,
                    hardware=hardware,
                    requests=len(chosen),
                    ttft_ms=spread(outcome.first_ms for outcome in chosen),
                    tpot_ms=spread(outcome.tpot_ms for outcome in chosen if outcome.tokens != 1),
                    e2e_ms=spread(outcome.last_ms for outcome in chosen),
                )


def _pools(record: PassRecord, pools: Mapping[Pool, PoolCapacity], cost: CostLedger) -> Iterable[PoolFigures]:
    work_ms: dict[Pool, float] = {}
    output: dict[Pool, int] = {}
    for end in record.ends:
        pool = Pool(end.model, end.hardware)
        if end.status == "ok" and pool in pools:
            work_ms[pool] = work_ms.get(pool, 0.0) + pools[pool].work_ms(end)
            output[pool] = output.get(pool, 0) + end.output_tokens
    usd = {(row.model, row.hardware): row.usd_per_million_total for row in cost.by_model_and_class()}
    window_ms = record.seconds * 1e3
    rows = [
        PoolFigures(
            model=pool.model,
            hardware=pool.hardware,
            gpus=capacity.gpus,
            used=work_ms.get(pool, 0.0) / (capacity.workers * window_ms),
            busy=record.busy_arriving_ms.get(pool, 0.0) / (capacity.workers * window_ms),
            output_tokens=output.get(pool, 0),
            usd_per_million_tokens=usd.get((pool.model, pool.hardware)),
        )
        for pool, capacity in pools.items()
    ]
    yield from rows
    for hardware in sorted({row.hardware for row in rows}):
        of_class = [row for row in rows if row.hardware == hardware]
        gpus = sum(row.gpus for row in of_class)
        costs = [row for row in cost.by_model_and_class() if row.hardware == hardware]
        tokens = sum(row.total_tokens for row in costs)
        yield PoolFigures(
            model="",
            hardware=hardware,
            gpus=gpus,
            used=sum(row.used * row.gpus for row in of_class) / gpus,
            busy=sum(row.busy * row.gpus for row in of_class) / gpus,
            output_tokens=sum(row.output_tokens for row in of_class),
            usd_per_million_tokens=sum(row.usd for row in costs) / tokens * 1e6 if tokens else None,
        )


def _routing(record: PassRecord) -> RoutingFigures:
    routers = record.routers
    return RoutingFigures(
        # of several routers the slowest one's
        decide_p50_us=max((router.decide_p50_us for router in routers), default=0.0),
        decide_p99_us=max((router.decide_p99_us for router in routers), default=0.0),
        dispatched=sum(router.dispatched for router in routers),
        splits=sum(router.splits for router in routers),
        holds=sum(router.holds for router in routers),
        affinity_hits=sum(router.affinity_hits for router in routers),
        retries=sum(router.retries for router in routers),
        cached_tokens=sum(end.cached_tokens for end in record.ends if end.status == "ok"),
    )


def _kv(record: PassRecord, block_tokens: int) -> KvFigures:
    decodes = [end for end in record.answers.values() if end.role is Role.DECODE]
    return KvFigures(
        transfers=len(record.moved),
        failed=len(record.failed_moves),
        real_bytes=sum(report.wire_bytes for report in record.moved),
        charged_bytes=sum(report.kv_bytes for report in record.moved),
        verified_blocks=sum(end.verified_blocks for end in decodes),
        unverified=tuple(
            end.stream.id for end in decodes if end.verified_blocks < -(-max(end.prompt_tokens, 1) // block_tokens)
        ),
    )
