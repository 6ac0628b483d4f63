"""The fast way to a decision against the plain one: a scan of all workers, one by one, with nothing kept or skipped.

The plain way knows no planes, rosters, bounds or searches. It asks every worker whether it may be thought of, looks its
cached depth up in a dict, puts workers that the router cannot tell apart into one cell, drops cells that another is
better than in every respect, and computes J of each cell that is left, term by term.
"""

import math
import random
from itertools import groupby
from unittest.mock import patch

import fleets
from hypothesis import example, given, settings
from hypothesis import strategies as st
from unit.core.test_routing import objective

from quartet_core import filters
from quartet_core import word as w
from quartet_core.affinity import _rungs_apart, rows_of  # which rungs are looked at has tests of its own
from quartet_core.ladder import Sketch, covered_tokens, rungs_within
from quartet_core.plan import Reason
from quartet_core.policy.base import LESSER
from quartet_core.verdict import Verdict

PROMPTS = (64, 512, 1_536, 4_096, 8_000, 32_768)
GRAIN = 24
LONG_PROMPT, LONG_CONTEXT = 4_096, 16_384


class World:
    """A random fleet, told to a router and remembered plainly."""

    def __init__(self, seed, count):
        self.rng = rng = random.Random(seed)
        self.workers = [
            fleets.facts(
                f"w{number}", rng.choice(("H100_SXM5", "L40S_PCIE")), role=rng.choice(("both",) * 6 + ("decode",)),
                cordoned=rng.random() < 0.05, kv_tokens=rng.choice((400_000,) * 4 + (20_000,)),
            )
            for number in range(count)
        ]  # fmt: skip
        self.routing = fleets.routing(self.workers, long_prompt_tokens=LONG_PROMPT, long_context_tokens=LONG_CONTEXT)
        self.words = dict.fromkeys(range(count), w.pack(free_kv=15, queue=0, batch=0, drift=0, accepting=True))
        self.verdicts = dict.fromkeys(range(count), Verdict.UP)
        self.depths = {}  # (first rungs of a prompt, slot) → rungs held
        self.last = {}  # by kind: the slot that was last chosen among equals
        self.beat = 1

    def hear(self):
        """Some workers' words change."""
        rng = self.rng
        for slot in rng.sample(range(len(self.workers)), rng.randint(0, len(self.workers))):
            self.beat += 1
            self.words[slot] = w.pack(
                free_kv=w.free_kv_level(rng.uniform(0, 1.1)), queue=w.queue_level(rng.expovariate(1 / 200)),
                batch=w.batch_level(rng.choice((0, rng.randrange(60)))), drift=rng.choice((0,) * 5 + (1, 3, 7)),
                accepting=rng.random() < 0.95, throttled=rng.random() < 0.1, fault=rng.random() < 0.02,
            )  # fmt: skip
            self.verdicts[slot] = rng.choice((Verdict.UP,) * 9 + (Verdict.SUSPECT,))
            self.routing.hear("c", f"w{slot}", 1, self.words[slot], self.beat, self.verdicts[slot], 0.0)

    def ask(self):
        """A prompt that some workers hold a part of."""
        rng = self.rng
        tokens = rng.choice(PROMPTS)
        rungs = tuple(rng.getrandbits(64) for _ in range(rungs_within(tokens)))
        few, many = rng.choice((0, 1, 3)), rng.choice((0, len(self.workers) // 2))
        system = len(rungs) // 3
        self.depths = dict.fromkeys(rng.sample(range(len(self.workers)), many), system)
        for slot in rng.sample(range(len(self.workers)), min(few, len(self.workers))):
            self.depths[slot] = max(rng.randint(1, len(rungs)), self.depths.get(slot, 0))
        for slot, depth in self.depths.items():
            rows = [row for rung in rungs[:depth] for row in rows_of(rung, 1 << 17, 4)]
            self.routing.affinity.turn_on(slot, rows)
        return fleets.ask_for(
            Sketch(rungs, tokens), ttft_ms=rng.choice((300.0, 2_000.0)), tpot_ms=rng.choice((30.0, 60.0, 200.0)),
            output_tokens=rng.choice((20.0, 256.0)), excluded=rng.choice((0, 0, rng.getrandbits(len(self.workers)))),
        )  # fmt: skip

    # The plain way

    def candidates(self, ask):
        """The slots left after the hard filters, or the reason why there are none."""
        fits = [
            slot for slot, worker in enumerate(self.workers)
            if ask.prompt_tokens + ask.max_tokens <= min(worker.kv_tokens, worker.max_context)
        ]  # fmt: skip
        if not fits:
            return Reason.TOO_LONG
        untried = [slot for slot in fits if not ask.excluded >> slot & 1]
        left = [slot for slot in untried if self.takes_work(slot)]
        if not left:
            return Reason.ALL_BUSY if untried else Reason.NO_WORKER
        left = [slot for slot in left if self.verdicts[slot] == Verdict.UP] or left
        left = [slot for slot in left if self.has_room(slot, ask)] or left
        roomy = left
        if ask.prompt_tokens > LONG_PROMPT:
            left = [s for s in left if not w.THROTTLED.of(self.words[s]) or self.new(s, ask) <= LONG_PROMPT] or left
        if ask.prompt_tokens > LONG_CONTEXT:
            near = [s for s in left if self.quick(s) or self.new(s, ask) <= LONG_CONTEXT]
            left = near or [s for s in roomy if self.quick(s)] or left  # rather a strained one of the right class
        return [slot for slot in left if self.workers[slot].role == "both"] or left

    def takes_work(self, slot):
        """Whether it accepts, without a fault, and is not cordoned or hopelessly slow."""
        told = self.words[slot]
        sound = w.ACCEPTING.of(told) and not w.FAULT.of(told) and w.DRIFT.of(told) != w.DRIFT_UNUSABLE_LEVEL
        return sound and not self.workers[slot].cordoned

    def has_room(self, slot, ask):
        """Whether its free KV surely holds prompt and answer; idle workers have room whatever they said."""
        told = self.words[slot]
        if not w.QUEUE.of(told) and not w.BATCH.of(told):
            return True
        needed = (ask.prompt_tokens + ask.output_tokens) / self.workers[slot].kv_tokens
        level = w.FREE_KV.of(told)
        return w.free_kv_fraction(level) >= min(needed, 1.0)

    def quick(self, slot):
        """Whether it is of a long-context class."""
        return self.workers[slot].hardware == "H100_SXM5"

    def cached(self, slot, ask):
        """How many tokens of the prompt it is known to hold: its deepest rung of those that a router looks at."""
        depth = self.depths.get(slot, 0) if self.workers[slot].role == "both" else 0
        held = max((rung for rung in _rungs_apart(len(ask.sketch.rungs), GRAIN) if rung < depth), default=-1)
        return min(covered_tokens(held), ask.prompt_tokens - 1)

    def new(self, slot, ask):
        """How many tokens it would have to compute."""
        return ask.prompt_tokens - self.cached(slot, ask)

    def best(self, ask, left):
        """(J, slot) of the best of ``left``."""
        loads = self.routing.board.loads
        by_depth = sorted(left, key=lambda slot: -self.cached(slot, ask))
        deeper, least, winner = [], math.inf, []
        for cached, group in groupby(by_depth, key=lambda slot: self.cached(slot, ask)):
            group = list(group)
            for kind in self.routing.fleet.kinds:
                of_kind = [slot for slot in group if loads[slot].kind is kind]
                rivals = of_kind + [slot for slot in deeper if loads[slot].kind is kind]
                for place in sorted({place_of(loads[slot]) for slot in of_kind}):
                    cell = [slot for slot in of_kind if place_of(loads[slot]) == place]
                    if len(of_kind) > 1 and any(beats(place_of(loads[rival]), place) for rival in rivals):
                        continue
                    cost = objective(self.routing, ask, max(cell), cached)
                    if self.hopeless(loads[max(cell)], ask, cached, least):
                        continue
                    if cost < least - 1e-12:
                        least, winner = cost, cell
            deeper += group
        return least, self.next_of(winner)

    def hopeless(self, load, ask, cached, least):
        """Whether it would have to be less of a burden than the lightest of its kind to beat ``least``: the one rule
        of the fast way that is no part of J, since another worker may have less of one term for more of another."""
        of_kind = {s: other for s, other in self.routing.board.loads.items() if other.kind is load.kind}
        lightest = of_kind[min(of_kind, key=lambda slot: (of_kind[slot].burden_level, -slot))]
        prefill = load.kind.profile.prefill_ms(cached, ask.prompt_tokens - cached)
        floor = lightest.harm + LESSER * lightest.tpot_ms / ask.tpot_ms + lightest.crowd * prefill / ask.output_tokens
        return load.wait_ms > (least - floor) * ask.ttft_ms - ask.waited_ms - prefill

    def next_of(self, cell):
        """The next of equals after the one that was chosen last."""
        if len(cell) == 1:
            return cell[0]
        kind = self.routing.board.loads[cell[0]].kind.index
        last = self.last.get(kind, -1)
        self.last[kind] = min((slot for slot in cell if slot > last), default=min(cell))
        return self.last[kind]


def place_of(load):
    """What tells workers of one kind and depth apart."""
    return load.wait_level, load.burden_level


def beats(one, other):
    """Whether a cell is no worse in wait and burden, and better in one of them."""
    return one != other and one[0] <= other[0] and one[1] <= other[1]


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 60))
@example(1215, 38)  # more depths than a search within the cap on probes tells apart
def test_a_decision_is_what_a_plain_scan_of_all_workers_finds(seed, count):
    with patch.object(filters, "_MAX_PROBES", 1_000):  # how the cap rounds down has tests of its own
        compare(seed, count)


def compare(seed, count):
    world = World(seed, count)
    for _ in range(12):
        world.hear()
        ask = world.ask()
        decision = world.routing.decide(ask)
        left = world.candidates(ask)
        if isinstance(left, Reason):
            assert decision.reason is left
            continue
        whole = [slot for slot in left if world.workers[slot].role == "both"]
        if not whole:
            continue  # halves alone: their rule has tests of its own
        cost, slot = world.best(ask, whole)
        plan = decision.plan
        assert (plan.prefill, plan.decode, plan.cached_tokens) == (slot, slot, world.cached(slot, ask))
        assert math.isclose(plan.cost, cost, rel_tol=1e-9)
