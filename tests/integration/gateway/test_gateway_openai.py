"""The official ``openai`` client, sync and async, against a real HTTP door."""

import asyncio
import json
from collections.abc import AsyncIterator
from hashlib import sha256

import openai
import pytest

from quartet_bus.config.schema import Config

MODEL = "chat"


def asking(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture
async def client(house) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key="unused", max_retries=0, timeout=20) as client:
        yield client


async def test_chat_in_one_piece(house, client):
    answer = await client.chat.completions.create(model=MODEL, messages=asking("say 3"))
    assert answer.choices[0].message.content == "w0 w1 w2"
    assert answer.usage.total_tokens == 5
    assert answer._request_id == house.fleet.headers[0].request_id


async def test_chat_streamed(client):
    stream = await client.chat.completions.create(model=MODEL, messages=asking("say 50"), stream=True)
    words = [chunk.choices[0].delta.content async for chunk in stream]
    assert words == [f"w{n} " for n in range(50)]


async def test_every_field_reaches_the_engine_and_its_tool_calls_and_usage_come_back_as_they_are(house, client):
    fields = {
        "n": 2,
        "stop": ["\n", "END"],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_object"},
        "logit_bias": {"7": -100},
        "stream_options": {"include_usage": True},
        "seed": 7,
        "user": "u",
    }
    stream = await client.chat.completions.create(
        model=MODEL, messages=asking("call 2"), stream=True, extra_body={"top_k": 5, "odd": {"a": [1]}}, **fields
    )
    chunks = [chunk async for chunk in stream]
    sent = json.loads(house.fleet.requests[0].data)
    assert sent == {
        "model": MODEL,
        "messages": asking("call 2"),
        "stream": True,
        "top_k": 5,
        "odd": {"a": [1]},
        **fields,
    }
    calls = [chunk.choices[0].delta.tool_calls[0].function for chunk in chunks if chunk.choices]
    assert [(call.name, call.arguments) for call in calls] == [("f", '{"n":'), (None, "0}")]
    assert chunks[-1].usage.total_tokens == 5


async def test_completions_streamed_and_in_one_piece(client):
    answer = await client.completions.create(model=MODEL, prompt="say 2")
    assert answer.choices[0].text == "w0 w1"
    stream = await client.completions.create(model=MODEL, prompt="say 4", stream=True)
    assert [chunk.choices[0].text async for chunk in stream] == ["w0 ", "w1 ", "w2 ", "w3 "]


async def test_the_sync_client_streams_too(house):
    def ask() -> list[str | None]:
        with openai.OpenAI(base_url=f"{house.url}/v1", api_key="unused", max_retries=0, timeout=20) as client:
            stream = client.chat.completions.create(model=MODEL, messages=asking("say 5"), stream=True)
            return [chunk.choices[0].delta.content for chunk in stream]

    assert await asyncio.to_thread(ask) == [f"w{n} " for n in range(5)]


async def test_many_streams_at_once_are_not_mixed_up(client):
    async def ask(count: int) -> int:
        stream = await client.chat.completions.create(model=MODEL, messages=asking(f"say {count}"), stream=True)
        return len([chunk async for chunk in stream])

    assert await asyncio.gather(*(ask(count) for count in range(1, 33))) == list(range(1, 33))


async def test_models_are_those_served_now(client):
    models = [model.id async for model in client.models.list()]
    assert models == ["chat", "chat-lora"]
    assert (await client.models.retrieve("chat-lora")).parent == "chat"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nobody/serves-this")


async def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as error:
        await client.chat.completions.create(model="gpt-9", messages=asking("say 1"), stream=True)
    assert error.value.code == "model_not_found"
    assert error.value.param == "model"


async def test_a_wrong_field_is_a_bad_request_that_names_it(client):
    with pytest.raises(openai.BadRequestError) as error:
        await client.chat.completions.create(model=MODEL, messages=asking("say 1"), max_tokens=-1)
    assert error.value.param == "max_tokens"


@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_before_the_first_byte_has_its_status(client, stream):
    with pytest.raises(openai.RateLimitError) as error:
        await client.chat.completions.create(model=MODEL, messages=asking("fail 429"), stream=stream)
    assert error.value.code == "wished"
    assert error.value.response.headers["retry-after"] == "3"
    with pytest.raises(openai.InternalServerError) as error:
        await client.chat.completions.create(model=MODEL, messages=asking("fail 503"), stream=stream)
    assert error.value.status_code == 503


async def test_an_error_in_the_middle_reaches_the_caller_as_one(house, client):
    stream = await client.chat.completions.create(model=MODEL, messages=asking("break 2"), stream=True)
    words = [(await anext(stream)).choices[0].delta.content for _ in range(2)]
    with pytest.raises(openai.APIError) as error:
        await anext(stream)
    assert words == ["w0 ", "w1 "]
    assert error.value.code == "worker_gone"
    assert house.count("failed_streams_total", code="worker_gone") == 1


async def test_leaving_a_stream_cancels_it_on_the_bus_within_a_second(house, client):
    stream = await client.chat.completions.create(model=MODEL, messages=asking("forever"), stream=True)
    async for _ in stream:
        break
    await stream.close()
    async with asyncio.timeout(1):
        await house.fleet.cancelled.wait()
    assert house.fleet.cancels[0].id == house.fleet.headers[0].request_id
    assert house.gateway.streams.open == 0


async def test_leaving_a_request_in_one_piece_cancels_it_within_a_second(house, client):
    waiting = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=asking("mute")))
    await house.fleet.heard.wait()
    waiting.cancel()
    await asyncio.wait([waiting])
    async with asyncio.timeout(1):
        await house.fleet.cancelled.wait()
    assert house.fleet.cancels[0].id == house.fleet.headers[0].request_id
    assert house.count("requests_total", endpoint="chat.completions", status="499", model=MODEL) == 1


async def test_keys_decide_the_tenant_and_wrong_ones_are_refused(build):
    config = Config()
    config.gateway.keys = {sha256(b"sk-acme").hexdigest(): "acme", sha256(b"sk-beta").hexdigest(): "beta"}
    house = await build(config)
    for key, tenant in (("sk-acme", "acme"), ("sk-beta", "beta")):
        async with openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key=key, max_retries=0) as client:
            await client.chat.completions.create(model=MODEL, messages=asking("say 1"))
        assert house.fleet.requests[-1].subject == f"quartet.v1.gateway.{tenant}.chat"
        assert house.fleet.requests[-1].reply.startswith(f"_INBOX.{tenant}.")
    async with openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key="sk-nobody", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as error:
            await client.chat.completions.create(model=MODEL, messages=asking("say 1"))
        assert error.value.code == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
    assert len(house.fleet.requests) == 2
