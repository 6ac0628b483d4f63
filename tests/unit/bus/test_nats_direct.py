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
from nats.errors import ProtocolError
from nats.protocol.parser import Parser

from quartet_bus.bus import Message
from quartet_bus.config.schema import NatsSection
from quartet_bus.nats_bus import connect
from quartet_bus.nats_reader import DirectParser, read_headers
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


class Heard:
    """What a parser makes of bytes: of a client as nats-py's parser knows it, and of a handler."""

    def __init__(self) -> None:
        self.all: list[tuple[object, ...]] = []

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        said = read_headers(headers) if headers and headers.startswith(b"NATS/1.0\r\n") else headers
        self.all.append((subject.decode(), data, said or None, reply.decode()))

    async def _process_ping(self) -> None:
        self.all.append(("ping",))

    async def _process_err(self, error: str) -> None:
        self.all.append((error,))

    def take(self, message: Message) -> None:
        self.all.append((message.subject, message.data, message.headers, message.reply))


names = st.from_regex(r"[a-zA-Z0-9_.-]{1,30}", fullmatch=True)
payloads = st.one_of(st.binary(max_size=60), st.sampled_from([b"x" * 70_000, b"MSG a 1 5\r\nHMSG"]))


@st.composite
def wire(draw: st.DrawFn) -> bytes:
    """Something that a broker may send."""
    kind = draw(st.sampled_from(["MSG"] * 4 + ["HMSG", "PING", "OK", "ERR"]))
    if kind not in ("MSG", "HMSG"):
        return {"PING": b"PING\r\n", "OK": b"+OK\r\n", "ERR": b"-ERR 'Permissions Violation'\r\n"}[kind]
    subject, sid, reply, data = (
        draw(names),
        draw(st.sampled_from([1, 1, 1, 2])),
        draw(st.none() | names),
        draw(payloads),
    )
    block = draw(st.sampled_from([b"NATS/1.0\r\na: b\r\n\r\n", b"NATS/1.0 503\r\n\r\n"])) if kind == "HMSG" else b""
    sizes = f"{len(block)} {len(block) + len(data)}" if block else f"{len(data)}"
    return f"{kind} {subject} {sid} {reply + ' ' if reply else ''}{sizes}\r\n".encode() + block + data + b"\r\n"


@given(st.lists(wire(), max_size=12), st.lists(st.integers(1, 40_000), max_size=12))
async def test_however_bytes_come_the_short_parser_hears_what_nats_pys_own_does(
    told: list[bytes], sizes: list[int]
) -> None:
    stream = b"".join(told)
    pieces = []
    for size in sizes:
        pieces.append(stream[:size])
        stream = stream[size:]
    pieces.append(stream)
    ours, theirs = Heard(), Heard()
    short, long = DirectParser(ours, {1: ours.take}), Parser(theirs)
    for piece in pieces:
        await short.parse(piece)
        await long.parse(piece)
    assert ours.all == theirs.all
    assert len(ours.all) == sum(not piece.startswith(b"+OK") for piece in told)


@pytest.mark.parametrize("wrong", [b"MSG a 1\r\n", b"MSG a b c d e f 3\r\n", b"WHAT\r\n", b"MSG a 1 x\r\n"])
async def test_what_is_no_protocol_is_an_error_here_too(wrong: bytes) -> None:
    heard = Heard()
    with pytest.raises(ProtocolError):
        await DirectParser(heard, {1: heard.take}).parse(wrong)


async def test_a_flush_confirms_what_was_published_before_it(server: NatsServer) -> None:
    """Also what the socket has not taken yet: the ping goes behind it."""
    bus, other = await connect(NatsSection(url=server.url)), await connect(NatsSection(url=server.url))
    heard: list[int] = []
    await other.subscribe("work", lambda message: heard.append(len(message.data)))
    for _ in range(60):
        bus.publish("work", bytes(500_000))
    await bus.flush()
    await other.flush()  # the broker had them all, so they are ahead of this pong
    assert len(heard) == 60
    await bus.close()
    await other.close()
