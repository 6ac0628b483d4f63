"""A gateway with its real HTTP door, and behind it a router and a worker in one that speak the real protocol."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
import pytest

from quartet_bus import subjects
from quartet_bus.author import RouterFrames, StreamAuthor
from quartet_bus.bus import Bus, Message
from quartet_bus.config.schema import Config, NatsSection
from quartet_bus.headers import RequestHeaders, parse_headers
from quartet_bus.memory import MemoryBroker, MemoryBus
from quartet_bus.messages import Cancel, KvLayout, NodeInventory, StreamId, WorkerInfo
from quartet_bus.nats_bus import NatsBus
from quartet_bus.server import NatsServer
from quartet_core.openai import Refused
from quartet_gateway.service import GatewayService
from quartet_gateway.site import http_site

MODEL = "chat"
ADAPTER = "chat-lora"


def worker(model: str = MODEL) -> WorkerInfo:
    return WorkerInfo(
        id="n1-0",
        ordinal=0,
        incarnation=1,
        hardware="H100_SXM5",
        model=model,
        precision="fp8",
        tp=1,
        gpus=(0,),
        kv_tokens=1 << 17,
        max_context=8192,
        max_batch=256,
        chunk_tokens=2048,
        layout=KvLayout(16, 1000, "fp8"),
        engine="simulated",
        adapters=(ADAPTER,),
    )


class Fleet:
    """Hears what gateways publish. What it answers is said by the prompt itself:

    ``say N`` words; ``forever`` words until cancelled, or until ``finish`` is set; ``flood N`` words of N bytes until
    cancelled; ``mute`` accepts and says nothing but that it is alive; ``fail STATUS`` before the first chunk;
    ``break N`` an error after N words; ``call`` a tool call in two pieces and the usage; ``twice`` two objects;
    ``odd`` a chunk of several lines.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.requests: list[Message] = []
        self.headers: list[RequestHeaders] = []
        self.cancels: list[Cancel] = []
        self.heard = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.finish = asyncio.Event()

    async def start(self) -> None:
        await self._bus.subscribe(subjects.gateway_all().subject, self._on_request, queue="router")
        await self._bus.subscribe(subjects.cancel_all().subject, self._on_cancel)
        await self._bus.subscribe("quartet.v1.ctl.agent._all.inventory", lambda _: self.announce())

    async def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    def announce(self) -> None:
        inventory = NodeInventory("n1", 1, 1, (worker(),))
        self._bus.publish(subjects.inventory("n1").subject, msgspec.msgpack.encode(inventory))

    def _on_request(self, message: Message) -> None:
        headers = parse_headers(message.headers, trusted=True)
        self.requests.append(message)
        self.headers.append(headers)
        self.heard.set()
        self._tasks[headers.request_id] = asyncio.create_task(self._answer(message, headers))

    def _on_cancel(self, message: Message) -> None:
        cancel = msgspec.msgpack.decode(message.data, type=Cancel)
        self.cancels.append(cancel)
        self.cancelled.set()
        if cancel.id in self._tasks:
            self._tasks[cancel.id].cancel()

    async def _answer(self, message: Message, headers: RequestHeaders) -> None:
        body = json.loads(message.data)
        said = body["messages"][-1]["content"] if "messages" in body else body.get("prompt", "say 1")
        words = said.split()
        verb, count = words[0], int(words[1]) if words[1:] else 0
        stream = StreamId(headers.request_id, headers.attempt, 1)
        if verb == "fail":
            refused = Refused(count, "As you wish.", kind="server_error", code="wished", retry_after_s=2.5)
            RouterFrames(self._bus, message.reply, stream, asyncio.get_running_loop()).error(refused)
            return
        author = StreamAuthor(self._bus, message.reply, stream, asyncio.get_running_loop())
        try:
            author.accepted("n1-0")
            if verb == "mute":
                await asyncio.Event().wait()
            if verb == "twice":
                author.chunk(whole(body, "a"))
                author.chunk(whole(body, "b"))
            elif verb == "odd":
                author.chunk(b'{\n "odd": 1\n}')
            elif verb == "call":
                for name, arguments in (("f", '{"n":'), (None, "0}")):
                    author.chunk(tool_call(body, name, arguments))
                author.chunk(usage_of(body))
            elif not body.get("stream"):
                author.chunk(whole(body, " ".join(f"w{n}" for n in range(count))))
            elif verb == "say":
                for number in range(count):
                    author.chunk(chunk(body, f"w{number} "))
                    await asyncio.sleep(0)
            elif verb == "break":
                for number in range(count):
                    author.chunk(chunk(body, f"w{number} "))
                author.error(Refused(502, "The worker is gone.", kind="server_error", code="worker_gone"))
            else:
                while not self.finish.is_set():
                    author.chunk(chunk(body, "w" * (count or 1)))
                    await asyncio.sleep(0 if count else 0.01)
            author.end(prompt_tokens=3, output_tokens=count)
        finally:
            author.close()


def chunk(body: dict[str, Any], text: str) -> bytes:
    """One streamed object of either endpoint, spaced oddly: whoever parsed it again would change its bytes."""
    if "messages" in body:
        choice = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}
        kind = "chat.completion.chunk"
    else:
        choice = {"index": 0, "text": text, "finish_reason": None, "logprobs": None}
        kind = "text_completion"
    answer = {"id": "a", "object": kind, "created": 1, "model": body["model"], "choices": [choice]}
    return json.dumps(answer, separators=(" ,", " : ")).encode()


def tool_call(body: dict[str, Any], name: str | None, arguments: str) -> bytes:
    """A streamed piece of a tool call."""
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    choice = {"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}
    answer = {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": body["model"], "choices": [choice]}
    return json.dumps(answer).encode()


def usage_of(body: dict[str, Any]) -> bytes:
    """The chunk behind the last one, where usage was asked for."""
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    answer = {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": body["model"], "choices": []}
    return json.dumps({**answer, "usage": usage}).encode()


def whole(body: dict[str, Any], text: str) -> bytes:
    """One answer of any endpoint."""
    if "input" in body:
        data = [{"object": "embedding", "index": 0, "embedding": [0.5, -0.5]}]
        return json.dumps({"object": "list", "data": data, "model": body["model"], "usage": {}}).encode()
    if "messages" in body:
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        kind = "chat.completion"
    else:
        choice = {"index": 0, "text": text, "finish_reason": "stop", "logprobs": None}
        kind = "text_completion"
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    answer = {"id": "a", "object": kind, "created": 1, "model": body["model"], "choices": [choice], "usage": usage}
    return json.dumps(answer).encode()


@pytest.fixture
def make_fleet() -> Callable[[Bus], Fleet]:
    """``make_fleet(bus)``: a fleet for tests that start their gateway themselves."""
    return Fleet


class House:
    """One gateway, its HTTP address, the fleet behind it, and how to stop the gateway."""

    def __init__(self, gateway: GatewayService, fleet: Fleet, site: AbstractAsyncContextManager[None]) -> None:
        self.gateway = gateway
        self.fleet = fleet
        self._site = site
        self._open = True

    @property
    def url(self) -> str:
        return f"http://{self.gateway.address}"

    @property
    def port(self) -> int:
        return int(self.gateway.address.rpartition(":")[2])

    def count(self, name: str, **labels: str) -> float:
        """A metric's value, 0 when it has none yet."""
        return self.gateway.metrics.registry.get_sample_value(f"quartet_gateway_{name}", labels) or 0.0

    async def stop(self) -> None:
        """Stop the HTTP door as a SIGTERM does."""
        if self._open:
            self._open = False
            await self._site.__aexit__(None, None, None)


async def wait_for(condition: Callable[[], bool], within_s: float) -> None:
    """Return when ``condition`` holds. Raises ``TimeoutError``."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in the product, which has no event for it
            await asyncio.sleep(0.005)


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool], float], Awaitable[None]]:
    """``await eventually(condition, within_s)``."""
    return wait_for


Build = Callable[..., Awaitable[House]]
NewBus = Callable[[], Awaitable[Bus]]


@pytest.fixture(params=["memory", "nats"])
async def new_bus(request, tmp_path) -> AsyncIterator[NewBus]:
    """Makes clients of one broker; every test that uses a gateway runs on both kinds."""
    async with contextlib.AsyncExitStack() as stack:
        if request.param == "memory":
            broker = MemoryBroker()

            async def make() -> Bus:
                return MemoryBus(broker)
        else:
            server = await stack.enter_async_context(NatsServer(tmp_path / "nats", jetstream=False))

            async def make() -> Bus:
                bus = NatsBus(NatsSection(url=server.url), name="test")
                await bus.open()
                stack.push_async_callback(bus.close)
                return bus

        yield make


@pytest.fixture
async def build(new_bus: NewBus) -> AsyncIterator[Build]:
    """Starts gateways, and stops what a test left running."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(config: Config, instance: str = "g1", fleet: Fleet | None = None) -> House:
            config.gateway.listen = "127.0.0.1:0"
            if fleet is None:
                fleet = Fleet(await new_bus())
                await fleet.start()
                stack.push_async_callback(fleet.stop)
            gateway = GatewayService(await new_bus(), config, instance=instance, random=random.Random(instance))
            await gateway.start()
            stack.push_async_callback(gateway.stop)
            site = http_site(gateway)
            await site.__aenter__()
            house = House(gateway, fleet, site)
            stack.push_async_callback(house.stop)
            await wait_for(lambda: gateway.not_ready() is None, 5)  # the inventory it asked for at start is here
            return house

        yield start


@pytest.fixture
async def house(build: Build) -> House:
    """A gateway without API keys, with the defaults but for what would make tests slow."""
    config = Config()
    config.service.stop_timeout_ms = 500
    return await build(config)
