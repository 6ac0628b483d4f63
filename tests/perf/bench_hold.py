"""What ten thousand held requests cost a router. ``run()``: ``make bench ONLY=hold``.

One router on an in-memory bus that drops what is said; 64 busy workers, so that every request is held. ``busy_word`` is
a changed word of a worker that stays busy: nothing can end a hold by it. ``freeing_word`` frees a worker: the first
sixteen held requests are decided anew. ``second`` is what is done once a second for all that wait.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Iterator

import fleets
import msgspec
import wired

from quartet_bus import logs, subjects
from quartet_bus.bus import Message
from quartet_bus.config.schema import Config
from quartet_bus.memory import MemoryBroker, MemoryBus
from quartet_bus.messages import FleetDelta, WorkerState
from quartet_core.word import batch_level, pack, queue_level
from quartet_router.service import RouterService

WORKERS = 64
HELD = 10_000
RUNS = 3
WORDS = 300

_encode = msgspec.msgpack.Encoder().encode


class Silent(MemoryBus):
    """A bus on which nothing is heard: what the router says costs it the encoding, and no more."""

    def publish(self, subject: str, data: bytes, **_: object) -> None:
        """Drop it."""


class Scene:
    """A router with a busy fleet and requests that wait."""

    def __init__(self) -> None:
        config = msgspec.convert(
            {"router": {"hold_max_ms": 600_000.0, "hold_max_requests": HELD, "hold_max_bytes": 1 << 30}}, Config
        )
        self.router = RouterService(Silent(MemoryBroker()), config, instance="bench", random=random.Random(1))
        self._number = 0
        self._beat = 0

    async def fill(self) -> None:
        """Start, make all workers busy, and let requests come."""
        await self.router.start()
        for inventory in wired.inventories(WORKERS):
            self.router.feed.inventory(inventory, 0.0)
        for name in wired.names(WORKERS):
            self.word(name, 5_000.0)
        subject = subjects.infer(wired.TENANT, fleets.MODEL).subject
        bodies = [wired.chat(number, 200) for number in range(64)]
        for number in range(HELD):
            headers = {"Quartet-Request-Id": f"r{number}"}
            inbox = f"{subjects.inbox_prefix(wired.TENANT)}{number}"
            self.router._receive(Message(subject, bodies[number % 64], headers, inbox), trusted=False)
        await asyncio.sleep(0)

    def word(self, name: str, queue_ms: float) -> None:
        """A worker's word changed."""
        self._number += 1
        self._beat += 1
        word = pack(
            free_kv=12, queue=queue_level(queue_ms), batch=batch_level(self._beat % 40), drift=0, accepting=True
        )
        delta = FleetDelta(wired.COLLECTOR, 1, self._number, (WorkerState(name, 1, word, self._beat, 0),))
        self.router.on_deltas((_encode(delta),))

    def busy_word(self) -> None:
        """Still five seconds of work."""
        self.word(wired.names(WORKERS)[self._beat % WORKERS], 5_000.0)

    async def freeing_word(self) -> None:
        """Done; the look at held requests follows in the loop's next turn. Then it is busy again."""
        self.word(wired.names(WORKERS)[self._beat % WORKERS], 0.0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


def _quantiles(times_us: list[float]) -> tuple[float, float]:
    ordered = sorted(times_us)
    return ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]


def _timed(call: Callable[[], object], times: int) -> list[float]:
    taken = []
    for _ in range(times):
        start_ns = time.perf_counter_ns()
        call()
        taken.append((time.perf_counter_ns() - start_ns) / 1e3)
    return taken


async def _measure() -> dict[str, list[float]]:
    scene = Scene()
    await scene.fill()
    if len(scene.router._desk.holds) < HELD * 0.99:
        raise AssertionError(f"{len(scene.router._desk.holds)} of {HELD} requests are held")
    found = {"busy_word": _timed(scene.busy_word, WORDS)}
    found["second"] = _timed(scene.router._desk.tend, 20)
    freeing = []
    for _ in range(WORDS // 10):
        start_ns = time.perf_counter_ns()
        await scene.freeing_word()
        freeing.append((time.perf_counter_ns() - start_ns) / 1e3)
    found["freeing_word"] = freeing
    await scene.router.stop()
    return found


def run() -> Iterator[dict[str, object]]:
    """One line for each kind of change."""
    logs.configure("error", service="bench", instance="bench")
    rounds = [asyncio.run(_measure()) for _ in range(RUNS)]
    for part in ("busy_word", "freeing_word", "second"):
        p50s, p99s = zip(*(_quantiles(each[part]) for each in rounds), strict=True)
        p50_us = statistics.median(p50s)
        yield {
            "bench": "hold",
            "config": {"part": part, "held": HELD, "workers": WORKERS},
            "p50_us": round(p50_us, 1),
            "p99_us": round(statistics.median(p99s), 1),
            "runs": RUNS,
            "spread": round((max(p50s) - min(p50s)) / p50_us, 3),
        }
