"""Splits whose KV goes from engine to engine: two agents, two servers that speak vLLM's handshake, a router by hand.

What the prefill's engine keeps must come free, whatever happens between the two.
"""

import asyncio
import json
import random

import msgspec
import pytest
from wire_engine import WireEngine, until

from quartet_agent.beats.virtual import VirtualBeats
from quartet_agent.kv.memory import MemoryMover, MemoryNetwork
from quartet_agent.service import AgentService
from quartet_bus import frames, subjects
from quartet_bus.config.schema import AgentSection, Config, EngineSection, KvSection, ModelSection
from quartet_bus.memory import MemoryBroker, MemoryBus
from quartet_bus.messages import (
    Cancel,
    ControlRequest,
    Handshake,
    HandshakeVerb,
    NodeInventory,
    Phase,
    Prefill,
    RequestEvent,
    Run,
    Split,
    StreamId,
)

PROMPT = [5, 6, 7, 8] * 40
BODY = {"model": "chat", "prompt": PROMPT, "max_tokens": 6, "stream": True}


class Pair:
    """A prefill agent ``p`` and a decode agent ``d``, each with its engine, and all that they say."""

    def __init__(self, prefill, decode):
        self.engines = {"p": prefill, "d": decode}
        self.broker, self.network = MemoryBroker(), MemoryNetwork()
        self.bus = MemoryBus(self.broker)
        self.agents, self.inventories = {}, {}
        self.events, self.frames, self.words = [], [], []

    async def __aenter__(self):
        def into(kind, take):
            decode = msgspec.msgpack.Decoder(kind).decode
            return lambda message: take(decode(message.data))

        await self.bus.subscribe(subjects.request_events().subject, into(RequestEvent, self.events.append))
        await self.bus.subscribe(
            subjects.inventory_all().subject, into(NodeInventory, lambda i: self.inventories.__setitem__(i.node, i))
        )
        await self.bus.subscribe("quartet.v1.worker.*.kv", into(Handshake, self.words.append))
        await self.bus.subscribe("_INBOX.t.>", lambda message: self.frames.append(frames.decode(message.data)))
        return self

    async def start(self, *nodes, lease_ms=5000.0):
        for node in nodes or ("p", "d"):
            section = EngineSection(
                "vllm", "chat", "H100_SXM5", url=self.engines[node].url, kv_connector="NixlConnector",
                probe_interval_ms=20,
            )  # fmt: skip
            config = Config(
                models={"chat": ModelSection("llama-3.1-8b", sketch="tokens")},
                agent=AgentSection(node=node, engines=(section,)),
                kv=KvSection(lease_ms=lease_ms),
            )
            self.agents[node] = agent = AgentService(
                MemoryBus(self.broker), config, instance=node, random=random.Random(node),
                beats=VirtualBeats(lambda _: None, 0.01), mover=MemoryMover(self.network, node),
            )  # fmt: skip
            await agent.start()
        for node in nodes or ("p", "d"):
            await until(lambda node=node: node in self.inventories and self.inventories[node].workers)
        return self

    async def __aexit__(self, *_):
        for agent in self.agents.values():
            await agent.stop()
            failed = [line for line in agent.metrics.exposition().decode().splitlines() if "failures_total{" in line]
            assert failed == []
            assert agent.streams.running == 0
            assert (agent.handshakes._answers, agent.handshakes._prefills) == ({}, {})
        assert self.broker.handler_errors == 0

    def worker(self, node):
        return self.inventories[node].workers[0]

    def dispatch(self, *halves, body=None, incarnation=None, **fields):
        data = json.dumps(BODY | (body or {})).encode()
        for half in halves or ("d", "p"):
            here, there = (self.worker("p"), self.worker("d")) if half == "p" else (self.worker("d"), self.worker("p"))
            split = Split("x", there.id, there.incarnation, len(PROMPT))
            common = (StreamId("r"), "t", "chat", here.id, incarnation or here.incarnation)
            if half == "p":
                self.say(
                    subjects.worker_prefill(here.id), Prefill(*common, data, "router", len(PROMPT), split, **fields)
                )
            else:
                self.say(
                    subjects.worker_run(here.id),
                    Run(*common, "_INBOX.t.x", data, "router", len(PROMPT), split=split, **fields),
                )

    def say(self, topic, message):
        self.bus.publish(topic.subject, msgspec.msgpack.encode(message))

    def cancel(self, node):
        self.say(subjects.worker_cancel(f"{node}-0"), Cancel("r", 1, 1, "client", "t"))

    def of(self, node, phase):
        return [event for event in self.events if event.worker == f"{node}-0" and event.phase is phase]

    async def end(self, node):
        await until(lambda: self.of(node, Phase.END))
        return self.of(node, Phase.END)[0]

    def verbs(self):
        return [word.verb for word in self.words]


@pytest.fixture
async def pair():
    async with WireEngine() as prefill, WireEngine() as decode, Pair(prefill, decode) as made:
        yield made


async def test_the_answer_is_the_decodes_and_the_prefills_kv_is_fetched(pair):
    await pair.start()
    assert pair.worker("p").capabilities == ("handshake:NixlConnector",)
    pair.dispatch()
    last, first = await pair.end("d"), await pair.end("p")
    assert (first.status, last.status) == ("ok", "ok")
    assert (last.transferred_tokens, last.output_tokens) == (len(PROMPT), 6)
    assert pair.verbs() == [HandshakeVerb.PARAMETERS, HandshakeVerb.TAKEN]
    assert pair.engines["p"].kept == {}
    assert pair.engines["p"].requests[-1][2]["max_tokens"] == 1
    text = "".join(json.loads(bytes(f.data))["choices"][0]["text"] for f in pair.frames if isinstance(f, frames.Chunk))
    assert text.count(" w") == 6


async def test_parameters_for_a_half_that_is_not_there_are_refused_and_what_they_name_is_freed(pair):
    await pair.start()
    pair.dispatch("p")
    await until(lambda: HandshakeVerb.PARAMETERS in pair.verbs())
    await until(lambda: HandshakeVerb.UNWANTED in pair.verbs())
    await until(lambda: not pair.engines["p"].kept)
    assert (await pair.end("p")).reason == "refused"


async def test_a_refused_decode_half_frees_what_was_computed(pair):
    await pair.start()
    pair.dispatch(incarnation=None, body={"n": 2})  # more answers than one cannot share what is fetched once
    assert (await pair.end("d")).reason == "not_capable"
    await pair.end("p")
    await until(lambda: not pair.engines["p"].kept)
    assert pair.engines["d"].fetched
    assert not pair.of("d", Phase.FIRST_TOKEN)


async def test_a_cancel_while_the_prompt_is_computed_reaches_its_engine_and_ends_both(pair):
    await pair.start()
    pair.engines["p"].fault = "hang"
    pair.dispatch()
    await until(lambda: pair.engines["p"].running == 1)
    pair.cancel("p")
    await until(lambda: pair.engines["p"].running == 0, patience_s=1.0)
    assert (await pair.end("p")).status == "cancelled"
    end = await pair.end("d")
    assert (end.status, end.code, end.reason) == ("error", 503, "prefill_client")
    assert pair.engines["d"].requests == []


async def test_a_cancelled_decode_half_lets_nothing_be_kept(pair):
    await pair.start()
    pair.engines["p"].token_s = 0.2  # the prompt is done after the other half's end
    pair.dispatch()
    await until(lambda: pair.of("d", Phase.ACCEPTED) and pair.engines["p"].running)
    pair.cancel("d")
    assert (await pair.end("d")).status == "cancelled"
    assert (await pair.end("p")).reason == "refused"
    await until(lambda: pair.engines["d"].fetched)
    assert pair.engines["p"].kept == {}


async def test_a_cancel_after_the_parameters_were_taken_fetches_nothing_twice(pair):
    await pair.start()
    pair.engines["d"].token_s = 0.1
    pair.dispatch(body={"max_tokens": 500})
    await until(lambda: pair.of("d", Phase.FIRST_TOKEN))
    pair.cancel("p")
    pair.cancel("d")
    await until(lambda: pair.engines["d"].running == 0, patience_s=1.0)
    word = next(word for word in pair.words if word.verb is HandshakeVerb.PARAMETERS)
    body = json.dumps(BODY).encode()
    unwanted = msgspec.structs.replace(word, verb=HandshakeVerb.UNWANTED, body=body)
    pair.say(subjects.worker_kv("d-0"), unwanted)  # late, or twice: the blocks that it names are others by now
    await asyncio.sleep(0.3)
    assert len(pair.engines["d"].requests) == 1
    assert pair.engines["d"].fetched == ["r0"]


async def test_a_failed_prefill_sends_the_request_back_before_the_client_heard_of_it(pair):
    await pair.start()
    pair.engines["p"].handshake = False
    pair.dispatch()
    assert (await pair.end("p")).reason == "no_handshake"
    end = await pair.end("d")
    assert (end.reason, pair.of("d", Phase.REFUSED)[0].reason) == ("prefill_no_handshake", "prefill_no_handshake")
    assert [type(frame).__name__ for frame in pair.frames] == ["Accepted"]


async def test_what_nobody_answers_for_expires(pair):
    await pair.start(lease_ms=300.0)
    worker = pair.worker("d")
    await pair.agents["d"].stop()
    pair.inventories["d"].workers = (worker,)
    pair.dispatch("p")
    end = await pair.end("p")
    assert (end.status, end.reason) == ("error", "kv_expired")
    assert pair.verbs() == [HandshakeVerb.PARAMETERS, HandshakeVerb.UNWANTED]


async def test_a_decode_half_whose_prefill_never_speaks_gives_up_by_its_deadline(pair):
    await pair.start()
    pair.dispatch("d", deadline_ms=300)
    end = await pair.end("d")
    assert (end.status, end.code) == ("error", 504)


async def test_words_of_a_former_life_are_not_heard(pair):
    await pair.start()
    worker = pair.worker("d")
    for verb in HandshakeVerb:
        word = Handshake(
            verb, "y", StreamId("r"), "t", "chat", worker.id, worker.incarnation + 1, "p-0", 1, b"{}", b"{}"
        )
        pair.say(subjects.worker_kv(worker.id), word)
    await asyncio.sleep(0.1)
    assert len(pair.words) == len(HandshakeVerb)
    assert pair.engines["d"].requests == []


async def test_an_engine_that_dies_is_no_worker_until_its_next_life_which_is_another_one(pair):
    await pair.start("p")
    before = pair.worker("p")
    await pair.engines["p"].stop()
    await until(lambda: pair.inventories["p"].workers == ())
    pair.inventories["d"] = msgspec.structs.replace(pair.inventories["p"], workers=(before,))
    here = before
    pair.say(
        subjects.worker_run(here.id),
        Run(
            StreamId("r"), "t", "chat", here.id, here.incarnation, "_INBOX.t.x", json.dumps(BODY).encode(), "router", 5
        ),
    )
    await until(lambda: pair.of("p", Phase.REFUSED))
    assert pair.of("p", Phase.REFUSED)[0].reason == "engine_down"
    await pair.engines["p"].start()
    await until(lambda: pair.inventories["p"].workers)
    after = pair.worker("p")
    assert after.incarnation != before.incarnation
    assert pair.inventories["p"].epoch > 1


async def test_the_doctor_tells_of_every_engine(pair):
    await pair.start()
    answer = await pair.bus.request(
        subjects.control("agent", "p", "doctor").subject, msgspec.msgpack.encode(ControlRequest()), timeout_s=1.0
    )
    told = json.loads(msgspec.msgpack.decode(answer.data)["payload"])
    assert (told["node"], told["rows"], told["hashes"]) == ("p", 1 << 17, 4)
    [worker] = told["workers"]
    assert (worker["sketch"], worker["engine"]["affinity"], worker["engine"]["up"]) == ("tokens", "events", True)
    assert worker["engine"]["findings"] == []
