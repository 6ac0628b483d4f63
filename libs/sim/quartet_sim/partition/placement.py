"""A placement: which layers lie where, in which precision; and everything that follows from it.

The rate of a pipeline is that of its slowest stage. All stages have a microbatch under way at once, so one token takes
as many turns of the slowest stage as there are stages, and the batch of each step is the concurrency over the stages.
With fewer requests than stages the pipeline stands empty in places; then the whole way bounds the rate.
"""

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from quartet_sim.partition.machines import Hop, Pool, hop
from quartet_sim.partition.precision import PrecisionTable
from quartet_sim.partition.shape import Shape
from quartet_sim.partition.timing import Cards, StageMemory, StageTimes, Workload, stage_memory, stage_times


class Cut(Struct, frozen=True):
    """One stage as the search sees it: ``layers`` layers on ``tp`` cards of pool number ``pool``."""

    pool: int
    tp: int
    precision: str
    layers: int


class Limits(Struct, frozen=True, kw_only=True):
    """What any placement must keep. ``budget_hundredths`` is the quality that may be lost, in hundredths of a percent.

    ``utilisation`` is the share of a card's memory that the engine may use. ``links_free`` makes links cost nothing:
    only to find out what they cost.
    """

    kv_bytes_per_element: int = 2
    utilisation: float = 0.9
    budget_hundredths: int = 100
    most_stages: int = 16
    links_free: bool = False


class Stage(Struct, frozen=True, kw_only=True):
    """One stage, placed. ``gpus`` are ``node:ordinal``; layers are ``first_layer`` up to, without, ``end_layer``."""

    node: str
    hardware: str
    gpus: tuple[str, ...]
    precision: str
    first_layer: int
    end_layer: int
    embedding: bool
    head: bool
    memory: StageMemory
    times: StageTimes
    way_in: Hop | None

    @property
    def tp(self) -> int:
        """Cards that share its layers."""
        return len(self.gpus)

    @property
    def layers(self) -> int:
        """How many layers it has."""
        return self.end_layer - self.first_layer


class Placement(Struct, frozen=True, kw_only=True):
    """A model, cut and placed, for a workload.

    ``rate_per_s`` is requests, ``tokens_per_s`` output tokens. ``ttft_ms`` is a prompt's way through an idle pipeline,
    ``tpot_ms`` one token's at full concurrency. ``kv_tokens`` fit (the least of all stages), ``loss_hundredths`` is the
    quality lost in hundredths of a percent.
    """

    model: str
    workload: Workload
    stages: tuple[Stage, ...]
    rate_per_s: float
    tokens_per_s: float
    ttft_ms: float
    tpot_ms: float
    kv_tokens: int
    loss_hundredths: float

    @property
    def slowest(self) -> Stage:
        """The stage that bounds the rate; the first of several."""
        return max(self.stages, key=lambda stage: stage.times.request_ms)

    @property
    def fits(self) -> bool:
        """Whether every card holds what it must."""
        return all(stage.memory.fits for stage in self.stages)


def place(
    shape: Shape, pools: Sequence[Pool], cuts: Sequence[Cut], work: Workload, table: PrecisionTable, limits: Limits
) -> Placement:
    """What the ``cuts``, in order, make of the ``pools``. Raises ``ValueError`` unless they cover every layer once."""
    if sum(cut.layers for cut in cuts) != shape.layers or any(cut.layers < 1 for cut in cuts):
        raise ValueError(f"{[cut.layers for cut in cuts]} are not {shape.layers} layers, each stage with at least one")
    batch = work.microbatch(len(cuts))
    taken = [0] * len(pools)
    stages: list[Stage] = []
    begin = 0
    lost = 0
    before: Cut | None = None
    for number, cut in enumerate(cuts):
        pool = pools[cut.pool]
        cards = Cards(hardware=pool.hardware, tp=cut.tp, precision=table.precisions[cut.precision])
        ends = {"first": number == 0, "last": number == len(cuts) - 1}
        way_in = None
        if before is not None and not limits.links_free:
            way_in = hop(pools[before.pool].place(before.tp), pool.place(cut.tp))
        ordinal = pool.first + taken[cut.pool]
        taken[cut.pool] += cut.tp
        loss = table.loss(shape.model, cut.precision)
        lost += cut.layers * (loss.loss_hundredths if loss else 0)
        stages.append(
            Stage(
                node=pool.node.name,
                hardware=pool.hardware.name,
                gpus=tuple(f"{pool.node.name}:{gpu}" for gpu in range(ordinal, ordinal + cut.tp)),
                precision=cut.precision,
                first_layer=begin,
                end_layer=begin + cut.layers,
                embedding=ends["first"],
                head=ends["last"],
                memory=stage_memory(
                    shape, cards, work, cut.layers, **ends,
                    kv_bytes_per_element=limits.kv_bytes_per_element, utilisation=limits.utilisation,
                ),
                times=stage_times(
                    shape, cards, work, cut.layers, batch, **ends, way_in=way_in,
                    kv_bytes_per_element=limits.kv_bytes_per_element,
                ),
                way_in=way_in,
            )
        )  # fmt: skip
        begin += cut.layers
        before = cut
    for pool, used in zip(pools, taken, strict=True):
        if used > pool.gpus:
            raise ValueError(f"{used} cards of {pool.hardware.name} on {pool.node.name}, which has {pool.gpus}")
    return summed_up(shape, stages, work, lost / shape.layers)


def summed_up(shape: Shape, stages: Sequence[Stage], work: Workload, loss_hundredths: float) -> Placement:
    """The placement that ``stages`` are."""
    ttft_ms = sum(stage.times.prefill_ms + stage.times.link_prefill_ms for stage in stages)
    way_ms = sum(stage.times.step_ms + stage.times.link_step_ms for stage in stages)
    slowest_step_ms = max(stage.times.step_ms + stage.times.link_step_ms for stage in stages)
    rate = 1e3 / max(stage.times.request_ms for stage in stages)
    if work.concurrency < len(stages):
        rate = min(rate, 1e3 * work.concurrency / (ttft_ms + work.output_tokens * way_ms))
    return Placement(
        model=shape.model,
        workload=work,
        stages=tuple(stages),
        rate_per_s=rate,
        tokens_per_s=rate * work.output_tokens,
        ttft_ms=ttft_ms,
        tpot_ms=max(way_ms, min(len(stages), work.concurrency) * slowest_step_ms),
        kv_tokens=min(_kv_room(stage, work) for stage in stages),
        loss_hundredths=loss_hundredths,
    )


def _kv_room(stage: Stage, work: Workload) -> int:
    """Tokens whose KV the stage's cards hold, at what one token takes of them now."""
    memory = stage.memory
    room = memory.limit - (memory.used - memory.kv)
    return max(0, room) * work.kv_tokens // max(memory.kv, 1)


def for_workload(placement: Placement, shape: Shape, pools: Sequence[Pool], work: Workload, table: PrecisionTable,
                 limits: Limits) -> Placement:  # fmt: skip
    """The same layers on the same cards under another workload, which they may no longer hold (``Placement.fits``)."""
    cuts = cuts_of(placement, pools)
    return place(shape, pools, cuts, work, table, limits)


def cuts_of(placement: Placement, pools: Sequence[Pool]) -> list[Cut]:
    """The cuts that made it. Raises ``ValueError`` for a stage on cards that are not among ``pools``."""
    numbers = {(pool.node.name, pool.hardware.name): number for number, pool in enumerate(pools)}
    cuts: list[Cut] = []
    for stage in placement.stages:
        number = numbers.get((stage.node, stage.hardware))
        if number is None:
            known = ", ".join(f"{hardware} on {node}" for node, hardware in numbers)
            raise ValueError(f"the current placement uses {stage.hardware} on node {stage.node!r}; there are {known}")
        cuts.append(Cut(number, stage.tp, stage.precision, stage.layers))
    return cuts


def encode(placement: Placement) -> bytes:
    """The placement as JSON, which `decode` reads back."""
    return msgspec.json.encode(placement)


def decode(data: bytes) -> Placement:
    """What `encode` wrote. Raises ``msgspec.DecodeError``."""
    return msgspec.json.decode(data, type=Placement)
