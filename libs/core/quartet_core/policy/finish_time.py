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
from collections.abc import Iterable
from itertools import islice
from typing import ClassVar

from quartet_core.fleet import Kind
from quartet_core.plan import Ask, Candidates, Decision, Plan, Reason
from quartet_core.policy.base import LESSER, Policy, kv_wait_ms, lateness
from quartet_core.policy.fetching import best_fetch

_DECODERS = 3
"""Cells of decode workers of a kind that a split looks at, from the least burdened on."""

_First = tuple[int, int, float, float, float]
"""A place for the prefill: slot, cached tokens, prefill ms, ms to the end of the prefill, harm done there."""


class FinishTime(Policy):
    """See the module. Exact over cells: a staircase holds every cell that could win."""

    name: ClassVar[str] = "finish-time"
    holds: ClassVar[bool] = True
    splits: ClassVar[bool] = True

    def choose(self, ask: Ask, candidates: Candidates) -> Decision:
        """The plan of least J; asks to hold when its worker has more than the kind's ``ahead_ms`` before it."""
        firsts: list[_First] | None = [] if ask.plans_split else None
        cost, slot, cached = self._best_whole(ask, candidates, firsts)
        plan = self.whole_plan(ask, slot, cached, cost) if slot >= 0 else None
        considered = (plan,) if plan is not None else ()
        if firsts:
            split = self._best_split(ask, candidates, firsts, cost * self.view.split_margin)
            if split is not None:
                plan = split
                considered = (split, *considered)
        if plan is None:
            return Decision(reason=Reason.NO_PREFILL_WORKER, left=candidates.left)
        if ask.plans_fetch:
            fetch = best_fetch(self.view, self.spread, ask, candidates, plan.cached_tokens, plan.cost)
            if fetch is not None:
                plan = fetch
                considered = (fetch, *considered)
        hold = self.view.board.loads[plan.prefill].queue_ms > self.worker(plan.prefill).kind.ahead_ms
        reason = Reason.BEST
        if hold:
            reason = Reason.HELD
        elif plan.split:
            reason = Reason.SPLIT
        elif plan.fetches:
            reason = Reason.FETCH
        return Decision(reason=reason, plan=plan, hold=hold, left=candidates.left, considered=considered)

    def _best_whole(self, ask: Ask, candidates: Candidates, firsts: list[_First] | None) -> tuple[float, int, int]:
        """(J, slot, cached tokens) of the best worker for all of it, slot −1 if there is none. With ``firsts``, every
        worker that could be the best place for the prefill is added to it.

        This is the inner loop of every decision: one pass, locals only, each worker weighed in a few float operations.
        """
        board, loads, kappa = self.view.board, self.view.board.loads, self.view.kappa
        waited, ttft, tpot, output = ask.waited_ms, ask.ttft_ms, ask.tpot_ms, ask.output_tokens
        whole = candidates.whole
        rest = whole if firsts is None else whole | candidates.prefill
        weighed = 0  # workers that hold more of the prompt than the ones now looked at
        least, best, best_cached, best_turn = math.inf, 0, 0, 0
        kinds = [
            (kind, of_kind, *self._least_burden(ask, of_kind.lightest, firsts is None))
            for kind in self.view.fleet.kinds_of[ask.model]
            if (of_kind := board.cells(kind)).lightest
        ]
        for cached, holders in (*candidates.holders, (0, rest)):
            plane = holders & rest
            if not plane:
                continue
            rest ^= plane
            uncached = ask.prompt_tokens - cached
            for kind, of_kind, once, each in kinds:
                mask = kind.plane & plane
                if not mask:
                    continue
                undisturbed = kind.profile.prefill_ms(cached, uncached)
                # How long one of them may let it wait and still be better than the best so far.
                fixed = once + each * undisturbed
                spare_ms = (least - fixed) * ttft - waited - undisturbed
                if spare_ms < 0.0:
                    continue  # not even the idlest of them could be the best
                cells: Iterable[tuple[float, int]]
                if not mask & (mask - 1):
                    cells = ((0.0, mask),)
                else:
                    # Who holds more, waits no longer and is no dearer is better than they are, whatever the request;
                    # but as the place for a prefill alone, the way from there counts too.
                    cells = of_kind.staircase(mask, beside=kind.plane & weighed if firsts is None else 0)
                for least_wait_ms, cell in cells:
                    if least_wait_ms > spare_ms:
                        break
                    slot = cell.bit_length() - 1
                    if firsts is not None:
                        slot = self.spread(cell, kind.index)
                        cell = 1 << slot
                    load = loads[slot]
                    prefill = load.drift * undisturbed
                    harm = kappa * load.crowd * prefill / output
                    both = harm + kappa * load.harm
                    if both >= least and firsts is None:
                        continue
                    first = waited + load.wait_ms + prefill
                    if load.step_ms:
                        first -= -(load.queued_tokens + uncached) // load.room * load.step_ms
                    if firsts is not None:
                        firsts.append((slot, cached, prefill, first, harm))
                        if not whole & cell:
                            continue
                    early, often = first / ttft, load.tpot_ms / tpot
                    cost = (early + LESSER * often if early > often else often + LESSER * early) + both
                    if cost < least:
                        least, best, best_cached, best_turn = cost, cell, cached, kind.index
                        spare_ms = (least - fixed) * ttft - waited - undisturbed
            weighed |= plane
        if not best & (best - 1):
            return least, best.bit_length() - 1, best_cached
        return least, self.spread(best, best_turn), best_cached

    def _least_burden(self, ask: Ask, lightest: int, whole: bool) -> tuple[float, float]:
        """What J has at least on workers of a kind besides the part of its first token: what the ``lightest`` of them
        have of it (once, for each ms of prefill). On those that only prefill, tokens cost nothing."""
        load, kappa = self.view.board.loads[lightest.bit_length() - 1], self.view.kappa
        once = kappa * load.harm + LESSER * load.tpot_ms / ask.tpot_ms if whole else 0.0
        return once, kappa * load.crowd / ask.output_tokens

    def _best_split(self, ask: Ask, candidates: Candidates, firsts: list[_First], bound: float) -> Plan | None:
        """The best pair that costs less than ``bound``."""
        fleet, board, kappa = self.view.fleet, self.view.board, self.view.kappa
        decoders: dict[int, list[int]] = {}
        best: Plan | None = None
        for slot, cached, prefill_ms, first_ms, harm in firsts:
            worker, load = fleet.at(slot), board.loads[slot]
            kind = worker.kind
            if not kind.targets or not candidates.prefill >> slot & 1 or first_ms / ask.ttft_ms + harm >= bound:
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

    def _decoders(self, model: str, source: Kind, plane: int) -> list[int]:
        """The least burdened workers of every kind that takes KV from ``source``."""
        found: list[int] = []
        for kind in self.view.fleet.kinds_of[model]:
            mask = kind.plane & plane
            if mask and source.targets >> kind.index & 1:
                cells = islice(self.view.board.cells(kind).by_burden(mask), _DECODERS)
                found.extend(self.spread(cell, -1 - kind.index) for cell in cells)
        return found
