"""Gateway, router, collector and agent as processes of their own behind one broker, with one engine, for benches."""

import asyncio
import os
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import wired
from msgspec import Struct

from quartet_bus.server import NatsServer

MODEL, SPEC, HARDWARE = "bench", "llama-3.1-8b", "H100_SXM5"
MAX_BATCH, CHUNK_TOKENS = 1024, 16_384
START_S = 60.0
HERE = Path(__file__).parent


class Chain(Struct):
    """Where clients ask, and who does the work in between."""

    address: str
    pids: dict[str, int]


@asynccontextmanager
async def fleet(directory: Path, time_scale: float, gateways: int = 1) -> AsyncIterator[Chain]:
    """Everything that stands between a client and an engine, ready to answer."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(NatsServer(directory / "nats", jetstream=True))
        address = f"127.0.0.1:{_free(socket.SOCK_STREAM)}"
        file = directory / "quartet.toml"
        file.write_text(_config(server.url, address, time_scale, gateways, directory))
        chain = Chain(address, {"nats": server.pid})
        services = ["heartbeat_collector", "router", "agent"]
        names = {name: f"quartet_{name}" for name in services}
        names |= {f"gateway-{number}" if number else "gateway": "quartet_gateway" for number in range(gateways)}
        for name, module in names.items():
            log = stack.enter_context((directory / f"{name}.log").open("wb"))
            process = await _start(stack, "-m", module, "--config", str(file), stderr=log)
            chain.pids[name] = process.pid
        await _ready(address, directory)
        yield chain


@asynccontextmanager
async def engine(time_scale: float) -> AsyncIterator[Chain]:
    """The same engine without anything between."""
    async with AsyncExitStack() as stack:
        process = await _start(stack, str(HERE / "engine_server.py"), str(time_scale), stdout=PIPE)
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        yield Chain(address, {"engine": process.pid})


async def _start(stack: AsyncExitStack, *arguments: str, stdout: int = DEVNULL, stderr: object = None) -> Process:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QUARTET_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, env=environment, stdout=stdout, stderr=stderr
    )

    async def stop() -> None:
        if process.returncode is None:
            process.terminate()
        await process.wait()

    stack.push_async_callback(stop)
    return process


async def _ready(address: str, directory: Path) -> None:
    body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 1}
    async with aiohttp.ClientSession() as http, asyncio.timeout(START_S):
        said = ""
        try:
            while True:
                try:
                    async with http.post(f"http://{address}/v1/completions", json=body) as reply:
                        said = await reply.text()
                        if reply.status == 200:
                            return
                except aiohttp.ClientConnectionError as error:
                    said = str(error)
                await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            print(f"not ready: {said}{_last_words(directory)}", file=sys.stderr)
            raise


def _last_words(directory: Path) -> str:
    return "".join(f"\n{log.name}: {log.read_text()[-500:]}" for log in sorted(directory.glob("*.log")))


def _config(nats: str, address: str, time_scale: float, gateways: int, directory: Path) -> str:
    beats = _free(socket.SOCK_DGRAM)
    return f"""
[nats]
url = "{nats}"
[service]
log_level = "warning"
stop_timeout_ms = 1000
[fleet]
port = {beats}
targets = ["127.0.0.1:{beats}"]
beat_interval_us = 5000
suspect_ms = 1000.0
dead_ms = 5000.0
ring_path = "{directory / "ring"}"
[router]
dispatch_ack_ms = 5000.0
[gateway]
listen = "{address}"
reuse_port = {"true" if gateways > 1 else "false"}
[models.{MODEL}]
spec = "{SPEC}"
[agent]
node = "n0"
[[agent.engines]]
kind = "simulated"
model = "{MODEL}"
hardware = "{HARDWARE}"
max_batch = {MAX_BATCH}
chunk_tokens = {CHUNK_TOKENS}
time_scale = {time_scale}
"""


def _free(kind: socket.SocketKind) -> int:
    with socket.socket(socket.AF_INET, kind) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_s(chain: Chain) -> dict[str, float]:
    """CPU seconds by process."""
    return {name: wired.cpu_s(pid) for name, pid in chain.pids.items()}
