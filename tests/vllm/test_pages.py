"""KV pages of two real vLLM servers with our connector: spilled, lent, split, paged out, and right every time.

The servers are shared, and the tests go in this order: first before a fleet without a pool, then before one with. The
last ones kill an agent and a server.
"""

import asyncio
import contextlib
import itertools
import os
import random
import time

import pytest
import pytest_asyncio
from vllm.fleet import Vllm, agents
from vllm.scene import HOME, PATIENCE_S, PYTHON, answered, fleet, make_model, served

from quartet_bus.bus import BusError
from quartet_bus.messages import Phase, Role

pytestmark = [
    pytest.mark.skipif(not HOME, reason="asked for by make test-vllm"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
]

BLOCKS = 160
"""Of A, each of 32 tokens: it is full after sixteen prompts of 320."""

POOL = """
pool = true
page_low = 0.5
page_high = 0.8
page_min_tokens = 64
page_min_idle_ms = 500
"""

_seeds = itertools.count(random.randrange(1 << 40))


def new_prompt(tokens):
    """Token ids of a prompt that nobody else has."""
    found = random.Random(next(_seeds))
    return [found.randrange(3, 500) for _ in range(tokens)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(tmp_path_factory):
    """The servers, and the directory where all is."""
    directory = tmp_path_factory.mktemp("pages")
    make_model(directory)
    servers = {
        "a": Vllm(PYTHON, directory, directory, "a", pages=directory / "a.sock", blocks=BLOCKS),
        "b": Vllm(PYTHON, directory, directory, "b", pages=directory / "b.sock"),
    }
    async with served(servers):
        yield directory, servers


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain(two):
    """A fleet without a pool; it makes way for the one with."""
    directory, servers = two
    stood = fleet(directory / "plain", servers, agents(servers, directory))
    scene = await stood.__aenter__()
    there = [stood]

    async def leave():
        while there:
            await there.pop().__aexit__(None, None, None)

    scene.leave = leave
    yield scene
    await leave()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(two, plain):
    """A fleet with the pool on, whose agents come to connectors that others spoke with before."""
    directory, servers = two
    await plain.leave()
    async with fleet(directory / "pool", servers, agents(servers, directory), kv=POOL) as scene:
        yield scene


async def pages(scene, name):
    """What the agent beside a server says of its pages."""
    told = await scene.control("agent", name, "doctor")
    return told["workers"][0]["engine"]["pages"]


async def until(condition, patience_s=PATIENCE_S):
    """Wait for something that must be asked for."""
    async with asyncio.timeout(patience_s):
        while not await condition():  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0.1)


async def settled(scene):
    """Until nothing is on its way between the two, and what they have is known to the router."""

    async def idle():
        told = [await pages(scene, name) for name in "ab"]
        return not any(each[what] for each in told for what in ("pins", "leases"))

    for _ in range(2):
        await asyncio.sleep(1.5)
        await until(idle)


async def fresh(scene, prompt, *, tokens=16):
    """What a server says that finds nothing: by a salt of its own, which no other request has."""
    return await scene.straight(scene.servers["b"], prompt, tokens=tokens, cache_salt=f"fresh {time.monotonic_ns()}")


def ended(events):
    """The end of a request's answer."""
    [end] = [event for event in events if event.phase is Phase.END and event.role is not Role.PREFILL]
    return end


EXTERNAL = "vllm:external_prefix_cache_hits_total"


async def test_what_the_engine_evicted_comes_back_from_its_arena(plain):
    scene, a = plain, plain.servers["a"]
    prompts = [new_prompt(320) for _ in range(18)]
    expected = [await scene.straight(a, prompt) for prompt in prompts]
    hits = await a.metric(EXTERNAL)
    assert [await scene.straight(a, prompt) for prompt in prompts] == expected
    hits = await a.metric(EXTERNAL) - hits
    told = await pages(scene, "a")
    print(f"of {len(prompts) * 320} tokens {hits:.0f} came from the arena: {told}")
    assert hits >= 8 * 288
    assert expected[0] == await fresh(scene, prompts[0])
    assert told["failed_loads"] == 0


async def test_a_split_goes_by_pages_and_gives_the_same_text(plain):
    scene = plain
    await scene.roles("prefill", "decode")
    try:
        for tokens in (320, 387):
            prompt, answer, ends = await scene.split(new_prompt(tokens) for _ in range(10))
            assert ends["b-0"].transferred_tokens >= tokens - 32
            assert answer.choices[0].text == await fresh(scene, prompt)
    finally:
        await scene.roles("both", "both")


async def long_answer(scene):
    """One that takes its time; unlike ``Scene.ask`` several may run at once."""
    await scene.client.completions.create(
        model="tiny", prompt=new_prompt(20), max_tokens=300, temperature=0, extra_body={"ignore_eos": True}
    )


async def fetch(scene):
    """Ask for a turn whose prefix only A has, while A is full; the end of what was answered."""
    await scene.order("b", "drain")
    await scene.until_only("a-0")
    shared = new_prompt(1472)
    await scene.ask(shared)
    busy = [asyncio.create_task(long_answer(scene)) for _ in range(8)]
    with contextlib.suppress(TimeoutError):  # a router may hold some of them back, which is as good
        a = scene.servers["a"]
        await scene.until_metric(a, "vllm:num_requests_running", lambda running: running == 8, patience_s=5.0)
    await scene.order("b", "resume")
    await asyncio.sleep(1.0)
    turn = shared + new_prompt(40)
    before = len(scene.events)
    answer = await scene.client.completions.create(
        model="tiny", prompt=turn, max_tokens=16, temperature=0, extra_body={"ignore_eos": True}
    )

    def ends():
        told = scene.events[before:]
        return [event for event in told if event.phase is Phase.END and event.prompt_tokens == len(turn)]

    await scene.until(lambda: any(event.role is not Role.PREFILL and event.status == "ok" for event in ends()))
    print([(event.worker, event.role, event.status, event.reason, event.transferred_tokens) for event in ends()])
    assert answer.choices[0].text == await fresh(scene, turn)
    await asyncio.gather(*busy)
    return ended(answered(ends()))


async def test_a_prefix_is_fetched_from_an_engine_that_is_busy(plain):
    hits = await plain.servers["b"].metric(EXTERNAL)
    for _ in range(4):  # on a loaded machine A may be done before B is known to be back
        end = await fetch(plain)
        if end.worker == "b-0" and end.role is Role.BOTH and end.transferred_tokens:
            break
    print(f"answered by {end.worker}, {end.cached_tokens} cached there, {end.transferred_tokens} came")
    assert end.worker == "b-0"
    assert end.transferred_tokens >= 1408
    assert await plain.servers["b"].metric(EXTERNAL) - hits >= 1408


async def test_the_coordinator_pages_cold_prefixes_out_and_their_next_turn_finds_them(scene):
    before = {name: await pages(scene, name) for name in "ab"}
    assert all(before.values())
    await scene.order("b", "drain")
    await scene.until_only("a-0")
    prompts = [new_prompt(320) for _ in range(12)]
    for prompt in prompts:
        _, events = await scene.ask(prompt)
        assert ended(events).worker == "a-0"

    async def paged():
        a, b = await pages(scene, "a"), await pages(scene, "b")
        return b["kept"] - before["b"]["kept"] >= 30 and a["dropped"] - before["a"]["dropped"] >= 30

    await until(paged)
    await settled(scene)
    print("a", await pages(scene, "a"), "b", await pages(scene, "b"))
    await scene.order("b", "resume")
    await settled(scene)
    hits = await scene.servers["b"].metric(EXTERNAL)
    told = []
    for prompt in prompts:
        turn = prompt + new_prompt(40)
        answer, events = await scene.ask(turn)
        assert answer.choices[0].text == await fresh(scene, turn)
        end = ended(events)
        told.append((end.worker, end.cached_tokens + end.transferred_tokens))
    hits = await scene.servers["b"].metric(EXTERNAL) - hits
    print(f"next turns {told}; b took {hits:.0f} tokens from pages")
    there = told.count(("b-0", 320))
    assert there >= 3
    assert hits >= 320 * there


async def test_an_agent_that_is_killed_finds_the_pages_again_and_the_engine_never_stopped(scene):
    a = scene.servers["a"]
    prompts = [new_prompt(320) for _ in range(18)]
    expected = [await scene.straight(a, prompt) for prompt in prompts]
    before = await pages(scene, "a")
    scene.quartet.kill_agent("a")
    assert [await scene.straight(a, prompt) for prompt in prompts[:4]] == expected[:4]
    scene.quartet.start_agent("a")

    async def back():
        with contextlib.suppress(BusError):
            return (await pages(scene, "a")).get("pages", 0) >= before["pages"] > 0
        return False

    await until(back)
    await scene.until_routed()
    answer, _ = await scene.ask(prompts[0])
    assert answer.choices[0].text == expected[0]


async def test_an_engine_that_is_killed_takes_its_pages_with_it_and_the_other_goes_on(scene):
    prompt = new_prompt(320)
    expected = await scene.straight(scene.servers["a"], prompt)
    scene.servers["b"].kill()
    await scene.until(lambda: not scene.doctor().get("b-0", {"up": True})["up"])
    engine = scene.doctor()["b-0"]
    assert engine["pages"] == {}
    answer, events = await scene.ask(prompt)
    assert ended(events).worker == "a-0"
    assert answer.choices[0].text == expected
    assert not [name for name in os.listdir("/dev/shm") if "quartet" in name]

    async def nothing_left():
        told = await pages(scene, "a")
        return not told["pins"] and not told["leases"]

    await until(nothing_left)
