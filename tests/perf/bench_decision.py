"""What it costs to decide, and to keep what decisions rest on. ``run()`` is what ``make bench ONLY=decision`` prints.

Parts: ``decide`` is ``Routing.decide`` alone, sketch given, each prompt new to it (so its affinity rows are read for the
first time); ``hear`` takes a changed word of a worker; ``sent`` puts a plan into the ledger and ``ended`` takes it off.
The garbage collector is off while the clock runs: a router freezes what it holds at start.
"""

import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator

import fleets

from quartet_core.plan import Plan
from quartet_core.routing import Routing
from quartet_core.word import batch_level, free_kv_level, pack, queue_level

CASES = (
    (64, (4_096, 32_768)),
    (1_000, (512, 4_096, 32_768, 128_000)),
    (10_000, (4_096, 32_768)),
)  # fmt: skip
RUNS = 3
PROMPTS = 900
LEAST_GROUPS = {64: 30, 1_000: 300, 10_000: 300}


def _times_us(call: Callable[[int], object], numbers: range) -> list[float]:
    clock = time.perf_counter_ns
    times = []
    gc.disable()
    try:
        for number in numbers:
            before = clock()
            call(number)
            times.append((clock() - before) / 1_000)
    finally:
        gc.enable()
    return sorted(times)


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


def _decide(workers: int, prompt_tokens: int) -> Iterator[dict[str, object]]:
    routing, sketches = fleets.loaded(workers, prompts=PROMPTS * (RUNS + 1), prompt_tokens=prompt_tokens)
    if routing.board.groups < LEAST_GROUPS[workers]:
        raise AssertionError(f"{routing.board.groups} groups: this fleet is no loaded one")
    asks = [fleets.ask_for(sketch) for sketch in sketches]
    plans: list[Plan | None] = []
    runs = [
        _times_us(lambda number: plans.append(routing.decide(asks[number]).plan), range(start, start + PROMPTS))
        for start in range(0, len(asks), PROMPTS)
    ]
    if None in plans:
        raise AssertionError("a request found no worker: this fleet is not what is to be measured")
    cached = sum(plan is not None and plan.cached_tokens > fleets.SYSTEM_TOKENS for plan in plans) / len(plans)
    # The first run warms the code up.
    yield _line("decide", routing, prompt_tokens, runs[1:]) | {"cache_hits": round(cached, 3)}
    if prompt_tokens == 32_768:
        yield from _upkeep(routing, prompt_tokens, [plan for plan in plans if plan is not None], asks)


def _upkeep(routing: Routing, prompt_tokens: int, plans: list[Plan], asks: list[fleets.Ask]) -> Iterator[dict[str, object]]:
    rng = random.Random(2)
    workers = [worker for worker in routing.fleet.workers if worker is not None]
    words = [
        (workers[rng.randrange(len(workers))].id, pack(
            free_kv=free_kv_level(rng.random()), queue=queue_level(rng.expovariate(1 / 300.0)),
            batch=batch_level(rng.randrange(60)), drift=0, accepting=True,
        ))
        for _ in range(PROMPTS * (RUNS + 1))
    ]  # fmt: skip

    def hear(number: int) -> None:
        worker, word = words[number]
        routing.hear("c", worker, 1, word, 10 + number, 0, 1.0)

    def key(number: int) -> tuple[str, str, int, str, int]:
        return ("bench", f"sent-{number}", 1, workers[plans[number].prefill].id, 1)

    keys = [key(number) for number in range(len(plans))]

    def sent(number: int) -> None:
        routing.sent({plans[number].prefill: keys[number]}, plans[number], asks[number], 1.0)

    def ended(number: int) -> None:
        routing.ended(keys[number], 0, 1.0)

    for part, call in (("hear", hear), ("sent", sent), ("ended", ended)):
        runs = [_times_us(call, range(start, start + PROMPTS)) for start in range(0, len(plans), PROMPTS)]
        yield _line(part, routing, prompt_tokens, runs[1:])


def run() -> Iterator[dict[str, object]]:
    """One line for each fleet, prompt length and part."""
    for workers, lengths in CASES:
        for prompt_tokens in lengths:
            yield from _decide(workers, prompt_tokens)


if __name__ == "__main__":
    for line in run():
        print(json.dumps(line), flush=True)
