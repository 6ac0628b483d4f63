"""``make chaos``: a fleet of processes under load, whose agents and coordinators are killed at random (SIGKILL).

    python tests/perf/kv_chaos.py [--seconds 60] [--rate 4] [--seed 1] [--pool]

With ``--pool`` the workers do both halves, have little KV and page it out to each other and to stores.
Two prefill and two decode agents, two coordinators, a router, a collector and a broker, each a process of its own; KV
crosses between agents by their movers. After the last death, once the load has ended and a lease has run out, every
agent is asked what it holds, and every coordinator what it carries. Prints one JSON line; exits with 1 unless that is
nothing, and every request has heard what became of it.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import grpc.aio
import msgspec

from quartet_bus import subjects
from quartet_bus.bus import BusError
from quartet_bus.client import Client, InferError
from quartet_bus.config.schema import NatsSection
from quartet_bus.messages import ControlReply, ControlRequest
from quartet_bus.nats_bus import NatsBus
from quartet_bus.server import NatsServer
from quartet_cli.fleet.child import Child
from quartet_cli.fleet.ports import free_tcp_ports, free_udp_port
from quartet_cli.fleet.probe import not_ready
from quartet_rpc.v1 import coordinator_pb2 as pb
from quartet_rpc.v1.coordinator_pb2_grpc import CoordinatorStub

MODEL = "llama-8b"
LEASE_MS = 3000.0
NODES = {"p0": ("H100_SXM5", "prefill"), "p1": ("H100_SXM5", "prefill"), "d0": ("L40S_PCIE", "decode"),
         "d1": ("L40S_PCIE", "decode")}  # fmt: skip
COORDINATORS = ("c0", "c1")
PATIENCE_S = 90.0
"""For a request's outcome; its own deadline is well below."""


class Ground:
    """The processes, by name."""

    def __init__(self, directory: Path, *, pool: bool = False) -> None:
        self._directory = directory
        self._pool = pool
        self._server = NatsServer(directory / "nats")
        self.children: dict[str, Child] = {}
        self.ports: dict[str, int] = {}
        self.doors: dict[str, int] = {}

    @property
    def url(self) -> str:
        """The broker."""
        return self._server.url

    async def open(self) -> None:
        """Start everything, and wait until it is ready."""
        await self._server.start()
        names = ["collector", "router", *COORDINATORS, *NODES]
        found = free_tcp_ports(len(names) + len(COORDINATORS))
        self.ports = dict(zip(names, found, strict=False))
        self.doors = dict(zip(COORDINATORS, found[len(names) :], strict=True))
        shared = self._directory / "shared.toml"
        shared.write_text(
            f'[nats]\nurl = "{self.url}"\n[fleet]\nport = {free_udp_port()}\ndead_ms = 1000.0\n'
            f'[models.{MODEL}]\nspec = "llama-3.1-8b"\nsketch = "tokens"\n[router]\ndispatch_ack_ms = 1000.0\n'
            f"[kv]\nlease_ms = {LEASE_MS}\n"
            + ("pool = true\nstore_bytes = 4_000_000_000\npage_min_idle_ms = 0.0\n" if self._pool else "")
            + "[service]\nstop_timeout_ms = 2000\n"
        )
        for name in names:
            self.children[name] = self._child(name, shared)
            await self.children[name].start()
        for name in names:
            await self._ready(name)

    async def close(self) -> None:
        """End everything."""
        await asyncio.gather(*(child.stop(4.0) for child in self.children.values()))
        await self._server.stop()

    async def kill(self, name: str) -> None:
        """As a crash: nothing is said."""
        child = self.children[name]
        assert child.pid is not None
        os.killpg(child.pid, signal.SIGKILL)  # its own session: the agent and its beating child
        await child.wait()

    async def revive(self, name: str) -> None:
        """Start it again under its name."""
        await self.children[name].start()

    async def _ready(self, name: str) -> None:
        async with asyncio.timeout(90.0):
            while True:
                if self.children[name].ended is not None:
                    raise RuntimeError(self.children[name].obituary())
                if await not_ready(self.ports[name]) is None:
                    return
                await asyncio.sleep(0.1)

    def _child(self, name: str, shared: Path) -> Child:
        modules = {"collector": "quartet_heartbeat_collector", "router": "quartet_router"}
        module = modules.get(name, "quartet_kv_coordinator" if name in COORDINATORS else "quartet_agent")
        own = self._directory / f"{name}.toml"
        if name in NODES:
            hardware, role = NODES[name]
            own.write_text(
                f'[agent]\nnode = "{name}"\nfabrics = ["RDMA_ROCE", "TCP"]\n[[agent.engines]]\nkind = "simulated"\n'
                f'model = "{MODEL}"\nhardware = "{hardware}"\n'
                + ("kv_tokens = 24_000\n" if self._pool else f'role = "{role}"\n')
            )
        else:
            own.write_text(f'[kv]\ngrpc = "127.0.0.1:{self.doors[name]}"\n' if name in COORDINATORS else "")
        env = {key: value for key, value in os.environ.items() if not key.startswith("QUARTET_")}
        env |= {"QUARTET_SERVICE__HTTP_PORT": str(self.ports[name]), "QUARTET_SERVICE__INSTANCE": name}
        arguments = ["--config", str(shared), "--config", str(own)]
        return Child(name, module, arguments, env=env, log=self._directory / f"{name}.log")


async def ask(client: Client, source: random.Random) -> str:
    """One request; how it ended."""
    tokens = [source.randrange(100_000) for _ in range(source.randrange(1500, 9000))]
    body = json.dumps({"model": MODEL, "prompt": tokens, "max_tokens": 6, "stream": True}).encode()
    try:
        async with asyncio.timeout(PATIENCE_S), await client.infer(MODEL, body) as answer:
            async for _ in answer:
                pass
    except InferError as error:
        return str(error.status)
    except TimeoutError:
        return "hung"
    return "200"


async def disturb(ground: Ground, seconds: float, source: random.Random, killed: Counter[str]) -> None:
    """Kill and revive, one at a time."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        await asyncio.sleep(source.uniform(0.5, 3.0))
        name = source.choice([*NODES, *COORDINATORS])
        killed["coordinator" if name in COORDINATORS else "agent"] += 1
        await ground.kill(name)
        await asyncio.sleep(source.uniform(0.2, 2.0))
        await ground.revive(name)


async def held(bus: NatsBus) -> dict[str, dict[str, object]]:
    """What every agent says it holds."""
    found: dict[str, dict[str, object]] = {}
    for node in NODES:
        topic = subjects.control("agent", node, "status").subject
        try:
            reply = await bus.request(topic, msgspec.msgpack.encode(ControlRequest()), timeout_s=5.0)
        except BusError as error:
            found[node] = {"silent": type(error).__name__}
            continue
        status = json.loads(msgspec.msgpack.decode(reply.data, type=ControlReply).payload)
        workers = status["workers"]
        found[node] = {
            "leases": status["arrivals"] + status["departures"],
            "streams": sum(worker["streams"] for worker in workers),
            "free_kv": min(worker["free_kv"] for worker in workers),
        }
    return found


async def carried(ground: Ground) -> tuple[int, int, int]:
    """(transfers under way, transfers done, pages among these) of all coordinators, as their doors say."""
    live = done = pages = 0
    for port in ground.doors.values():
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            reply = await CoordinatorStub(channel).ListTransfers(pb.ListTransfersRequest(limit=1000), timeout=5.0)
        live += sum(transfer.live for transfer in reply.transfers)
        done += sum(transfer.state == "released" for transfer in reply.transfers)
        pages += sum((each.state, each.reason) == ("released", "page_out") for each in reply.transfers)
    return live, done, pages


async def story(seconds: float, rate: float, seed: int, *, pool: bool = False) -> dict[str, object]:
    """All of it; what was left at the end."""
    source, killed = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="quartet-chaos-") as directory:
        ground = Ground(Path(directory), pool=pool)
        bus = None
        try:
            await ground.open()
            bus = NatsBus(NatsSection(url=ground.url), name="chaos")
            await bus.open()
            client = Client(bus, "acme", source=random.Random(seed + 1))
            await asyncio.sleep(2.0)
            beside = asyncio.ensure_future(disturb(ground, seconds, source, killed))
            asked = []
            while not beside.done():
                asked.append(asyncio.ensure_future(ask(client, source)))
                await asyncio.sleep(source.expovariate(rate))
            await beside
            answers = Counter(await asyncio.gather(*asked))
            for name in ground.children:
                await ground._ready(name)
            await asyncio.sleep(LEASE_MS / 1e3 + 2.0)
            left = await held(bus)
            live, done, pages = await carried(ground)
            await client.close()
            return {
                "bench": "kv_chaos",
                "config": {"seconds": seconds, "per_s": rate, "seed": seed, "pool": pool},
                "killed": dict(killed),
                "requests": len(asked),
                "answers": dict(answers),
                "hung": answers["hung"],
                "leased": sum(int(each.get("leases", 1)) for each in left.values()),
                "streams": sum(int(each.get("streams", 1)) for each in left.values()),
                "agents": left,
                "transfers_live": live,
                "transfers_done_since_last_restart": done,
                "pages_done_since_last_restart": pages,
            }
        finally:
            if bus is not None:
                await bus.close()
            await ground.close()


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pool", action="store_true", help="with the virtual VRAM pool, under KV pressure")
    told = parser.parse_args()
    found = asyncio.run(story(told.seconds, told.rate, told.seed, pool=told.pool))
    print(json.dumps(found))
    clean = not (found["hung"] or found["leased"] or found["streams"] or found["transfers_live"])
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
