"""Requests and tokens a minute, over HTTP: refused with a time to retry, and divided among the gateways that live."""

import asyncio
import json
from collections.abc import AsyncIterator
from hashlib import sha256

import aiohttp
import openai
import pytest

from quartet_bus.config.schema import Config, LimitSection

CHAT = "/v1/chat/completions"


def chat(content: str, **fields: object) -> bytes:
    return json.dumps({"model": "chat", "messages": [{"role": "user", "content": content}], **fields}).encode()


def limited(**limits: int) -> Config:
    config = Config()
    config.service.stop_timeout_ms = 500
    config.gateway.limits = {"public": LimitSection(**limits)}
    return config


@pytest.fixture
async def clients() -> AsyncIterator[list[aiohttp.ClientSession]]:
    opened: list[aiohttp.ClientSession] = []
    yield opened
    for client in opened:
        await client.close()


async def ask(client: aiohttp.ClientSession, content: str = "say 1", **fields: object) -> aiohttp.ClientResponse:
    reply = await client.post(CHAT, data=chat(content, **fields))
    await reply.read()
    return reply


def session(house, clients) -> aiohttp.ClientSession:
    clients.append(aiohttp.ClientSession(house.url, timeout=aiohttp.ClientTimeout(total=20)))
    return clients[-1]


async def test_one_request_more_than_the_minute_has_is_429_with_a_time_to_retry(build, clients):
    house = await build(limited(requests_per_minute=2))
    client = session(house, clients)
    first = await ask(client)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert (await ask(client)).status == 200
    refused = await ask(client)
    assert refused.status == 429
    assert 55 <= int(refused.headers["Retry-After"]) <= 61
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    error = (await refused.json())["error"]
    assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
    assert "`public`" in error["message"]
    assert len(house.fleet.requests) == 2
    assert house.count("limited_total", limit="requests") == 1
    assert house.gateway.streams.open == 0


async def test_tokens_are_held_for_the_longest_answer_and_given_back_when_it_was_shorter(build, clients):
    house = await build(limited(tokens_per_minute=1000))
    client = session(house, clients)
    waiting = asyncio.create_task(ask(client, "mute", max_tokens=900))
    await house.fleet.heard.wait()
    assert (await ask(client, max_tokens=900)).status == 429
    waiting.cancel()
    await asyncio.wait([waiting])
    await house.fleet.cancelled.wait()
    done = await ask(client, max_tokens=900)  # the fleet counts 3 prompt tokens and 1 of the answer
    assert done.status == 200
    again = await ask(client, max_tokens=900)
    assert again.status == 200
    assert int(again.headers["x-ratelimit-remaining-tokens"]) < 100  # while its own 900 are held


async def test_a_stream_that_was_left_counts_what_it_brought(build, clients):
    house = await build(limited(tokens_per_minute=200))
    client = session(house, clients)
    reply = await client.post(CHAT, data=chat("forever", stream=True, max_tokens=100))
    for _ in range(30):
        await reply.content.readuntil(b"\n\n")
    reply.close()
    await house.fleet.cancelled.wait()
    quota = house.gateway.quotas.headers("public", house.gateway.now_s())
    assert 100 < int(quota["x-ratelimit-remaining-tokens"]) < 200 - 30


async def test_what_the_fleet_refused_costs_no_tokens(build, clients):
    house = await build(limited(tokens_per_minute=1000))
    client = session(house, clients)
    for _ in range(3):
        assert (await ask(client, "fail 503", max_tokens=900)).status == 503
    assert (await ask(client, max_tokens=900)).status == 200


async def test_a_prompt_that_no_minute_can_hold_says_that_trying_again_is_no_use(build):
    house = await build(limited(tokens_per_minute=100))
    async with openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key="x", max_retries=5) as client:
        messages = [{"role": "user", "content": "say 1 " + "x" * 1000}]
        with pytest.raises(openai.RateLimitError) as error:
            await client.chat.completions.create(model="chat", messages=messages)
    assert error.value.type == "tokens"
    assert "retry-after" not in error.value.response.headers
    assert error.value.response.headers["x-should-retry"] == "false"
    assert house.count("requests_total", endpoint="chat.completions", status="429", model="chat") == 1


async def test_tenants_without_limits_of_their_own_have_the_default_one(build, clients):
    config = limited()
    config.gateway.keys = {sha256(b"a").hexdigest(): "a", sha256(b"b").hexdigest(): "b"}
    config.gateway.limits = {"b": LimitSection()}
    config.gateway.default_limit = LimitSection(requests_per_minute=1)
    house = await build(config)
    client = session(house, clients)

    async def status(key: str) -> int:
        return (await client.post(CHAT, data=chat("say 1"), headers={"Authorization": f"Bearer {key}"})).status

    assert [await status("a"), await status("a")] == [200, 429]
    assert [await status("b"), await status("b")] == [200, 200]


async def test_two_gateways_admit_together_what_one_would(build, clients, eventually):
    one = await build(limited(requests_per_minute=20))
    two = await build(limited(requests_per_minute=20), "g2", one.fleet)
    for house in (one, two):
        await eventually(lambda house=house: house.count("live_gateways") == 2, 5)
    clients_of = [session(house, clients) for house in (one, two)]
    statuses = [(await ask(clients_of[number % 2])).status for number in range(60)]
    assert statuses.count(200) <= 20
    assert set(statuses) == {200, 429}

    for _ in range(6):  # turn after turn, what one of them has left becomes available to the other
        await asyncio.sleep(0.5)
        for client in clients_of:
            await ask(client)
    assert 18 <= len(one.fleet.requests) <= 20


async def test_a_gateway_that_leaves_leaves_its_part_to_the_others(build, clients, eventually):
    one = await build(limited(requests_per_minute=40))
    two = await build(limited(requests_per_minute=40), "g2", one.fleet)
    await eventually(lambda: one.count("live_gateways") == 2, 5)
    await two.stop()
    await eventually(lambda: one.count("live_gateways") == 1, 1)
    client = session(one, clients)
    assert [(await ask(client)).status for _ in range(41)].count(200) == 40


async def test_a_stop_is_announced_before_the_door_closes(build, clients, eventually):
    config = limited()
    config.gateway.drain_notice_ms = 600
    house = await build(config)
    client = session(house, clients)
    stop = asyncio.create_task(house.stop())
    await eventually(lambda: house.gateway.leaving, 1)
    assert (await client.get("/ready")).status == 503
    late = await ask(client)
    assert (late.status, late.headers["Connection"]) == (200, "close")
    await stop
