"""Rounds: solve, let the simulator judge, leave more room or less, solve again.

The program knows no queues and only guesses what caches find; the simulator has both, with the very routing rules of
the product. Each round teaches the program the hits that were found. One that misses the share of requests in time
lowers the planned utilisation of the models that missed it, the more the farther they were. Where the first mix passes,
utilisation is raised in ever longer strides until one does not, and then halved in on. At last one worker of each team
is taken away, the dearest first: the answer is a mix that the simulator accepts, and from which it lets none be taken
away, as far as the number of runs allows.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf, sqrt
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct

from quartet_core.catalogue import Catalogue
from quartet_sim.capacity.carrying import Margins
from quartet_sim.capacity.mix import Limits, Mix, Program, Team
from quartet_sim.simulation.figures import Outcome
from quartet_sim.simulation.spec import FleetSpec, Group, Request

Simulate = Callable[[FleetSpec, Sequence[Request]], Outcome]
"""Runs a fleet on requests; ``simulation.run.simulate`` with everything else decided."""

RoundKind = Literal["solved", "tighter", "looser", "one less"]

_STEP = 0.93
_STEPS_PER_SHARE = 10.0
"""A model that missed the goal by a tenth of its requests is planned two steps lower at once."""
_MOST_STEPS = 40
_LEAST_UTILISATION = 0.05
_MOST_LOOSER = 4.0


class Round(Struct, frozen=True, kw_only=True):
    """One mix and how it fared. ``utilisation`` is the margin it was planned with, by model; ``short`` says of each
    model that missed the goal by how large a share of its requests it did."""

    kind: RoundKind
    mix: Mix
    utilisation: dict[str, float]
    outcome: Outcome
    short: dict[str, float]

    @property
    def passed(self) -> bool:
        """Whether every model had enough requests in time."""
        return not self.short


class Rounds(NamedTuple):
    """All rounds in order. ``best`` is the cheapest that passed; ``margins`` and ``program`` are what was learned.
    ``ended`` says why there is none, or why the search for a cheaper one stopped."""

    rounds: tuple[Round, ...]
    best: Round | None
    margins: dict[str, Margins]
    program: Program
    ended: str


def fleet_of(mix: Mix) -> FleetSpec:
    """The mix as a fleet to simulate."""
    return FleetSpec(
        tuple(
            Group(
                hardware=team.option.hardware,
                model=team.option.model,
                precision=team.option.precision,
                tp=team.option.tp,
                count=team.count,
            )
            for team in mix.teams
            if team.count
        )
    )


def confirmed(
    program: Program,
    limits: Limits,
    margins: Mapping[str, Margins],
    requests: Sequence[Request],
    simulate: Simulate,
    *,
    most_runs: int = 12,
    learn: Callable[[Outcome], Program] | None = None,
    told: Callable[[Round], None] = lambda _: None,
) -> Rounds:
    """Rounds until one passes and none of its teams can spare a worker, or ``most_runs`` simulations were made.

    ``learn`` makes the program anew from what a run found.
    """
    margins = dict(margins)
    rounds: list[Round] = []

    def run(kind: RoundKind, mix: Mix) -> Round:
        outcome = simulate(fleet_of(mix), requests)
        short = {part.name: limits.goal - part.within_slo for part in outcome.by_model if part.within_slo < limits.goal}
        utilisation = {model: margin.utilisation for model, margin in margins.items()}
        made = Round(kind=kind, mix=mix, utilisation=utilisation, outcome=outcome, short=short)
        rounds.append(made)
        told(made)
        return made

    def learned(outcome: Outcome) -> Program:
        return program if learn is None else learn(outcome)

    mix = program.solve(limits, margins)
    if mix is None:
        return Rounds(rounds=(), best=None, margins=margins, program=program, ended="no mix within the limits")
    made = run("solved", mix)
    while not made.passed and len(rounds) < most_runs:
        program = learned(made.outcome)
        tighter = _tighter(program, limits, margins, made)
        if tighter is None:
            ended = "no mix within the limits leaves more room than the last one, which the simulator found too small"
            return Rounds(rounds=tuple(rounds), best=None, margins=margins, program=program, ended=ended)
        made = run("tighter", tighter)
    if not made.passed:
        ended = f"{most_runs} simulations, and none passed; --runs allows more"
        return Rounds(rounds=tuple(rounds), best=None, margins=margins, program=program, ended=ended)
    best = made
    if len(rounds) == 1:
        program = learned(made.outcome)
        best = _looser(program, limits, margins, made, run, most_runs, rounds)
    best, ended = _trimmed(best, run, most_runs, rounds)
    margins = _learned(program, limits, margins, best)
    return Rounds(rounds=tuple(rounds), best=best, margins=margins, program=program, ended=ended)


def _tighter(program: Program, limits: Limits, margins: dict[str, Margins], made: Round) -> Mix | None:
    """The cheapest mix that is not ``made``'s, nor cheaper, under the nearest utilisation below its that gives one.

    ``margins`` become those it was found with.
    """
    before = made.mix
    for _ in range(_MOST_STEPS):
        mix = program.solve(limits, margins)  # first as it is: the program may have learned
        if mix is None:
            return None
        if _workers(mix) != _workers(before) and mix.price_per_hour > before.price_per_hour - 1e-6:
            return mix
        for model, share in made.short.items():
            less = margins[model].utilisation * _STEP ** (1 + _STEPS_PER_SHARE * share)
            if less < _LEAST_UTILISATION:
                return None
            margins[model] = msgspec.structs.replace(margins[model], utilisation=less)
    return None


def _looser(
    program: Program, limits: Limits, margins: dict[str, Margins], passed: Round,
    run: Callable[[RoundKind, Mix], Round], most_runs: int, rounds: Sequence[Round],
) -> Round:  # fmt: skip
    """The cheapest that passes of the mixes that the program finds with more and more use of each worker.

    ``margins`` become those of the last that was tried.
    """
    planned = dict(margins)
    best = passed
    low, stride, high = 1.0, 1.0 / _STEP, inf
    while len(rounds) < most_runs and high / low > 1.01:
        at = low * stride if high == inf else sqrt(low * high)
        if at > _MOST_LOOSER:
            break
        for model, margin in planned.items():
            margins[model] = msgspec.structs.replace(margin, utilisation=margin.utilisation * at)
        mix = program.solve(limits, margins)
        if mix is None or mix.price_per_hour > best.mix.price_per_hour - 1e-6:
            low = at
            continue
        if any(_workers(mix) == _workers(made.mix) for made in rounds if not made.passed):
            high = at
            continue
        made = run("looser", mix)
        if made.passed:
            best, low, stride = made, at, stride * stride
        else:
            high = at
    return best


def _learned(program: Program, limits: Limits, margins: Mapping[str, Margins], best: Round) -> dict[str, Margins]:
    """Margins under which the program, too, finds nothing dearer than what passed: what binds is asked with them."""
    found = {
        model: msgspec.structs.replace(margin, utilisation=best.utilisation[model]) for model, margin in margins.items()
    }
    for _ in range(_MOST_STEPS):
        mix = program.solve(limits, found)
        if mix is None or mix.price_per_hour <= best.mix.price_per_hour + 1e-6:
            break
        found = {
            model: msgspec.structs.replace(margin, utilisation=margin.utilisation / _STEP)
            for model, margin in found.items()
        }
    return found


def _trimmed(
    passed: Round, run: Callable[[RoundKind, Mix], Round], most_runs: int, rounds: list[Round]
) -> tuple[Round, str]:
    """``passed`` with as many workers taken away, one by one, as the simulator allows."""
    best = passed
    refused: set[tuple[tuple[str, int], ...]] = {_workers(made.mix) for made in rounds if not made.passed}
    progress = True
    while progress:
        progress = False
        for team in sorted(best.mix.teams, key=lambda each: -each.option.price_per_hour):
            fewer = _one_less(best.mix, team)
            if fewer is None or _workers(fewer) in refused:
                continue
            if len(rounds) >= most_runs:
                return best, f"{most_runs} simulations: it may be that one worker less would still do"
            made = run("one less", fewer)
            if made.passed:
                best = made
                progress = True
                break
            refused.add(_workers(fewer))
    return best, "one worker less of any team does not pass"


def _one_less(mix: Mix, team: Team) -> Mix | None:
    """None when its model would have no worker left."""
    others = sum(each.count for each in mix.teams if each.option.model == team.option.model)
    if others == 1:
        return None
    teams = tuple(
        msgspec.structs.replace(each, count=each.count - 1, used=each.used * each.count / max(1, each.count - 1))
        if each is team
        else each
        for each in mix.teams
    )
    teams = tuple(each for each in teams if each.count)
    return Mix(teams=teams, price_per_hour=mix.price_per_hour - team.option.price_per_hour)


def _workers(mix: Mix) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((f"{team.option.model} {team.option.name}", team.count) for team in mix.teams))


def simulator(catalogue: Catalogue, seed: int) -> Simulate:
    """The simulator as it is, under our policy."""
    from quartet_sim.simulation.run import simulate  # late: solving alone needs none of it

    return lambda fleet, requests: simulate(catalogue, fleet, requests, seed=seed)
