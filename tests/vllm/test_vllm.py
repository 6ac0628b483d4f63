"""Quartet before two real vLLM servers, unchanged but for documented flags: ``make test-vllm``.

A tiny model with random weights on two CPU servers, which are declared as two hardware classes. The tests share the
servers, since these take a minute to start, and go in this order; the last one kills one of them.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

import aiohttp
import msgspec
import openai
import pytest
import pytest_asyncio
from served_fleet import Quartet
from vllm.fleet import READY_S, Vllm, agents

from quartet_bus import subjects
from quartet_bus.config.schema import NatsSection
from quartet_bus.messages import ControlRequest, Phase, PrefetchCommand, PrefetchVerb, RequestEvent, Role
from quartet_bus.nats_bus import NatsBus
from quartet_bus.server import NatsServer

HOME = os.environ.get("QUARTET_VLLM", "")
PYTHON = Path(HOME).resolve() / "bin" / "python"
PATIENCE_S = 60.0

pytestmark = [
    pytest.mark.skipif(not HOME, reason="asked for by make test-vllm"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
]


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
        # On a loaded machine a client may ask again, and a router try again: what counts is what was answered.
        [answered] = {
            event.stream
            for event in self.events[before:]
            if event.phase is Phase.END and event.role is not Role.PREFILL and event.status == "ok"
        }
        return answer, [event for event in self.events[before:] if event.stream == answered]

    async def straight(self, server, prompt, *, model="tiny", tokens=16):
        """The text that the server gives when it is asked without Quartet."""
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
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
        async with asyncio.timeout(PATIENCE_S):
            while True:
                told = await self.control("router", "_all", "status")
                if told["up"] == 2 and told["coordinator"]:
                    return
                await asyncio.sleep(0.1)

    async def roles(self, a, b):
        """What the two workers are for, and until that is known."""
        await self.order("a", "role", a)
        await self.order("b", "role", b)
        await asyncio.sleep(1.0)

    async def shake_hands(self):
        """Until each engine has fetched KV of the other: vLLM gives its first handshake with an engine five seconds,
        and on a machine that is shared that may fail more than once."""
        for roles in (("prefill", "decode"), ("decode", "prefill")):
            await self.roles(*roles)
            fetches = self.servers["b" if roles[0] == "prefill" else "a"]
            before = await fetches.metric("vllm:external_prefix_cache_hits_total")
            async with asyncio.timeout(3 * PATIENCE_S):
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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory):
    if reason := why_not():
        pytest.skip(f"vLLM is not installed: {reason}")
    directory = tmp_path_factory.mktemp("vllm")
    make_model(directory)
    servers = {name: Vllm(PYTHON, directory, directory, name) for name in "ab"}
    started_s = time.monotonic()
    try:
        for server in servers.values():
            server.start()
        async with NatsServer(directory) as broker:
            bus = NatsBus(NatsSection(url=broker.url), name="test")
            await bus.open()
            quartet = Quartet(directory, broker.url, agents(servers, directory))
            try:
                for server in servers.values():
                    await server.ready(started_s + READY_S)
                print(f"both vLLM servers up after {time.monotonic() - started_s:.0f} s")
                quartet.start()
                scene = Scene(servers, quartet, bus)
                scene.url = broker.url
                decode = msgspec.msgpack.Decoder(RequestEvent).decode
                await bus.subscribe(
                    subjects.request_events().subject, lambda message: scene.events.append(decode(message.data))
                )
                await scene.until(lambda: [engine["up"] for engine in scene.doctor().values()] == [True, True])
                await scene.until_routed()
                await scene.shake_hands()
                yield scene
                await scene.client.close()
            finally:
                quartet.stop()
                await bus.close()
                if os.environ.get("QUARTET_VLLM_LOGS"):
                    print(quartet.logs())
    finally:
        for server in servers.values():
            server.stop()


def prompt_of(seed, tokens):
    """Token ids of a prompt that no other seed shares."""
    return [3 + (seed * 7919 + index * (seed + 3)) % 500 for index in range(tokens)]


async def test_answers_are_those_of_vllm_itself(scene):
    for seed, prompt in enumerate(("the quick brown fox", "the lazy dog jumps over", prompt_of(1, 40))):
        expected = await scene.straight(scene.servers["ab"[seed % 2]], prompt)
        answer, _ = await scene.ask(prompt)
        assert answer.choices[0].text == expected
        assert answer.usage.completion_tokens == 16
        stream = await scene.client.completions.create(
            model="tiny", prompt=prompt, max_tokens=16, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    chat = await scene.client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "the fox"}], max_tokens=8, n=2, seed=1
    )
    assert len(chat.choices) == 2


async def test_an_error_of_vllm_is_the_clients(scene):
    with pytest.raises(openai.BadRequestError) as caught:
        await scene.client.completions.create(model="tiny", prompt="the fox", extra_body={"temperature": -3})
    assert "temperature" in str(caught.value)


async def test_the_second_turn_goes_where_the_first_was_and_the_engine_finds_it(scene):
    engines = scene.doctor()
    assert {engine["affinity"] for engine in engines.values()} == {"events"}
    assert {engine["metrics"] for engine in engines.values()} == {"current"}
    assert {engine["version"] for engine in engines.values()} != {""}
    holders = {}
    for seed in range(10, 16):
        _, events = await scene.ask(prompt_of(seed, 320), tokens=4)
        holders[seed] = holders_of(events)
    # Both are idle each time, and one of them is quicker: have the other one work, too.
    [quick, *_] = sorted(holders[15])
    other = "b-0" if quick == "a-0" else "a-0"
    await scene.order(quick[0], "drain")
    await asyncio.sleep(0.5)
    for seed in range(20, 24):
        _, events = await scene.ask(prompt_of(seed, 320), tokens=4)
        holders[seed] = holders_of(events)
        assert holders[seed] == {other}
    await scene.order(quick[0], "resume")
    await asyncio.sleep(1.5)  # events → rungs → rows → routers
    hits = [await server.metric("vllm:prefix_cache_hits_total") for server in scene.servers.values()]
    for seed, there in holders.items():
        _, events = await scene.ask(prompt_of(seed, 320) + prompt_of(99, 40), tokens=4)
        [end] = [event for event in events if event.phase is Phase.END and event.role is not Role.DECODE]
        assert end.worker in there
        assert end.cached_tokens == 320
    after = [await server.metric("vllm:prefix_cache_hits_total") for server in scene.servers.values()]
    assert sum(after) - sum(hits) >= len(holders) * 320


def holders_of(events):
    """The workers that have a request's KV: who answered it, and of a split who computed its prompt."""
    assert {event.status for event in events if event.phase is Phase.END} == {"ok"}
    return {event.worker for event in events if event.phase is Phase.END}


async def test_a_split_over_vllms_own_handshake_gives_the_same_text(scene):
    before = await scene.servers["b"].metric("vllm:external_prefix_cache_hits_total")
    await scene.roles("prefill", "decode")
    try:
        for seed in (40, 41, 42):
            prompt = prompt_of(seed, 387)
            answer, events = await scene.ask(prompt)
            ends = {event.worker: event for event in events if event.phase is Phase.END}
            told = {worker: (end.status, end.reason) for worker, end in ends.items()}
            assert told == {"a-0": ("ok", ""), "b-0": ("ok", "")}
            assert ends["b-0"].transferred_tokens == 387
            assert answer.choices[0].text == await scene.straight(scene.servers["a"], prompt)
        moved = await scene.servers["b"].metric("vllm:external_prefix_cache_hits_total") - before
        assert moved >= 3 * 384
        assert await scene.servers["b"].metric("vllm:nixl_num_failed_transfers_total") == 0
    finally:
        await scene.roles("both", "both")


@pytest.mark.parametrize("streams", [True, False])
async def test_a_cancel_reaches_the_engine_within_a_second(scene, streams):
    before = len(scene.events)
    body = {"model": "tiny", "prompt": "the fox", "max_tokens": 1000, "stream": streams, "ignore_eos": True}
    session = aiohttp.ClientSession()
    asking = asyncio.create_task(session.post(scene.quartet.gateway + "/completions", json=body))
    await scene.until(lambda: any(event.phase is Phase.ACCEPTED for event in scene.events[before:]))
    server = scene.servers[next(e.worker for e in scene.events[before:] if e.phase is Phase.ACCEPTED)[0]]
    await scene.until_metric(server, "vllm:num_requests_running", lambda running: running == 1)
    asking.cancel()
    await session.close()
    left_s = time.monotonic()
    await scene.until_metric(server, "vllm:num_requests_running", lambda running: running == 0, patience_s=10.0)
    print(f"the engine had ended it {time.monotonic() - left_s:.2f} s after the client went")
    await scene.until(lambda: any(event.phase is Phase.END for event in scene.events[before:]))
    assert scene.events[-1].status == "cancelled"


async def test_an_adapter_is_loaded_at_run_time_and_answers(scene):
    await scene.until(lambda: all("lora" in engine_models(scene, name) for name in "ab"))
    prompt = "the quick brown fox"
    with_adapter, _ = await scene.ask(prompt, model="lora")
    without, _ = await scene.ask(prompt)
    assert with_adapter.choices[0].text == await scene.straight(scene.servers["a"], prompt, model="lora")
    assert with_adapter.choices[0].text != without.choices[0].text
    command = PrefetchCommand(PrefetchVerb.RELEASE, "lora", "CPU_QUICK", 1000, 1000.0, 0.9, "test")
    for node in "ab":
        scene.bus.publish(subjects.prefetch(node).subject, msgspec.msgpack.encode(command))
    await scene.until(lambda: not any("lora" in engine_models(scene, name) for name in "ab"))
    command = PrefetchCommand(PrefetchVerb.LOAD, "lora", "CPU_QUICK", 1000, 1000.0, 0.9, "test")
    for node in "ab":
        scene.bus.publish(subjects.prefetch(node).subject, msgspec.msgpack.encode(command))
    await scene.until(lambda: all("lora" in engine_models(scene, name) for name in "ab"))
    await asyncio.sleep(1.0)
    again, _ = await scene.ask(prompt, model="lora")
    assert again.choices[0].text == with_adapter.choices[0].text


def engine_models(scene, name):
    """The names that a server answers to."""
    with urllib.request.urlopen(scene.servers[name].url + "/v1/models", timeout=10) as told:
        return {model["id"] for model in json.load(told)["data"]}


def where(events):
    """The server that a request was accepted for."""
    [name] = {event.worker[0] for event in events if event.phase is Phase.ACCEPTED}
    return name


async def test_an_engine_killed_in_mid_stream_is_a_clear_error_and_the_other_one_goes_on(scene):
    before = len(scene.events)
    stream = await scene.client.completions.create(
        model="tiny", prompt="the lazy dog", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
    )
    read = Counter()

    async def read_and_kill():
        async for _ in stream:
            read["chunks"] += 1
            if read["chunks"] == 5:
                scene.servers[where(scene.events[before:])].kill()

    with pytest.raises(openai.APIError) as caught:
        await read_and_kill()
    name = where(scene.events[before:])
    assert read["chunks"] >= 5
    assert "engine" in str(caught.value)
    other = "b" if name == "a" else "a"
    await scene.until(lambda: not scene.doctor()[f"{name}-0"]["up"])
    for _ in range(4):
        answer, events = await scene.ask("the quick brown fox")
        assert events[-1].worker == f"{other}-0"
        assert answer.choices[0].text == await scene.straight(scene.servers[other], "the quick brown fox")
