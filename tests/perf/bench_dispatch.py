"""NATS publish → worker has the request, through one router process. ``run()``: ``make bench ONLY=dispatch``.

Broker, router, agents (one process for all) and client (this one) are separate processes on one machine, so their
monotonic clocks are one. Arrivals are Poisson. ``bare``: the same messages at the same rate from this process to an
echo process to the agents' process: two hops and no router. ``cpu_us_each`` is CPU of the router process per request,
all that it hears besides included. Requests ask not to be held: a hold is a wait for a worker, not for the router.
"""

import asyncio
import json
import statistics
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import fleets
import msgspec
import uvloop
import wired
import wired_peers

from quartet_bus import subjects
from quartet_bus.config.schema import NatsSection
from quartet_bus.headers import NO_HOLD, REQUEST_ID
from quartet_bus.nats_bus import NatsBus, connect
from quartet_bus.server import NatsServer

WORKERS = 64
CASES = ((100, 200), (500, 200), (100, 4_096), (500, 4_096))
RUNS = 3
SECONDS, WARM_UP_SECONDS = 2.0, 1.0
BODIES = 256


async def _case(bus: NatsBus, router_pid: int, rate: int, prompt_tokens: int) -> dict[str, object]:
    bodies = [wired.chat(number, prompt_tokens) for number in range(BODIES)]
    subject = subjects.infer(wired.TENANT, fleets.MODEL).subject

    def to_router(request: str, body: bytes) -> None:
        inbox = f"{subjects.inbox_prefix(wired.TENANT)}{request}"
        bus.publish(subject, body, headers={REQUEST_ID: request, NO_HOLD: "1"}, reply=inbox)

    def to_echo(request: str, body: bytes) -> None:
        bus.publish(wired_peers.HOP_1, body, headers={REQUEST_ID: request})

    for send in (to_router, to_echo):
        await wired.played(bus, send, bodies, rate, WARM_UP_SECONDS)
    p50s, p99s, bare_p50s, bare_p99s, lost, cpu_us = [], [], [], [], 0, []
    for _ in range(RUNS):
        before_s = wired.cpu_s(router_pid)
        times_ms, missing = await wired.played(bus, to_router, bodies, rate, SECONDS)
        if not times_ms:
            raise AssertionError(f"no request arrived; the router says {await wired.status(bus)}")
        cpu_us.append((wired.cpu_s(router_pid) - before_s) * 1e6 / max(1, len(times_ms)))
        p50s.append(times_ms[len(times_ms) // 2])
        p99s.append(times_ms[len(times_ms) * 99 // 100])
        lost += missing
        bare_ms, _ = await wired.played(bus, to_echo, bodies, rate, SECONDS)
        bare_p50s.append(bare_ms[len(bare_ms) // 2])
        bare_p99s.append(bare_ms[len(bare_ms) * 99 // 100])
    told = await wired.status(bus)
    p50_ms, bare_p50_ms = statistics.median(p50s), statistics.median(bare_p50s)
    return {
        "bench": "dispatch",
        "config": {"workers": WORKERS, "rate_per_s": rate, "prompt_tokens": prompt_tokens, "seconds": SECONDS},
        "p50_ms": round(p50_ms, 3),
        "p99_ms": round(statistics.median(p99s), 3),
        "bare_p50_ms": round(bare_p50_ms, 3),
        "bare_p99_ms": round(statistics.median(bare_p99s), 3),
        "ratio": round(p50_ms / bare_p50_ms, 2),
        "cpu_us_each": round(statistics.median(cpu_us)),
        "decide_p50_us": told["decide_p50_us"],
        "decide_p99_us": told["decide_p99_us"],
        "lost": lost,
        "runs": RUNS,
        "spread": round((max(p50s) - min(p50s)) / p50_ms, 3),
    }


async def _all() -> AsyncIterator[dict[str, object]]:
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = await stack.enter_async_context(NatsServer(directory, jetstream=False))
        bus = await connect(NatsSection(url=server.url), name="bench")
        stack.push_async_callback(bus.close)
        await stack.enter_async_context(wired.peer("agents", server))
        await stack.enter_async_context(wired.peer("echo", server))
        router = await stack.enter_async_context(wired.router(server, bus))
        for inventory in wired.inventories(WORKERS):
            bus.publish(subjects.inventory(inventory.node).subject, msgspec.msgpack.encode(inventory))
        await wired.knows(bus, WORKERS)
        await stack.enter_async_context(wired.Beats(bus, WORKERS).go_on(deltas_per_s=100, changes=4))
        for rate, prompt_tokens in CASES:
            yield await _case(bus, router.pid, rate, prompt_tokens)


def run() -> Iterator[dict[str, object]]:
    """One line for each rate and prompt length; about a minute altogether."""

    async def following(lines: AsyncIterator[dict[str, object]]) -> dict[str, object] | None:
        return await anext(lines, None)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        lines = _all()
        while (line := runner.run(following(lines))) is not None:
            yield line


if __name__ == "__main__":
    for line in run():
        print(json.dumps(line))
