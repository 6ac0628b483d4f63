"""Web pages of other origins, and embeddings, over HTTP."""

import json
from collections.abc import AsyncIterator

import aiohttp
import openai
import pytest

from quartet_bus.config.schema import Config

CHAT = "/v1/chat/completions"
PAGE = "https://app.example"
ASKS = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


def cors(reply: aiohttp.ClientResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in reply.headers.items() if name.lower().startswith("access-control")}


@pytest.fixture
async def allowing(build) -> AsyncIterator[aiohttp.ClientSession]:
    config = Config()
    config.service.stop_timeout_ms = 500
    config.gateway.cors_origins = (PAGE,)
    house = await build(config)
    async with aiohttp.ClientSession(house.url) as http:
        yield http


async def test_by_default_no_page_of_another_origin_may_call(house):
    async with aiohttp.ClientSession(house.url) as http:
        reply = await http.options(CHAT, headers=ASKS)
        assert (reply.status, cors(reply), "Vary" in reply.headers) == (405, {}, False)
        reply = await http.get("/v1/models", headers={"Origin": PAGE})
        assert (reply.status, cors(reply)) == (200, {})


async def test_a_page_of_an_allowed_origin_may_ask_and_read_answers_streams_and_errors(allowing):
    asked = await allowing.options(CHAT, headers=ASKS)
    assert asked.status == 204
    assert asked.headers["Access-Control-Allow-Origin"] == PAGE
    assert asked.headers["Access-Control-Allow-Methods"] == "POST"
    assert "authorization" in asked.headers["Access-Control-Allow-Headers"]
    assert "Access-Control-Allow-Credentials" not in asked.headers
    for said, status in (("say 1", 200), ("fail 503", 503)):
        body = json.dumps({"model": "chat", "stream": True, "messages": [{"role": "user", "content": said}]})
        reply = await allowing.post(CHAT, data=body, headers={"Origin": PAGE})
        assert (reply.status, reply.headers["Access-Control-Allow-Origin"]) == (status, PAGE)
        assert reply.headers["Vary"] == "Origin"


async def test_a_page_of_any_other_origin_may_not(allowing):
    reply = await allowing.options(CHAT, headers={**ASKS, "Origin": "https://evil.example"})
    assert (reply.status, cors(reply)) == (405, {})


async def test_any_origin_may_be_allowed(build):
    config = Config()
    config.gateway.cors_origins = ("*",)
    house = await build(config)
    async with aiohttp.ClientSession(house.url) as http:
        reply = await http.get("/v1/models", headers={"Origin": "https://anywhere.example"})
        assert reply.headers["Access-Control-Allow-Origin"] == "*"


async def test_embeddings_are_passed_through(house):
    async with openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key="x", max_retries=0) as client:
        answer = await client.embeddings.create(model="chat", input=["one", "two"], encoding_format="float")
        assert answer.data[0].embedding == [0.5, -0.5]
        assert json.loads(house.fleet.requests[0].data)["input"] == ["one", "two"]
        with pytest.raises(openai.BadRequestError) as error:
            await client.embeddings.create(model="chat", input=[])
        assert error.value.param == "input"
        with pytest.raises(openai.BadRequestError) as error:
            await client.post("/embeddings", body={"model": "chat", "prompt": "x"}, cast_to=object)
        assert error.value.param == "input"
