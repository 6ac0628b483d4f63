"""Rounds: solve, let the simulator judge, leave more room or less, solve again.

The program knows no queues; the simulator has them, with the very routing rules of the product. A round that misses
the share of requests in time lowers the planned utilisation of the models that missed it; one that passes raises it,
until a cheaper mix does not. What passed is then tried with one worker less of each team, the dearest first: the answer
is a mix that the simulator accepts, and from which it lets none be taken away, as far as the number of runs allows.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

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
_MOST_STEPS = 40
_UTILISATIONS = (0.05, 3.0)
"""Between these a plan is looked for."""


class Round(Struct, frozen=True, kw_only=True):
    """One mix and how it fared. ``utilisation`` is the margin it was planned with, by model; ``missed`` are models."""

    kind: RoundKind
    mix: Mix
    utilisation: dict[str, float]
    outcome: Outcome
    missed: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every model had enough requests in time."""
        return not self.missed


class Rounds(Struct, frozen=True, kw_only=True):
    """All rounds in order. ``best`` is the cheapest that passed; ``margins`` those it was planned with. ``ended`` says
    why there is none, or why the search for a cheaper one stopped."""

    rounds: tuple[Round, ...]
    best: Round | None
    margins: dict[str, Margins]
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
    told: Callable[[Round], None] = lambda _: None,
) -> Rounds:
    """Rounds until one passes and none of its teams can spare a worker, or ``most_runs`` simulations were made."""
    margins = dict(margins)
    rounds: list[Round] = []

    def run(kind: RoundKind, mix: Mix) -> Round:
        outcome = simulate(fleet_of(mix), requests)
        utilisation = {model: margin.utilisation for model, margin in margins.items()}
        missed = tuple(part.name for part in outcome.by_model if part.within_slo < limits.goal)
        made = Round(kind=kind, mix=mix, utilisation=utilisation, outcome=outcome, missed=missed)
        rounds.append(made)
        told(made)
        return made

    mix = program.solve(limits, margins)
    if mix is None:
        return Rounds(rounds=(), best=None, margins=margins, ended="no mix within the limits")
    made = run("solved", mix)
    best = made if made.passed else None
    kind: RoundKind = "looser" if made.passed else "tighter"
    while len(rounds) < most_runs:
        models = made.missed or tuple(margins)
        other = _other(program, limits, margins, made.mix, models, _STEP if kind == "tighter" else 1 / _STEP)
        if other is None:
            break
        made = run(kind, other)
        if made.passed:
            best = made
        if made.passed == (kind == "tighter"):
            break
    if best is None:
        ended = f"{most_runs} simulations, and none passed"
        if len(rounds) < most_runs:
            ended = "no mix within the limits leaves more room than the last one, which the simulator found too small"
        return Rounds(rounds=tuple(rounds), best=None, margins=margins, ended=ended)
    best, ended = _trimmed(best, run, most_runs, rounds)
    return Rounds(rounds=tuple(rounds), best=best, margins=_learned(program, limits, margins, best), ended=ended)


def _other(
    program: Program, limits: Limits, margins: dict[str, Margins], mix: Mix, models: Sequence[str], factor: float
) -> Mix | None:
    """The cheapest mix under the nearest utilisation of ``models``, step by step of ``factor``, that is not ``mix``.

    Cheaper than that where ``factor`` is above 1. ``margins`` become those it was found with.
    """
    least, most = _UTILISATIONS
    for _ in range(_MOST_STEPS):
        for model in models:
            margins[model] = msgspec.structs.replace(margins[model], utilisation=margins[model].utilisation * factor)
        if not all(least <= margin.utilisation <= most for margin in margins.values()):
            return None
        other = program.solve(limits, margins)
        if other is None:
            return None
        if _workers(other) != _workers(mix) and (factor < 1 or other.price_per_hour < mix.price_per_hour):
            return other
    return None


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
