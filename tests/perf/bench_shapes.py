"""Request rates and shapes that others publish, through one router process. ``run()``: ``make bench ONLY=shapes``.

Broker, router, agents (one process for all) and client (this one) are processes of one machine. Engines take no time of
their own: the first token comes after 5 ms and the end after 10, whatever the shape, so that what is measured is the
router and not the queues of a fleet. Whether a real fleet of these workers could bear the rate at all is computed from
the profiles that the router predicts with: ``fleet_per_s`` is what it could serve at best, prompts uncached and every
batch full; ``fleet_saturated`` where the rate is above it.

``p50_ms`` and ``p99_ms`` are from the client's publish to the worker; at 10 a second p99 is the slowest of some 20.
``keeps_up`` is whether the last request was with its worker within a second after it was sent, and none was lost.
``cpu_us_each`` is CPU of the router per request, the fleet's deltas (100 a second) and its own timers included: at 10 a
second that is most of it. Requests may be held.
"""

import asyncio
import statistics
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import fleets
import msgspec
import uvloop
import wired

from quartet_bus import subjects
from quartet_bus.config.schema import NatsSection
from quartet_bus.headers import REQUEST_ID
from quartet_bus.nats_bus import NatsBus, connect
from quartet_bus.server import NatsServer
from quartet_core import catalogue

FLEETS = (10, 100)
SHAPES = ((200, 100), (10_000, 1_000), (100_000, 1_000))
RATES = (10, 100, 200, 500)
RUNS = 3
SECONDS = 1.6
BODIES = 16
BEHIND_MS = 1_000.0


def fleet_per_s(workers: int, prompt_tokens: int, output_tokens: int) -> float:
    """What a fleet as ``wired.inventories`` has it can serve at best, by its profiles."""
    known = catalogue.builtin()
    total = 0.0
    for number in range(workers):
        hardware = fleets.CLASSES[number % len(fleets.CLASSES)]
        profile = known.profile(hardware, fleets.MODEL, "fp8", 1)
        room = known.kv_capacity_tokens(hardware, fleets.MODEL, "fp8", 1) // (prompt_tokens + output_tokens)
        batch = max(1, min(256, room))
        step_ms = profile.step_ms_at(batch, prompt_tokens + output_tokens / 2)
        total += 1e3 / (profile.prefill_ms(0, prompt_tokens) + output_tokens * step_ms / batch)
    return total


async def _case(
    bus: NatsBus, router_pid: int, workers: int, shape: tuple[int, int], rate: int, bodies: list[bytes]
) -> dict[str, object]:
    subject = subjects.infer(wired.TENANT, fleets.MODEL).subject

    def send(request: str, body: bytes) -> None:
        inbox = f"{subjects.inbox_prefix(wired.TENANT)}{request}"
        bus.publish(subject, body, headers={REQUEST_ID: request}, reply=inbox)

    p50s, p99s, slowest, lost, number = [], [], 0.0, 0, 0
    before, cpu_s = await wired.status(bus), wired.cpu_s(router_pid)
    for _ in range(RUNS):
        times_ms, missing = await wired.played(bus, send, bodies, rate, SECONDS)
        lost += missing
        number += len(times_ms) + missing
        if times_ms:
            p50s.append(times_ms[len(times_ms) // 2])
            p99s.append(times_ms[len(times_ms) * 99 // 100])
            slowest = max(slowest, times_ms[-1])
    cpu_s = wired.cpu_s(router_pid) - cpu_s
    told = await wired.status(bus)
    p50_ms = statistics.median(p50s) if p50s else float("nan")
    could_per_s = fleet_per_s(workers, *shape)
    return {
        "bench": "shapes",
        "config": {
            "workers": workers, "rate_per_s": rate, "prompt_tokens": shape[0], "output_tokens": shape[1],
            "seconds": SECONDS, "engines": "instant",
        },
        "p50_ms": round(p50_ms, 2),
        "p99_ms": round(statistics.median(p99s), 2) if p99s else None,
        "keeps_up": not lost and slowest < BEHIND_MS,
        "cpu_us_each": round(cpu_s * 1e6 / max(1, number)),
        "rss_mb": round(wired.memory_mb(router_pid, "VmRSS"), 1),
        "held": told["holds"] - before["holds"],
        "refused": told["refused"] - before["refused"],
        "lost": lost,
        "fleet_per_s": round(could_per_s, 1),
        "fleet_saturated": rate > could_per_s,
        "runs": RUNS,
        "spread": round((max(p50s) - min(p50s)) / p50_ms, 3) if p50s else None,
    }  # fmt: skip


def _body(number: int, shape: tuple[int, int]) -> bytes:
    body: dict[str, Any] = msgspec.json.decode(wired.chat(number, shape[0]))
    return msgspec.json.encode(body | {"max_tokens": shape[1]})


async def _all() -> AsyncIterator[dict[str, object]]:
    all_bodies = {shape: [_body(number, shape) for number in range(BODIES)] for shape in SHAPES}
    for workers in FLEETS:
        async with AsyncExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            server = await stack.enter_async_context(NatsServer(directory, jetstream=False))
            bus = await connect(NatsSection(url=server.url), name="bench")
            stack.push_async_callback(bus.close)
            await stack.enter_async_context(wired.peer("agents", server))
            router = await stack.enter_async_context(wired.router(server, bus))
            for inventory in wired.inventories(workers):
                bus.publish(subjects.inventory(inventory.node).subject, msgspec.msgpack.encode(inventory))
            await wired.knows(bus, workers)
            await stack.enter_async_context(wired.Beats(bus, workers).go_on(deltas_per_s=100, changes=4))
            for shape, bodies in all_bodies.items():
                for rate in RATES:
                    yield await _case(bus, router.pid, workers, shape, rate, bodies)


def run() -> Iterator[dict[str, object]]:
    """One line for each fleet, shape and rate; about three minutes altogether."""

    async def following(lines: AsyncIterator[dict[str, object]]) -> dict[str, object] | None:
        return await anext(lines, None)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        lines = _all()
        while (line := runner.run(following(lines))) is not None:
            yield line
