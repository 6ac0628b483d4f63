"""Other objectives, to be judged beside ours: what ``quartet simulate --study objective`` compares.

They weigh every worker in turn, without cells or bounds, so that a variant is a few lines and nothing it could choose
is left out; they are not for routers. ``Plain`` is our objective written this way, as a check on both.
"""

import math
from types import MappingProxyType
from typing import ClassVar, Final

from quartet_core.load import Load
from quartet_core.plan import Ask, Candidates, Decision, Plan, Reason
from quartet_core.planes import slots
from quartet_core.policy.base import Policy, kv_wait_ms, lateness
from quartet_core.routing import PolicyOf

_FIRSTS, _DECODERS = 6, 6


class Plain(Policy):
    """max(TTFT/T, TPOT/P) + LESSER·min + κ·harm, over whole plans and splits."""

    name: ClassVar[str] = "plain"
    holds: ClassVar[bool] = True
    splits: ClassVar[bool] = True
    margin: ClassVar[float] = 0.0
    """A split must cost less than this share of the best whole plan; 0 takes the router's."""

    def weigh(self, early: float, often: float) -> float:
        """Two ratios of prediction to target as one number."""
        return lateness(early, often)

    def choose(self, ask: Ask, candidates: Candidates) -> Decision:
        """The plan of least cost; held while its worker has enough before it."""
        loads, kappa = self.view.board.loads, self.view.kappa
        cached_at: dict[int, int] = {}
        for cached, plane in candidates.holders:
            for slot in slots(plane):
                cached_at.setdefault(slot, cached)
        least, equals = math.inf, 0
        firsts: list[tuple[float, int, float, float, float]] = []
        for slot in slots(candidates.whole | candidates.prefill):
            load, cached = loads[slot], cached_at.get(slot, 0)
            uncached = ask.prompt_tokens - cached
            prefill_ms = load.drift * load.kind.profile.prefill_ms(cached, uncached)
            first_ms = self.ttft_ms(ask, load, prefill_ms, uncached)
            harm = kappa * load.crowd * prefill_ms / ask.output_tokens
            early = first_ms / ask.ttft_ms
            if ask.plans_split and candidates.prefill >> slot & 1:
                firsts.append((self.weigh(early, 0.0) + harm, slot, prefill_ms, first_ms, harm))
            if not candidates.whole >> slot & 1:
                continue
            cost = self.weigh(early, load.tpot_ms / ask.tpot_ms) + harm + kappa * load.harm
            if cost < least:
                least, equals = cost, 0
            if cost == least:
                equals |= 1 << slot
        plan = None
        if equals:
            slot = self.spread(equals, 0)
            plan = self.whole_plan(ask, slot, cached_at.get(slot, 0), least)
        bound = least * (self.margin or self.view.split_margin)
        plan = self._split(ask, candidates, sorted(firsts)[:_FIRSTS], cached_at, bound) or plan
        if plan is None:
            return Decision(reason=Reason.NO_PREFILL_WORKER, left=candidates.left)
        hold = loads[plan.prefill].queue_ms > loads[plan.prefill].kind.ahead_ms
        reason = Reason.HELD if hold else Reason.SPLIT if plan.split else Reason.BEST
        return Decision(reason=reason, plan=plan, hold=hold, left=candidates.left, considered=(plan,))

    def _split(
        self,
        ask: Ask,
        candidates: Candidates,
        firsts: list[tuple[float, int, float, float, float]],
        cached_at: dict[int, int],
        bound: float,
    ) -> Plan | None:
        """The best pair that costs less than ``bound``: the best few for each half."""
        if not firsts:
            return None
        loads, fleet, kappa = self.view.board.loads, self.view.fleet, self.view.kappa
        decoders = sorted(
            (load.tpot_ms / ask.tpot_ms + kappa * load.harm, slot) for slot, load in self._loads(candidates.decode)
        )[:_DECODERS]
        best: Plan | None = None
        for _, slot, prefill_ms, first_ms, harm in firsts:
            worker = fleet.at(slot)
            kv_bytes = ask.prompt_tokens * worker.kind.layout.bytes_per_token
            for _, target in decoders:
                other = loads[target]
                if target == slot or not worker.kind.targets >> other.kind.index & 1:
                    continue
                price = self.view.links.price_ms(worker.place, fleet.at(target).place, kv_bytes)
                if price is None:
                    continue
                wait_ms = kv_wait_ms(loads[slot], ask.prompt_tokens, cached_at.get(slot, 0), price[0])
                ttft_ms = first_ms + wait_ms + 0.5 * other.step_ms
                cost = self.weigh(ttft_ms / ask.ttft_ms, other.tpot_ms / ask.tpot_ms) + harm + kappa * other.harm
                if cost < bound:
                    bound = cost
                    best = Plan(
                        prefill=slot,
                        decode=target,
                        cached_tokens=cached_at.get(slot, 0),
                        prefill_ms=prefill_ms,
                        ttft_ms=ttft_ms,
                        tpot_ms=other.tpot_ms,
                        total_ms=ttft_ms + ask.output_tokens * other.tpot_ms,
                        ahead_ms=loads[slot].drift * loads[slot].queue_ms,
                        cost=cost,
                        kv_bytes=kv_bytes,
                        kv_ms=price[0],
                        kv_wait_ms=wait_ms,
                    )
        return best

    def _loads(self, plane: int) -> list[tuple[int, Load]]:
        return [(slot, self.view.board.loads[slot]) for slot in slots(plane)]


class Total(Plain):
    """TTFT/T + TPOT/P + κ·harm."""

    name: ClassVar[str] = "sum"

    def weigh(self, early: float, often: float) -> float:
        """Both alike."""
        return early + often


class Squares(Plain):
    """(TTFT/T)² + (TPOT/P)² + κ·harm: what is far from its target hardly counts, what is near it counts more and
    more."""

    name: ClassVar[str] = "squares"

    def weigh(self, early: float, often: float) -> float:
        """The nearer to its target, the more."""
        return early * early + often * often


class SquaresClearSplit(Squares):
    """Squares, and splits only where that is clearly better."""

    name: ClassVar[str] = "squares-clear-split"
    margin: ClassVar[float] = 0.7


VARIANTS: Final = MappingProxyType[str, PolicyOf](
    {variant.name: variant for variant in (Plain, Total, Squares, SquaresClearSplit)}
)
"""By name."""
