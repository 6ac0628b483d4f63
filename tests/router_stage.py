"""A router on a bus, what it says, and the means to play agents, collectors and clients, under virtual time."""

import asyncio
import random

import msgspec

from quartet_bus import frames, subjects
from quartet_bus.config.schema import Config
from quartet_bus.loop import run_virtual
from quartet_bus.memory import MemoryBroker, MemoryBus
from quartet_bus.messages import (
    Cancel,
    FleetDelta,
    KvLayout,
    NodeInventory,
    Prefill,
    RequestEvent,
    Role,
    Run,
    WorkerInfo,
    WorkerState,
)
from quartet_core.verdict import Verdict
from quartet_core.word import batch_level, pack, queue_level
from quartet_router.service import RouterService

encode = msgspec.msgpack.encode
INBOX = "_INBOX.acme.x.1"
BODY = b'{"prompt":"hello","max_tokens":8,"stream":true}'


def config(**router):
    return msgspec.convert(
        {
            "models": {
                "m": {"spec": "llama-3.1-8b"},
                "big": {"spec": "llama-3.1-70b", "tpot_ms": 100.0},
                "cold": {"spec": "qwen3-32b"},
            },
            "router": router,
        },
        Config,
    )


def worker(name, hardware="H100_SXM5", model="m", *, incarnation=1, tp=1, **more):
    given = dict(
        id=name, ordinal=int(name.rsplit("-", 1)[1]), incarnation=incarnation, hardware=hardware, model=model,
        precision="fp8", tp=tp, gpus=tuple(range(tp)), kv_tokens=300_000, max_context=100_000, max_batch=256,
        chunk_tokens=2048, layout=KvLayout(16, 131_072, "bf16", tp=tp), engine="simulated",
        capabilities=("export", "import", "reserve"),
    )  # fmt: skip
    return WorkerInfo(**(given | more))


def decoded(data, kind):
    """The message, or the bytes when a test sent nonsense."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError:
        return data


class Stage:
    """A router, what it says, and the means to play agents, collectors and clients."""

    def __init__(self, configured=None, *, broker=None, **router):
        self.broker = broker or MemoryBroker()
        self.bus = MemoryBus(self.broker)
        self.router = RouterService(
            MemoryBus(self.broker), configured or config(**router), instance="r0", random=random.Random(1)
        )
        self.said = []
        self.frames = []
        self.number = 0

    async def __aenter__(self):
        for topic in (
            subjects.routed(), subjects.kv_plan(), subjects.request_events(),
        ):  # fmt: skip
            await self.listen(topic)
        for verb, kind in (("run", Run), ("prefill", Prefill), ("cancel", Cancel)):
            await self.listen(subjects.Topic(f"quartet.v1.worker.*.{verb}", kind))
        await self.bus.subscribe("_INBOX.>", lambda m: self.frames.append(frames.decode(m.data)) if m.data else None)
        await self.router.start()
        return self

    async def __aexit__(self, *_):
        await self.router.stop()

    async def listen(self, topic):
        await self.bus.subscribe(topic.subject, lambda m: self.said.append(decoded(m.data, topic.kind)))

    def of(self, kind):
        return [each for each in self.said if isinstance(each, kind)]

    def say(self, topic, message):
        self.bus.publish(topic.subject, encode(message))

    async def announce(self, *workers, node="n", **more):
        self.say(subjects.inventory(node), NodeInventory(node=node, incarnation=1, epoch=1, workers=workers, **more))
        await self.settle()

    async def word(self, name, *, queue=0.0, batch=0, verdict=Verdict.UP, beat=1, accepting=True):
        self.number += 1
        word = pack(free_kv=15, queue=queue_level(queue), batch=batch_level(batch), drift=0, accepting=accepting)
        change = WorkerState(name, 1, word, beat, verdict)
        self.say(subjects.fleet_delta(), FleetDelta("c", 1, self.number, (change,)))
        await self.settle()

    async def ask(self, body=BODY, model="m", *, reply=INBOX, id="q", headers=None):
        self.bus.publish(
            subjects.infer("acme", model).subject, body, reply=reply,
            headers={"Quartet-Request-Id": id, **(headers or {})},
        )  # fmt: skip
        await self.settle()

    def event(self, phase, run, **more):
        role = more.pop("role", Role.BOTH)
        self.say(
            subjects.request_event(phase),
            RequestEvent(
                phase=phase, stream=run.stream, tenant=run.tenant, model=run.model, worker=run.worker,
                incarnation=run.incarnation, role=role, **more,
            ),
        )  # fmt: skip

    async def settle(self):
        for _ in range(12):
            await asyncio.sleep(0)


def play(script, **router):
    async def whole():
        async with Stage(**router) as stage:
            await script(stage)

    run_virtual(whole())
