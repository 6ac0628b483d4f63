"""Telemetry from real agent processes over a real broker to the admin, the command line and Prometheus."""

import asyncio
import json
import os
import signal
import socket
import sys
import urllib.request

import msgspec
import pytest

from quartet_bus import subjects
from quartet_bus.config.schema import NatsSection
from quartet_bus.messages import GpuTelemetry, NicTelemetry, NodeTelemetry, RootAlert
from quartet_bus.nats_bus import NatsBus
from quartet_bus.server import NatsServer
from quartet_core import heartbeat

GENEROUS_S = 30.0
AGENT = """
[models.chat]
spec = "llama-3.1-8b"
[agent]
node = "{node}"
[[agent.engines]]
kind = "simulated"
model = "chat"
hardware = "L40S_PCIE"
[telemetry]
source = "{source}"
interval_ms = 100
"""


def free_port(kind=socket.SOCK_STREAM) -> int:
    with socket.socket(socket.AF_INET, kind) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Scene:
    """A broker's processes: an admin, and agents whose beats come to ``beats``."""

    def __init__(self, directory, url: str) -> None:
        self._directory = directory
        self.url = url
        self.admin = f"127.0.0.1:{free_port()}"
        self.beats = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.beats.bind(("127.0.0.1", 0))
        self.beats.settimeout(GENEROUS_S)
        self.started: list[asyncio.subprocess.Process] = []

    async def start(self, module: str, *arguments: str, **environment: str) -> asyncio.subprocess.Process:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("QUARTET_")}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *arguments),
            env=clean | {"QUARTET_NATS__URL": self.url, "QUARTET_ADMIN__GRPC": self.admin} | environment,
            stderr=asyncio.subprocess.PIPE,
        )
        self.started.append(process)
        return process

    async def agent(self, node: str, source: str) -> int:
        """Start an agent; returns its HTTP port."""
        file, port = self._directory / f"{node}.toml", free_port()
        file.write_text(AGENT.format(node=node, source=source))
        await self.start(
            *("quartet_agent", "--config", str(file)),
            QUARTET_SERVICE__HTTP_PORT=str(port),
            QUARTET_FLEET__TARGETS=f'["127.0.0.1:{self.beats.getsockname()[1]}"]',
        )
        return port

    async def ask(self, *arguments: str) -> tuple[int, str]:
        """What ``quartet telemetry`` answers."""
        command = (sys.executable, "-m", "quartet_cli", "telemetry", "--admin", self.admin, *arguments)
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await asyncio.wait_for(process.communicate(), GENEROUS_S)
        return process.returncode, output.decode()

    async def told(self, wanted) -> dict[str, dict]:
        """What the command says of each node, as soon as ``wanted`` holds of it."""
        async with asyncio.timeout(GENEROUS_S):
            while True:
                code, output = await self.ask("--json")
                if code == 0:
                    nodes = {node["node"]: node for node in json.loads(output).get("nodes", ())}
                    if wanted(nodes):
                        return nodes
                await asyncio.sleep(0.1)


@pytest.fixture
async def scene(tmp_path):
    async with NatsServer(tmp_path / "nats") as server:
        scene = Scene(tmp_path, server.url)
        await scene.start("quartet_admin")
        yield scene
        for process in scene.started:
            if process.returncode is None:
                process.kill()
            await process.communicate()
        scene.beats.close()


async def test_an_agents_telemetry_reaches_operators_and_prometheus(scene):
    port = await scene.agent("n1", "auto")
    nodes = await scene.told(lambda nodes: "rx_gb_per_s" in nodes.get("n1", {}).get("nics", [{}])[0])
    assert nodes["n1"]["source"] == "simulated"
    [gpu] = nodes["n1"]["gpus"]
    assert (gpu["workers"], gpu["root"], gpu["pcie_gen"], gpu["power_w"]) == (["n1-0"], "simulated", 4, 35.0)
    assert "sm_mhz" not in gpu
    assert gpu["temperature_c"] == pytest.approx(30.0, abs=5.0)
    code, table = await scene.ask("--node", "n1")
    assert code == 0
    assert "Gen4 x16" in table
    assert "source simulated: n1" in table
    assert (await scene.ask("--node", "n9")) == (1, "quartet: no telemetry of a node n9 within the last minute\n")

    def scrape() -> list[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return answer.read().decode().splitlines()

    lines = await asyncio.to_thread(scrape)
    assert 'quartet_agent_gpu_power_watts{gpu="0"} 35.0' in lines
    assert 'quartet_agent_nic_errors{nic="sim0"} 0.0' in lines
    assert "quartet_agent_telemetry_degraded 0.0" in lines


async def test_an_agent_without_a_driver_says_so_beats_on_and_stops_cleanly(scene):
    await scene.agent("bare", "nvml")
    nodes = await scene.told(lambda nodes: "degraded" in nodes.get("bare", {}))
    if "gpus" in nodes["bare"]:
        pytest.skip("this host has cards")
    assert nodes["bare"]["source"] == "nvml"
    assert "NVML does not answer" in nodes["bare"]["degraded"]
    assert "DEGRADED bare: NVML does not answer" in (await scene.ask())[1]
    heard = [heartbeat.decode(scene.beats.recv(2048)) for _ in range(100)]
    assert heard[-1].workers
    agent = scene.started[-1]
    agent.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(agent.wait(), GENEROUS_S) == 0


async def test_a_congested_root_complex_is_an_alert_on_the_command_line(scene):
    bus = NatsBus(NatsSection(url=scene.url), name="test")
    await bus.open()
    alert = RootAlert(
        root="pci0000:15", worker="h1-3", nic="ens2", correlation=0.81, t=9.3, drift_busy=1.62, drift_quiet=1.04
    )
    telemetry = NodeTelemetry(
        node="h1", incarnation=1, number=1, source="nvml", alerts=(alert,),
        gpus=(GpuTelemetry(index=3, workers=("h1-3",), root="pci0000:15", congested=True, reasons=("hw_thermal",)),),
        nics=(NicTelemetry(name="ens2", root="pci0000:15", gbit_per_s=400.0, rx_gb_per_s=44.0, errors=3),),
    )  # fmt: skip

    async def repeat() -> None:
        while True:
            bus.publish(subjects.telemetry("h1").subject, msgspec.msgpack.encode(telemetry))
            telemetry.number += 1
            await asyncio.sleep(0.2)

    repeating = asyncio.create_task(repeat())
    try:
        nodes = await scene.told(lambda nodes: "h1" in nodes)
        assert nodes["h1"]["alerts"][0]["worker"] == "h1-3"
        _, table = await scene.ask()
    finally:
        repeating.cancel()
        await bus.close()
    assert (
        "ALERT h1: root complex pci0000:15 is congested: h1-3 has drift x1.62 while ens2 is busy, "
        "x1.04 while it is quiet (rank correlation 0.81, t 9.3)"
    ) in " ".join(table.split())
    assert "congested, hw_thermal" in table
