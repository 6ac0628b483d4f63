"""What will be asked for, and how soon: the forecast core of the prefetch predictor.

Per model it keeps EWMAs of 10 minutes, 4 hours and 3 days, and a Markov chain over (demand level, idle age); per tenant
a chain over models. Each of these is a member of a mix, one mix per horizon, whose weights are learned from how likely
each member called what then happened. Forecasts are made on a clock, not at arrivals, and are scored on that clock.

Everything is a function of the calls made: no clock, no randomness. Times are seconds of the caller's monotonic clock.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from msgspec import Struct

from quartet_core.demand_chain import DemandChain, Exposure
from quartet_core.demand_mix import Mix, Score
from quartet_core.demand_rates import DAY_PART_S, TIME_CONSTANTS_S, Ewma, Mean
from quartet_core.demand_tenants import TenantChains

MEMBERS: Final = ("chain", "ewma_10m", "ewma_4h", "ewma_3d", "tenants")
"""The mix's members, in the order of their opinions."""

_RATES: Final = slice(1, 4)  # of MEMBERS: those that are rates, and so also say how much
_SAMPLES_PER_HORIZON: Final = 4
_MAX_CLASSES: Final = 16


class Outlook(Struct, frozen=True):
    """One model's future. ``probabilities`` (of at least one request) and ``requests_per_s`` are per horizon, in order.

    ``prompt_tokens`` and ``output_tokens`` are means per request; ``state`` is the number of its chain's state.
    """

    model: str
    state: int
    probabilities: tuple[float, ...]
    requests_per_s: tuple[float, ...]
    prompt_tokens: float
    output_tokens: float


class ClassOutlook(Struct, frozen=True):
    """The part of an ``Outlook`` that falls on one hardware class."""

    hardware: str
    share: float
    probabilities: tuple[float, ...]
    requests_per_s: tuple[float, ...]


class HorizonScore(Struct, frozen=True):
    """How one horizon's forecasts did, and what its mix weighs its members with."""

    horizon_s: float
    score: Score
    weights: dict[str, float]


class _Model:
    __slots__ = ("base", "chain", "last_s", "name", "output_tokens", "prompt_tokens", "rates", "shares")

    def __init__(self, name: str, pool: Exposure, since_s: float, horizons: int) -> None:
        self.name = name
        self.last_s = since_s  # watched since then, and not asked for until its first request
        self.chain = DemandChain(pool, since_s)
        self.rates = tuple(Ewma(tau_s, since_s) for tau_s in TIME_CONSTANTS_S)
        self.prompt_tokens = Mean()
        self.output_tokens = Mean()
        self.shares: OrderedDict[str, Ewma] = OrderedDict()  # by class, least recently served first
        self.base = [Mean(weight=0.0005, value=0.5, prior=1) for _ in range(horizons)]


class _Sample(Struct):
    """One forecast that waits for its outcome."""

    model: _Model
    opinions: tuple[float, ...]
    probability: float


class _Round(Struct):
    """All forecasts that one horizon made at one moment."""

    horizon: int
    taken_s: float
    due_s: float
    samples: list[_Sample]


class Demand:
    """Demand for at most ``max_models`` models (beyond that the one longest unasked is forgotten)."""

    def __init__(self, now_s: float, horizons_s: Sequence[float], *, max_models: int, max_tenants: int = 2_000) -> None:
        """``horizons_s`` must be positive and rise; raises ``ValueError`` otherwise."""
        if not horizons_s or horizons_s[0] <= 0 or any(a >= b for a, b in pairwise(horizons_s)):
            raise ValueError(f"horizons must be positive and rise, not {list(horizons_s)}")
        self.horizons_s = tuple(horizons_s)
        self.since_s = now_s
        self.seen = 0
        self._max_models = max_models
        self._models: OrderedDict[str, _Model] = OrderedDict()  # longest unasked first
        self._pool = Exposure.pooled()
        self._tenants = TenantChains(now_s, max_tenants)
        self._mixes = [Mix(MEMBERS) for _ in horizons_s]
        self._rounds: list[deque[_Round]] = [deque() for _ in horizons_s]  # soonest due first

    def __len__(self) -> int:
        """How many models are followed."""
        return len(self._models)

    def arrived(self, model: str, tenant: str, prompt_tokens: int, now_s: float) -> None:
        """A request for ``model`` came."""
        self._settle(now_s)  # what is due is settled first: this request comes after it
        known = self._models.get(model)
        if known is None:
            if len(self._models) >= self._max_models:
                self._models.popitem(last=False)
            known = self._models[model] = _Model(model, self._pool, self.since_s, len(self.horizons_s))
        else:
            self._models.move_to_end(model)
        for rate in known.rates:
            rate.add(now_s)
        known.chain.arrived(now_s, known.rates[0].per_s(now_s))
        known.prompt_tokens.add(prompt_tokens)
        known.last_s = max(now_s, known.last_s)
        self._tenants.asked(tenant, model, now_s)
        self.seen += 1

    def served(self, model: str, hardware: str, output_tokens: int, now_s: float) -> None:
        """A request for ``model`` ended on a worker of class ``hardware``. Models never asked for are not followed."""
        known = self._models.get(model)
        if known is None:
            return
        share = known.shares.get(hardware)
        if share is None:
            if len(known.shares) >= _MAX_CLASSES:
                known.shares.popitem(last=False)
            share = known.shares[hardware] = Ewma(DAY_PART_S, now_s)
        share.add(now_s)
        known.shares.move_to_end(hardware)
        known.output_tokens.add(output_tokens)

    def tick(self, now_s: float) -> list[Outlook]:
        """Settle what is due, and forecast every model, in the order of their last requests. Call it on a clock."""
        self._settle(now_s)
        sampling = [
            not rounds or now_s >= rounds[-1].taken_s + horizon_s / _SAMPLES_PER_HORIZON
            for rounds, horizon_s in zip(self._rounds, self.horizons_s, strict=True)
        ]
        taken: list[list[_Sample]] = [[] for _ in self.horizons_s]
        intensities = self._tenants.intensities(now_s)
        outlooks: list[Outlook] = []
        for model in self._models.values():
            model.chain.advance(now_s)
            passages = model.chain.first_passage(now_s, self.horizons_s)
            rates = [rate.per_s(now_s) for rate in model.rates]
            poisson = (*rates, intensities.get(model.name, 0.0))
            probabilities: list[float] = []
            expected: list[float] = []
            least = 0.0
            for index, horizon_s in enumerate(self.horizons_s):
                mix = self._mixes[index]
                opinions = (passages[index], *(-math.expm1(-rate * horizon_s) for rate in poisson))
                # each horizon weighs its members differently; a longer one must not be less likely for it
                least = max(least, mix.blend(opinions))
                probabilities.append(least)
                weights = mix.weights[_RATES]
                expected.append(sum(w * rate for w, rate in zip(weights, rates, strict=True)) / sum(weights))
                if sampling[index]:
                    taken[index].append(_Sample(model, opinions, least))
            outlooks.append(
                Outlook(
                    model.name,
                    model.chain.state(now_s),
                    tuple(probabilities),
                    tuple(expected),
                    model.prompt_tokens.value,
                    model.output_tokens.value,
                )
            )
        for index, samples in enumerate(taken):
            if samples:
                self._rounds[index].append(_Round(index, now_s, now_s + self.horizons_s[index], samples))
        return outlooks

    def by_class(self, outlook: Outlook, serving: Sequence[str], now_s: float) -> list[ClassOutlook]:
        """Split an outlook over hardware classes, by where requests ended lately.

        ``serving`` are the classes that have the model now; with none, the classes that had it; with none of those
        either, the class "". Requests thin out: a share ``s`` of them is needed with 1 − (1 − p)^s.
        """
        known = self._models.get(outlook.model)
        observed = {} if known is None else {name: share.count(now_s) for name, share in known.shares.items()}
        classes = list(serving) or list(observed) or [""]
        counts = [observed.get(name, 0.0) + 0.5 for name in classes]
        total = sum(counts)
        return [
            ClassOutlook(
                name,
                count / total,
                tuple(1.0 - (1.0 - probability) ** (count / total) for probability in outlook.probabilities),
                tuple(rate * count / total for rate in outlook.requests_per_s),
            )
            for name, count in zip(classes, counts, strict=True)
        ]

    def scores(self) -> list[HorizonScore]:
        """How the forecasts of every horizon have done so far."""
        return [
            HorizonScore(horizon_s, mix.score, dict(zip(mix.members, mix.weights, strict=True)))
            for horizon_s, mix in zip(self.horizons_s, self._mixes, strict=True)
        ]

    def _settle(self, now_s: float) -> None:
        """Compare the forecasts that are due with what happened."""
        for rounds in self._rounds:
            while rounds and rounds[0].due_s <= now_s:
                settled = rounds.popleft()
                mix = self._mixes[settled.horizon]
                for sample in settled.samples:
                    happened = sample.model.last_s > settled.taken_s
                    base = sample.model.base[settled.horizon]
                    mix.score.add(sample.probability, happened, base.value)
                    base.add(happened)
                    mix.learn(sample.opinions, happened)
