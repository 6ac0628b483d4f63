"""A router process as it is deployed, and what a fleet says to it over NATS, for benches."""

import asyncio
import json
import os
import random
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import fleets
import msgspec
import wired_peers

from quartet_bus import subjects
from quartet_bus.bus import NoResponders, RequestTimeout
from quartet_bus.messages import (
    ControlReply,
    FleetDelta,
    FleetSnapshot,
    KvLayout,
    LinkInfo,
    NodeInventory,
    WorkerInfo,
    WorkerState,
)
from quartet_bus.nats_bus import NatsBus
from quartet_bus.server import NatsServer
from quartet_core import catalogue
from quartet_core.word import batch_level, free_kv_level, pack, queue_level

TENANT = "bench"
COLLECTOR = "bench-collector"
INSTANCE = "bench"
PATIENCE_S = 3.0
"""How long after the last send what has not arrived counts as lost."""
PEERS = Path(__file__).with_name("wired_peers.py")

Send = Callable[[str, bytes], None]

_encode = msgspec.msgpack.Encoder().encode
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def names(workers: int) -> list[str]:
    """The workers' ids, eight to a node."""
    return [f"n{number // 8}-{number % 8}" for number in range(workers)]


def inventories(workers: int) -> Iterator[NodeInventory]:
    """What the fleet's nodes announce: a quarter H100, the rest L40S, one model."""
    known = catalogue.builtin()
    spec = known.model(fleets.MODEL)
    infos = [
        WorkerInfo(
            id=name,
            ordinal=number % 8,
            incarnation=1,
            hardware=(hardware := fleets.CLASSES[number % len(fleets.CLASSES)]),
            model=fleets.MODEL,
            precision="fp8",
            tp=1,
            gpus=(number % 8,),
            kv_tokens=known.kv_capacity_tokens(hardware, fleets.MODEL, "fp8", 1),
            max_context=131_072,
            max_batch=256,
            chunk_tokens=2048,
            layout=KvLayout(16, spec.kv_bytes_per_token, "bf16"),
            engine="simulated",
            engine_version="1",
            capabilities=("export", "import", "reserve"),
            step_ms=10.0,
        )
        for number, name in enumerate(names(workers))
    ]
    links = (LinkInfo("RDMA_ROCE", 46.6, 0.05),)
    for start in range(0, workers, 8):
        yield NodeInventory(f"n{start // 8}", 1, 0, tuple(infos[start : start + 8]), links=links)


class Beats:
    """Says the fleet's state as a collector would: busy workers, of whom a few change each time."""

    def __init__(self, bus: NatsBus, workers: int) -> None:
        self._bus = bus
        self._rng = random.Random(3)
        self._beat = 10
        self._number = 0
        self._states = [self._state(name) for name in names(workers)]

    def snapshot(self) -> None:
        """Say all of it."""
        told = FleetSnapshot(COLLECTOR, 1, self._number, tuple(self._states))
        self._bus.publish(subjects.fleet_snapshot().subject, _encode(told))

    def delta(self, changes: int) -> None:
        """Say that so many workers changed."""
        self._beat += 1
        self._number += 1
        changed = self._rng.sample(range(len(self._states)), min(changes, len(self._states)))
        for slot in changed:
            self._states[slot] = self._state(self._states[slot].worker)
        told = FleetDelta(COLLECTOR, 1, self._number, tuple(self._states[slot] for slot in changed))
        self._bus.publish(subjects.fleet_delta().subject, _encode(told))

    @asynccontextmanager
    async def go_on(self, *, deltas_per_s: int, changes: int) -> AsyncIterator[None]:
        """Deltas at a rate, and four snapshots a second."""
        saying = asyncio.create_task(self._say(deltas_per_s, changes))
        try:
            yield
        finally:
            saying.cancel()

    async def _say(self, deltas_per_s: int, changes: int) -> None:
        while True:
            self.snapshot()
            for _ in range(deltas_per_s // 4):
                self.delta(changes)
                await asyncio.sleep(1 / deltas_per_s)

    def _state(self, worker: str) -> WorkerState:
        rng = self._rng
        word = pack(
            free_kv=free_kv_level(rng.uniform(0.3, 1.0)),
            queue=queue_level(rng.expovariate(1 / 10.0)),
            batch=batch_level(rng.randrange(8, 60)),
            drift=0,
            accepting=True,
        )
        return WorkerState(worker, 1, word, self._beat, 0)


def chat(number: int, prompt_tokens: int) -> bytes:
    """A chat request of about so many tokens (four bytes each), different for each number."""
    rng = random.Random(number)
    text = rng.randbytes(2 * prompt_tokens).hex()
    body = {"model": fleets.MODEL, "max_tokens": 64, "stream": True, "messages": [{"role": "user", "content": text}]}
    return json.dumps(body).encode()


async def played(bus: NatsBus, send: Send, bodies: list[bytes], rate: int, seconds: float) -> tuple[list[float], int]:
    """Send at a rate, Poisson; return the sorted times (ms) of what arrived, and how many did not."""
    loop = asyncio.get_running_loop()
    rng = random.Random(rate)
    run = f"{time.monotonic_ns():x}"
    sent_ns: dict[str, int] = {}
    begin_s = due_s = loop.time()
    while due_s < begin_s + seconds:
        due_s += rng.expovariate(rate)
        await asyncio.sleep(due_s - loop.time())
        request = f"{run}-{len(sent_ns)}"
        body = bodies[len(sent_ns) % len(bodies)]
        sent_ns[request] = time.monotonic_ns()
        send(request, body)
    await bus.flush()
    arrived_ns: dict[str, int] = {}
    patience_s = loop.time() + PATIENCE_S
    while not sent_ns.keys() <= arrived_ns.keys() and loop.time() < patience_s:
        await asyncio.sleep(0.1)
        answer = await bus.request(wired_peers.ARRIVED, b"", timeout_s=PATIENCE_S)
        arrived_ns |= msgspec.msgpack.decode(answer.data, type=dict[str, int])
    times_ms = sorted(
        (arrived_ns[request] - at_ns) / 1e6 for request, at_ns in sent_ns.items() if request in arrived_ns
    )
    return times_ms, len(sent_ns) - len(times_ms)


@asynccontextmanager
async def router(server: NatsServer, bus: NatsBus, instance: str = INSTANCE) -> AsyncIterator[Process]:
    """A router process that listens."""
    environment = os.environ | {
        "QUARTET_NATS__URL": server.url,
        "QUARTET_SERVICE__INSTANCE": instance,
        "QUARTET_SERVICE__LOG_LEVEL": "error",
        "QUARTET_FLEET__RING_PATH": "",
    }
    async with _process("-m", "quartet_router", env=environment) as process:
        await status(bus, instance)
        yield process


@asynccontextmanager
async def peer(role: str, server: NatsServer) -> AsyncIterator[Process]:
    """A process of ``wired_peers.py`` that listens."""
    async with _process(str(PEERS), role, server.url, stdout=PIPE) as process:
        assert process.stdout is not None
        if await process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"{role} did not start")
        yield process


async def status(bus: NatsBus, instance: str = INSTANCE) -> dict[str, Any]:
    """What a router says of itself; waits until it says anything."""
    topic = subjects.control("router", instance, "status")
    for _ in range(200):
        try:
            answer = await bus.request(topic.subject, b"\x80", timeout_s=1.0)
        except (NoResponders, RequestTimeout):
            await asyncio.sleep(0.05)
            continue
        told: dict[str, Any] = json.loads(msgspec.msgpack.decode(answer.data, type=ControlReply).payload)
        return told
    raise TimeoutError("the router does not answer")


async def knows(bus: NatsBus, workers: int) -> None:
    """Return when the router knows so many live workers."""
    for _ in range(200):
        if (await status(bus))["up"] == workers:
            return
        await asyncio.sleep(0.05)
    raise TimeoutError(f"the router does not know {workers} workers: {await status(bus)}")


def cpu_s(pid: int) -> float:
    """CPU that a process has used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def memory_mb(pid: int, what: str = "VmHWM") -> float:
    """A process's peak resident memory (or ``VmRSS``, its present one) in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) / 1024
    raise LookupError(f"the kernel reports no {what}")


@asynccontextmanager
async def _process(*arguments: str, env: dict[str, str] | None = None, stdout: int = DEVNULL) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, env=env, stdout=stdout)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()
