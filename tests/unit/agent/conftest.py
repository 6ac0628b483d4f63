"""A stage for whole agents: a memory bus under virtual time; router, coordinator and client are played by hand."""

import json
import random
from dataclasses import dataclass, field

import msgspec
import pytest

from quartet_agent.beats.virtual import VirtualBeats
from quartet_agent.kv.memory import MemoryMover, MemoryNetwork
from quartet_agent.service import AgentService
from quartet_bus import frames as wire_frames
from quartet_bus import subjects
from quartet_bus.config.schema import AgentSection, Config, EngineSection, ModelSection
from quartet_bus.loop import run_virtual
from quartet_bus.memory import MemoryBroker, MemoryBus
from quartet_bus.messages import (
    Cancel,
    ControlReply,
    ControlRequest,
    KvCommand,
    KvReply,
    KvVerb,
    NodeInventory,
    NodeTelemetry,
    Phase,
    Prefill,
    RequestEvent,
    Role,
    Run,
    Split,
    StreamId,
    TransferReport,
)
from quartet_core.heartbeat import Beat

MODEL = "chat"
SPEC = "llama-3.1-8b"
KV_BYTES_PER_TOKEN = 131_072


def agent_config(node: str, *engines: EngineSection, max_running: int = 4096) -> Config:
    return Config(
        models={MODEL: ModelSection(SPEC, max_tokens=64)},
        agent=AgentSection(node=node, engines=engines or (EngineSection("simulated", MODEL, "H100_SXM5"),),
                           max_running=max_running),
    )  # fmt: skip


def chat_body(text: str = "hello", *, max_tokens: int | None = 8, stream: bool = True, **fields) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "stream": stream, **fields}
    return json.dumps(body if max_tokens is None else body | {"max_tokens": max_tokens}).encode()


@dataclass
class Heard:
    """All that was said on the bus, in order."""

    frames: list[wire_frames.AnyFrame] = field(default_factory=list)
    events: list[RequestEvent] = field(default_factory=list)
    inventories: list[NodeInventory] = field(default_factory=list)
    progress: list[TransferReport] = field(default_factory=list)
    affinity: list = field(default_factory=list)
    telemetry: list[NodeTelemetry] = field(default_factory=list)
    beats: list[Beat] = field(default_factory=list)

    def phases(self, stream_id: str = "r") -> list[str]:
        return [event.phase.value for event in self.events if event.stream.id == stream_id]

    def last(self, phase: Phase) -> RequestEvent:
        return [event for event in self.events if event.phase is phase][-1]

    def kinds(self) -> list[str]:
        return [type(frame).__name__ for frame in self.frames]

    def text(self) -> str:
        chunks = [json.loads(bytes(frame.data)) for frame in self.frames if isinstance(frame, wire_frames.Chunk)]
        return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])


class Stage:
    """Agents, and everybody they talk to."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.bus = MemoryBus(self.broker)
        self.network = MemoryNetwork()
        self.heard = Heard()
        self.agents: list[AgentService] = []

    async def open(self) -> None:
        for topic, into in (
            (subjects.request_events(), self.heard.events),
            (subjects.inventory_all(), self.heard.inventories),
            (subjects.kv_progress(), self.heard.progress),
            (subjects.affinity_all(), self.heard.affinity),
            (subjects.telemetry_all(), self.heard.telemetry),
        ):
            decode = msgspec.msgpack.Decoder(topic.kind).decode
            await self.bus.subscribe(topic.subject, lambda m, into=into, decode=decode: into.append(decode(m.data)))
        await self.bus.subscribe("_INBOX.t.>", lambda m: self.heard.frames.append(wire_frames.decode(m.data)))

    async def agent(self, config: Config, *, mover=None, beat_s: float = 0.005, real_readings=None) -> AgentService:
        node = config.agent.node
        agent = AgentService(
            MemoryBus(self.broker),
            config,
            instance=node,
            random=random.Random(node),
            beats=VirtualBeats(self.heard.beats.append, beat_s),
            mover=mover or MemoryMover(self.network, node),
            real_readings=real_readings,
        )
        await agent.start()
        self.agents.append(agent)
        return agent

    async def close(self) -> None:
        for agent in self.agents:
            await agent.stop()
            failures = [
                line for line in agent.metrics.exposition().decode().splitlines() if "agent_failures_total{" in line
            ]
            assert failures == [], "a handler, timer or task of the agent raised"
            assert (len(agent.arrivals), len(agent.departures), agent.streams.running) == (0, 0, 0)
        assert self.broker.handler_errors == 0

    def publish(self, topic, message) -> None:
        self.bus.publish(topic.subject, msgspec.msgpack.encode(message))

    def run(self, agent: AgentService, body: bytes, *, id: str = "r", attempt: int = 1, try_: int = 1, worker: int = 0,
            incarnation: int | None = None, split: Split | None = None, **fields) -> Run:  # fmt: skip
        hosted = list(agent.workers.values())[worker]
        dispatch = Run(
            stream=StreamId(id, attempt, try_), tenant="t", model=MODEL, worker=hosted.id,
            incarnation=hosted.incarnation if incarnation is None else incarnation,
            inbox="_INBOX.t.x", body=body, router="router", prompt_tokens=10, split=split, predicted_ttft_ms=12.5,
        )  # fmt: skip
        for name, value in fields.items():
            setattr(dispatch, name, value)
        self.publish(subjects.worker_run(hosted.id), dispatch)
        return dispatch

    def prefill(self, agent: AgentService, body: bytes, split: Split, *, id: str = "r", worker: int = 0) -> None:
        hosted = list(agent.workers.values())[worker]
        self.publish(
            subjects.worker_prefill(hosted.id),
            Prefill(
                stream=StreamId(id), tenant="t", model=MODEL, worker=hosted.id, incarnation=hosted.incarnation,
                body=body, router="router", prompt_tokens=split.tokens, split=split,
            ),
        )  # fmt: skip

    async def kv(self, agent: AgentService, verb: KvVerb, *, transfer: str = "x", worker: int = 0, term: int = 1,
                 coordinator: str = "c", **fields) -> KvReply:  # fmt: skip
        hosted = list(agent.workers.values())[worker]
        command = KvCommand(
            verb, transfer, term, coordinator, hosted.id, hosted.incarnation, StreamId("r"),
            **({"lease_ms": 5000.0} | fields),
        )  # fmt: skip
        answer = await self.bus.request(
            subjects.kv_command(agent.instance).subject, msgspec.msgpack.encode(command), timeout_s=1.0
        )
        return msgspec.msgpack.decode(answer.data, type=KvReply)

    async def control(self, agent: AgentService, verb: str, worker: str = "", argument: str = "") -> ControlReply:
        answer = await self.bus.request(
            subjects.control("agent", agent.instance, verb).subject,
            msgspec.msgpack.encode(ControlRequest(worker, argument)),
            timeout_s=1.0,
        )
        return msgspec.msgpack.decode(answer.data, type=ControlReply)

    def cancel(self, id: str = "r", attempt: int = 0, try_: int = 0, tenant: str = "t") -> None:
        self.publish(subjects.cancel(tenant), Cancel(id, attempt, try_))

    def split_of(self, agent: AgentService, tokens: int, transfer: str = "x") -> Split:
        hosted = next(iter(agent.workers.values()))
        return Split(transfer, hosted.id, hosted.incarnation, tokens)


@pytest.fixture
def on_stage():
    """Runs ``play(stage)`` under virtual time, and stops every agent afterwards."""

    def perform(play):
        async def whole():
            stage = Stage()
            await stage.open()
            try:
                return await play(stage)
            finally:
                await stage.close()

        return run_virtual(whole())

    return perform


@pytest.fixture
def config_of():
    return agent_config


@pytest.fixture
def body_of():
    return chat_body


@pytest.fixture
def engine_of():
    def make(hardware: str = "H100_SXM5", **fields) -> EngineSection:
        return EngineSection("simulated", MODEL, hardware, **fields)

    return make


@pytest.fixture
def roles():
    return Role
