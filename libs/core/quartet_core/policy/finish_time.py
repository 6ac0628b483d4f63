"""Finish time: the plan whose worst ratio of prediction to target, plus the harm it does to others, is least.

For a request with targets T (first token) and P (per token), u uncached tokens and L expected output tokens, on (p, d):

    TTFT = waited + half an iteration + drift·(queue + prefill(u)) + the decode steps carried along + KV wait
    TPOT = drift·step(batch + 1) / (1 − φ)
    harm = batch_p·prefill_p(u)/L·E_p[1/P]  +  batch_d·(step_d(batch + 1) − step_d(batch))/(1 − φ_d)·E_d[1/P]
    J    = max(TTFT/T, TPOT/P) + LESSER·min(TTFT/T, TPOT/P) + κ·harm

KV wait is of splits: what of the transfer is left when the prefill ends (``policy.base.kv_wait_ms``); all of it where
the engine does not send while it computes. A split takes two workers and a link, which J does not know: it must cost
less than ``split_margin`` of the best plan for one worker.

No class name, threshold or price is in it: an H100 is preferred where its profile makes it better, and left alone
where a cheaper card meets the targets with less harm. (Objective study: of twelve objectives the best on conversation,
code and long-context traces; the harm term is what pays.)
"""

import math
from collections.abc import Iterator
from itertools import islice
from typing import ClassVar

from quartet_core.fleet import Kind
from quartet_core.plan import Ask, Candidates, Decision, Plan, Reason
from quartet_core.policy.base import LESSER, Policy, kv_wait_ms, lateness
from quartet_core.policy.fetching import best_fetch

_DECODERS = 3
"""Cells of decode workers of a kind that a split looks at, from the least burdened on."""

_FIRSTS = -3_000_001
"""Turns of ``spread`` among places for a prefill alone, apart from others'."""

_First = tuple[int, int, float, float, float]
"""A place for the prefill: slot, cached tokens, prefill ms, ms to the end of the prefill, harm done there."""


class FinishTime(Policy):
    """See the module. Exact over cells: a staircase holds every cell that could win."""

    name: ClassVar[str] = "finish-time"
    holds: ClassVar[bool] = True
    splits: ClassVar[bool] = True

    def choose(self, ask: Ask, candidates: Candidates) -> Decision:
        """The plan of least J; asks to hold when its worker has more than the kind's ``ahead_ms`` before it."""
        cost, slot, cached = self._best_whole(ask, candidates)
        plan = self.whole_plan(ask, slot, cached, cost) if slot >= 0 else None
        considered = (plan,) if plan is not None else ()
        if ask.plans_split:
            split = self._best_split(ask, candidates, cost * self.view.split_margin)
            if split is not None:
                plan = split
                considered = (split, *considered)
        if plan is None:
            return Decision(reason=Reason.NO_PREFILL_WORKER, left=candidates.left)
        if ask.plans_fetch:
            fetch = best_fetch(self.view, self.spread, ask, candidates, plan)
            if fetch is not None:
                plan = fetch
                considered = (fetch, *considered)
        load = self.view.board.loads[plan.prefill]
        hold = load.queue_ms > load.kind.ahead_ms
        reason = Reason.BEST
        if hold:
            reason = Reason.HELD
        elif plan.split:
            reason = Reason.SPLIT
        elif plan.fetches:
            reason = Reason.FETCH
        return Decision(reason, plan, hold, candidates.left, considered)

    def _best_whole(self, ask: Ask, candidates: Candidates) -> tuple[float, int, int]:
        """(J, slot, cached tokens) of the best worker for all of it, slot −1 if there is none.

        This is the inner loop of every decision: one pass, locals only, each worker weighed in a few float operations.
        """
        board, kappa = self.view.board, self.view.kappa
        loads = board.loads
        waited, ttft, tpot, output = ask.waited_ms, ask.ttft_ms, ask.tpot_ms, ask.output_tokens
        rest = candidates.whole
        weighed = 0  # workers that hold more of the prompt than the ones now looked at
        least, best, best_cached, best_turn = math.inf, 0, 0, 0
        lanes = []
        for kind in self.view.fleet.kinds_of[ask.model]:
            if lightest := board.cells(kind).lightest:
                # What J has at least besides the part of its first token: once, and for each ms of prefill.
                load = loads[lightest.bit_length() - 1]
                lanes.append((kind, kappa * load.harm + LESSER * load.tpot_ms / tpot, kappa * load.crowd / output))
        for cached, holders in (*candidates.holders, (0, rest)):
            plane = holders & rest
            if not plane:
                continue
            rest ^= plane
            uncached = ask.prompt_tokens - cached
            for kind, once, each in lanes:
                mask = kind.plane & plane
                if not mask:
                    continue
                undisturbed = kind.profile.prefill_ms(cached, uncached)
                # How long one of them may let it wait and still be better than the best so far.
                fixed = once + each * undisturbed
                spare_ms = (least - fixed) * ttft - waited - undisturbed
                if spare_ms < 0.0:
                    continue  # not even the idlest of them could be the best
                # Who holds more, waits no longer and is no dearer is better than they are, whatever the request.
                cells = board.staircase(kind, mask, beside=kind.plane & weighed, within_ms=spare_ms)
                for least_wait_ms, cell in cells:
                    if least_wait_ms > spare_ms:
                        break
                    load = loads[cell.bit_length() - 1]
                    wait_ms = load.wait_ms
                    if wait_ms > spare_ms:
                        continue
                    prefill = load.drift * undisturbed
                    harm = kappa * load.crowd * prefill / output + kappa * load.harm
                    if harm >= least:
                        continue
                    first = waited + wait_ms + prefill
                    if load.step_ms:
                        first -= -(load.queued_tokens + uncached) // load.room * load.step_ms
                    early, often = first / ttft, load.tpot_ms / tpot
                    cost = (early + LESSER * often if early > often else often + LESSER * early) + harm
                    if cost < least:
                        least, best, best_cached, best_turn = cost, cell, cached, kind.index
                        spare_ms = (least - fixed) * ttft - waited - undisturbed
            weighed |= plane
        if not best & (best - 1):
            return least, best.bit_length() - 1, best_cached
        return least, self.spread(best, best_turn), best_cached

    def _best_split(self, ask: Ask, candidates: Candidates, bound: float) -> Plan | None:
        """The best pair that costs less than ``bound``."""
        fleet, board, kappa = self.view.fleet, self.view.board, self.view.kappa
        decoders: dict[int, list[int]] = {}
        best: Plan | None = None
        for slot, cached, prefill_ms, first_ms, harm in self._firsts(ask, candidates, bound):
            worker, load = fleet.at(slot), board.loads[slot]
            kind = worker.kind
            if not kind.targets or first_ms / ask.ttft_ms + harm >= bound:
                continue
            kv_bytes = ask.prompt_tokens * kind.layout.bytes_per_token
            if kind.index not in decoders:
                decoders[kind.index] = self._decoders(ask.model, kind, candidates.decode)
            for target in decoders[kind.index]:
                other = board.loads[target]
                both = harm + kappa * other.harm
                often = other.tpot_ms / ask.tpot_ms
                if target == slot or often + both >= bound:
                    continue
                price = self.view.links.price_ms(worker.place, fleet.at(target).place, kv_bytes)
                if price is None:
                    continue
                wait_ms = kv_wait_ms(load, ask.prompt_tokens, cached, price[0])
                ttft_ms = first_ms + wait_ms + 0.5 * other.step_ms
                cost = lateness(ttft_ms / ask.ttft_ms, often) + both
                if cost < bound:
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
                        kv_wait_ms=wait_ms,
                    )
        return best

    def _firsts(self, ask: Ask, candidates: Candidates, bound: float) -> Iterator[_First]:
        """The places for a prefill alone from which a pair could cost less than ``bound``."""
        board, kappa = self.view.board, self.view.kappa
        waited, ttft = ask.waited_ms, ask.ttft_ms
        rest = candidates.prefill
        for cached, holders in (*candidates.holders, (0, rest)):
            plane = holders & rest
            rest ^= plane
            uncached = ask.prompt_tokens - cached
            for kind in self.view.fleet.kinds_of[ask.model]:
                mask = kind.plane & plane
                if not mask or not kind.targets:
                    continue
                undisturbed = kind.profile.prefill_ms(cached, uncached)
                spare_ms = bound * ttft - waited - undisturbed
                # Who holds more is not better for that alone: the way to the other half counts too.
                for least_wait_ms, cell in board.staircase(kind, mask, within_ms=spare_ms):
                    if least_wait_ms > spare_ms:
                        break
                    load = board.loads[cell.bit_length() - 1]
                    prefill = load.drift * undisturbed
                    harm = kappa * load.crowd * prefill / ask.output_tokens
                    first = waited + load.wait_ms + prefill
                    if load.step_ms:
                        first -= -(load.queued_tokens + uncached) // load.room * load.step_ms
                    if first / ttft + harm < bound:
                        yield self.spread(cell, _FIRSTS - kind.index), cached, prefill, first, harm

    def _decoders(self, model: str, source: Kind, plane: int) -> list[int]:
        """The least burdened workers of every kind that takes KV from ``source``."""
        found: list[int] = []
        for kind in self.view.fleet.kinds_of[model]:
            mask = kind.plane & plane
            if mask and source.targets >> kind.index & 1:
                cells = islice(self.view.board.cells(kind).by_burden(mask), _DECODERS)
                found.extend(self.spread(cell, -1 - kind.index) for cell in cells)
        return found
