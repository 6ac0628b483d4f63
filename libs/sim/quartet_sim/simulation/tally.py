"""Counts what became of requests and of the fleet's time, and makes the outcome of it."""

from array import array
from collections.abc import Iterable, Sequence
from typing import Final

from quartet_sim.simulation.figures import ClassFigures, Outcome, PartFigures, Sample, percentiles
from quartet_sim.simulation.flight import Flight
from quartet_sim.simulation.site import Site

BUCKETS: Final = (
    ("under 1k", 1 << 10), ("1k to 4k", 1 << 12), ("4k to 16k", 1 << 14), ("16k to 64k", 1 << 16),
    ("over 64k", 1 << 62),
)  # fmt: skip
"""Prompt lengths, in tokens below the bound."""


class _Part:
    """Requests counted together."""

    __slots__ = ("good", "requests", "tpot_ms", "ttft_ms")

    def __init__(self) -> None:
        self.requests = self.good = 0
        self.ttft_ms = array("d")
        self.tpot_ms = array("d")

    def figures(self, name: str) -> PartFigures:
        return PartFigures(
            name=name,
            requests=self.requests,
            within_slo=self.good / self.requests if self.requests else 0.0,
            ttft_ms=percentiles(self.ttft_ms),
            tpot_ms=percentiles(self.tpot_ms),
        )


class _Served:
    """What one model got of one hardware class."""

    __slots__ = ("cached_tokens", "output_tokens", "prompt_tokens", "requests")

    def __init__(self) -> None:
        self.requests = self.prompt_tokens = self.cached_tokens = self.output_tokens = 0


class Tally:
    """Takes every flight once, when it ends."""

    def __init__(self) -> None:
        self._all = _Part()
        self._e2e_ms = array("d")
        self._by_slo: dict[str, _Part] = {}
        self._by_model: dict[str, _Part] = {}
        self._by_prompt: dict[str, _Part] = {}
        self._served: dict[tuple[str, str], _Served] = {}
        self._outcomes: dict[str, int] = {}
        self._good_tokens = 0
        self._tokens = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0

    def add(self, flight: Flight) -> None:
        """A flight ended."""
        request = flight.request
        self._outcomes[flight.outcome] = self._outcomes.get(flight.outcome, 0) + 1
        finished = flight.outcome == "finished"
        ttft_ms = flight.first_ms - flight.arrived_ms if flight.first_ms >= 0.0 else -1.0
        tpot_ms = -1.0
        if finished and request.output_tokens > 1:
            tpot_ms = (flight.ended_ms - flight.first_ms) / (request.output_tokens - 1)
        good = finished and ttft_ms <= request.slo.ttft_ms and tpot_ms <= request.slo.tpot_ms
        bucket = next(name for name, bound in BUCKETS if request.prompt_tokens < bound)
        for part in (
            self._all,
            self._by_slo.setdefault(request.slo.name, _Part()),
            self._by_model.setdefault(request.model, _Part()),
            self._by_prompt.setdefault(bucket, _Part()),
        ):
            part.requests += 1
            part.good += good
            if ttft_ms >= 0.0:
                part.ttft_ms.append(ttft_ms)
            if tpot_ms >= 0.0:
                part.tpot_ms.append(tpot_ms)
        if finished:
            self._e2e_ms.append(flight.ended_ms - flight.arrived_ms)
            self._tokens += request.output_tokens
            self._prompt_tokens += request.prompt_tokens
            self._cached_tokens += flight.cached_tokens
            self._good_tokens += request.output_tokens * good

    def served(self, flight: Flight) -> None:
        """An answer is complete: note which classes had how much of it."""
        request = flight.request
        for job in flight.jobs:
            served = self._served.setdefault((job.site.facts.hardware, job.site.facts.model), _Served())
            if job.work.kind != "decode":
                served.prompt_tokens += request.prompt_tokens
                served.cached_tokens += flight.cached_tokens
            if job.work.kind != "prefill":
                served.requests += 1
                served.output_tokens += request.output_tokens

    @property
    def misses(self) -> int:
        """Requests that ended without meeting both targets."""
        return self._all.requests - self._all.good

    def within_slo(self) -> float:
        """The share of requests so far that met both targets."""
        return self._all.good / self._all.requests if self._all.requests else 0.0

    def outcome(
        self, sites: Sequence[Site], *, span_ms: float, policy: str, seed: int, held: int, splits: int, fetches: int,
        retries: int, decisions: int, events: int, series: Sequence[Sample], log_hash: str,
    ) -> Outcome:  # fmt: skip
        """All figures. Sites' times are as of the span's end."""
        span_s = max(span_ms, 1.0) / 1e3
        every = self._all
        classes = tuple(self._classes(sites))
        usd = sum(figures.usd for figures in classes)
        energy_j = sum(figures.energy_j for figures in classes)
        busy_usd = sum(site.busy_ms / 3.6e6 * site.gpus * site.hardware.price_per_hour for site in sites)
        count = self._outcomes.get

        def per_million(amount: float, tokens: int) -> float:
            return amount / tokens * 1e6 if tokens else 0.0

        return Outcome(
            policy=policy,
            seed=seed,
            requests=every.requests,
            finished=count("finished", 0),
            refused=sum(n for why, n in self._outcomes.items() if why not in ("finished", "failed", "unfinished")),
            failed=count("failed", 0),
            unfinished=count("unfinished", 0),
            span_s=span_s,
            offered_per_s=every.requests / span_s,
            within_slo=self.within_slo(),
            goodput_per_s=every.good / span_s,
            good_tokens_per_s=self._good_tokens / span_s,
            ttft_ms=percentiles(every.ttft_ms),
            tpot_ms=percentiles(every.tpot_ms),
            e2e_ms=percentiles(self._e2e_ms),
            worst_wait_ms=max(every.ttft_ms, default=0.0),
            usd=usd,
            energy_j=energy_j,
            usd_per_million_good=per_million(usd, self._good_tokens),
            usd_per_million=per_million(usd, self._tokens),
            j_per_million_good=per_million(energy_j, self._good_tokens),
            j_per_million=per_million(energy_j, self._tokens),
            busy_usd_per_million=per_million(busy_usd, self._tokens),
            hit_rate=self._cached_tokens / self._prompt_tokens if self._prompt_tokens else 0.0,
            held=held,
            splits=splits,
            fetches=fetches,
            retries=retries,
            preemptions=sum(site.preemptions for site in sites),
            decisions=decisions,
            events=events,
            classes=classes,
            by_slo=_named(self._by_slo),
            by_model=_named(self._by_model),
            by_prompt=tuple(self._by_prompt[name].figures(name) for name, _ in BUCKETS if name in self._by_prompt),
            series=tuple(series),
            log_hash=log_hash,
        )

    def _classes(self, sites: Sequence[Site]) -> Iterable[ClassFigures]:
        for hardware, model in sorted({(site.facts.hardware, site.facts.model) for site in sites}):
            these = [site for site in sites if (site.facts.hardware, site.facts.model) == (hardware, model)]
            card = these[0].hardware
            served = self._served.get((hardware, model), _Served())
            busy_ms = sum(site.busy_ms * site.gpus for site in these)
            paid_ms = sum(site.paid_ms * site.gpus for site in these)
            idle_ms = max(0.0, paid_ms - busy_ms)
            yield ClassFigures(
                hardware=hardware,
                model=model,
                gpus=sum(site.gpus for site in these),
                requests=served.requests,
                prompt_tokens=served.prompt_tokens,
                cached_tokens=served.cached_tokens,
                output_tokens=served.output_tokens,
                utilisation=busy_ms / paid_ms if paid_ms else 0.0,
                prefill_share=sum(s.prefill_busy_ms * s.gpus for s in these) / busy_ms if busy_ms else 0.0,
                hit_rate=served.cached_tokens / served.prompt_tokens if served.prompt_tokens else 0.0,
                usd=paid_ms / 3.6e6 * card.price_per_hour,
                energy_j=(busy_ms * card.tdp_w + idle_ms * card.idle_w) / 1e3,
                preemptions=sum(site.preemptions for site in these),
                peak_kv_share=max(site.peak_kv_share for site in these),
            )


def _named(parts: dict[str, _Part]) -> tuple[PartFigures, ...]:
    return tuple(parts[name].figures(name) for name in sorted(parts))
