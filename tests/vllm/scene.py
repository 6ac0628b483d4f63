"""What the tests with real vLLM servers share: servers, a fleet before them, and what its agents say of requests."""

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import msgspec
import openai
import pytest
from served_fleet import Quartet
from vllm.fleet import READY_S, Vllm

from quartet_bus import subjects
from quartet_bus.bus import BusError
from quartet_bus.config.schema import NatsSection
from quartet_bus.messages import ControlRequest, Phase, RequestEvent, Role
from quartet_bus.nats_bus import NatsBus
from quartet_bus.server import NatsServer

HOME = os.environ.get("QUARTET_VLLM", "")
PYTHON = Path(HOME).resolve() / "bin" / "python"
PATIENCE_S = 60.0


def why_not() -> str:
    why = Path(HOME) / "why"
    return why.read_text() if why.exists() else ""


def make_model(directory: Path) -> None:
    """By vLLM's own Python, which has torch."""
    command = [str(PYTHON), str(Path(__file__).with_name("model.py")), str(directory)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-2000:]


def ended(events):
    """Whether every worker that took a part of a request has ended it."""
    phases = {phase: {(e.worker, e.stream) for e in events if e.phase is phase} for phase in Phase}
    return bool(phases[Phase.END]) and phases[Phase.END] == phases[Phase.ACCEPTED]


def answered(events):
    """Those of the try that was answered: on a loaded machine a client may ask again, and a router try again, and more
    than one may come to its end."""
    [stream, *_] = [
        event.stream
        for event in events
        if event.phase is Phase.END and event.role is not Role.PREFILL and event.status == "ok"
    ]
    return [event for event in events if event.stream == stream]


class Scene:
    """Two servers, the fleet, and what its agents say of requests."""

    def __init__(self, servers, quartet, bus):
        self.servers, self.quartet, self.bus = servers, quartet, bus
        self.events: list[RequestEvent] = []
        self.client = openai.AsyncOpenAI(base_url=quartet.gateway, api_key="none", max_retries=0, timeout=PATIENCE_S)

    async def ask(self, prompt, *, model="tiny", tokens=16, **fields):
        """The text of an answer through Quartet, and the events of its request."""
        before = len(self.events)
        answer = await self.client.completions.create(
            model=model, prompt=prompt, max_tokens=tokens, temperature=0, extra_body={"ignore_eos": True}, **fields
        )
        await self.until(lambda: ended(self.events[before:]))
        return answer, answered(self.events[before:])

    async def straight(self, server, prompt, *, model="tiny", tokens=16, **fields):
        """The text that the server gives when it is asked without Quartet."""
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **fields}
        async with aiohttp.ClientSession() as session, session.post(server.url + "/v1/completions", json=body) as told:
            return (await told.json())["choices"][0]["text"]

    async def order(self, node, verb, argument=""):
        """An operator's order to a node's agent."""
        await self.control("agent", node, verb, argument)

    async def until(self, condition, *, patience_s=PATIENCE_S):
        """Wait for something that is told."""
        async with asyncio.timeout(patience_s):
            while not condition():  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(0.02)

    async def until_metric(self, server, name, good, *, patience_s=PATIENCE_S):
        """Wait for one of vLLM's own metrics."""
        async with asyncio.timeout(patience_s):
            while not good(await server.metric(name)):  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(0.1)

    async def control(self, service, instance, verb, argument=""):
        """What an instance answers to a verb."""
        request = msgspec.msgpack.encode(ControlRequest(argument=argument))
        answer = await self.bus.request(subjects.control(service, instance, verb).subject, request, timeout_s=20.0)
        return json.loads(msgspec.msgpack.decode(answer.data)["payload"])

    async def until_routed(self):
        """Until the router knows both workers to be up, and a coordinator, without which nothing is split."""
        async with asyncio.timeout(2 * PATIENCE_S):
            while True:
                with contextlib.suppress(BusError):
                    told = await self.control("router", "_all", "status")
                    if told["up"] == 2 and told["coordinator"]:
                        return
                await asyncio.sleep(0.1)

    async def roles(self, a, b):
        """What the two workers are for, and until that is known."""
        await self.order("a", "role", a)
        await self.order("b", "role", b)
        await asyncio.sleep(1.0)

    async def until_only(self, worker):
        """Until the router sends everything to ``worker``, the other one being drained."""
        async with asyncio.timeout(2 * PATIENCE_S):
            for seed in itertools.count(400):
                _, events = await self.ask(prompt_of(seed, 20), tokens=1)
                if {event.worker for event in events} == {worker}:
                    return

    async def split(self, prompts):
        """The first of ``prompts`` that is answered by both workers, its answer, and the ends of its halves by worker.

        On a loaded machine a transfer may be late, or roles not known yet: then the request is tried otherwise, or its
        client told to come again, which is what the next prompt does.
        """
        for prompt in prompts:
            try:
                answer, events = await self.ask(prompt)
            except openai.APIError as error:
                print(f"not split: {error}")
                continue
            ends = {event.worker: event for event in events if event.phase is Phase.END}
            told = {worker: (str(end.role), end.status, end.reason) for worker, end in ends.items()}
            if told == {"a-0": ("prefill", "ok", ""), "b-0": ("decode", "ok", "")}:
                return prompt, answer, ends
            print(f"not split: {told}")
        raise AssertionError("none was split")

    async def shake_hands(self):
        """Until each engine has fetched KV of the other: vLLM gives its first handshake with an engine five seconds,
        and on a machine that is shared that may fail more than once."""
        for roles in (("prefill", "decode"), ("decode", "prefill")):
            await self.roles(*roles)
            fetches = self.servers["b" if roles[0] == "prefill" else "a"]
            before = await fetches.metric("vllm:external_prefix_cache_hits_total")
            async with asyncio.timeout(5 * PATIENCE_S):
                seed = 200
                while await fetches.metric("vllm:external_prefix_cache_hits_total") == before:
                    seed += 1
                    with contextlib.suppress(openai.APIError):
                        await self.client.completions.create(model="tiny", prompt=prompt_of(seed, 100), max_tokens=1)
        await self.roles("both", "both")
        await asyncio.sleep(2.0)

    def doctor(self):
        """What ``quartet doctor --json`` says; nothing before an agent answers it."""
        command = [sys.executable, "-m", "quartet_cli", "doctor", "--json", "--nats", self.url]
        told = subprocess.run(command, capture_output=True, text=True, check=False)
        assert told.returncode in (0, 1), told.stderr
        if not told.stdout:
            return {}
        return {worker["worker"]: worker["engine"] for node in json.loads(told.stdout) for worker in node["workers"]}


def prompt_of(seed, tokens):
    """Token ids of a prompt that no other seed shares."""
    return [3 + (seed * 7919 + index * (seed + 3)) % 500 for index in range(tokens)]


@contextlib.asynccontextmanager
async def served(servers: dict[str, Vllm]):
    """The servers, up; ended afterwards, however that goes."""
    if reason := why_not():
        pytest.skip(f"vLLM is not installed: {reason}")
    started_s = time.monotonic()
    try:
        for server in servers.values():
            server.start()
        for server in servers.values():
            await server.ready(started_s + READY_S)
        print(f"both vLLM servers up after {time.monotonic() - started_s:.0f} s")
        yield servers
    finally:
        for server in servers.values():
            server.stop()


@contextlib.asynccontextmanager
async def fleet(directory: Path, servers: dict[str, Vllm], agents: dict[str, str], *, kv: str = ""):
    """A fleet before servers that are up, until its router knows both; ended afterwards."""
    directory.mkdir(exist_ok=True)  # noqa: ASYNC240 - a test's own folder
    async with NatsServer(directory) as broker:
        bus = NatsBus(NatsSection(url=broker.url), name="test")
        await bus.open()
        quartet = Quartet(directory, broker.url, agents, kv=kv)
        try:
            quartet.start()
            scene = Scene(servers, quartet, bus)
            scene.url = broker.url
            decode = msgspec.msgpack.Decoder(RequestEvent).decode
            await bus.subscribe(
                subjects.request_events().subject, lambda message: scene.events.append(decode(message.data))
            )
            await scene.until_routed()
            yield scene
            await scene.client.close()
        finally:
            quartet.stop()
            await bus.close()
            if os.environ.get("QUARTET_VLLM_LOGS"):
                print(quartet.logs())
