"""Heartbeats into one collector process on loopback multicast. ``run()`` is what ``make bench ONLY=heartbeat`` prints.

    python tests/perf/bench_heartbeat.py [--seconds 30] [--runs 1] [--only 250000]

The collector is the one that is deployed, with a broker, a ring and 125 announced nodes of eight workers; the load is
``beat_load.py``. Rate 0 is the most that two generators can drive.

``lost`` is what was sent and not received, ``lost_kernel`` what the kernel dropped of it for want of buffer.
``cpu_us_each`` is the CPU of the collector's whole process, deltas, snapshots and verdicts included, per datagram, of
which
``cpu_system_us_each`` is the kernel's (as it samples it); ``core_pct`` is the same as a share of one core, and
``sender_core_pct`` what the generators took of this machine at the same time. The last line is the straight line
through all rates without keys: what the collector costs with nobody beating, what each datagram adds, and what that
makes at 125 nodes x 2,000/s. ``visible_…`` is the time from just before a state was sent until a reader that polls the
ring each millisecond had it, ``planes_…`` until a router (``quartet_router``'s service and its ring edge, in the
bench's process) had it in its planes.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from beat_load import FIRST_MARK, INCARNATION, WORKERS, node_name

from quartet_bus import subjects
from quartet_bus.config.schema import Config, NatsSection
from quartet_bus.memory import MemoryBroker, MemoryBus
from quartet_bus.messages import ControlReply, FleetDelta, KvLayout, NodeInventory, WorkerInfo
from quartet_bus.nats_bus import NatsBus
from quartet_bus.ring import RingReader
from quartet_bus.server import NatsServer
from quartet_router import edge
from quartet_router.service import RouterService

LOAD = Path(__file__).with_name("beat_load.py")
NODES = 125
FULL_RATE = NODES * 2_000
MASTERS = ("6f" * 16, "6e" * 16)
CASES = (
    {"rate_per_s": 10_000},
    {"rate_per_s": 50_000},
    {"rate_per_s": 100_000},
    {"rate_per_s": FULL_RATE},
    {"rate_per_s": 0},
    {"rate_per_s": 100_000, "batch_ms": 1.0},
    {"rate_per_s": 100_000, "batch_ms": 5.0},
    {"rate_per_s": 50_000, "master_keys": len(MASTERS)},
    {"rate_per_s": 100_000, "master_keys": len(MASTERS)},
)
RUNS = 3
SECONDS = 10.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

_decode = msgspec.msgpack.Decoder(FleetDelta).decode
Figures = dict[str, Any]


def inventory(node: str) -> NodeInventory:
    """A node of eight idle L40S."""
    workers = tuple(
        WorkerInfo(
            id=f"{node}-{ordinal}",
            ordinal=ordinal,
            incarnation=INCARNATION,
            hardware="L40S_PCIE",
            model="llama-3.1-8b",
            precision="fp8",
            tp=1,
            gpus=(ordinal,),
            kv_tokens=100_000,
            max_context=32_768,
            max_batch=256,
            chunk_tokens=2048,
            layout=KvLayout(16, 65_536, "fp8"),
            engine="simulated",
            step_ms=20.0,
        )
        for ordinal in range(WORKERS)
    )
    return NodeInventory(node, INCARNATION, 0, workers)


class Collector:
    """The collector's process, and what the kernel and it say of it."""

    def __init__(self, process: asyncio.subprocess.Process, bus: NatsBus) -> None:
        self._process = process
        self._bus = bus

    @classmethod
    async def start(cls, bus: NatsBus, url: str, **fleet: object) -> "Collector":
        """One that knows all nodes already."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("QUARTET_")}
        environment |= {f"QUARTET_FLEET__{key.upper()}": str(value) for key, value in fleet.items()}
        environment |= {
            "QUARTET_NATS__URL": url,
            "QUARTET_SERVICE__INSTANCE": "bench",
            "QUARTET_SERVICE__LOG_LEVEL": "error",
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "quartet_heartbeat_collector"),
            env=environment,
            stderr=asyncio.subprocess.DEVNULL,  # its alarm that the whole fleet fell silent, when the load ends
        )
        collector = cls(process, bus)
        async with asyncio.timeout(30.0):
            await collector.status()
            for number in range(NODES):
                known = inventory(node_name(number))
                bus.publish(subjects.inventory(known.node).subject, msgspec.msgpack.encode(known))
            while len((await collector.status())["nodes"]) < NODES:
                pass
        return collector

    async def status(self) -> Figures:
        """What it says of itself, once it answers."""
        topic = subjects.control("collector", "bench", "status")
        while True:
            try:
                answer = await self._bus.request(topic.subject, b"", timeout_s=1.0)
            except Exception:  # not there yet: nobody listens, or the broker is not told
                if self._process.returncode is not None:
                    raise
                await asyncio.sleep(0.05)
            else:
                return json.loads(msgspec.msgpack.decode(answer.data, type=ControlReply).payload)

    def cpu_s(self) -> tuple[float, float]:
        """CPU time so far: all of it, and the kernel's."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        user_s, system_s = int(fields[11]) / TICKS_PER_S, int(fields[12]) / TICKS_PER_S
        return user_s + system_s, system_s

    def peak_rss_mb(self) -> float:
        """The most memory it ever held."""
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
        raise LookupError("the kernel reports no peak memory")

    async def stop(self) -> None:
        """As an operator would."""
        self._process.send_signal(signal.SIGTERM)
        await self._process.wait()


class Watch:
    """When each marked state showed up: in the ring, and in a router's planes."""

    def __init__(self) -> None:
        self.ring: dict[int, int] = {}
        self.planes: dict[int, int] = {}

    async def read_ring(self, path: str) -> None:
        """Poll the ring each millisecond, until cancelled."""
        with RingReader(path) as reader:
            while True:
                self._note(reader.poll(), self.ring)
                await asyncio.sleep(0.001)

    @contextlib.asynccontextmanager
    async def router(self, path: str) -> Any:
        """A router on this host that knows the fleet and hears nothing but the ring."""
        config = msgspec.convert({"fleet": {"ring_path": path}}, Config)
        router = RouterService(MemoryBus(MemoryBroker()), config, instance="bench", random=random.Random(1))
        await router.start()
        for number in range(NODES):
            assert router.feed.inventory(inventory(node_name(number)), 0.0) == []
        fleet, take = router.routing.fleet, router.on_deltas

        def on_deltas(records: list[bytes]) -> None:
            take(records)
            for worker, state in self._note(records, self.planes).items():
                slot = fleet.slot_of(worker)
                assert slot is not None
                assert fleet.planes.word(slot) == state

        router.on_deltas = on_deltas  # type: ignore[method-assign]  # the moment after, where nothing tells it
        try:
            async with edge.edges(router):
                yield
        finally:
            await router.stop()

    def latencies(self, marks: list[int]) -> Figures:
        """Percentiles, in ms, of the marks sent at these moments."""
        figures: Figures = {"marks": len(marks)}
        for name, seen in (("visible", self.ring), ("planes", self.planes)):
            took_ms = sorted((seen[at] - sent_ns) / 1e6 for at, sent_ns in enumerate(marks) if at in seen)
            figures[f"{name}_seen"] = len(took_ms)
            figures[f"{name}_p50_ms"] = round(took_ms[len(took_ms) // 2], 2)
            figures[f"{name}_p99_ms"] = round(took_ms[len(took_ms) * 99 // 100], 2)
        return figures

    @staticmethod
    def _note(records: list[bytes], seen: dict[int, int]) -> dict[str, int]:
        now_ns, states = time.monotonic_ns(), {}
        for record in records:
            for change in _decode(record).changes:
                states[change.worker] = change.state
                if change.state >= FIRST_MARK:
                    seen.setdefault(change.state - FIRST_MARK, now_ns)
        return states


async def _play(port: int, rate: int, seconds: float, keys: str) -> list[Figures]:
    """One generator, or two where one could not be fast enough; what each says when it is done."""
    processes = 2 if rate == 0 or rate >= FULL_RATE else 1
    first, playing = 0, []
    for number in range(processes):
        nodes = NODES // processes + (number < NODES % processes)
        command = (sys.executable, LOAD, "--port", str(port), "--nodes", str(nodes), "--first", str(first))
        share = ("--rate", str(rate * nodes / NODES), "--seconds", str(seconds), "--keys", keys)
        playing.append(await asyncio.create_subprocess_exec(*command, *share, stdout=asyncio.subprocess.PIPE))
        first += nodes
    return [json.loads((await process.communicate())[0]) for process in playing]


async def _once(
    server: NatsServer, directory: Path, seconds: float, *, rate_per_s: int, batch_ms: float = 2.0, master_keys: int = 0
) -> Figures:
    ring, keys = str(directory / "ring"), MASTERS[:master_keys]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    bus = NatsBus(NatsSection(url=server.url), name="bench")
    await bus.open()
    collector = await Collector.start(
        bus, server.url, port=port, ring_path=ring, receive_batch_ms=batch_ms, master_keys=json.dumps(keys),
        # What each node really does; at the default of 500 us the slower cases would be suspect all the time.
        beat_interval_us=NODES * 1_000_000 // (rate_per_s or FULL_RATE),
    )  # fmt: skip
    watch = Watch()
    try:
        async with watch.router(ring):
            reading = asyncio.create_task(watch.read_ring(ring))
            before = collector.cpu_s()
            played = await _play(port, rate_per_s, seconds, ",".join(keys))
            await asyncio.sleep(0.1)
            cpu_s, system_s = (now - then for now, then in zip(collector.cpu_s(), before, strict=True))
            reading.cancel()
        status = await collector.status()
        sent, received = sum(each["sent"] for each in played), status["received"]
        wall_s = max(each["wall_s"] for each in played)
        return {
            "sent": sent,
            "received": received,
            "lost": sent - received,
            "lost_kernel": status["kernel_drops"],
            "lost_gaps": status["lost"],
            "dropped": sum(status["dropped"].values()),
            "per_s": round(sent / wall_s),
            "cpu_us_each": round(cpu_s * 1e6 / received, 2),
            "cpu_system_us_each": round(system_s * 1e6 / received, 2),
            "core_pct": round(100 * cpu_s / wall_s, 1),
            "sender_core_pct": round(100 * sum(each["cpu_s"] for each in played) / wall_s, 1),
            "rss_mb": round(collector.peak_rss_mb(), 1),
            **watch.latencies(played[0]["marks"]),
        }
    finally:
        await bus.close()
        await collector.stop()


async def _case(case: dict[str, Any], runs: int, seconds: float) -> Figures:
    with tempfile.TemporaryDirectory() as directory:
        async with NatsServer(Path(directory), jetstream=False) as server:
            all_runs = [await _once(server, Path(directory), seconds, **case) for _ in range(runs)]
    costs = [run["cpu_us_each"] for run in all_runs]
    settings = {"nodes": NODES, "workers": NODES * WORKERS, "batch_ms": 2.0, "master_keys": 0, "seconds": seconds}
    return {
        "bench": "heartbeat",
        "config": settings | case,
        **{key: statistics.median(run[key] for run in all_runs) for key in all_runs[0]},
        "runs": runs,
        "spread": round((max(costs) - min(costs)) / statistics.median(costs), 3),
    }


def _fitted(lines: list[Figures]) -> Figures:
    """The straight line through (datagrams a second, share of a core)."""
    each_pct, fixed_pct = np.polyfit([line["per_s"] for line in lines], [line["core_pct"] for line in lines], 1)
    return {
        "bench": "heartbeat",
        "config": {"fitted_over_per_s": [line["per_s"] for line in lines], "nodes": NODES, "batch_ms": 2.0},
        "fixed_core_pct": round(float(fixed_pct), 1),
        "cpu_us_each_more": round(float(each_pct) * 1e4, 2),
        "core_pct_at_250k_per_s": round(float(fixed_pct + each_pct * FULL_RATE), 1),
    }


def run(runs: int = RUNS, seconds: float = SECONDS, only: int | None = None) -> Iterator[Figures]:
    """One line a case, and the fitted one; some six minutes altogether."""
    plain = []
    for case in CASES:
        if only in (None, case["rate_per_s"]):
            line = asyncio.run(_case(case, runs, seconds))
            if len(case) == 1:
                plain.append(line)
            yield line
    if len(plain) > 1:
        yield _fitted(plain)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Heartbeats into one collector.")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--only", type=int, help="this rate alone")
    arguments = parser.parse_args()
    for figures in run(arguments.runs, arguments.seconds, arguments.only):
        print(json.dumps(figures), flush=True)
