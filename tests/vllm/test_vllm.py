"""Quartet before two real vLLM servers, unchanged but for documented flags: ``make test-vllm``.

A tiny model with random weights on two CPU servers, which are declared as two hardware classes. The tests share the
servers, since these take a minute to start, and go in this order; the last one kills one of them.
"""

import asyncio
import json
import time
import urllib.request
from collections import Counter

import aiohttp
import msgspec
import openai
import pytest
import pytest_asyncio
from vllm.fleet import Vllm, agents
from vllm.scene import HOME, PYTHON, fleet, make_model, prompt_of, served

from quartet_bus import subjects
from quartet_bus.messages import Phase, PrefetchCommand, PrefetchVerb, Role

pytestmark = [
    pytest.mark.skipif(not HOME, reason="asked for by make test-vllm"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory):
    directory = tmp_path_factory.mktemp("vllm")
    make_model(directory)
    servers = {name: Vllm(PYTHON, directory, directory, name) for name in "ab"}
    async with served(servers), fleet(directory / "fleet", servers, agents(servers, directory)) as scene:
        await scene.shake_hands()
        yield scene


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
    await scene.until_only(other)
    for seed in range(20, 24):
        _, events = await scene.ask(prompt_of(seed, 320), tokens=4)
        holders[seed] = holders_of(events)
        assert holders[seed] == {other}
    await scene.order(quick[0], "resume")
    await asyncio.sleep(3.0)  # events → rungs → rows → routers
    hits = [await server.metric("vllm:prefix_cache_hits_total") for server in scene.servers.values()]
    found = 0
    for seed, there in holders.items():
        _, events = await scene.ask(prompt_of(seed, 320) + prompt_of(99, 40), tokens=4)
        [end, *_] = [event for event in events if event.phase is Phase.END and event.role is not Role.DECODE]
        if end.worker in there:
            found += 1
            assert end.cached_tokens == 320
    after = [await server.metric("vllm:prefix_cache_hits_total") for server in scene.servers.values()]
    print(f"{found} of {len(holders)} second turns went where the first was")
    # On a loaded machine a worker may be so much slower than its class that its prefix does not pay.
    assert found >= 0.7 * len(holders)
    assert sum(after) - sum(hits) >= found * 320


def holders_of(events):
    """The workers that have a request's KV: who answered it, and of a split who computed its prompt."""
    assert {event.status for event in events if event.phase is Phase.END} == {"ok"}
    return {event.worker for event in events if event.phase is Phase.END}


async def test_a_split_over_vllms_own_handshake_gives_the_same_text(scene):
    await scene.roles("prefill", "decode")
    try:
        before = await scene.servers["b"].metric("vllm:external_prefix_cache_hits_total")
        prompts = (prompt_of(seed, 387) for seed in range(40, 55))
        for _ in range(3):
            prompt, answer, ends = await scene.split(prompts)
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
