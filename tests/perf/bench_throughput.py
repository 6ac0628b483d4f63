"""Requests a second that routers take from NATS, decide and dispatch. ``run()``: ``make bench ONLY=throughput``.

A burst is published at once; ``per_s`` is how many of its requests reached workers, over the time from the first to the
last that did. Broker, routers, agents (one process for all) and client share this machine's cores, so two replicas show
what the machine has left rather than what two would do on cores of their own. ``lost`` never arrived.
"""

import asyncio
import statistics
import tempfile
import time
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
BURST = 1_500
PROMPT_TOKENS = 200
RUNS = 3
PATIENCE_S = 15.0


async def _burst(bus: NatsBus, bodies: list[bytes]) -> tuple[float, int]:
    """(requests a second, lost) of one burst."""
    run = f"{time.monotonic_ns():x}"
    subject = subjects.infer(wired.TENANT, fleets.MODEL).subject
    for number in range(BURST):
        request = f"{run}-{number}"
        inbox = f"{subjects.inbox_prefix(wired.TENANT)}{request}"
        bus.publish(subject, bodies[number % len(bodies)], headers={REQUEST_ID: request, NO_HOLD: "1"}, reply=inbox)
    await bus.flush()
    arrived_ns: dict[str, int] = {}
    patience_s = time.monotonic() + PATIENCE_S
    while len(arrived_ns) < BURST and time.monotonic() < patience_s:
        await asyncio.sleep(0.2)
        answer = await bus.request(wired_peers.ARRIVED, b"", timeout_s=PATIENCE_S)
        told = msgspec.msgpack.decode(answer.data, type=dict[str, int])
        arrived_ns |= {request: at_ns for request, at_ns in told.items() if request.startswith(run)}
    if len(arrived_ns) < 2:
        raise AssertionError(f"{len(arrived_ns)} requests arrived; the router says {await wired.status(bus)}")
    took_s = (max(arrived_ns.values()) - min(arrived_ns.values())) / 1e9
    return len(arrived_ns) / took_s, BURST - len(arrived_ns)


async def _all() -> AsyncIterator[dict[str, object]]:
    bodies = [wired.chat(number, PROMPT_TOKENS) for number in range(256)]
    for routers in (1, 2):
        async with AsyncExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            server = await stack.enter_async_context(NatsServer(directory, jetstream=False))
            bus = await connect(NatsSection(url=server.url), name="bench")
            stack.push_async_callback(bus.close)
            await stack.enter_async_context(wired.peer("agents", server))
            for number in range(routers):
                instance = wired.INSTANCE if not number else f"{wired.INSTANCE}-{number}"
                await stack.enter_async_context(wired.router(server, bus, instance))
            for inventory in wired.inventories(WORKERS):
                bus.publish(subjects.inventory(inventory.node).subject, msgspec.msgpack.encode(inventory))
            await wired.knows(bus, WORKERS)
            await stack.enter_async_context(wired.Beats(bus, WORKERS).go_on(deltas_per_s=100, changes=4))
            await _burst(bus, bodies)
            rates, lost = zip(*[await _burst(bus, bodies) for _ in range(RUNS)], strict=True)
            per_s = statistics.median(rates)
            yield {
                "bench": "throughput",
                "config": {"routers": routers, "workers": WORKERS, "prompt_tokens": PROMPT_TOKENS, "burst": BURST},
                "per_s": round(per_s),
                "lost": sum(lost),
                "runs": RUNS,
                "spread": round((max(rates) - min(rates)) / per_s, 3),
            }


def run() -> Iterator[dict[str, object]]:
    """One line for one router, one for two."""

    async def following(lines: AsyncIterator[dict[str, object]]) -> dict[str, object] | None:
        return await anext(lines, None)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        lines = _all()
        while (line := runner.run(following(lines))) is not None:
            yield line
