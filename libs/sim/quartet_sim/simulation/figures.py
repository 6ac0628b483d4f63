"""What a simulation answers: how the requests fared, and what the fleet did, class by class."""

from collections.abc import Sequence

from msgspec import Struct


class Percentiles(Struct, frozen=True):
    """Of one time, in milliseconds, over the requests that have it; all 0 without any."""

    p50: float
    p90: float
    p99: float
    most: float
    mean: float


class ClassFigures(Struct, frozen=True, kw_only=True):
    """One model on one hardware class. ``utilisation`` is the busy share of paid GPU time, ``prefill_share`` the share
    of busy time spent on prefill; ``hit_rate`` the share of prompt tokens found in the prefix cache. ``energy_j``
    counts busy time at TDP and idle time at idle power: an upper bound."""

    hardware: str
    model: str
    gpus: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    utilisation: float
    prefill_share: float
    hit_rate: float
    usd: float
    energy_j: float
    preemptions: int
    peak_kv_share: float


class PartFigures(Struct, frozen=True, kw_only=True):
    """Some of the requests (an SLO class, a model, or prompts of some length): how many, how many within their targets,
    and their times to first token."""

    name: str
    requests: int
    within_slo: float
    ttft_ms: Percentiles
    tpot_ms: Percentiles


class Sample(Struct, frozen=True):
    """One hardware class in the time up to ``at_s``, since the sample before: busy share of paid GPU time, share of
    busy time spent on prefill, and sequences in its decode batches at that moment."""

    at_s: float
    hardware: str
    utilisation: float
    prefill_share: float
    running: int


class Outcome(Struct, frozen=True, kw_only=True):
    """One run. Rates are over ``span_s``: from 0 to the last arrival, or to the last end where arrivals wait for ends.

    ``within_slo`` is the share of *all* requests that met both targets: refused, failed and unfinished ones did not.
    ``usd`` and ``energy_j`` are those of the whole fleet over the span, idle time included. Money and joules per
    million *good* output tokens count only answers within their targets; the plain ones count all answers. ``log_hash``
    is a hash over every event of the run.
    """

    policy: str
    seed: int
    requests: int
    finished: int
    refused: int
    failed: int
    unfinished: int
    span_s: float
    offered_per_s: float
    within_slo: float
    goodput_per_s: float
    good_tokens_per_s: float
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    e2e_ms: Percentiles
    worst_wait_ms: float
    usd: float
    energy_j: float
    usd_per_million_good: float
    usd_per_million: float
    j_per_million_good: float
    j_per_million: float
    busy_usd_per_million: float
    hit_rate: float
    held: int
    splits: int
    fetches: int
    retries: int
    preemptions: int
    decisions: int
    events: int
    classes: tuple[ClassFigures, ...]
    by_slo: tuple[PartFigures, ...]
    by_model: tuple[PartFigures, ...]
    by_prompt: tuple[PartFigures, ...]
    series: tuple[Sample, ...]
    log_hash: str


def percentiles(values: Sequence[float]) -> Percentiles:
    """Nearest-rank percentiles of ``values``."""
    if not values:
        return Percentiles(0.0, 0.0, 0.0, 0.0, 0.0)
    ordered = sorted(values)
    count = len(ordered)

    def at(share: float) -> float:
        return ordered[min(count - 1, int(share * count))]

    return Percentiles(at(0.5), at(0.9), at(0.99), ordered[-1], sum(ordered) / count)
