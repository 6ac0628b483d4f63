"""Finish time: the plan whose worst ratio of prediction to target, plus the harm it does to others, is least.

For a request with targets T (first token) and P (per token), u uncached tokens and L expected output tokens, on (p, d):

    TTFT = waited + half an iteration + drift·(queue + prefill(u)) + the decode steps carried along + KV transfer
    TPOT = drift·step(batch + 1) / (1 − φ)
    harm = batch_p·prefill_p(u)/L·E_p[1/P]  +  batch_d·(step_d(batch + 1) − step_d(batch))/(1 − φ_d)·E_d[1/P]
    J    = max(TTFT/T, TPOT/P) + κ·harm

No class name, threshold or price is in it: an H100 is preferred where its profile makes it better, and left alone
where a cheaper card meets the targets with less harm. (Objective study: of twelve objectives the best on conversation,
code and long-context traces; the harm term is what pays.)
"""

import math
from typing import ClassVar

from quartet_core.fleet import Kind
from quartet_core.load import least_wait_ms
from quartet_core.plan import Ask, Candidates, Decision, Plan, Reason
from quartet_core.policy.base import Policy

_FEW = 4
"""Holders of a prefix up to this many are weighed one by one; more are weighed by cell."""

_DECODERS = 3
"""Decode workers of a kind that a split looks at, from the least burdened on."""


class FinishTime(Policy):
    """See the module. Exact over cells: a staircase holds every cell that could win."""

    name: ClassVar[str] = "finish-time"
    holds: ClassVar[bool] = True

    def choose(self, ask: Ask, candidates: Candidates) -> Decision:
        """The plan of least J; asks to hold when its worker has more than the kind's ``ahead_ms`` before it."""
        prefills = self._first_halves(ask, candidates)
        best: tuple[float, int, int] | None = None
        considered: list[Plan] = []
        for slot, cached in prefills:
            if candidates.whole >> slot & 1:
                cost = self._whole_cost(ask, slot, cached)
                if best is None or cost < best[0]:
                    best = (cost, slot, cached)
        plan = None if best is None else self.whole_plan(ask, best[1], best[2], best[0])
        if plan is not None:
            considered.append(plan)
        if ask.plans_split and self.view.fleet.kinds:
            split = self._best_split(ask, candidates, prefills, math.inf if plan is None else plan.cost)
            if split is not None:
                considered.insert(0, split)
                plan = split
        if plan is None:
            return Decision(reason=Reason.NO_PREFILL_WORKER, left=candidates.left)
        hold = self.view.board.loads[plan.prefill].queue_ms > self.worker(plan.prefill).kind.ahead_ms
        reason = Reason.HELD if hold else Reason.SPLIT if plan.split else Reason.BEST
        return Decision(reason=reason, plan=plan, hold=hold, left=candidates.left, considered=tuple(considered))

    def _first_halves(self, ask: Ask, candidates: Candidates) -> list[tuple[int, int]]:
        """(slot, cached tokens) of every worker that could be the best place for the prefill."""
        found: list[tuple[int, int]] = []
        rest = candidates.prefill | candidates.whole
        for cached, holders in candidates.holders:
            plane = holders & rest
            rest &= ~holders
            if not plane:
                continue
            if plane.bit_count() <= _FEW:
                while plane:
                    bit = plane & -plane
                    plane ^= bit
                    found.append((bit.bit_length() - 1, cached))
            else:
                self._by_cell(ask, plane, cached, found)
        if rest:
            self._by_cell(ask, rest, 0, found)
        return found

    def _by_cell(self, ask: Ask, plane: int, cached: int, found: list[tuple[int, int]]) -> None:
        board = self.view.board
        uncached = ask.prompt_tokens - cached
        least = math.inf
        for kind in self.view.fleet.kinds:
            mask = kind.plane & plane
            if not mask:
                continue
            prefill_ms = kind.profile.prefill_ms(cached, uncached)
            for wait_level, cell in board.cells(kind).staircase(mask):
                # All further cells wait at least so long: none of them can beat what is found already.
                if (ask.waited_ms + least_wait_ms(wait_level) + prefill_ms) / ask.ttft_ms > least:
                    break
                slot = self.spread(cell, kind.index)
                found.append((slot, cached))
                if not ask.plans_split:
                    least = min(least, self._whole_cost(ask, slot, cached))

    def _whole_cost(self, ask: Ask, slot: int, cached: int) -> float:
        load = self.view.board.loads[slot]
        uncached = ask.prompt_tokens - cached
        prefill_ms = load.drift * self.worker(slot).kind.profile.prefill_ms(cached, uncached)
        ttft = self.ttft_ms(ask, load, prefill_ms, uncached) / ask.ttft_ms
        tpot = load.tpot_ms / ask.tpot_ms
        harm = load.crowd * prefill_ms / ask.output_tokens + load.harm
        return (ttft if ttft > tpot else tpot) + self.view.kappa * harm

    def _best_split(
        self, ask: Ask, candidates: Candidates, prefills: list[tuple[int, int]], bound: float
    ) -> Plan | None:
        """The best pair that costs less than ``bound``."""
        fleet, board, kappa = self.view.fleet, self.view.board, self.view.kappa
        decoders: dict[int, list[int]] = {}
        best: Plan | None = None
        for slot, cached in prefills:
            worker = fleet.at(slot)
            kind = worker.kind
            if not kind.targets or not candidates.prefill >> slot & 1:
                continue
            load = board.loads[slot]
            uncached = ask.prompt_tokens - cached
            prefill_ms = load.drift * kind.profile.prefill_ms(cached, uncached)
            first_ms = self.ttft_ms(ask, load, prefill_ms, uncached)
            harm = kappa * load.crowd * prefill_ms / ask.output_tokens
            if first_ms / ask.ttft_ms + harm >= bound:
                continue
            kv_bytes = ask.prompt_tokens * kind.layout.bytes_per_token
            if kind.index not in decoders:
                decoders[kind.index] = self._decoders(kind, candidates.decode)
            for target in decoders[kind.index]:
                if target == slot:
                    continue
                other = board.loads[target]
                harm_there = kappa * other.harm
                if other.tpot_ms / ask.tpot_ms + harm + harm_there >= bound:
                    continue
                price = self.view.links.price_ms(worker.node, fleet.at(target).node, kv_bytes)
                if price is None:
                    continue
                ttft_ms = first_ms + price[0] + 0.5 * other.step_ms
                cost = max(ttft_ms / ask.ttft_ms, other.tpot_ms / ask.tpot_ms) + harm + harm_there
                if cost >= bound:
                    continue
                bound = cost
                best = Plan(
                    prefill=slot,
                    decode=target,
                    cached_tokens=cached,
                    prefill_ms=prefill_ms,
                    ttft_ms=ttft_ms,
                    tpot_ms=other.tpot_ms,
                    total_ms=ttft_ms + ask.output_tokens * other.tpot_ms,
                    ahead_ms=load.drift * load.queue_ms,
                    cost=cost,
                    kv_bytes=kv_bytes,
                    kv_ms=price[0],
                )
        return best

    def _decoders(self, source: Kind, plane: int) -> list[int]:
        """The least burdened workers of every kind that takes KV from ``source``."""
        found: list[int] = []
        for kind in self.view.fleet.kinds:
            mask = kind.plane & plane
            if not mask or not source.targets >> kind.index & 1:
                continue
            for count, cell in enumerate(self.view.board.cells(kind).by_burden(mask)):
                if count == _DECODERS:
                    break
                found.append(self.spread(cell, -1 - kind.index))
        return found
