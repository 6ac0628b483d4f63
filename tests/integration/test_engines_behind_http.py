"""Quartet as processes before engines behind HTTP, through gateway and broker: crash, restart, drain, doctor."""

import asyncio
import contextlib
import json
import subprocess
import sys

import msgspec
import openai
import pytest
from served_fleet import CLASSES, Quartet
from wire_engine import WireEngine, engines, until

from quartet_bus import subjects
from quartet_bus.config.schema import NatsSection
from quartet_bus.messages import ControlRequest, NodeInventory, Phase, RequestEvent
from quartet_bus.nats_bus import NatsBus
from quartet_bus.server import NatsServer

AGENT = """
[agent]
node = "{node}"
[[agent.engines]]
kind = "{kind}"
url = "{url}"
api_key = "secret"
model = "tiny"
hardware = "{hardware}"
precision = "bf16"
max_batch = 8
chunk_tokens = 1024
probe_interval_ms = 100
"""


def agent_of(node, engine, more=""):
    return AGENT.format(node=node, kind=engine.kind, url=engine.url, hardware=CLASSES[node][0]) + more


class Scene:
    def __init__(self, quartet, bus, url, servers):
        self.quartet, self.bus, self.url, self.servers = quartet, bus, url, servers
        self.client = openai.AsyncOpenAI(base_url=quartet.gateway, api_key="none", max_retries=0, timeout=30)
        self.inventories = {}
        self.events = []

    def hear(self, message):
        inventory = msgspec.msgpack.decode(message.data, type=NodeInventory)
        self.inventories[inventory.node] = inventory

    def workers(self, node):
        return self.inventories[node].workers if node in self.inventories else ()

    async def ask(self, prompt="hello", **fields):
        return await self.client.completions.create(model="tiny", prompt=prompt, max_tokens=4, **fields)

    def hear_event(self, message):
        self.events.append(msgspec.msgpack.decode(message.data, type=RequestEvent))

    def ends(self, name):
        ends = [event for event in self.events if event.stream.id == name and event.phase is Phase.END]
        return {event.worker: (event.status, event.reason) for event in ends}

    async def routed(self):
        """Until the router knows both workers to be up, and a coordinator, without which nothing is split."""
        async with asyncio.timeout(60):
            while True:
                told = await self.control("router", "_all", "status")
                if told["up"] == 2 and told["coordinator"]:
                    return
                await asyncio.sleep(0.1)

    async def control(self, service, instance, verb):
        answer = await self.bus.request(
            subjects.control(service, instance, verb).subject, msgspec.msgpack.encode(ControlRequest()), timeout_s=10.0
        )
        return json.loads(msgspec.msgpack.decode(answer.data)["payload"])

    async def answered(self):
        """Until a request is answered: routers have heard of the workers."""
        async with asyncio.timeout(30):
            while True:
                try:
                    return await self.ask()
                except openai.APIStatusError:
                    await asyncio.sleep(0.1)

    async def order(self, node, verb):
        return await self.control("agent", node, verb)

    async def doctor(self, *arguments):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "quartet_cli", "doctor", "--nats", self.url, *arguments,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        out, _ = await process.communicate()
        return process.returncode, out.decode()


@contextlib.asynccontextmanager
async def whole(directory, servers, *, more=("", "")):
    async with engines(*servers), NatsServer(directory) as broker:
        bus = NatsBus(NatsSection(url=broker.url), name="test")
        await bus.open()
        agents = {node: agent_of(node, *pair) for node, *pair in zip("ab", servers, more, strict=True)}
        quartet = Quartet(directory, broker.url, agents)
        scene = Scene(quartet, bus, broker.url, servers)
        await bus.subscribe(subjects.inventory_all().subject, scene.hear)
        await bus.subscribe(subjects.request_events().subject, scene.hear_event)
        quartet.start()
        try:
            await until(lambda: scene.workers("a") and scene.workers("b"), patience_s=60)
            await scene.routed()
            await scene.answered()
            yield scene
            await scene.client.close()
        finally:
            quartet.stop()
            await bus.close()


@pytest.fixture
async def scene(tmp_path):
    servers = (WireEngine("vllm", model="tiny", key="secret"), WireEngine("openai", model="tiny", key="secret"))
    async with whole(tmp_path, servers, more=("embeddings = true\n", "")) as scene:
        yield scene


async def test_a_split_goes_from_engine_to_engine_and_both_halves_end_well(tmp_path):
    servers = (WireEngine("vllm", model="tiny", key="secret"), WireEngine("vllm", model="tiny", key="secret"))
    more = ('kv_connector = "X"\nrole = "prefill"\n', 'kv_connector = "X"\nrole = "decode"\n')
    async with whole(tmp_path, servers, more=more) as scene:
        for stream in (False, True):
            name = f"split-{stream}"
            answer = await scene.ask("hello " * 100, stream=stream, extra_headers={"x-request-id": name})
            if stream:
                assert len([chunk async for chunk in answer]) == 4
            await until(lambda name=name: len(scene.ends(name)) == 2)
            assert scene.ends(name) == {"a-0": ("ok", ""), "b-0": ("ok", "")}
        assert servers[0].kept == {}


async def test_crash_restart_drain_and_doctor(scene):
    vllm, plain = scene.servers

    # Answers come from engines, keys go with all calls.
    answers = await asyncio.gather(*(scene.ask(f"{number}") for number in range(20)))
    assert all(answer.choices[0].text.count(" w") == 4 for answer in answers)
    assert vllm.unauthorised == plain.unauthorised == 0

    # Embeddings come from the one that makes them.
    made = await scene.client.embeddings.create(model="tiny", input=["a", "text"], encoding_format="float")
    assert [each.embedding for each in made.data] == [[1.0, 0.5], [4.0, 0.5]]
    assert [path for path, _, _ in plain.requests if path == "/v1/embeddings"] == []

    # The doctor names each one's mode and why; only the plain server is no exact one.
    code, told = await scene.doctor("--json")
    told = {worker["worker"]: worker["engine"] for node in json.loads(told) for worker in node["workers"]}
    assert code == 1
    assert (told["a-0"]["affinity"], told["b-0"]["affinity"]) == ("events", "traffic")
    assert [finding["code"] for finding in told["b-0"]["findings"]] == ["no_metrics", "no_events"]
    code, told = await scene.doctor()
    assert "approximate" in told
    assert "[no_events]" in told

    # One drained: all goes to the other one, and it is safe to be taken away.
    before = len(plain.requests)
    await scene.order("b", "drain")
    await asyncio.sleep(0.3)
    await asyncio.gather(*(scene.ask(f"{number}") for number in range(5)))
    assert len(plain.requests) == before
    assert (await scene.order("b", "status"))["safe"]

    # The other one crashes in mid-stream: a clear error, then nobody is there, then it is back as another worker.
    incarnation = scene.workers("a")[0].incarnation
    vllm.token_s = 0.05
    stream = await scene.client.completions.create(model="tiny", prompt="hello", max_tokens=500, stream=True)
    await anext(stream)
    await vllm.stop()
    with pytest.raises(openai.APIError, match="engine"):
        async for _ in stream:
            pass
    await until(lambda: not scene.workers("a"))
    with pytest.raises(openai.APIStatusError) as caught:
        await scene.ask()
    assert caught.value.status_code in (429, 503)
    vllm.token_s = 0.0
    await vllm.start()
    await until(lambda: scene.workers("a"))
    assert scene.workers("a")[0].incarnation != incarnation
    await scene.answered()
    await scene.order("b", "resume")
    await scene.answered()

    # An agent that hangs is named, and so is one that is gone; the others are still told of.
    with scene.quartet.stopped("agent-b"):
        code, told = await scene.doctor("--json", "--wait", "1.5")
        silent = {node["node"]: node.get("silent", "") for node in json.loads(told)}
        assert (code, sorted(silent), silent["a"]) == (1, ["a", "b"], "")
        assert silent["b"]
        code, told = await scene.doctor()
        assert "b: the agent does not answer [silent]" in told
        assert "a-0" in told
