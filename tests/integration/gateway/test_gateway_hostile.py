"""Clients that mean harm, or know no better: raw sockets against the real door. Whatever they send, everybody gets an
answer or a closed connection, nothing is left behind, and the next client is served."""

import asyncio
import contextlib
import gzip
import hashlib
import json
import resource
import socket

import aiohttp
import pytest
from structlog.testing import CapturingLogger

from quartet_bus.config.schema import Config

CHAT = "/v1/chat/completions"
HOST = b"Host: x\r\n"


def body_of(content="say 2", **fields):
    return json.dumps({"model": "chat", "messages": [{"role": "user", "content": content}], **fields}).encode()


def post(body, *more, path=CHAT, length=True):
    head = [f"POST {path} HTTP/1.1".encode(), b"Host: x", *more]
    if length:
        head.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(head) + b"\r\n\r\n" + body


async def talk(port, *sent, half_close=False, patience_s=5.0):
    """Send the pieces, then read until the other side closes, or says nothing for half a second."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    got = b""
    try:
        with contextlib.suppress(ConnectionError):
            for piece in sent:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.01)
            if half_close:
                writer.write_eof()
        async with asyncio.timeout(patience_s):
            with contextlib.suppress(ConnectionError, TimeoutError):
                while piece := await asyncio.wait_for(reader.read(1 << 16), 0.5):
                    got += piece
    finally:
        writer.close()
    return got


def statuses(got):
    """The status of each answer in what came over one connection."""
    return [int(part[:3]) for part in got.replace(b"HTTP/1.0 ", b"HTTP/1.1 ").split(b"HTTP/1.1 ")[1:]]


@pytest.fixture
async def sound(build, eventually):
    """A gateway that must be as it was before, when the test is over: nothing open, nothing held, no fault logged."""
    config = Config()
    config.gateway.max_body_bytes = 1 << 20
    config.gateway.body_timeout_ms = 400
    config.gateway.idle_timeout_ms = 2000
    config.service.stop_timeout_ms = 500
    house = await build(config)
    house.gateway.log = CapturingLogger()
    yield house
    house.fleet.finish.set()
    await eventually(lambda: house.gateway.streams.open == 0, 5)
    assert house.gateway.streams.held_bytes == 0
    said = [call for call in house.gateway.log.calls if call.method_name in ("error", "exception", "critical")]
    assert said == []
    async with aiohttp.ClientSession(house.url) as http, http.post(CHAT, data=body_of()) as reply:
        assert reply.status == 200


async def test_pipelined_requests_are_answered_in_order(sound):
    got = await talk(
        sound.port, post(body_of("say 1")) + post(body_of("fail 502")) + post(body_of("say 3", stream=True))
    )
    assert statuses(got) == [200, 502, 200]
    assert got.count(b"data: {") == 3
    assert got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_who_pipelines_a_thousand_requests_and_reads_nothing_waits_behind_its_own(sound, eventually):
    _reader, writer = await asyncio.open_connection("127.0.0.1", sound.port)
    writer.write(post(body_of("forever", stream=True)) * 1000)
    await sound.fleet.heard.wait()
    await asyncio.sleep(0.2)
    assert sound.gateway.streams.open == 1
    writer.transport.abort()
    await eventually(lambda: sound.gateway.streams.open == 0, 2)
    assert len(sound.fleet.cancels) == 1


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 5\r\nContent-Length: 6",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked",
        b"Content-Length: -5",
        b"Content-Length: +5",
        b"Content-Length: 5x",
        b"Content-Length: 99999999999999999999999",
        b"Transfer-Encoding: chunked, identity",
        b"Transfer-Encoding: gzip",
        b"X: a\r\n folded: b",
        b"X\x00Y: a",
        b"X: a\x00b",
        b"Bad Name: x",
        b": x",
    ],
)
async def test_two_readings_of_one_request_are_none(sound, head):
    """What a proxy before us may read otherwise is how requests are smuggled."""
    got = await talk(sound.port, b"POST " + CHAT.encode() + b" HTTP/1.1\r\n" + HOST + head + b"\r\n\r\n{}{}{")
    assert all(400 <= status < 500 for status in statuses(got)), got
    assert len(statuses(got)) == 1
    assert b'{"error":{' in got
    assert len(sound.fleet.requests) == 0


@pytest.mark.parametrize(
    "chunks",
    [
        b"zz\r\n{}\r\n0\r\n\r\n",
        b"-1\r\n{}\r\n0\r\n\r\n",
        b"ffffffffffffffffff\r\n{}",
        b"5" + b";x=" + b"y" * 40_000 + b"\r\n12345\r\n0\r\n\r\n",
        b"2\r\n{}garbage\r\n0\r\n\r\n",
        b"2\n{}\n0\n\n",
        b"0\r\nX-Trailer: " + b"y" * 40_000 + b"\r\n\r\n",
    ],
)
async def test_chunks_that_are_none_are_refused(sound, chunks):
    got = await talk(sound.port, post(b"", b"Transfer-Encoding: chunked", length=False), chunks)
    assert 400 <= statuses(got)[0] < 500, got
    assert b'{"error":{' in got


async def test_a_body_in_chunks_of_one_byte_is_a_body(sound):
    body = body_of("say 2")
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    got = await talk(sound.port, post(b"", b"Transfer-Encoding: chunked", length=False), chunks)
    assert statuses(got) == [200]
    assert sound.fleet.requests[0].data == body


@pytest.mark.parametrize("stream", [True, False])
async def test_who_closes_its_half_after_the_request_is_answered_or_gone_but_never_forgotten(sound, stream, eventually):
    got = await talk(sound.port, post(body_of("say 3", stream=stream)), half_close=True)
    assert statuses(got) in ([200], [])
    await talk(sound.port, post(body_of("forever", stream=True)), half_close=True, patience_s=0.5)
    await eventually(lambda: sound.gateway.streams.open == 0, 2)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"chat","messages":[{"role":"user","content":"\xff\xfe"}]}',
        b'{"model":"chat","messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"model":"ch\\u0000at","messages":[]}',
        b'{"model":"../../x >.*","prompt":"say 1"}',
        b"[" * 100_000,
        b'{"model":"chat","messages":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"a":' * 20_000,
        b'{"model":"chat","prompt":"x","max_tokens":1e999}',
        b'{"model":"chat","prompt":"x","max_tokens":' + b"9" * 5000 + b"}",
        b'{"model":"chat","prompt":[' + b"1," * 100 + b"-1]}",
        b"\x00" * 100,
        b"",
        b"null",
        '{"model":"chat","messages":[]}'.encode("utf-16"),
    ],
)
async def test_bodies_that_are_no_requests_are_400_or_404(sound, body):
    got = await talk(sound.port, post(body, b"Connection: close"))
    assert statuses(got)[0] in (400, 404), got
    error = json.loads(got.partition(b"\r\n\r\n")[2])["error"]
    assert error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "line",
    [
        b"PRI * HTTP/2.0",
        b"CONNECT evil.example:443 HTTP/1.1",
        b"TRACE / HTTP/1.1",
        b"GET http://evil.example/v1/models/../../etc/passwd HTTP/1.1",
        b"GET /v1/models/%00%ff%2e%2e%2f HTTP/1.1",
        b"GET /v1/models/\xff\xfe HTTP/1.1",
        b"GET //v1//models HTTP/1.1",
        b"GET /" + b"a" * 30_000 + b" HTTP/1.1",
        b"A" * 5000 + b" / HTTP/1.1",
        b"GET /health HTTP/9.9",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_request_lines_of_any_kind_get_an_error_object(sound, line):
    got = await talk(sound.port, line + b"\r\n" + HOST + b"Connection: close\r\n\r\n")
    (status,) = statuses(got)
    assert 400 <= status < 500, got
    assert b'{"error":{' in got


@pytest.mark.parametrize(
    "header", [b"Authorization: Bearer \xff\xfe", b"X-Request-Id: \xff\xf0", b"X-Quartet-Session: \xc3("]
)
async def test_headers_that_are_no_text_break_nothing(sound, header):
    got = await talk(sound.port, post(body_of("say 1"), header, b"Connection: close"))
    assert statuses(got)[0] in (200, 400, 401), got


async def test_an_upgrade_is_not_taken_up(sound):
    head = (b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Key: x", b"Sec-WebSocket-Version: 13")
    got = await talk(sound.port, post(body_of("say 1"), *head))
    assert statuses(got)[0] in (200, 400)


async def test_a_small_body_that_unpacks_to_a_huge_one_is_413_and_costs_no_memory(sound):
    bomb = gzip.compress(bytes(200 << 20), 9)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    got = await talk(sound.port, post(bomb, b"Content-Encoding: gzip"))
    assert statuses(got)[:1] == [413], got[:300]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40 << 10  # KiB


async def test_a_hundred_clients_that_leave_in_mid_stream_at_once_leave_nothing(sound, eventually):
    writers = []
    for number in range(100):
        reader, writer = await asyncio.open_connection("127.0.0.1", sound.port)
        writer.write(post(body_of("forever", stream=True) if number % 4 else body_of("mute")))
        writers.append(writer)
        if number % 4:
            await reader.readuntil(b"data: ")
    await eventually(lambda: sound.gateway.streams.open == 100, 5)
    for writer in writers:
        writer.transport.abort()
    await eventually(lambda: sound.gateway.streams.open == 0 and len(sound.fleet.cancels) == 100, 1)
    assert len({cancel.id for cancel in sound.fleet.cancels}) == 100


async def test_who_leaves_in_the_middle_of_its_body_leaves_no_room_taken(sound, eventually):
    for _ in range(50):
        _, writer = await asyncio.open_connection("127.0.0.1", sound.port)
        writer.write(post(body_of("x" * 100_000))[:60_000])
        await writer.drain()
        writer.transport.abort()
    await eventually(lambda: sound.gateway.streams.open == 0, 2)
    assert sound.gateway.streams.held_bytes == 0
    assert sound.fleet.requests == []


async def test_hundreds_of_connections_that_say_nothing_keep_nobody_out(sound):
    silent = [socket.create_connection(("127.0.0.1", sound.port)) for _ in range(400)]
    try:
        got = await talk(sound.port, post(body_of("say 1"), b"Connection: close"))
        assert statuses(got) == [200]
    finally:
        for each in silent:
            each.close()


async def test_what_follows_a_request_is_another_request_or_an_error_and_the_end(sound):
    garbage = b"GARBAGE THAT FOLLOWS\r\n\r\n" + post(body_of("say 1"))
    assert statuses(await talk(sound.port, post(body_of("say 1")), b"", garbage)) in ([200, 400], [400])
    assert len(sound.fleet.requests) <= 1


# Changes of the house while it is full


async def streams(house, number, **headers):
    """So many streams that have begun, as (reader, writer)."""
    more = [f"{name}: {value}".encode() for name, value in headers.items()]
    opened = []
    for _ in range(number):
        reader, writer = await asyncio.open_connection("127.0.0.1", house.port)
        writer.write(post(body_of("forever", stream=True), *more, b"Connection: close"))
        await reader.readuntil(b"data: ")
        opened.append((reader, writer))
    return opened


async def rest_of(opened):
    """What the streams say until they are closed."""
    async with asyncio.timeout(10):
        return [await reader.read() for reader, _ in opened]


async def test_a_key_is_revoked_under_load_and_open_streams_go_on(build, tmp_path, eventually):
    file = tmp_path / "tenants.toml"
    keys = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("old-key", "new-key")}
    file.write_text(f'[keys]\n{keys["old-key"]} = "acme"\n')
    config = Config()
    config.gateway.tenants_file = str(file)
    house = await build(config)
    opened = await streams(house, 40, Authorization="Bearer old-key")

    async def status(key):
        return statuses(await talk(house.port, post(body_of("say 1"), f"Authorization: Bearer {key}".encode())))[0]

    asking = asyncio.gather(*(status("old-key") for _ in range(40)))
    file.write_text("keys = [broken")
    await asyncio.sleep(0.1)
    file.write_text(f'[keys]\n{keys["new-key"]} = "acme"\n')
    assert set(await asking) <= {200, 401}
    async with asyncio.timeout(5):
        while (await status("old-key"), await status("new-key")) != (401, 200):  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0.05)
    assert house.gateway.streams.open == 40
    house.fleet.finish.set()
    assert all(said.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for said in await rest_of(opened))


@pytest.mark.parametrize("finish", [True, False])
async def test_a_drain_under_load_ends_every_stream_in_one_of_two_ways(build, finish, eventually):
    config = Config()
    config.service.stop_timeout_ms = 3000 if finish else 300
    house = await build(config)
    opened = await streams(house, 60)
    port = house.port
    stopping = asyncio.create_task(house.stop())
    await eventually(lambda: house.gateway.leaving, 1)
    await asyncio.sleep(0.05)
    with pytest.raises(ConnectionError):
        await asyncio.open_connection("127.0.0.1", port)
    if finish:
        house.fleet.finish.set()
    said = await rest_of(opened)
    await stopping
    if finish:
        assert all(each.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for each in said)
        assert house.fleet.cancels == []
    else:
        assert all(b'data: {"error":{' in each and b"[DONE]" not in each for each in said)
        await eventually(lambda: len({cancel.id for cancel in house.fleet.cancels}) == 60, 1)
