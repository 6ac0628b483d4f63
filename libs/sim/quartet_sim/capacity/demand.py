"""Demand: a trace's requests as a few buckets of work, each with the rate at which it comes at peak.

Buckets are model, service class and prompt length. How much of a prompt a prefix cache saves is not known before a
fleet is chosen: of the leading units that some earlier request had, a share is taken to be found.
"""

from collections.abc import Callable, Sequence
from math import ceil

from msgspec import Struct

from quartet_sim.simulation.spec import Request, Slo

PROMPT_BORDERS = (1024, 4096, 16384, 65536)
"""Prompt lengths, in tokens, between which requests are alike enough: prefill grows faster than its prompt."""

CACHED_SHARE = 0.25
SESSION_CACHED_SHARE = 0.95
"""Of the prefix hits of an endless cache, what workers' own caches find, until a simulation has told: judged by hit
rates of ``quartet simulate``, near a quarter of that for Mooncake's requests and near all of it for sessions."""

MOST_SAMPLES = 400
"""Requests of a bucket that are looked at one by one; evenly spaced, where there are more."""


class Sample(Struct, frozen=True):
    """One request's work: prompt tokens found cached, to be computed, and answered."""

    cached: int
    uncached: int
    output: int


class Bucket(Struct, frozen=True, kw_only=True):
    """Requests of ``model`` under ``slo`` with prompts of ``least`` tokens up to, without, ``below`` (0: no end).

    ``rate_per_s`` is at peak, ``mean_per_s`` over the whole span.
    """

    model: str
    slo: Slo
    least: int
    below: int
    rate_per_s: float
    mean_per_s: float
    samples: tuple[Sample, ...]

    @property
    def name(self) -> str:
        """For people."""
        length = f"{self.least:,}-{self.below:,}" if self.below else f"from {self.least:,}"
        return f"{self.model}, {self.slo.name}, prompts {length}"


class Demand(Struct, frozen=True, kw_only=True):
    """All buckets, and how much more than on average there is to do at peak, by model."""

    buckets: tuple[Bucket, ...]
    peak_over_mean: dict[str, float]
    requests: int
    span_s: float
    output_tokens_per_s: float


def demand_of(
    requests: Sequence[Request],
    work_ms: Callable[[str, Sample], float],
    *,
    peak_percentile: float = 95.0,
    window_s: float = 60.0,
    cached_share: float | None = None,
    borders: tuple[int, ...] = PROMPT_BORDERS,
) -> Demand:
    """``requests``, which are in order of arrival, as a demand.

    ``cached_share`` is of the hits of an endless cache; without it, what is usual. The peak of a model is the
    ``peak_percentile`` of its work over windows of ``window_s``, as ``work_ms`` of some worker says it. Requests that
    follow others count where they are in the list. Raises ``ValueError`` without any.
    """
    if not requests:
        raise ValueError("no requests: nothing to plan for")
    span_s = max(request.at_ms for request in requests) / 1e3
    windows = max(1, ceil(span_s / window_s))
    span_s = max(span_s, 1e-3)
    work: dict[str, list[float]] = {}
    found: dict[tuple[str, Slo, int], list[Sample]] = {}
    seen: dict[str, set[int]] = {}
    for request in requests:
        sample = _sample(request, seen.setdefault(request.model, set()), cached_share)
        bucket = sum(request.prompt_tokens >= border for border in borders)
        found.setdefault((request.model, request.slo, bucket), []).append(sample)
        window = min(windows - 1, int(request.at_ms / 1e3 / window_s))
        work.setdefault(request.model, [0.0] * windows)[window] += work_ms(request.model, sample)
    peaks = {model: _peak(sums, peak_percentile) for model, sums in work.items()}
    edges = (0, *borders, 0)
    buckets = tuple(
        Bucket(
            model=model,
            slo=slo,
            least=edges[bucket],
            below=edges[bucket + 1],
            rate_per_s=len(samples) / span_s * peaks[model],
            mean_per_s=len(samples) / span_s,
            samples=_spaced(samples),
        )
        for (model, slo, bucket), samples in sorted(
            found.items(), key=lambda item: (item[0][0], item[0][1].name, item[0][2])
        )
    )
    return Demand(
        buckets=buckets,
        peak_over_mean=peaks,
        requests=len(requests),
        span_s=span_s,
        output_tokens_per_s=sum(request.output_tokens for request in requests) / span_s,
    )


def endless_hit_rate(requests: Sequence[Request]) -> float:
    """The share of prompt tokens that a cache without end, shared by all workers of a model, would find."""
    seen: dict[str, set[int]] = {}
    hits = sum(_hit_tokens(request, seen.setdefault(request.model, set())) for request in requests)
    return hits / max(1, sum(request.prompt_tokens for request in requests))


def _sample(request: Request, seen: set[int], cached_share: float | None) -> Sample:
    if cached_share is None:
        cached_share = CACHED_SHARE if request.session < 0 else SESSION_CACHED_SHARE
    cached = int(_hit_tokens(request, seen) * cached_share)
    return Sample(cached, request.prompt_tokens - cached, request.output_tokens)


def _hit_tokens(request: Request, seen: set[int]) -> int:
    """Leading tokens of the prompt that are in ``seen`` units, to which it then adds its own."""
    hits = 0
    for unit in request.units:
        if unit not in seen:
            break
        hits += 1
    seen.update(request.units)
    # at least one token is always computed: the first of the answer comes out of it
    return max(0, min(request.prompt_tokens - 1, hits * request.unit_tokens))


def _peak(sums: list[float], percentile: float) -> float:
    """The windows' percentile over their mean, without the last window, which may be cut short, if there is another."""
    whole = sums[:-1] or sums
    ordered = sorted(whole)
    mean = sum(whole) / len(whole)
    at = min(len(ordered) - 1, ceil(percentile / 100 * len(ordered)) - 1)
    return max(1.0, ordered[max(0, at)] / mean) if mean else 1.0


def _spaced(samples: list[Sample]) -> tuple[Sample, ...]:
    if len(samples) <= MOST_SAMPLES:
        return tuple(samples)
    step = len(samples) / MOST_SAMPLES
    return tuple(samples[int(i * step)] for i in range(MOST_SAMPLES))
