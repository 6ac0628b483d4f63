"""The official ``openai`` client and ``curl`` against a whole fleet of processes, with keys and two gateways."""

import asyncio
import base64
import json
import shutil
import struct
import subprocess
from collections.abc import AsyncIterator, Iterator
from hashlib import sha256

import msgspec
import openai
import pytest
from e2e.up import Up

from quartet_bus import subjects
from quartet_bus.config.schema import NatsSection
from quartet_bus.messages import Phase, RequestEvent, Role
from quartet_bus.nats_bus import NatsBus, connect

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

KEY = "sk-e2e"
MODEL = "llama-8b"
ASK = [{"role": "user", "content": "Tell me something"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    directory = tmp_path_factory.mktemp("openai")
    config = directory / "keys.toml"
    config.write_text(f'[gateway.keys]\n{sha256(KEY.encode()).hexdigest()} = "acme"\n')
    running = Up(directory / "run", "--gateways", "2", "--config", str(config))
    yield running
    if running.process.poll() is None:
        running.stop()


@pytest.fixture
def sync(up: Up) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=up.address("gateway"), api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
async def client(up: Up) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=up.address("gateway"), api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
async def bus(up: Up) -> AsyncIterator[NatsBus]:
    bus = await connect(NatsSection(url=up.address("NATS")), name="test")
    yield bus
    await bus.close()


def test_the_sync_client_gets_chats_and_completions_whole_and_streamed(sync: openai.OpenAI):
    whole = sync.chat.completions.create(model=MODEL, messages=ASK, max_tokens=7)
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 7)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 7
    streamed = list(sync.chat.completions.create(model=MODEL, messages=ASK, max_tokens=7, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == whole.choices[0].message.content
    completion = sync.completions.create(model=MODEL, prompt="Once", max_tokens=5)
    pieces = [chunk.choices[0].text for chunk in sync.completions.create(
        model=MODEL, prompt="Once", max_tokens=5, stream=True
    )]  # fmt: skip
    assert "".join(pieces) == completion.choices[0].text


async def test_many_async_streams_at_once_are_each_whole_and_say_their_usage(client: openai.AsyncOpenAI):
    async def tokens(count: int) -> tuple[int, int]:
        stream = await client.chat.completions.create(
            model=MODEL, messages=ASK, max_tokens=count, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        said = sum(bool(chunk.choices and chunk.choices[0].delta.content) for chunk in chunks)
        return said, chunks[-1].usage.completion_tokens

    assert await asyncio.gather(*(tokens(count) for count in range(1, 33))) == [(n, n) for n in range(1, 33)]


async def test_leaving_mid_stream_ends_the_work_on_the_engine_within_a_second(client, bus):
    ended: asyncio.Queue[RequestEvent] = asyncio.Queue()
    decode = msgspec.msgpack.Decoder(RequestEvent).decode
    await bus.subscribe(subjects.request_event(Phase.END).subject, lambda told: ended.put_nowait(decode(told.data)))
    stream = await client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=4000, stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    async with asyncio.timeout(2):  # a second, and what a machine that runs thirty processes adds
        event = await ended.get()
        while event.role is Role.PREFILL or event.stream.id != stream.response.headers["x-request-id"]:
            event = await ended.get()
    assert event.status == "cancelled"
    assert event.output_tokens < 1000


def test_a_wrong_key_a_wrong_model_and_too_long_a_prompt_are_the_errors_that_the_client_knows(up: Up, sync):
    stranger = openai.OpenAI(base_url=up.address("gateway"), api_key="sk-nobody", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError) as unknown:
        stranger.chat.completions.create(model=MODEL, messages=ASK)
    assert unknown.value.code == "invalid_api_key"
    with pytest.raises(openai.NotFoundError) as missing:
        sync.chat.completions.create(model="gpt-9", messages=ASK)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as long:
            sync.completions.create(model=MODEL, prompt="word" * 140_000, stream=stream)
        assert long.value.code == "context_length_exceeded"


def test_tools_travel_both_ways_as_they_are(sync: openai.OpenAI):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "7 degrees"},
    ]
    answer = sync.chat.completions.create(
        model=MODEL, messages=messages, tools=[WEATHER], tool_choice="auto", max_tokens=3
    )
    assert answer.usage.completion_tokens == 3


def test_what_the_engine_refuses_comes_back_as_it_says_it(sync: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as refused:
        sync.chat.completions.create(model=MODEL, messages=ASK, n=2)
    assert refused.value.param == "n"


def test_embeddings_come_from_workers_that_offer_them_and_from_no_others(sync: openai.OpenAI):
    plain = sync.embeddings.create(model=MODEL, input=["one", "two"], encoding_format="float", dimensions=8)
    assert [len(each.embedding) for each in plain.data] == [8, 8]
    packed = sync.embeddings.with_raw_response.create(model=MODEL, input="two", encoding_format="base64", dimensions=8)
    (vector,) = [each["embedding"] for each in json.loads(packed.content)["data"]]
    assert list(struct.unpack("<8f", base64.b64decode(vector))) == pytest.approx(plain.data[1].embedding)
    with pytest.raises(openai.BadRequestError) as refused:
        sync.embeddings.create(model="llama-70b", input="x")
    assert refused.value.code == "embeddings_not_offered"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_streams_until_done(up: Up):
    body = json.dumps({"model": MODEL, "messages": ASK, "max_tokens": 4, "stream": True})
    command = ["curl", "-sSN", "-D", "-", f"{up.address('gateway')}/chat/completions", "-d", body]
    done = subprocess.run([*command, "-H", f"Authorization: Bearer {KEY}"], capture_output=True, timeout=60, check=True)
    assert done.stdout.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\nx-request-id: req-" in done.stdout
    assert done.stdout.endswith(b"data: [DONE]\n\n")
    refused = subprocess.run(command, capture_output=True, timeout=60, check=True)
    assert refused.stdout.startswith(b"HTTP/1.1 401 ")
    assert json.loads(refused.stdout.partition(b"\r\n\r\n")[2])["error"]["code"] == "missing_api_key"
