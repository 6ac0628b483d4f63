"""KV pages of two real vLLM servers with our connector: paged out, lent, split, spilled, and right every time.

The servers are shared, and the tests go in this order; the last ones kill an agent and a server.
"""

import asyncio
import itertools
import random
import time

import pytest
import pytest_asyncio
from vllm.fleet import Vllm, agents
from vllm.scene import HOME, PYTHON, make_model, standing

from quartet_bus.messages import Phase, Role

pytestmark = [
    pytest.mark.skipif(not HOME, reason="asked for by make test-vllm"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
]

BLOCKS = 96
"""Of A, each of 32 tokens: it is full after nine prompts of 320."""

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
async def scene(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pages")
    make_model(directory)
    servers = {
        "a": Vllm(PYTHON, directory, directory, "a", pages=directory / "a.sock", blocks=BLOCKS),
        "b": Vllm(PYTHON, directory, directory, "b", pages=directory / "b.sock"),
    }
    async with standing(directory, servers, agents(servers, directory), kv=POOL) as scene:
        yield scene


def pages(scene, name):
    """What the agent beside a server says of its pages."""
    return scene.doctor()[f"{name}-0"]["pages"]


async def settled(scene):
    """Until nothing is on its way between the two, and what they have is known to the router."""
    for _ in range(2):
        await asyncio.sleep(1.5)
        await scene.until(lambda: not any(pages(scene, name)[what] for name in "ab" for what in ("pins", "leases")))


async def fresh(scene, prompt, *, tokens=16):
    """What a server says that finds nothing: by a salt of its own, which no other request has."""
    return await scene.straight(scene.servers["b"], prompt, tokens=tokens, cache_salt=f"fresh {time.monotonic_ns()}")


def ended(events):
    """The end of a request's answer."""
    [end] = [event for event in events if event.phase is Phase.END and event.role is not Role.PREFILL]
    return end


async def test_the_coordinator_pages_cold_prefixes_out_and_their_next_turn_finds_them(scene):
    assert all(engine["pages"] for engine in scene.doctor().values())
    before = {name: pages(scene, name) for name in "ab"}
    await scene.order("b", "drain")
    await asyncio.sleep(0.5)
    prompts = [new_prompt(320) for _ in range(8)]
    for prompt in prompts:
        _, events = await scene.ask(prompt)
        assert ended(events).worker == "a-0"

    def paged():
        a, b = (pages(scene, name) for name in "ab")
        return b["kept"] - before["b"]["kept"] >= 30 and a["dropped"] - before["a"]["dropped"] >= 30

    await scene.until(paged)
    await settled(scene)
    print("a", pages(scene, "a"), "b", pages(scene, "b"))
    await scene.order("b", "resume")
    await settled(scene)
    hits = await scene.servers["b"].metric("vllm:external_prefix_cache_hits_total")
    there = 0
    for prompt in prompts:
        turn = prompt + new_prompt(40)
        answer, events = await scene.ask(turn)
        assert answer.choices[0].text == await fresh(scene, turn)
        end = ended(events)
        if end.worker == "b-0":
            there += 1
            assert end.cached_tokens == 320
    hits = await scene.servers["b"].metric("vllm:external_prefix_cache_hits_total") - hits
    print(f"{there} of {len(prompts)} next turns ran on b, which took {hits:.0f} tokens from pages")
    assert there >= 3
    assert hits >= 320 * there
