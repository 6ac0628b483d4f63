"""What binds a mix, what else would do, and why there is none: the same program under other limits."""

from collections.abc import Iterator, Mapping

import msgspec
from msgspec import Struct

from quartet_sim.capacity.carrying import Margins
from quartet_sim.capacity.demand import Demand
from quartet_sim.capacity.mix import Limits, Mix, Program

_LOOSER = 1.25
_ENDLESS = 100_000


class Relief(Struct, frozen=True, kw_only=True):
    """A limit, and the price per hour without it; None where there is still no mix."""

    limit: str
    text: str
    price_per_hour: float | None


def binding(program: Program, limits: Limits, margins: Mapping[str, Margins], mix: Mix) -> list[Relief]:
    """Each limit without which the mix would be cheaper, the most costly first."""
    found: list[Relief] = []
    for limit, text, other_program, other_limits in _relaxations(program, limits):
        other = other_program.solve(other_limits, margins)
        if other is not None and other.price_per_hour < mix.price_per_hour - 1e-6:
            found.append(Relief(limit=limit, text=text, price_per_hour=other.price_per_hour))
    return sorted(found, key=lambda relief: relief.price_per_hour or 0.0)


def obstacles(program: Program, limits: Limits, margins: Mapping[str, Margins]) -> list[Relief]:
    """Why there is no mix: buckets that nothing serves in time, and each limit without which there would be one."""
    found = [Relief(limit="slo", text=text, price_per_hour=None) for text in _late(program, limits, margins)]
    for limit, text, other_program, other_limits in _relaxations(program, limits):
        other = other_program.solve(other_limits, margins)
        if other is not None:
            found.append(Relief(limit=limit, text=text, price_per_hour=other.price_per_hour))
    if not found:
        endless = dict.fromkeys(limits.stock, _ENDLESS)
        free = Limits(stock=endless, budget_per_hour=None, goal=limits.goal)
        other = program.solve(free, margins)
        text = "stock and budget together"
        if other is None:
            text = "no stock and no budget would do: the targets cannot be met by any card asked about"
        found.append(Relief(limit="stock", text=text, price_per_hour=None if other is None else other.price_per_hour))
    return found


def next_best(program: Program, limits: Limits, margins: Mapping[str, Margins], mix: Mix, count: int) -> list[Mix]:
    """The ``count`` cheapest other mixes, none of which is just more cards than a cheaper one."""
    found: list[Mix] = []
    known = [mix.cards]
    while len(found) < count:
        other = program.solve(limits, margins, unlike=known)
        if other is None:
            break
        found.append(other)
        known.append(other.cards)
    return found


def _relaxations(program: Program, limits: Limits) -> Iterator[tuple[str, str, Program, Limits]]:
    if limits.budget_per_hour is not None:
        text = f"without the budget of ${limits.budget_per_hour:g}/h"
        yield "budget", text, program, msgspec.structs.replace(limits, budget_per_hour=None)
    for name, cards in limits.stock.items():
        more = {**limits.stock, name: _ENDLESS}
        yield "stock", f"with more {name} than {cards}", program, msgspec.structs.replace(limits, stock=more)
    for field, what in (("ttft_ms", "time to first token"), ("tpot_ms", "time per output token")):
        looser = program.of(_looser(program.demand, field))
        yield "slo", f"with {_LOOSER - 1:.0%} more for {what}", looser, limits


def _looser(demand: Demand, field: str) -> Demand:
    buckets = tuple(
        msgspec.structs.replace(
            bucket, slo=msgspec.structs.replace(bucket.slo, **{field: getattr(bucket.slo, field) * _LOOSER})
        )
        for bucket in demand.buckets
    )
    return msgspec.structs.replace(demand, buckets=buckets)


def _late(program: Program, limits: Limits, margins: Mapping[str, Margins]) -> Iterator[str]:
    """Models of which too few requests can be in time wherever they go, by the buckets that cannot."""
    table = program.table(margins)
    buckets = program.demand.buckets
    for model in dict.fromkeys(bucket.model for bucket in buckets):
        asked = {k: bucket for k, bucket in enumerate(buckets) if bucket.model == model}
        best: dict[int, float] = {}
        for (k, _), each in table.items():
            if k in asked:
                best[k] = max(best.get(k, 0.0), each.within)
        total = sum(bucket.rate_per_s for bucket in asked.values())
        within = sum(bucket.rate_per_s * best.get(k, 0.0) for k, bucket in asked.items()) / total
        if within >= limits.goal:
            continue
        yield f"at most {within:.1%} of {model}'s requests can be in time on any card, {limits.goal:.0%} must"
        for k, bucket in asked.items():
            if best.get(k, 0.0) < limits.goal:
                for (other, o), each in table.items():
                    if other == k and each.late:
                        yield f"  {bucket.name} on {program.options[o].name}: {each.late}"
