"""Streams through gateway, router and agent, beside the same engine asked directly. ``make bench ONLY=gateway``.

``instant``: the simulated engine computes in no time, so that what is measured is everything else: how many tokens a
second pass, and what a request and a token cost. ``paced``: the engine takes an H100's time for an 8B model, and what
counts is what is added to each token. All of it runs on one machine and shares its cores: client, broker, services.
``cpu_us_per_token`` is CPU time of each process, less what it uses when nothing is asked (``idle_cpu_ms_per_s``: beats
and timers), by the tokens that clients received. It says where the time goes also on a machine that others use, too.
"""

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import chain
import msgspec
import sse_load
import uvloop
import wired

STREAMS = (1, 16, 128, 512)
OUTPUT_TOKENS, PROMPT_TOKENS = 64, 64
RUNS = 3
WARM_UP_S, MEASURED_S, IDLE_S = 1.0, 2.0, 2.0
SCALES = {"instant": 1e-4, "paced": 1.0}
PACED_STREAMS = (1, 16, 128)


def _bodies() -> list[bytes]:
    rng = random.Random(1)
    return [
        msgspec.json.encode(
            {
                "model": chain.MODEL,
                "prompt": [rng.randrange(1, 60_000) for _ in range(PROMPT_TOKENS)],
                "max_tokens": OUTPUT_TOKENS,
                "stream": True,
            }
        )
        for _ in range(256)
    ]


async def _idle(asked: chain.Chain) -> dict[str, float]:
    """CPU seconds a second of each process while nobody asks anything."""
    before, started_s = chain.cpu_s(asked), time.monotonic()
    await asyncio.sleep(IDLE_S)
    wall_s = time.monotonic() - started_s
    after = chain.cpu_s(asked)
    return {name: (after[name] - before[name]) / wall_s for name in asked.pids}


async def _line(pace: str, through: str, asked: chain.Chain, streams: int, idle: dict[str, float]) -> dict[str, object]:
    bodies = _bodies()
    runs: list[sse_load.Measured] = []
    cpu_us: dict[str, list[float]] = {name: [] for name in asked.pids}
    for _ in range(RUNS):
        before, started_s = chain.cpu_s(asked), time.monotonic()
        measured = await sse_load.load(asked.address, bodies, streams, WARM_UP_S, MEASURED_S)
        spent, wall_s = chain.cpu_s(asked), time.monotonic() - started_s
        # The warm-up is in the CPU time, so its tokens are reckoned at the same rate.
        tokens = measured.tokens * wall_s / measured.wall_s
        for name in asked.pids:
            cpu_us[name].append(max(0.0, spent[name] - before[name] - idle[name] * wall_s) * 1e6 / tokens)
        runs.append(measured)
        await asyncio.sleep(0.5)  # what was given up with the run is cancelled

    def median(field: str) -> float:
        return statistics.median(getattr(run, field) for run in runs)

    rates = [run.tokens / run.wall_s for run in runs]
    return {
        "bench": "gateway",
        "config": {"engine": pace, "through": through, "streams": streams, "output_tokens": OUTPUT_TOKENS},
        "tokens_per_s": round(statistics.median(rates)),
        "requests_per_s": round(statistics.median(run.requests / run.wall_s for run in runs), 1),
        "ttft_p50_ms": round(median("ttft_p50_ms"), 3),
        "ttft_p99_ms": round(median("ttft_p99_ms"), 3),
        "per_token_us": round(median("per_token_us"), 1),
        "cpu_us_per_token": {name: round(statistics.median(each), 2) for name, each in cpu_us.items()},
        "idle_cpu_ms_per_s": {name: round(idle[name] * 1e3, 1) for name in asked.pids},
        "rss_mb": {name: round(wired.memory_mb(pid)) for name, pid in asked.pids.items()},
        "errors": sum(run.errors for run in runs),
        "runs": RUNS,
        "spread": round((max(rates) - min(rates)) / statistics.median(rates), 3),
    }


async def _all() -> AsyncIterator[dict[str, object]]:
    failed: list[str] = []
    for pace, scale in SCALES.items():
        counts = STREAMS if pace == "instant" else PACED_STREAMS
        for through in ("nothing", "quartet"):
            with tempfile.TemporaryDirectory() as directory:
                opened: AbstractAsyncContextManager[chain.Chain] = (
                    chain.engine(scale) if through == "nothing" else chain.fleet(Path(directory), scale)
                )
                async with opened as asked:
                    idle = await _idle(asked)
                    for streams in counts:
                        try:
                            yield await _line(pace, through, asked, streams, idle)
                        except RuntimeError as error:  # the other lines say something all the same
                            failed.append(f"{pace}, {through}, {streams} streams: {error}")
    if failed:
        raise RuntimeError("\n".join(failed))


def run() -> Iterator[dict[str, object]]:
    """One line for each engine, way and number of streams; about two minutes altogether."""

    async def following(lines: AsyncIterator[dict[str, object]]) -> dict[str, object] | None:
        return await anext(lines, None)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        lines = _all()
        while (line := runner.run(following(lines))) is not None:
            yield line


if __name__ == "__main__":
    for line in run():
        print(json.dumps(line))
