"""From what ``quartet plan capacity`` was asked to what it answers."""

from collections.abc import Callable

import msgspec
from msgspec import Struct

from quartet_core.catalogue import Catalogue, UnknownProfile
from quartet_sim.capacity import sensitivity
from quartet_sim.capacity.carrying import Margins, Option, alone_ms, options_of
from quartet_sim.capacity.demand import Demand, Sample, demand_of, endless_hit_rate
from quartet_sim.capacity.mix import Limits, Mix, Program
from quartet_sim.capacity.rounds import Round, Rounds, confirmed, simulator
from quartet_sim.capacity.sensitivity import Relief
from quartet_sim.simulation.figures import Outcome
from quartet_sim.simulation.workload import Workload, requests


class Wish(Struct, frozen=True, kw_only=True):
    """What is asked."""

    catalogue: Catalogue
    workload: Workload
    stock: dict[str, int]
    budget_per_hour: float | None
    within: float
    precisions: tuple[str, ...]
    peak_percentile: float
    window_s: float
    most_runs: int
    alternatives: int
    seed: int


class BucketLine(Struct, frozen=True, kw_only=True):
    """One bucket, and what one worker of each option takes of it, in requests per second at its best batch."""

    name: str
    rate_per_s: float
    mean_per_s: float
    per_worker: dict[str, float]
    held_by: dict[str, str]
    within: dict[str, float]


class CapacityAnswer(Struct, frozen=True, kw_only=True):
    """``mix`` is the cheapest that was confirmed, or, without simulations, the cheapest that the program finds.

    Without a mix, ``obstacles`` say why. ``usd_per_million`` is per million output tokens of the trace's mean rate.
    """

    mix: Mix | None
    confirmed: bool
    demand: Demand
    buckets: list[BucketLine]
    rounds: list[Round]
    ended: str
    within: float
    usd_per_million: float
    binding: list[Relief]
    alternatives: list[Mix]
    obstacles: list[Relief]


def answer(wish: Wish, told: Callable[[str], None]) -> CapacityAnswer:
    """The plan. ``told`` hears of each round as it ends. Raises ``ValueError`` for what cannot be planned at all."""
    models = tuple(dict.fromkeys(model for part in wish.workload.parts for model, _ in part.models))
    try:
        for name in wish.stock:
            wish.catalogue.hardware_class(name)
        for name in models:
            wish.catalogue.model(name)
    except UnknownProfile as error:
        raise ValueError(str(error)) from error
    options = options_of(wish.catalogue, models, wish.stock, wish.precisions)
    for model in models:
        if not any(option.model == model for option in options):
            known = sorted({f"{h} {p} tp{tp}" for h, m, p, tp in wish.catalogue.profiles if m == model})
            raise ValueError(f"no card in --stock runs {model} in {', '.join(wish.precisions)}; times are known for: "
                             f"{', '.join(known) or 'none'}")  # fmt: skip
    trace = requests(wish.workload, wish.seed)
    work = _work(wish.catalogue, options)

    def program_of(cached_share: float | None) -> Program:
        demand = demand_of(
            trace, work, peak_percentile=wish.peak_percentile, window_s=wish.window_s, cached_share=cached_share
        )
        return Program(demand, options, wish.catalogue)

    def learned(outcome: Outcome) -> Program:
        endless = endless_hit_rate(trace)
        return program_of(min(1.0, outcome.hit_rate / endless) if endless else None)

    program = program_of(None)
    limits = Limits(stock=wish.stock, budget_per_hour=wish.budget_per_hour, goal=wish.within)
    margins = {model: Margins() for model in models}
    found = Rounds(rounds=(), best=None, margins=margins, program=program, ended="not simulated")
    if wish.most_runs:
        found = confirmed(
            program, limits, margins, trace, simulator(wish.catalogue, wish.seed), most_runs=wish.most_runs,
            learn=learned, told=lambda made: told(_line(made)),
        )  # fmt: skip
        mix = None if found.best is None else found.best.mix
    else:
        mix = program.solve(limits, margins)
    last, program, demand = found.margins, found.program, found.program.demand
    per_million = 0.0 if mix is None else mix.price_per_hour / 3600 / demand.output_tokens_per_s * 1e6
    return CapacityAnswer(
        mix=mix,
        confirmed=found.best is not None,
        demand=_without_samples(demand),
        buckets=_buckets(program, last),
        rounds=list(found.rounds),
        ended=found.ended,
        within=wish.within,
        usd_per_million=per_million,
        binding=[] if mix is None else sensitivity.binding(program, limits, last, mix),
        alternatives=[] if mix is None else sensitivity.next_best(program, limits, last, mix, wish.alternatives),
        obstacles=[] if mix is not None else _obstacles(found, limits),
    )


def _obstacles(found: Rounds, limits: Limits) -> list[Relief]:
    """Without a mix of the program's, why; where the simulator only refused all that were tried, nothing binds."""
    if found.program.solve(limits, found.margins) is not None:
        return []
    return sensitivity.obstacles(found.program, limits, found.margins)


def _work(catalogue: Catalogue, options: list[Option]) -> Callable[[str, Sample], float]:
    """Work by the first option of each model: only its ups and downs over time are asked for."""
    first = {option.model: catalogue.profile(*option.key) for option in reversed(options)}
    return lambda model, sample: alone_ms(first[model], sample)


def _line(made: Round) -> str:
    verdict = "in time enough" if made.passed else f"too few in time: {', '.join(made.short)}"
    price = f"${made.mix.price_per_hour:.2f}/h"
    return f"{made.kind}: {made.mix.text}, {price}: {made.outcome.within_slo:.1%} within SLO, {verdict}"


def _buckets(program: Program, margins: dict[str, Margins]) -> list[BucketLine]:
    lines: list[BucketLine] = []
    table = program.table(margins)
    for k, bucket in enumerate(program.demand.buckets):
        of = {program.options[o].name: each for (other, o), each in table.items() if other == k}
        lines.append(
            BucketLine(
                name=bucket.name,
                rate_per_s=bucket.rate_per_s,
                mean_per_s=bucket.mean_per_s,
                per_worker={name: 1 / each.seconds for name, each in of.items()},
                held_by={name: f"batch {each.batch}: {each.held_by}" for name, each in of.items()},
                within={name: each.within for name, each in of.items()},
            )
        )
    return lines


def _without_samples(demand: Demand) -> Demand:
    """JSON of single requests would be as long as the trace."""
    return msgspec.structs.replace(
        demand, buckets=tuple(msgspec.structs.replace(bucket, samples=()) for bucket in demand.buckets)
    )
