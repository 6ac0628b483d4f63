"""What it costs to hash a prompt up to each rung of the ladder. ``run()`` is what ``make bench ONLY=sketch`` prints."""

import gc
import json
import random
import statistics
import time
from array import array
from collections.abc import Callable, Sequence

from quartet_core.ladder import Sketch, sketch_text, sketch_tokens

PROMPT_TOKENS = (512, 4_096, 32_768, 131_072)
RUNS = 3
CALLS = 400

_TEXT = bytes(range(32, 127))


def _prompts(tokens: int) -> dict[str, Callable[[], Sketch]]:
    """The same prompt in each shape in which it may reach the router; lists pay for their conversion."""
    source = random.Random(tokens)
    ids = [source.randrange(150_000) for _ in range(1_000)] * (tokens // 1_000 + 1)
    listed: Sequence[int] = ids[:tokens]
    packed = array("I", listed)
    data = packed.tobytes()
    text = (_TEXT * (4 * tokens // len(_TEXT) + 1))[: 4 * tokens]
    return {
        "array": lambda: sketch_tokens(packed),
        "bytes": lambda: sketch_tokens(data),
        "list": lambda: sketch_tokens(listed),
        "text": lambda: sketch_text(text),
    }


def _times_us(call: Callable[[], Sketch], calls: int) -> list[float]:
    times = []
    for _ in range(calls):
        before = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - before) / 1_000)
    return sorted(times)


def _line(tokens: int, kind: str, call: Callable[[], Sketch]) -> dict[str, object]:
    calls = CALLS if kind != "list" else CALLS // 8
    _times_us(call, calls // 10)
    runs = [_times_us(call, calls) for _ in range(RUNS)]
    p50s = [run[len(run) // 2] for run in runs]
    p99s = [run[len(run) * 99 // 100] for run in runs]
    return {
        "bench": "sketch",
        "config": {"prompt_tokens": tokens, "kind": kind},
        "p50_us": round(statistics.median(p50s), 2),
        "p99_us": round(statistics.median(p99s), 2),
        "runs": RUNS,
        "spread": round((max(p50s) - min(p50s)) / statistics.median(p50s), 3),
    }


def run() -> list[dict[str, object]]:
    """One line for each prompt length and kind."""
    gc.disable()
    try:
        return [_line(tokens, kind, call) for tokens in PROMPT_TOKENS for kind, call in _prompts(tokens).items()]
    finally:
        gc.enable()


if __name__ == "__main__":
    for line in run():
        print(json.dumps(line))
