"""The agent as it is deployed: two processes, a broker, KV over TCP between them, and beats on loopback."""

import asyncio
import json
import os
import signal
import socket
import sys

import msgspec
import pytest

from quartet_bus import frames, subjects
from quartet_bus.config.schema import NatsSection
from quartet_bus.messages import (
    KvCommand,
    KvReply,
    KvVerb,
    NodeInventory,
    Phase,
    Prefill,
    RequestEvent,
    Run,
    Split,
    StreamId,
    TransferReport,
)
from quartet_bus.nats_bus import NatsBus
from quartet_bus.server import NatsServer
from quartet_core import heartbeat, word
from quartet_core.openai import parse

CONFIG = """
[nats]
url = "{url}"
[fleet]
targets = ["127.0.0.1:{port}"]
inventory_interval_ms = 200
[models.chat]
spec = "llama-3.1-8b"
[agent]
node = "{node}"
[[agent.engines]]
kind = "simulated"
model = "chat"
hardware = "{hardware}"
"""
BODY = json.dumps({
    "model": "chat", "messages": [{"role": "user", "content": "of lanes and rungs " * 200}], "stream": True,
    "max_tokens": 8,
}).encode()  # fmt: skip
GENEROUS_S = 30.0


class Scene:
    """A broker, agent processes, and what they say."""

    def __init__(self, directory):
        self.directory = directory
        self.beats = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.beats.bind(("127.0.0.1", 0))
        self.beats.settimeout(GENEROUS_S)
        self.agents: list[asyncio.subprocess.Process] = []
        self.inventories: dict[str, NodeInventory] = {}
        self.frames: list[frames.AnyFrame] = []
        self.events: list[RequestEvent] = []
        self.progress: list[TransferReport] = []

    async def hear(self, bus: NatsBus) -> None:
        self.bus = bus

        def into(kind, take):
            decode = msgspec.msgpack.Decoder(kind).decode
            return lambda message: take(decode(message.data))

        topic = subjects.inventory_all()
        await bus.subscribe(topic.subject, into(topic.kind, lambda i: self.inventories.__setitem__(i.node, i)))
        await bus.subscribe(subjects.request_events().subject, into(RequestEvent, self.events.append))
        await bus.subscribe(subjects.kv_progress().subject, into(TransferReport, self.progress.append))
        await bus.subscribe("_INBOX.t.>", lambda message: self.frames.append(frames.decode(message.data)))

    async def start(self, url: str, node: str, hardware: str) -> asyncio.subprocess.Process:
        file = self.directory / f"{node}.toml"
        file.write_text(CONFIG.format(url=url, port=self.beats.getsockname()[1], node=node, hardware=hardware))
        agent = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "quartet_agent", "--config", str(file), stderr=asyncio.subprocess.PIPE
        )
        self.agents.append(agent)
        return agent

    async def ask(self, verb: KvVerb, worker, **fields) -> KvReply:
        command = KvCommand(verb, "x", 1, "c", worker.id, worker.incarnation, StreamId("r"), lease_ms=5000.0, **fields)
        answer = await self.bus.request(
            subjects.kv_command(worker.id.rpartition("-")[0]).subject, msgspec.msgpack.encode(command), timeout_s=5.0
        )
        return msgspec.msgpack.decode(answer.data, type=KvReply)

    def publish(self, topic, message) -> None:
        self.bus.publish(topic.subject, msgspec.msgpack.encode(message))


async def until(condition) -> None:
    async with asyncio.timeout(GENEROUS_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


@pytest.fixture
async def scene(tmp_path):
    scene = Scene(tmp_path)
    async with NatsServer(tmp_path) as server:
        bus = NatsBus(NatsSection(url=server.url), name="test")
        await bus.open()
        await scene.hear(bus)
        scene.url = server.url
        try:
            yield scene
        finally:
            for agent in scene.agents:
                if agent.returncode is None:
                    agent.kill()
                await agent.wait()
            await bus.close()
            scene.beats.close()


async def test_a_split_between_two_processes_is_answered_and_verified_and_both_stop_cleanly(scene):
    for node, hardware in (("p", "H100_SXM5"), ("d", "L40S_PCIE")):
        await scene.start(scene.url, node, hardware)
    await until(lambda: len(scene.inventories) == 2)
    source, target = (scene.inventories[node].workers[0] for node in "pd")
    tokens = parse(BODY).prompt_tokens

    scene.publish(
        subjects.worker_run(target.id),
        Run(StreamId("r"), "t", "chat", target.id, target.incarnation, "_INBOX.t.x", BODY, "router", tokens,
            split=Split("x", source.id, source.incarnation, tokens)),
    )  # fmt: skip
    scene.publish(
        subjects.worker_prefill(source.id),
        Prefill(StreamId("r"), "t", "chat", source.id, source.incarnation, BODY, "router", tokens,
                Split("x", target.id, target.incarnation, tokens)),
    )  # fmt: skip
    lease = await scene.ask(KvVerb.RESERVE, target, tokens=tokens)
    assert lease.address == scene.inventories["d"].kv_address
    moving = await scene.ask(
        KvVerb.MOVE, source, tokens=tokens, kv_bytes=tokens * 131_072, epoch=lease.epoch, address=lease.address,
        secret=lease.secret, gb_per_s=9.0, setup_ms=1.0,
    )  # fmt: skip
    assert moving.ok
    await until(lambda: "moved" in [report.state for report in scene.progress])
    assert (await scene.ask(KvVerb.COMMIT, target, epoch=lease.epoch)).ok
    await scene.ask(KvVerb.RELEASE, source)
    await until(lambda: [e.phase for e in scene.events].count(Phase.END) == 2)

    ends = {event.worker: event for event in scene.events if event.phase is Phase.END}
    assert (ends["p-0"].status, ends["d-0"].status) == ("ok", "ok")
    assert ends["d-0"].verified_blocks == -(-tokens // 16)
    assert ends["d-0"].output_tokens == 8
    assert scene.progress[-1].wire_bytes > tokens * 64
    assert scene.progress[-1].took_ms >= 1.0 + tokens * 131_072 / 9e6
    await until(lambda: type(scene.frames[-1]).__name__ == "End")
    # accepted, who speaks, eight tokens, why it ended, end
    assert [frame.seq for frame in scene.frames] == list(range(12))

    children = [child for agent in scene.agents for child in children_of(agent.pid)]
    assert len(children) == 2
    for agent in scene.agents:
        agent.send_signal(signal.SIGTERM)
    for agent in scene.agents:
        assert await asyncio.wait_for(agent.wait(), GENEROUS_S) == 0
    assert not any(runs(child) for child in children)


async def test_a_killed_agent_falls_silent_and_its_successor_is_another_incarnation(scene):
    agent = await scene.start(scene.url, "n1", "H100_SXM5")
    await until(lambda: "n1" in scene.inventories)
    before = scene.inventories["n1"]
    loop = asyncio.get_running_loop()
    beat = heartbeat.decode(await loop.run_in_executor(None, scene.beats.recv, 2048))
    assert beat.incarnation == before.incarnation
    [child] = children_of(agent.pid)
    agent.kill()
    await agent.wait()
    await until(lambda: not runs(child))
    await scene.start(scene.url, "n1", "H100_SXM5")
    # The killed one says its inventory five times a second, and what it said last may arrive late.
    await until(lambda: scene.inventories["n1"].incarnation != before.incarnation)
    after = scene.inventories["n1"]
    while beat.incarnation != after.incarnation or not beat.workers:
        beat = heartbeat.decode(await loop.run_in_executor(None, scene.beats.recv, 2048))
    assert beat.workers[0].incarnation == after.workers[0].incarnation
    assert word.epoch_of(beat.workers[0].word) == after.epoch % 16


async def test_a_model_that_does_not_fit_stops_the_start_with_one_line(scene):
    file = scene.directory / "bad.toml"
    text = CONFIG.format(url=scene.url, port=1, node="bad", hardware="L40S_PCIE").replace("8b", "70b")
    file.write_text(text)
    agent = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "quartet_agent", "--config", str(file), stderr=asyncio.subprocess.PIPE
    )
    _, errors = await asyncio.wait_for(agent.communicate(), GENEROUS_S)
    assert agent.returncode == 2
    [line] = [line for line in errors.decode().splitlines() if not line.startswith("{")]
    assert "agent.engines[0]" in line


def runs(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as children:
        return [int(child) for child in children.read().split()]
