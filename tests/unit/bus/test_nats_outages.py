"""What the NATS bus does when the broker is not there, comes back, or lacks something."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from contract.bus_contract import until

from quartet_bus import nats_link
from quartet_bus.bus import BusError, Disconnected, LogSpec, Message, Unavailable
from quartet_bus.config.schema import NatsSection
from quartet_bus.nats_bus import connect
from quartet_bus.nats_link import CredentialsRefused
from quartet_bus.server import NatsServer

USERS = """
authorization {
  users = [
    { user: router, password: right, permissions: {
        publish: ["work.>", "_INBOX.*.>"], subscribe: ["work.>", "_INBOX.router.>"] } }
  ]
}
"""


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with NatsServer(tmp_path) as server:
        yield server


async def test_a_killed_broker_that_comes_back_finds_everything_as_it_was(server: NatsServer) -> None:
    section = NatsSection(url=server.url)
    here, there = await connect(section), await connect(section)
    heard: list[bytes] = []
    await there.subscribe("work.*", lambda message: heard.append(message.data), queue="q")
    await there.subscribe("echo", lambda message: there.publish(message.reply, message.data))
    await server.kill()
    await until(lambda: not here.connected and not there.connected)
    await server.start()
    await until(lambda: there.connected and here.connected)
    await there.flush()
    here.publish("work.1", b"after")
    await until(lambda: heard == [b"after"])
    assert (await here.request("echo", b"x", timeout_s=5.0)).data == b"x"
    assert here.counts.reconnects == there.counts.reconnects == 1
    await here.close()
    await there.close()


async def test_a_bus_that_is_closed_while_its_broker_ends_does_end(server: NatsServer) -> None:
    buses = [await connect(NatsSection(url=server.url)) for _ in range(12)]
    await server.kill()
    for number, bus in enumerate(buses):  # from before they notice to after they began to look for it again
        bus.publish("work", b"unsent")
        await asyncio.sleep(0.01 * number)
        async with asyncio.timeout(10.0):
            await bus.close()


async def test_a_lost_cancel_does_not_keep_a_closed_bus_from_ending(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connect(NatsSection(url=server.url))
    looking = asyncio.Event()

    async def deaf(*_: object) -> None:
        looking.set()
        try:
            await asyncio.sleep(60.0)
        except asyncio.CancelledError:
            raise nats_link.ConnectFailed("nats-py heard the cancel, and kept it to itself") from None

    monkeypatch.setattr(nats_link, "connect", deaf)
    await server.kill()
    await looking.wait()
    async with asyncio.timeout(5.0):
        await bus.close()


async def test_messages_published_during_an_outage_arrive_in_order_and_before_later_ones(server: NatsServer) -> None:
    bus = await connect(NatsSection(url=server.url))
    heard: list[bytes] = []
    await bus.subscribe("work", lambda message: heard.append(message.data))
    await server.kill()
    await until(lambda: not bus.connected)
    for number in range(100):
        bus.publish("work", b"%d" % number)
    await server.start()
    await until(lambda: bus.connected)
    bus.publish("work", b"later")
    await until(lambda: len(heard) == 101)
    assert heard == [*(b"%d" % number for number in range(100)), b"later"]
    await bus.close()


async def test_what_waits_during_an_outage_is_bounded(server: NatsServer) -> None:
    bus = await connect(NatsSection(url=server.url, outgoing_bytes=100_000))
    await server.kill()
    await until(lambda: not bus.connected)
    for _ in range(10):
        bus.publish("work", bytes(1000))

    def fill() -> None:
        for _ in range(100):
            bus.publish("work", bytes(1000))

    with pytest.raises(Disconnected, match="away"):
        fill()
    await bus.close()


async def test_a_subscription_made_during_an_outage_is_there_afterwards(server: NatsServer) -> None:
    bus = await connect(NatsSection(url=server.url))
    heard: list[Message] = []
    await server.kill()
    await until(lambda: not bus.connected)
    subscribing = asyncio.ensure_future(bus.subscribe("work", heard.append))
    await asyncio.sleep(0)
    await server.start()
    await subscribing
    bus.publish("work", b"")
    await until(lambda: bool(heard))
    await bus.close()


async def test_a_bus_can_be_closed_during_an_outage(server: NatsServer) -> None:
    bus = await connect(NatsSection(url=server.url))
    await server.kill()
    await until(lambda: not bus.connected)
    await asyncio.wait_for(bus.close(), 5.0)


async def test_a_broker_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    await server.start()
    await server.stop()
    connecting = asyncio.ensure_future(connect(NatsSection(url=server.url, connect_timeout_ms=20_000)))
    await asyncio.sleep(0.3)
    assert not connecting.done()
    await server.start()
    bus = await connecting
    assert bus.connected
    await bus.close()
    await server.stop()


async def test_a_broker_that_never_comes_is_one_clear_error() -> None:
    with pytest.raises(Disconnected, match=r"no NATS broker at nats://127\.0\.0\.1:1 within 300 ms"):
        await connect(NatsSection(url="nats://127.0.0.1:1", connect_timeout_ms=300))


async def test_a_broker_without_jetstream_says_what_to_change(tmp_path: Path) -> None:
    async with NatsServer(tmp_path, jetstream=False) as server:
        bus = await connect(NatsSection(url=server.url))
        log = LogSpec("ends", ("ends",), max_age_s=60.0, max_bytes=1000)
        with pytest.raises(Unavailable, match=r"has no JetStream.*-js"):
            await bus.keep(log)
        with pytest.raises(Unavailable, match="has no JetStream"):
            [message async for message in bus.replay(log, "ends")]
        await bus.close()


async def test_wrong_credentials_fail_at_once(tmp_path: Path) -> None:
    async with NatsServer(tmp_path, extra=USERS) as server:
        section = NatsSection(url=server.url, user="router", password="wrong", connect_timeout_ms=0)
        with pytest.raises(CredentialsRefused, match="refuses our credentials"):
            await asyncio.wait_for(connect(section), 5.0)


async def test_a_user_bound_to_its_own_inbox_can_ask_and_lives_on_after_a_forbidden_publish(tmp_path: Path) -> None:
    async with NatsServer(tmp_path, extra=USERS) as server:
        bus = await connect(NatsSection(url=server.url, user="router", password="right"))
        await bus.subscribe("work.echo", lambda message: bus.publish(message.reply, message.data))
        bus.publish("forbidden", b"")
        await bus.flush()
        assert (await bus.request("work.echo", b"x", timeout_s=5.0)).data == b"x"
        assert bus.counts.reconnects == 0
        await bus.close()


@pytest.mark.parametrize("away", [False, True])
async def test_what_is_no_subject_is_refused_alike_with_and_without_a_broker(server: NatsServer, away: bool) -> None:
    bus = await connect(NatsSection(url=server.url))
    if away:
        await server.kill()
        await until(lambda: not bus.connected)
    for subject in ("", "a b", "a\r\nPUB b 0", "\ud800"):
        with pytest.raises(BusError, match="cannot publish"):
            bus.publish(subject, b"")
    with pytest.raises(BusError, match="cannot publish"):
        bus.publish("a", b"", reply="b c")
    with pytest.raises(BusError, match="cannot publish"):
        bus.publish("a", b"", headers={"b c": "d"})
    for subject in ("", "a b", "a..b", "a*.b", "a.>.b", "a.b>"):
        with pytest.raises(BusError, match="no subject"):
            await bus.subscribe(subject, lambda message: None)
    with pytest.raises(BusError, match="queue"):
        await bus.subscribe("a", lambda message: None, queue="b c")
    await bus.close()


async def test_a_message_and_a_subscription_that_fail_on_return_keep_nothing_else_back(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connect(NatsSection(url=server.url))
    heard: list[bytes] = []
    await bus.subscribe("work", lambda message: heard.append(message.data))
    await bus.subscribe("odd", lambda message: None)
    await server.kill()
    await until(lambda: not bus.connected)
    send, subscribe_on = nats_link.send, bus._subscribe_on

    def picky_send(client: Any, subject: str, *rest: Any) -> None:
        if subject == "odd":
            raise BusError("odd")
        send(client, subject, *rest)

    async def picky_subscribe(client: Any, subscription: Any) -> None:
        await subscribe_on(client, subscription)
        if subscription.subject == "odd":
            raise BusError("odd")

    monkeypatch.setattr(nats_link, "send", picky_send)
    monkeypatch.setattr(bus, "_subscribe_on", picky_subscribe)
    bus.publish("work", b"1")
    bus.publish("odd", b"")
    bus.publish("work", b"2")
    await server.start()
    await until(lambda: heard == [b"1", b"2"])
    assert bus.counts.restore_drops == 2
    await bus.close()


async def test_whatever_goes_wrong_on_the_way_back_is_tried_again(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connect(NatsSection(url=server.url))
    restore, failures = bus._restore, [RuntimeError("unforeseen")]

    async def fails_once(client: Any) -> bool:
        if failures:
            raise failures.pop()
        return await restore(client)

    monkeypatch.setattr(bus, "_restore", fails_once)
    await server.kill()
    await until(lambda: not bus.connected)
    await server.start()
    await until(lambda: bus.connected)
    assert (failures, bus.counts.reconnects) == ([], 1)
    await bus.close()
