"""Many runs: policies against each other, over several seeds, on several processes; and their summary."""

import gc
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from statistics import fmean
from typing import TypeVar

from msgspec import Struct

from quartet_core.catalogue import Catalogue, builtin
from quartet_sim.simulation.figures import Outcome
from quartet_sim.simulation.run import simulate
from quartet_sim.simulation.spec import FleetSpec, Request, Settings
from quartet_sim.simulation.workload import Workload, requests

_Given = TypeVar("_Given")
_Result = TypeVar("_Result")


class Case(Struct, frozen=True, kw_only=True):
    """One run that is wanted. ``name`` is whatever the caller groups by."""

    name: str
    fleet: FleetSpec
    workload: Workload
    policy: str
    seed: int = 0
    settings: Settings = Settings()


class Spread(Struct, frozen=True):
    """A figure over seeds: mean, least and most."""

    mean: float
    least: float
    most: float


def run(case: Case, catalogue: Catalogue | None = None, *, least_within: float = 0.0) -> Outcome:
    """The outcome of one case, with the requests made for its seed. Raises ``WrongTrace`` and what ``simulate``
    does."""
    return simulate(
        catalogue or builtin(),
        case.fleet,
        _requests(case.workload, case.seed),
        policy=case.policy,
        seed=case.seed,
        settings=case.settings,
        least_within=least_within,
    )


def run_all(
    cases: Sequence[Case],
    jobs: int,
    done: Callable[[Case, Outcome], None] | None = None,
    catalogue: Catalogue | None = None,
) -> list[Outcome]:
    """The outcomes of ``cases``, in their order, on ``jobs`` processes. ``done`` is told of each as it comes."""
    found: list[Outcome | None] = [None] * len(cases)
    for place, outcome in each(run, cases, jobs, catalogue):
        found[place] = outcome
        if done is not None:
            done(cases[place], outcome)
    return [outcome for outcome in found if outcome is not None]


def each(
    work: Callable[[_Given, Catalogue | None], _Result], given: Sequence[_Given], jobs: int, catalogue: Catalogue | None
) -> Iterator[tuple[int, _Result]]:
    """(place, result) of ``work`` on each of ``given`` as they are done, on ``jobs`` processes; in order on one."""
    if jobs <= 1 or len(given) <= 1:
        for place, one in enumerate(given):
            yield place, work(one, catalogue)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_quiet) as pool:
        futures = {pool.submit(work, one, catalogue): place for place, one in enumerate(given)}
        for future in as_completed(futures):
            yield futures[future], future.result()


def spread(values: Sequence[float]) -> Spread:
    """Mean, least and most of ``values``, which are not empty."""
    return Spread(fmean(values), min(values), max(values))


def by_name(cases: Sequence[Case], outcomes: Sequence[Outcome]) -> dict[tuple[str, str], list[Outcome]]:
    """Outcomes grouped by (name, policy), in the order of the cases."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for case, outcome in zip(cases, outcomes, strict=True):
        groups.setdefault((case.name, case.policy), []).append(outcome)
    return groups


def _quiet() -> None:
    # Few cycles, many objects: collecting garbage less often makes a run a tenth quicker.
    gc.set_threshold(100_000, 50, 50)


@lru_cache(maxsize=4)
def _requests(workload: Workload, seed: int) -> list[Request]:
    return requests(workload, seed)
