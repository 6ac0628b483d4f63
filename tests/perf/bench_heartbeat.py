"""Heartbeats into one collector process on loopback multicast. ``run()`` is what ``make bench ONLY=heartbeat`` prints.

The collector is the one that is deployed, with a broker, a ring and announced nodes; the load is ``beat_load.py``.
``lost`` is what was sent and not received; CPU is that of the collector's whole process, everything it does included,
divided by datagrams; ``visible`` is the time from just before a state was sent until a reader that polls the ring each
millisecond had it.
"""

import asyncio
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from quartet_bus import subjects
from quartet_bus.config.schema import NatsSection
from quartet_bus.messages import ControlReply, FleetDelta, KvLayout, NodeInventory, WorkerInfo
from quartet_bus.nats_bus import NatsBus
from quartet_bus.ring import RingReader
from quartet_bus.server import NatsServer

LOAD = Path(__file__).with_name("beat_load.py")
CASES = ((3, 10_000), (125, 10_000), (125, 50_000), (125, 100_000))
RUNS = 3
SECONDS = 3.0
WORKERS, INCARNATION, FIRST_MARK = 8, 1, 0x10000  # as in beat_load.py
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def _inventory(node: str) -> NodeInventory:
    workers = tuple(
        WorkerInfo(
            id=f"{node}-{ordinal}",
            ordinal=ordinal,
            incarnation=INCARNATION,
            hardware="L40S_PCIE",
            model="llama-8b",
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


def _free_udp_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _peak_rss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise LookupError("the kernel reports no peak memory")


async def _status(bus: NatsBus) -> dict:
    topic = subjects.control("collector", "bench", "status")
    for _ in range(100):
        try:
            answer = await bus.request(topic.subject, b"", timeout_s=1.0)
            return json.loads(msgspec.msgpack.decode(answer.data, type=ControlReply).payload)
        except Exception:  # not there yet: nobody listens, or the broker is not told
            await asyncio.sleep(0.05)
    raise TimeoutError("the collector does not answer")


async def _watch(path: str, seen: dict[int, int]) -> None:
    """Note when each marked state shows up in the ring."""
    decoder = msgspec.msgpack.Decoder(FleetDelta)
    with RingReader(path) as reader:
        while True:
            for record in reader.poll():
                now_ns = time.monotonic_ns()
                for change in decoder.decode(record).changes:
                    if change.state >= FIRST_MARK:
                        seen.setdefault(change.state - FIRST_MARK, now_ns)
            await asyncio.sleep(0.001)


async def _once(server: NatsServer, directory: Path, nodes: int, rate: int, seconds: float) -> dict[str, float]:
    port, ring = _free_udp_port(), str(directory / "ring")
    environment = os.environ | {
        "QUARTET_NATS__URL": server.url,
        "QUARTET_SERVICE__INSTANCE": "bench",
        "QUARTET_SERVICE__LOG_LEVEL": "error",
        "QUARTET_FLEET__PORT": str(port),
        # What each node really does; at the default of 500 us the slower cases would be suspect all the time.
        "QUARTET_FLEET__BEAT_INTERVAL_US": str(nodes * 1_000_000 // rate),
        "QUARTET_FLEET__RING_PATH": ring,
    }
    collector = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quartet_heartbeat_collector"),
        env=environment,
        stdout=asyncio.subprocess.DEVNULL,  # its alarm that the whole fleet fell silent, when the load ends
    )
    bus = NatsBus(NatsSection(url=server.url), name="bench")
    await bus.open()
    watching = None
    try:
        await _status(bus)
        for number in range(nodes):
            inventory = _inventory(f"load-{number:03d}")
            bus.publish(subjects.inventory(inventory.node).subject, msgspec.msgpack.encode(inventory))
        while len((await _status(bus))["nodes"]) < nodes:
            pass
        seen: dict[int, int] = {}
        watching = asyncio.create_task(_watch(ring, seen))
        before_s = _cpu_s(collector.pid)
        load = await asyncio.create_subprocess_exec(
            *(sys.executable, LOAD, "--port", str(port), "--nodes", str(nodes)),
            *("--rate", str(rate), "--seconds", str(seconds)),
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await load.communicate()
        played = json.loads(output)
        await asyncio.sleep(0.1)
        cpu_s = _cpu_s(collector.pid) - before_s
        status = await _status(bus)
        visible_ms = sorted((seen[at] - sent_ns) / 1e6 for at, sent_ns in enumerate(played["marks"]) if at in seen)
        return {
            "sent": played["sent"],
            "received": status["received"],
            "lost": played["sent"] - status["received"],
            "per_s": round(played["sent"] / played["wall_s"]),
            "cpu_us_each": round(cpu_s * 1e6 / max(1, status["received"]), 2),
            "rss_mb": round(_peak_rss_mb(collector.pid), 1),
            "visible": len(visible_ms),
            "marks": len(played["marks"]),
            "visible_p50_ms": round(visible_ms[len(visible_ms) // 2], 2),
            "visible_p99_ms": round(visible_ms[len(visible_ms) * 99 // 100], 2),
        }
    finally:
        if watching is not None:
            watching.cancel()
        await bus.close()
        collector.send_signal(signal.SIGTERM)
        await collector.wait()


async def _case(nodes: int, rate: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as directory:
        async with NatsServer(Path(directory), jetstream=False) as server:
            runs = [await _once(server, Path(directory), nodes, rate, SECONDS) for _ in range(RUNS)]
    figures = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    costs = [run["cpu_us_each"] for run in runs]
    return {
        "bench": "heartbeat",
        "config": {"nodes": nodes, "workers": nodes * WORKERS, "rate_per_s": rate, "seconds": SECONDS},
        **figures,
        "runs": RUNS,
        "spread": round((max(costs) - min(costs)) / statistics.median(costs), 3),
    }


def run() -> list[dict[str, object]]:
    """One line a case; about a minute altogether."""
    return [asyncio.run(_case(nodes, rate)) for nodes, rate in CASES]


if __name__ == "__main__":
    for line in run():
        print(json.dumps(line))
