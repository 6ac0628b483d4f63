"""The knee: how many requests a second a fleet carries while enough of them meet their targets."""

import math
from collections.abc import Callable

from msgspec import Struct, structs

from quartet_core.catalogue import Catalogue
from quartet_sim.simulation import compare
from quartet_sim.simulation.compare import Case
from quartet_sim.simulation.figures import Outcome

_TOLERANCE = 1.03
_WIDEST = 64.0


class Knee(Struct, frozen=True):
    """``rate_per_s`` is the highest rate found at which ``share`` of the requests met their targets, 0 if none did;
    ``outcome`` is that run. It is within 3 % where more load never does better; bursts make it rougher than that."""

    share: float
    rate_per_s: float
    outcome: Outcome | None


class Sought(Struct, frozen=True):
    """The knees of ``case`` at ``shares``; its workload's rate is where the search begins."""

    case: Case
    shares: tuple[float, ...]


def find(sought: Sought, catalogue: Catalogue | None = None) -> list[Knee]:
    """The knee at each share. A doubling search for both sides, then bisection of the factor between them."""
    seen: dict[float, Outcome] = {}
    lowest = min(sought.shares)

    def outcome(factor: float) -> Outcome:
        known = seen.get(factor)
        if known is None:
            case = structs.replace(sought.case, workload=sought.case.workload.faster(factor))
            known = seen[factor] = compare.run(case, catalogue, least_within=lowest)
        return known

    return [_one(outcome, share) for share in sorted(sought.shares)]


def _one(outcome: Callable[[float], Outcome], share: float) -> Knee:
    good, bad = 0.0, math.inf
    factor = 1.0
    while 1.0 / _WIDEST <= factor <= _WIDEST:
        if outcome(factor).within_slo >= share:
            good = factor
            if bad < math.inf:
                break
            factor *= 1.6
        else:
            bad = factor
            if good:
                break
            factor /= 1.6
    if not good:
        return Knee(share, 0.0, None)
    while bad < math.inf and bad / good > _TOLERANCE:
        factor = math.sqrt(good * bad)
        if outcome(factor).within_slo >= share:
            good = factor
        else:
            bad = factor
    found = outcome(good)
    return Knee(share, found.offered_per_s, found)
