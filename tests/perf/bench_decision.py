"""What it costs to decide, and to keep what decisions rest on. ``run()`` is what ``make bench ONLY=decision`` prints.

Parts: ``decide`` is ``Routing.decide`` alone, sketch given, each prompt new to it (so its affinity rows are read for
the first time); ``sent`` puts the plan into the ledger, ``ended`` takes an older one off, and ``hear`` takes a changed
word of some worker. They are timed apart in one loop, as a router does them, so that the fleet stays as loaded as it is
and no two decisions meet the same state. The garbage collector is off while the clock runs: a router freezes what it
holds at start.
"""

import gc
import json
import random
import statistics
import time
from collections import deque
from collections.abc import Iterator

import fleets

from quartet_core.plan import Ask
from quartet_core.routing import Routing

CASES = ((64, (4_096, 32_768)), (1_000, (512, 4_096, 32_768, 128_000)), (10_000, (4_096, 32_768)))
LEAST_GROUPS = {64: 30, 1_000: 300, 10_000: 300}
UPKEEP_TOKENS = 32_768
"""The prompt length for which the parts besides ``decide``, which do not depend on it, are told."""

RUNS = 3
PROMPTS = 800
OUTSTANDING = 400
"""Requests under way before the first of them ends."""

Times = dict[str, list[float]]


class _Traffic:
    """Requests that come and go on a loaded fleet."""

    def __init__(self, routing: Routing) -> None:
        self._routing = routing
        self._rng = random.Random(2)
        self._workers = [worker.id for worker in routing.fleet.workers if worker is not None]
        self._under_way: deque[tuple[str, str, int, str, int]] = deque()
        self._beat = 10
        self.deep = 0
        """Decisions for a worker that holds more than the system prompt."""

    def play(self, asks: list[Ask]) -> Times:
        """Decide for each, and let it run; return what each part took, in us."""
        clock, routing, rng = time.perf_counter_ns, self._routing, self._rng
        times: Times = {"decide": [], "sent": [], "ended": [], "hear": []}
        for ask in asks:
            before = clock()
            decision = routing.decide(ask)
            after = clock()
            times["decide"].append((after - before) / 1e3)
            plan = decision.plan
            if plan is None:
                raise AssertionError(f"no plan ({decision.reason}): this fleet is not what is to be measured")
            self.deep += plan.cached_tokens > fleets.SYSTEM_TOKENS
            self._beat += 1
            key = ("bench", f"d{self._beat}", 1, routing.fleet.at(plan.prefill).id, 1)
            self._under_way.append(key)
            before = clock()
            routing.sent({plan.prefill: key}, plan, ask, 1.0)
            after = clock()
            times["sent"].append((after - before) / 1e3)
            routing.accepted(key, 1, 1.0)
            routing.prefilled(key, 1, 1.0)
            if len(self._under_way) > OUTSTANDING:
                oldest = self._under_way.popleft()
                before = clock()
                routing.ended(oldest, 1, 1.0)
                after = clock()
                times["ended"].append((after - before) / 1e3)
            worker, word = rng.choice(self._workers), fleets.busy_word(rng)
            before = clock()
            routing.hear("c", worker, 1, word, self._beat, 0, 1.0)
            after = clock()
            times["hear"].append((after - before) / 1e3)
        return {part: sorted(each) for part, each in times.items()}


def _line(part: str, routing: Routing, prompt_tokens: int, runs: list[list[float]]) -> dict[str, object]:
    p50s = [run[len(run) // 2] for run in runs]
    p99s = [run[len(run) * 99 // 100] for run in runs]
    return {
        "bench": "decision",
        "config": {"part": part, "workers": len(routing.fleet), "prompt_tokens": prompt_tokens},
        "p50_us": round(statistics.median(p50s), 2),
        "p99_us": round(statistics.median(p99s), 2),
        "groups": routing.board.groups,
        "runs": len(runs),
        "spread": round((max(p50s) - min(p50s)) / statistics.median(p50s), 3),
    }


def _case(routing: Routing, traffic: _Traffic, prompt_tokens: int) -> Iterator[dict[str, object]]:
    # One run more than is told: it warms up, and brings the requests under way to their number.
    sketches = fleets.conversations(routing, PROMPTS * (RUNS + 1), prompt_tokens)
    asks = [fleets.ask_for(sketch) for sketch in sketches]
    traffic.deep = 0
    gc.disable()
    try:
        runs = [traffic.play(asks[start : start + PROMPTS]) for start in range(0, len(asks), PROMPTS)][1:]
    finally:
        gc.enable()
    hits = {"deep_hits": round(traffic.deep / len(asks), 3)}
    yield _line("decide", routing, prompt_tokens, [run["decide"] for run in runs]) | hits
    if prompt_tokens == UPKEEP_TOKENS:
        for part in ("sent", "ended", "hear"):
            yield _line(part, routing, prompt_tokens, [run[part] for run in runs])


def run() -> Iterator[dict[str, object]]:
    """One line for each fleet, prompt length and part; half a minute altogether."""
    for workers, lengths in CASES:
        routing = fleets.loaded(workers)
        if routing.board.groups < LEAST_GROUPS[workers]:
            raise AssertionError(f"{routing.board.groups} groups: this fleet is no loaded one")
        traffic = _Traffic(routing)
        for prompt_tokens in lengths:
            yield from _case(routing, traffic, prompt_tokens)


if __name__ == "__main__":
    for line in run():
        print(json.dumps(line), flush=True)
