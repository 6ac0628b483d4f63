"""Where the microseconds of a decision go.

    python tests/perf/decision_stages.py [WORKERS [PROMPT_TOKENS]]

The traffic is that of ``make bench ONLY=decision``. One JSON line a stage: ``filters`` up to the search for holders,
``holders`` (the affinity table), ``candidates`` (what is left, as planes and counts), ``weigh`` (the best worker), and
``plan``. ``warm`` is the same decision at once again, with all of its memory in the caches: what the first one took
more is spent waiting for memory, and for whoever else uses the machine. ``min_us`` is the quietest decision of all,
which may be an easy one as well.
"""

import gc
import json
import sys
import time
from typing import Any

import bench_decision
import fleets

from quartet_core.plan import Ask, Decision

PROMPTS = 2_000
WARM_UP = 600


class _Stopwatch:
    """Notes when a decision enters and leaves its two inner loops."""

    def __init__(self, routing: Any) -> None:
        self.taken: dict[str, list[float]] = {}
        self._at: dict[str, int] = {}
        self._decide = routing.decide
        table = routing.affinity
        routing._filters._affinity = _Watched(table, self._timed("holders", table.deepest))
        routing.policy._best_whole = self._timed("weigh", routing.policy._best_whole)

    def _timed(self, stage: str, call: Any) -> Any:
        def timed(*args: Any, **more: Any) -> Any:
            self._at[stage] = time.perf_counter_ns()
            found = call(*args, **more)
            self._at[stage + " end"] = time.perf_counter_ns()
            return found

        return timed

    def decide(self, ask: Ask) -> Decision:
        """``Routing.decide``, twice; what the stages of the first one took is noted."""
        start = time.perf_counter_ns()
        decision = self._decide(ask)
        end = time.perf_counter_ns()
        at = self._at
        for stage, begun, ended in (
            ("decide", start, end), ("filters", start, at["holders"]), ("holders", at["holders"], at["holders end"]),
            ("candidates", at["holders end"], at["weigh"]), ("weigh", at["weigh"], at["weigh end"]),
            ("plan", at["weigh end"], end),
        ):  # fmt: skip
            self.taken.setdefault(stage, []).append((ended - begun) / 1e3)
        start = time.perf_counter_ns()
        self._decide(ask)
        self.taken.setdefault("warm", []).append((time.perf_counter_ns() - start) / 1e3)
        return decision


class _Watched:
    def __init__(self, table: Any, deepest: Any) -> None:
        self._table = table
        self.deepest = deepest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)


def main(workers: int, prompt_tokens: int) -> None:
    """Print a line for each stage."""
    routing = fleets.loaded(workers)
    traffic = bench_decision._Traffic(routing)
    asks = [fleets.ask_for(sketch) for sketch in fleets.conversations(routing, PROMPTS + WARM_UP, prompt_tokens)]
    traffic.play(asks[:WARM_UP])
    watch = _Stopwatch(routing)
    routing.decide = watch.decide  # type: ignore[method-assign]
    gc.collect()
    gc.disable()
    traffic.play(asks[WARM_UP:])
    for stage, taken in watch.taken.items():
        taken.sort()
        share = {f"p{pct}_us": round(taken[len(taken) * pct // 100], 1) for pct in (10, 50, 90)}
        config = {"workers": workers, "prompt_tokens": prompt_tokens}
        print(json.dumps({"stage": stage, "config": config, "min_us": round(taken[0], 1), **share}))


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    main(*(given + [1_000, 32_768][len(given) :]))
