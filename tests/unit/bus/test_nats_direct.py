"""The short way in and out of the NATS bus: handlers called in order of arrival, urgent messages written at once."""

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from contract.bus_contract import until
from hypothesis import given
from hypothesis import strategies as st

from quartet_bus.bus import Message
from quartet_bus.config.schema import NatsSection
from quartet_bus.nats_bus import connect
from quartet_bus.nats_direct import read_headers
from quartet_bus.server import NatsServer


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with NatsServer(tmp_path) as server:
        yield server


async def test_what_a_slow_handler_has_not_heard_yet_waits_at_the_broker_and_is_not_lost(server: NatsServer) -> None:
    bus, other = await connect(NatsSection(url=server.url)), await connect(NatsSection(url=server.url))
    heard: list[bytes] = []

    def slow(message: Message) -> None:
        time.sleep(0.002)
        heard.append(message.data[:4])

    await bus.subscribe("work", slow)
    for number in range(500):
        other.publish("work", number.to_bytes(4) + bytes(20_000))
    await other.flush()
    await until(lambda: len(heard) == 500)
    assert heard == [number.to_bytes(4) for number in range(500)]
    assert bus.counts.reconnects == 0
    await bus.close()
    await other.close()


class Listener:
    """A subscriber that needs no event loop: a plain socket."""

    def __init__(self, url: str, subject: str) -> None:
        host, port = url.removeprefix("nats://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=5.0)
        self.lines = self.socket.makefile("rb")
        self.socket.sendall(b'CONNECT {"verbose":false}\r\nSUB %b 1\r\nPING\r\n' % subject.encode())
        while self.lines.readline() != b"PONG\r\n":
            pass

    def payload(self) -> bytes:
        header = self.lines.readline()
        return self.lines.read(int(header.split()[-1]) + 2)[:-2]


async def test_what_is_urgent_is_out_before_publish_returns_and_what_was_queued_before_too(
    server: NatsServer,
) -> None:
    bus = await connect(NatsSection(url=server.url))
    listener = Listener(server.url, "work")
    bus.publish("work", b"first")
    bus.publish("work", b"second", urgent=True)
    # Nothing was awaited: the loop had no turn in which anything could have been written.
    assert [listener.payload(), listener.payload()] == [b"first", b"second"]
    listener.socket.close()
    await bus.close()


async def test_urgent_messages_keep_their_place_behind_those_that_the_socket_has_not_taken_yet(
    server: NatsServer,
) -> None:
    bus, other = await connect(NatsSection(url=server.url)), await connect(NatsSection(url=server.url))
    heard: list[bytes] = []
    await other.subscribe("work", lambda message: heard.append(message.data[:4]))
    for number in range(200):
        bus.publish("work", number.to_bytes(4) + bytes(200_000), urgent=number % 3 == 0)
        if number % 50 == 0:
            await asyncio.sleep(0)
    await bus.flush()
    await until(lambda: len(heard) == 200)
    assert heard == [number.to_bytes(4) for number in range(200)]
    await bus.close()
    await other.close()


async def test_messages_of_all_subscriptions_are_handled_in_the_order_in_which_they_came(server: NatsServer) -> None:
    bus, other = await connect(NatsSection(url=server.url)), await connect(NatsSection(url=server.url))
    heard: list[str] = []
    for subject in ("a", "b", "c"):
        await bus.subscribe(subject, lambda message: heard.append(message.subject))
    told = [random.choice("abc") for _ in range(300)]
    for subject in told:
        other.publish(subject, b"")
    await other.flush()
    await until(lambda: len(heard) == 300)
    assert heard == told
    await bus.close()
    await other.close()


@given(st.dictionaries(st.from_regex(r"[!-9;-~]{1,20}", fullmatch=True), st.from_regex(r"[ -~]{0,40}", fullmatch=True)))
def test_headers_are_read_as_they_were_written(said: dict[str, str]) -> None:
    block = b"NATS/1.0\r\n" + b"".join(f"{key}: {value}\r\n".encode() for key, value in said.items()) + b"\r\n"
    assert (read_headers(block) or {}) == {key: value.strip() for key, value in said.items()}


@given(st.binary(max_size=200))
def test_headers_of_any_bytes_are_read_without_a_fault(block: bytes) -> None:
    read_headers(b"NATS/1.0\r\n" + block)
