"""KV pages of two real vLLM servers with our connector: paged out, lent, split, spilled, and right every time."""

import asyncio
import time

import pytest
import pytest_asyncio
from vllm.fleet import Vllm, agents
from vllm.scene import HOME, PYTHON, make_model, prompt_of, standing

from quartet_bus.messages import Phase

pytestmark = [
    pytest.mark.skipif(not HOME, reason="asked for by make test-vllm"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
]

BLOCKS = 96
"""Of A, each of 32 tokens: what it has is full after nine prompts of 320."""

POOL = """
pool = true
page_low = 0.5
page_high = 0.8
page_min_tokens = 64
page_min_idle_ms = 500
"""


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
    return scene.doctor()[f"{name}-0"]["pages"]


async def fresh(scene, prompt, *, tokens=16):
    """What a server says that finds nothing: by a salt of its own, which no other request has."""
    return await scene.straight(scene.servers["b"], prompt, tokens=tokens, cache_salt=f"fresh {time.monotonic_ns()}")


async def test_the_coordinator_pages_cold_prefixes_out_and_their_next_turn_finds_them(scene):
    assert all(engine["pages"] for engine in scene.doctor().values())
    await scene.order("b", "drain")
    await asyncio.sleep(0.5)
    turns = {}
    for seed in range(10, 18):
        prompt = prompt_of(seed, 320)
        answer, events = await scene.ask(prompt)
        assert {event.worker for event in events} == {"a-0"}
        turns[seed] = answer.choices[0].text
    await scene.until(lambda: pages(scene, "b")["kept"] >= 20 and pages(scene, "a")["dropped"] >= 20)
    print("a", pages(scene, "a"), "b", pages(scene, "b"))
    await scene.order("b", "resume")
    await asyncio.sleep(1.5)
    hits = await scene.servers["b"].metric("vllm:external_prefix_cache_hits_total")
    there = 0
    for seed in turns:
        turn = prompt_of(seed, 320) + prompt_of(seed + 100, 40)
        answer, events = await scene.ask(turn)
        [end] = [event for event in events if event.phase is Phase.END]
        there += end.worker == "b-0"
        assert end.cached_tokens + end.transferred_tokens >= 320
        assert answer.choices[0].text == await fresh(scene, turn)
    assert there >= 2
    hits = await scene.servers["b"].metric("vllm:external_prefix_cache_hits_total") - hits
    print(f"{there} of {len(turns)} next turns ran on b, which took {hits:.0f} tokens from pages")
    assert hits >= 320 * there
