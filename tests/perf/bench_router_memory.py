"""Peak memory of a router process that knows a fleet, affinity full. ``run()``: ``make bench ONLY=router_memory``.

The process is the one that is deployed. It hears the inventories of all nodes, a full affinity set of every worker
(4,000 rungs: some 15,000 of 131,072 rows) all at once, as when the router has just started and asked for them, deltas
and snapshots, and dispatches requests that agents answer. ``started_mb``, ``inventories_mb`` and ``affinity_mb`` are
the peaks up to there, ``settled_mb`` is what is resident at the end.
"""

import asyncio
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import fleets
import msgspec
import numpy as np
import uvloop
import wired

from quartet_bus import subjects
from quartet_bus.config.schema import NatsSection
from quartet_bus.headers import REQUEST_ID
from quartet_bus.messages import AffinityUpdate
from quartet_bus.nats_bus import NatsBus
from quartet_bus.server import NatsServer

WORKERS = (1_000,)
RUNS = 3
RUNGS = 4_000
RATE_PER_S, SECONDS, PROMPT_TOKENS = 200, 4.0, 4_096


async def _fill(bus: NatsBus, workers: int) -> None:
    """Say the full affinity set of every worker."""
    rng = np.random.default_rng(5)
    for worker in wired.names(workers):
        rows = np.unique(rng.integers(0, fleets.AFFINITY_ROWS, RUNGS * fleets.AFFINITY_HASHES)).astype("<u4")
        update = AffinityUpdate(
            worker, 1, 1, fleets.AFFINITY_ROWS, fleets.AFFINITY_HASHES, on=rows.tobytes(), full=True
        )
        bus.publish(subjects.affinity(worker).subject, msgspec.msgpack.encode(update))
    await bus.flush()


async def _load(bus: NatsBus) -> None:
    bodies = [wired.chat(number, PROMPT_TOKENS) for number in range(64)]
    subject = subjects.infer(wired.TENANT, fleets.MODEL).subject
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    for number in range(int(RATE_PER_S * SECONDS)):
        await asyncio.sleep(begin_s + number / RATE_PER_S - loop.time())
        inbox = f"{subjects.inbox_prefix(wired.TENANT)}{number}"
        bus.publish(subject, bodies[number % len(bodies)], headers={REQUEST_ID: f"m-{number}"}, reply=inbox)


async def _once(server: NatsServer, workers: int) -> dict[str, float]:
    bus = NatsBus(NatsSection(url=server.url), name="bench")
    await bus.open()
    try:
        async with wired.peer("agents", server), wired.router(server, bus) as router:
            bare_mb = wired.memory_mb(router.pid)
            for inventory in wired.inventories(workers):
                bus.publish(subjects.inventory(inventory.node).subject, msgspec.msgpack.encode(inventory))
            await wired.knows(bus, workers)
            known_mb = wired.memory_mb(router.pid)
            async with wired.Beats(bus, workers).go_on(deltas_per_s=100, changes=20):
                await _fill(bus, workers)
                await wired.status(bus)  # answered after all of it was heard
                filled_mb = wired.memory_mb(router.pid)
                await _load(bus)
                await asyncio.sleep(0.5)
            told = await wired.status(bus)
            return {
                "rss_mb": wired.memory_mb(router.pid),
                "started_mb": bare_mb,
                "inventories_mb": known_mb,
                "affinity_mb": filled_mb,
                "settled_mb": wired.memory_mb(router.pid, "VmRSS"),
                "groups": told["groups"],
                "flights": told["flights"],
                "decide_p50_us": told["decide_p50_us"],
                "decide_p99_us": told["decide_p99_us"],
            }
    finally:
        await bus.close()


async def _case(workers: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as directory:
        async with NatsServer(Path(directory), jetstream=False) as server:
            runs = [await _once(server, workers) for _ in range(RUNS)]
    peaks = [run["rss_mb"] for run in runs]
    return {
        "bench": "router_memory",
        "config": {
            "workers": workers, "rungs_each": RUNGS, "rate_per_s": RATE_PER_S,
            "prompt_tokens": PROMPT_TOKENS,
        },
        **{key: round(statistics.median(run[key] for run in runs), 1) for key in runs[0]},
        "runs": RUNS,
        "spread": round((max(peaks) - min(peaks)) / statistics.median(peaks), 3),
    }  # fmt: skip


def run() -> Iterator[dict[str, object]]:
    """One line a size; half a minute altogether."""
    for workers in WORKERS:
        yield uvloop.run(_case(workers))


if __name__ == "__main__":
    for line in run():
        print(json.dumps(line))
