"""The base of every service, on a memory bus in virtual time."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

import msgspec
import pytest

from quartet_bus import subjects
from quartet_bus.bus import Disconnected, Message, NoResponders, RequestTimeout
from quartet_bus.config.schema import Config
from quartet_bus.loop import run_virtual
from quartet_bus.memory import MemoryBroker, MemoryBus
from quartet_bus.messages import Cancel, ControlReply, ControlRequest, KvCommand, KvReply, KvVerb
from quartet_bus.service import MalformedReply, Service


class Probe(Service):
    name: ClassVar[str] = "probe"


class World:
    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.service = Probe(MemoryBus(self.broker), Config(), instance="p.1", random=random.Random(1))
        self.asker = Probe(MemoryBus(self.broker), Config(), instance="asker", random=random.Random(2))

    def metric(self, name: str, **labels: str) -> float:
        return self.service.metrics.registry.get_sample_value(f"quartet_probe_{name}", labels) or 0.0


def virtual(test: Callable[[World], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test on a virtual loop, with a started service, and stop it in the end."""

    async def whole() -> None:
        world = World()
        await world.service.start()
        await world.asker.start()
        try:
            await test(world)
        finally:
            await world.service.stop()
            await world.asker.stop()

    def run() -> None:
        run_virtual(whole())

    run.__name__ = test.__name__
    return run


def command() -> KvCommand:
    return KvCommand(KvVerb.LEASES, "t", 1, "c")


@virtual
async def test_a_message_is_heard_decoded(world: World) -> None:
    heard: list[Cancel] = []
    await world.service.hear(subjects.cancel_all(), heard.append)
    world.asker.say(subjects.cancel("acme"), Cancel("r", 1, 2))
    await asyncio.sleep(0.01)
    assert heard == [Cancel("r", 1, 2)]


@virtual
async def test_what_cannot_be_read_is_counted_and_never_reaches_the_handler(world: World) -> None:
    heard: list[Cancel] = []
    await world.service.hear(subjects.cancel_all(), heard.append)
    for data in (b"", b"\xc1", b"not msgpack", msgspec.msgpack.encode({"id": 3}), b"\xa2\xff\xfe"):
        world.asker.bus.publish("quartet.v1.cancel.acme", data)
    world.asker.say(subjects.cancel("acme"), Cancel("good"))
    await asyncio.sleep(0.01)
    assert heard == [Cancel("good")]
    assert world.metric("malformed_total", subject="quartet.v1.cancel.*") == 5


@virtual
async def test_a_handler_that_raises_is_counted_and_hears_the_next_message(world: World) -> None:
    heard: list[str] = []

    def on_cancel(cancel: Cancel) -> None:
        heard.append(cancel.id)
        raise RuntimeError("no")

    await world.service.hear(subjects.cancel_all(), on_cancel)
    for name in ("a", "b"):
        world.asker.say(subjects.cancel("acme"), Cancel(name))
    await asyncio.sleep(0.01)
    assert heard == ["a", "b"]
    assert world.metric("failures_total", where="handler") == 2


@virtual
async def test_questions_are_answered_by_plain_and_by_waiting_handlers(world: World) -> None:
    async def slowly(request: KvCommand) -> KvReply:
        await asyncio.sleep(1.0)
        return KvReply(True, request.transfer, "slow")

    await world.service.answer(subjects.kv_command("a"), lambda request: KvReply(True, request.transfer))
    await world.service.answer(subjects.kv_command("b"), slowly)
    assert await world.asker.ask(subjects.kv_command("a"), command(), KvReply, timeout_s=5.0) == KvReply(True, "t")
    assert await world.asker.ask(subjects.kv_command("b"), command(), KvReply, timeout_s=5.0) == KvReply(
        True, "t", "slow"
    )


@virtual
async def test_a_question_whose_handler_fails_or_that_cannot_be_read_is_answered_with_a_reason(world: World) -> None:
    async def fails_later(request: KvCommand) -> KvReply:
        raise ValueError("later")

    await world.service.answer(subjects.kv_command("a"), lambda request: 1 / 0)
    await world.service.answer(subjects.kv_command("b"), fails_later)
    first = await world.asker.ask(subjects.kv_command("a"), command(), KvReply, timeout_s=5.0)
    second = await world.asker.ask(subjects.kv_command("b"), command(), KvReply, timeout_s=5.0)
    assert (first.ok, first.reason) == (False, "ZeroDivisionError: division by zero")
    assert (second.ok, second.reason) == (False, "ValueError: later")
    answer = await world.asker.bus.request("quartet.v1.kv.cmd.a", b"garbage", timeout_s=5.0)
    third = msgspec.msgpack.decode(answer.data, type=KvReply)
    assert not third.ok
    assert third.reason.startswith("malformed: ")


@virtual
async def test_a_question_open_when_the_service_stops_is_told_so(world: World) -> None:
    async def never(request: KvCommand) -> KvReply:
        await asyncio.sleep(3600)
        return KvReply(True)

    await world.service.answer(subjects.kv_command("a"), never)
    asking = asyncio.ensure_future(world.asker.ask(subjects.kv_command("a"), command(), KvReply, timeout_s=60.0))
    await asyncio.sleep(0.1)
    await world.service.stop()
    reply = await asking
    assert (reply.ok, reply.reason) == (False, "stopping")


@virtual
async def test_a_reply_of_another_type_is_an_error_that_says_its_reason(world: World) -> None:
    await world.service.answer(subjects.kv_command("a"), lambda request: KvReply(True, "t", "what"))
    with pytest.raises(MalformedReply) as caught:
        await world.asker.ask(subjects.kv_command("a"), command(), Cancel, timeout_s=5.0)
    assert caught.value.reason == "what"


@virtual
async def test_verbs_are_answered_for_one_instance_and_for_all_with_who_answered(world: World) -> None:
    await world.service.controls({"status": lambda request: ControlReply(True, payload=request.argument.encode())})
    request = ControlRequest(argument="{}")
    for whom in ("p.1", "_all"):
        reply = await world.asker.ask(subjects.control("probe", whom, "status"), request, ControlReply, timeout_s=1.0)
        assert reply == ControlReply(True, "probe", "p.1", "", b"{}")
    bare = await world.asker.bus.request("quartet.v1.ctl.probe._all.status", b"", timeout_s=1.0)
    assert msgspec.msgpack.decode(bare.data, type=ControlReply).ok


@virtual
async def test_an_unknown_verb_is_told_which_there_are(world: World) -> None:
    await world.service.controls({"status": lambda r: ControlReply(True), "drain": lambda r: ControlReply(True)})
    topic = subjects.control("probe", "p.1", "explode")
    reply = await world.asker.ask(topic, ControlRequest(), ControlReply, timeout_s=1.0)
    assert (reply.ok, reply.service, reply.instance) == (False, "probe", "p.1")
    assert reply.reason == "unknown verb 'explode'; probe knows drain, status"


@virtual
async def test_a_verb_that_fails_or_is_malformed_says_so_and_who(world: World) -> None:
    await world.service.controls({"bad": lambda request: 1 / 0})
    reply = await world.asker.ask(
        subjects.control("probe", "p.1", "bad"), ControlRequest(), ControlReply, timeout_s=1.0
    )
    assert (reply.ok, reply.instance, reply.reason) == (False, "p.1", "ZeroDivisionError: division by zero")
    answer = await world.asker.bus.request("quartet.v1.ctl.probe._all.bad", b"\xc1", timeout_s=1.0)
    assert msgspec.msgpack.decode(answer.data, type=ControlReply).reason.startswith("malformed")


@pytest.mark.parametrize("tail", ["", ".probe", ".probe.p%2E1"])
def test_discovery_answers_as_the_nats_services_api_does(tail: str) -> None:
    @virtual
    async def check(world: World) -> None:
        await world.asker.stop()
        await world.service.hear(subjects.cancel_all(), lambda cancel: None, queue="probes")
        world.asker.say(subjects.cancel("acme"), Cancel("r"))
        world.asker.bus.publish("quartet.v1.cancel.acme", b"\xc1")
        await asyncio.sleep(0.01)
        replies = {}
        for verb in ("PING", "INFO", "STATS"):
            answer = await world.asker.bus.request(f"$SRV.{verb}{tail}", b"", timeout_s=1.0)
            replies[verb] = msgspec.json.decode(answer.data)
        for verb, reply in replies.items():
            assert reply["type"] == f"io.nats.micro.v1.{verb.lower()}_response"
            assert (reply["name"], reply["id"], reply["metadata"]) == ("probe", "p.1", {})
        endpoint = {"name": "quartet_v1_cancel__", "subject": "quartet.v1.cancel.*", "queue_group": "probes"}
        assert replies["INFO"]["endpoints"] == [endpoint | {"metadata": {}}]
        stats = replies["STATS"]["endpoints"][0]
        assert {key: stats[key] for key in endpoint} == endpoint
        assert (stats["num_requests"], stats["num_errors"]) == (2, 1)

    check()


@virtual
async def test_a_tick_that_is_late_shifts_no_later_one_and_missed_ones_are_skipped(world: World) -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()
    at: list[float] = []

    def tick() -> None:
        at.append(round(loop.time() - started, 6))
        if len(at) == 2:
            loop._now_s += 0.25  # type: ignore[attr-defined]  # this tick took a quarter of a second

    world.service.every(0.1, tick)
    await asyncio.sleep(0.75)
    assert at == [0.1, 0.2, 0.45, 0.5, 0.6, 0.7]


@virtual
async def test_a_tick_that_raises_is_counted_and_goes_on(world: World) -> None:
    calls: list[int] = []

    def tick() -> None:
        calls.append(1)
        raise RuntimeError("no")

    world.service.every(1.0, tick)
    await asyncio.sleep(3.5)
    assert len(calls) == 3
    assert world.metric("failures_total", where="timer") == 3


@virtual
async def test_a_task_that_raises_is_counted(world: World) -> None:
    async def fails() -> None:
        raise RuntimeError("no")

    world.service.spawn(fails(), "failing")
    await asyncio.sleep(0.01)
    assert world.metric("failures_total", where="task") == 1


@virtual
async def test_stopping_ends_timers_subscriptions_and_tasks_and_may_be_repeated(world: World) -> None:
    happened: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            happened.append("task ended")

    await world.service.hear(subjects.cancel_all(), lambda cancel: happened.append("heard"))
    world.service.every(1.0, lambda: happened.append("tick"))
    world.service.later(1.0, happened.append, "later")
    world.service.spawn(forever())
    await asyncio.sleep(0.1)
    await world.service.stop()
    await world.service.stop()
    world.asker.say(subjects.cancel("acme"), Cancel("r"))
    await asyncio.sleep(10.0)
    assert happened == ["task ended"]
    with pytest.raises(NoResponders):
        await world.asker.bus.request("$SRV.PING.probe.p%2E1", b"", timeout_s=1.0)


@virtual
async def test_what_cannot_be_said_because_the_broker_is_away_is_counted(world: World) -> None:
    await world.service.bus.close()
    world.service.say(subjects.cancel("acme"), Cancel("r"))
    assert world.metric("unsaid_total") == 1


@virtual
async def test_asking_somebody_silent_times_out(world: World) -> None:
    await world.service.hear_raw(subjects.Topic("quartet.v1.kv.cmd.a", bytes), lambda message: None)
    with pytest.raises(RequestTimeout):
        await world.asker.ask(subjects.kv_command("a"), command(), KvReply, timeout_s=3.0)


@virtual
async def test_raw_hearing_gives_headers_and_reply_and_bytes_topics_pass_undecoded(world: World) -> None:
    raw: list[Message] = []
    plain: list[bytes] = []
    await world.service.hear_raw(subjects.infer_all(), raw.append, queue="router")
    await world.service.hear(subjects.infer_all(), plain.append)
    world.asker.bus.publish("quartet.v1.infer.acme.chat", b"{}", headers={"A": "b"}, reply="_INBOX.acme.1")
    await asyncio.sleep(0.01)
    assert raw == [Message("quartet.v1.infer.acme.chat", b"{}", {"A": "b"}, "_INBOX.acme.1")]
    assert plain == [b"{}"]


@virtual
async def test_the_clock_is_the_loops_own(world: World) -> None:
    before = world.service.now_ns()
    await asyncio.sleep(12.5)
    assert world.service.now_ns() - before == 12_500_000_000


def test_a_service_that_was_not_started_has_no_clock() -> None:
    service = Probe(MemoryBus(MemoryBroker()), Config(), instance="x", random=random.Random(1))
    with pytest.raises(RuntimeError, match="start"):
        service.now_ns()


@virtual
async def test_a_closed_bus_cannot_be_asked(world: World) -> None:
    await world.asker.bus.close()
    with pytest.raises(Disconnected):
        await world.asker.ask(subjects.kv_command("a"), command(), KvReply, timeout_s=3.0)
