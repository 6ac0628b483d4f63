"""Fetching: is it better to move a cached prefix to a worker with time than to compute it, or to wait for its holder?

For a prefix of f tokens that worker h holds, and a worker w that holds less of the prompt:

    TTFT = waited + max(wait_w, iteration_h / 2 + transfer(f)) + drift_w·prefill_w(f, rest) + steps carried along

Whether that beats computing the prefix on w is what coordinators ask as well (``quartet_core.links.choose``).

The holder computes nothing: it lends at the end of its iteration under way, whatever waits there (a store at once: it
has no iterations). The transfer runs while w works off what is ahead. TPOT, harm and J are those of ``finish_time``.

Only workers that the hard filters leave for all of the prompt are thought of: a fetch may fail, and then they compute
it.
"""

from collections.abc import Callable
from itertools import islice

from quartet_core.fleet import Worker
from quartet_core.links import choose
from quartet_core.load import Load
from quartet_core.plan import Ask, Candidates, Plan
from quartet_core.policy.base import View, lateness

FETCH_TOKENS = 1024
"""How much deeper than the best plan's own cache a prefix must be: below it there is little to gain (some 15 ms on an
H100 with an 8B model), and the messages around a transfer take a few."""

GAIN = 0.9
"""A fetch must cost less than the best plan without, and bring the first token in less than this share of its time: it
takes link, memory and messages that J does not know, and it may fail. (Judged. J itself would not tell: where the time
per token binds it, it hardly moves, however much of a prompt need not be computed again.)"""

_LENDERS = 2
"""Holders that are looked at, the deepest first, until one will do."""

_CELLS = 3
"""Cells of a kind that are looked at for each, from the shortest wait on."""

_LENDS, _FETCHES = -1_000_001, -2_000_001
"""Turns of ``Policy.spread``, apart from those that policies take themselves."""


def best_fetch(
    view: View, spread: Callable[[int, int], int], ask: Ask, candidates: Candidates, without: Plan
) -> Plan | None:
    """The best plan that fetches, if it is clearly better than ``without``, the best plan that does not (from a store:
    better at all). Call it only when a coordinator is there to move anything.
    """
    held = without.cached_tokens
    lenders, deeper = 0, 0
    for depth, holders in candidates.holders:
        if depth - held < FETCH_TOKENS or lenders == _LENDERS:
            break
        deeper |= holders
        lenders += 1
        lender = view.fleet.at(spread(holders, _LENDS))
        if not lender.kind.targets or not lender.kind.lends:
            continue
        fetched = depth - depth % lender.kind.layout.block_tokens
        others = candidates.whole ^ (candidates.whole & deeper)
        # What a store has was put there to come back, and lending it disturbs nobody: there any gain will do.
        early_ms = without.ttft_ms if lender.kind.store else GAIN * without.ttft_ms
        plan = _fetched_from(view, spread, ask, candidates, lender, fetched, others, without.cost, early_ms)
        if plan is not None:
            return plan
    return None


def _fetched_from(
    view: View, spread: Callable[[int, int], int], ask: Ask, candidates: Candidates, lender: Worker, fetched: int,
    others: int, bound: float, early_ms: float,
) -> Plan | None:  # fmt: skip
    """The best of ``others`` for a prefix that ``lender`` holds, if it costs less than ``bound`` and its first token
    comes within ``early_ms``."""
    fleet, board, kappa = view.fleet, view.board, view.kappa
    lend_ms = 0.0 if lender.kind.store else lending_ms(board.loads[lender.slot])
    kv_bytes = fetched * lender.kind.layout.bytes_per_token
    rest = ask.prompt_tokens - fetched
    best: Plan | None = None
    for kind in fleet.kinds_of[ask.model]:
        mask = kind.plane & others
        if not mask or not lender.kind.targets >> kind.index & 1:
            continue
        undisturbed = kind.profile.prefill_ms(fetched, rest)
        spare_ms = min(bound * ask.ttft_ms, early_ms) - ask.waited_ms - undisturbed
        if spare_ms < lend_ms:
            continue
        for least_wait_ms, cell in islice(board.cells(kind).staircase(mask), _CELLS):
            if least_wait_ms > spare_ms:
                break
            slot = spread(cell, _FETCHES - kind.index)
            load = board.loads[slot]
            prefill_ms = load.drift * undisturbed
            harm = kappa * (load.crowd * prefill_ms / ask.output_tokens + load.harm)
            then_ms = prefill_ms
            if load.step_ms:
                then_ms -= -(load.queued_tokens + rest) // load.room * load.step_ms
            # The most that all before may take; a look at the link is dearer than this.
            most_ms = min((bound - harm) * ask.ttft_ms, early_ms) - ask.waited_ms - then_ms
            if load.tpot_ms / ask.tpot_ms + harm >= bound or load.wait_ms >= most_ms:
                continue
            price = view.links.price_ms(lender.place, fleet.at(slot).place, kv_bytes)
            if price is None:
                continue
            here_ms = lend_ms + price[0]
            before_ms = max(load.wait_ms, here_ms + 0.5 * load.step_ms)
            if before_ms >= most_ms:
                continue
            ttft_ms = ask.waited_ms + before_ms + then_ms
            cost = lateness(ttft_ms / ask.ttft_ms, load.tpot_ms / ask.tpot_ms) + harm
            own = _held_by(slot, candidates)
            choice = choose(
                price[0], kind.profile, own, fetched - own, load.drift, lend_ms=lend_ms, wait_ms=load.wait_ms
            )
            if not choice.move:
                continue  # computing it would be done first
            bound = cost
            best = Plan(
                prefill=slot,
                decode=slot,
                cached_tokens=own,
                prefill_ms=prefill_ms,
                ttft_ms=ttft_ms,
                tpot_ms=load.tpot_ms,
                total_ms=ttft_ms + ask.output_tokens * load.tpot_ms,
                ahead_ms=load.drift * load.queue_ms,
                cost=cost,
                kv_bytes=kv_bytes,
                kv_ms=price[0],
                source=lender.slot,
                fetched_tokens=fetched,
                fetch_wait_ms=choice.recompute_ms,
            )
    return best


def lending_ms(load: Load) -> float:
    """How long a holder takes until a cached prefix can be sent: half an iteration, with a chunk in it if any waits."""
    chunk_ms = min(load.queue_ms, load.kind.profile.prefill_ms(0, load.kind.chunk_tokens)) if load.queue_ms else 0.0
    return 0.5 * load.drift * (load.step_ms + chunk_ms)


def _held_by(slot: int, candidates: Candidates) -> int:
    for cached, plane in candidates.holders:
        if plane >> slot & 1:
            return cached
    return 0
