"""The HTTP door byte by byte: what curl, a proxy or an attacker sees."""

import asyncio
import contextlib
import gzip
import json
import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest
from structlog.testing import CapturingLogger

from quartet_bus.config.schema import Config
from quartet_core.ladder import sketch_text
from quartet_core.openai import parse
from quartet_gateway.events import EventStream
from quartet_gateway.site import CannotListen, http_site

CHAT = "/v1/chat/completions"


def chat(content: str, **fields: object) -> bytes:
    return json.dumps({"model": "chat", "messages": [{"role": "user", "content": content}], **fields}).encode()


@pytest.fixture
async def http(house) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=20)
    async with aiohttp.ClientSession(house.url, timeout=timeout) as session:
        yield session


async def error_of(reply: aiohttp.ClientResponse) -> dict[str, object]:
    """The error object, which must have exactly OpenAI's four fields."""
    assert reply.content_type == "application/json"
    body = await reply.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


async def raw(port: int, request: bytes, *, until: bytes = b"") -> bytes:
    """Send bytes and return what comes until the server closes, or until ``until`` was seen."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        got = b""
        async with asyncio.timeout(5):
            while not until or until not in got:
                more = await reader.read(65536)
                if not more:
                    break
                got += more
        return got
    finally:
        writer.close()


async def test_a_stream_is_the_engines_bytes_in_openais_events(house, http):
    reply = await http.post(CHAT, data=chat("say 2", stream=True))
    assert reply.status == 200
    assert reply.content_type == "text/event-stream"
    assert reply.headers["Cache-Control"] == "no-cache"
    events = (await reply.read()).split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    assert [event[:12] for event in events[:2]] == [b'data: {"id" ', b'data: {"id" ']  # the odd space is the engine's
    assert json.loads(events[0][6:])["choices"][0]["delta"]["content"] == "w0 "


async def test_the_body_reaches_the_bus_unchanged_with_what_the_gateway_knows_of_it(house, http):
    body = b' { "model":"chat",\n"messages": [{"role":"user","content":"say 1 ' + b"x" * 3000 + b'"}], "odd": 1e3 }'
    headers = {
        "X-Request-Id": "mine-1",
        "x-quartet-ttft-ms": "250.5",
        "x-quartet-tpot-ms": "9" * 40,
        "x-quartet-deadline-ms": "9" * 40,
        "x-quartet-session": "s1",
        "x-quartet-no-hold": "1",
        "Quartet-Priority": "9",
    }
    reply = await http.post(CHAT, data=body, headers=headers)
    assert reply.status == 200
    assert reply.headers["x-request-id"] == "mine-1"
    message, said = house.fleet.requests[0], house.fleet.headers[0]
    assert message.subject == "quartet.v1.gateway.public.chat"
    assert message.data == body
    assert said.request_id == "mine-1"
    assert said.ttft_ms == 250.5
    assert said.tpot_ms == 3_600_000
    assert 0 < said.deadline_ms <= Config().gateway.request_timeout_ms
    assert said.session == "s1"
    assert said.no_hold
    assert said.priority == 0
    text = parse(body).prompt_text
    assert said.sketch == sketch_text(text)
    assert said.prompt_tokens == -(-len(text) // 4)


@pytest.mark.parametrize(
    ("name", "value"),
    [("x-quartet-ttft-ms", "soon"), ("x-quartet-no-hold", "maybe"), ("x-quartet-session", "s" * 300)],
)
async def test_a_header_that_cannot_be_meant_is_400_and_named(http, name, value):
    reply = await http.post(CHAT, data=chat("say 1"), headers={name: value})
    assert reply.status == 400
    error = await error_of(reply)
    assert error["param"] == name
    assert name in str(error["message"])


async def test_a_request_id_that_is_not_sane_or_used_before_is_replaced(house, http):
    for wanted in ("in valid", "x" * 200):
        reply = await http.post(CHAT, data=chat("say 1"), headers={"X-Request-Id": wanted})
        assert reply.headers["x-request-id"].startswith("req-")
    ids = [
        (await http.post(CHAT, data=chat("say 1"), headers={"X-Request-Id": "twice"})).headers["x-request-id"]
        for _ in range(2)
    ]
    assert ids[0] == "twice"
    assert ids[1].startswith("twice-")
    assert [said.request_id for said in house.fleet.headers[-2:]] == ids


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"\xff\xfe", None),
        (b'{"messages": [{"role": "user", "content": "x"}]}', "model"),
        (b'{"model": "chat", "messages": "x"}', "messages"),
        (b'{"model": "chat", "messages": [{"content": "x"}]}', "messages[0].role"),
        (b'{"model": "chat", "prompt": "x"}', "messages"),
        (b'{"model": 7, "messages": [{"role": "user", "content": "x"}]}', "model"),
        (b"[" * 100_000, None),
    ],
)
async def test_a_malformed_body_is_400_with_the_field(http, body, param):
    reply = await http.post(CHAT, data=body)
    assert reply.status == 400
    assert (await error_of(reply))["param"] == param


async def test_unknown_addresses_and_methods_are_error_objects(http):
    reply = await http.get("/v1/nothing")
    assert (reply.status, (await error_of(reply))["code"]) == (404, "unknown_url")
    reply = await http.get(CHAT)
    assert (reply.status, reply.headers["Allow"]) == (405, "POST")
    assert (await error_of(reply))["code"] == "method_not_allowed"
    reply = await http.delete("/v1/models/chat")
    assert (reply.status, reply.headers["Allow"]) == (405, "GET")
    reply = await http.options(CHAT, headers={"Origin": "http://evil.example"})
    assert reply.status == 405
    assert not [name for name in reply.headers if name.lower().startswith("access-control")]


async def test_what_is_not_http_is_an_error_object_too(house):
    answer = await raw(house.port, b"GARBAGE\r\n\r\n")
    assert answer.startswith(b"HTTP/1.0 400 ")
    assert b'{"error":{"message":"The request is not valid HTTP' in answer
    answer = await raw(house.port, b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 20_000 + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.0 431 ")
    assert b'"code":"headers_too_large"' in answer
    many = b"".join(b"X-%d: y\r\n" % number for number in range(5000))
    answer = await raw(house.port, b"GET /health HTTP/1.1\r\nHost: x\r\n" + many + b"\r\n")
    assert answer.startswith(b"HTTP/1.0 400 ")
    assert b'{"error":{"message":' in answer


async def test_a_header_that_never_ends_is_not_waited_for(build):
    """One byte now and then keeps a connection busy, but not open."""
    config = Config()
    config.gateway.idle_timeout_ms = 300
    house = await build(config)
    reader, writer = await asyncio.open_connection("127.0.0.1", house.port)
    writer.write(b"GET /health HTTP/1.1\r\nX-Slow: ")

    async def drip() -> None:
        while True:
            writer.write(b"x")
            await asyncio.sleep(0.05)

    dripping = asyncio.create_task(drip())
    async with asyncio.timeout(5):
        with contextlib.suppress(ConnectionResetError):  # it was closed with a byte unread
            assert await reader.read() == b""
    dripping.cancel()
    writer.close()


async def test_a_body_over_the_limit_is_413_whether_or_not_it_says_its_length(build):
    config = Config()
    config.gateway.max_body_bytes = 10_000
    house = await build(config)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield b"x" * 4000

    async with aiohttp.ClientSession(house.url) as http:
        assert (await http.post(CHAT, data=chat("say 1 " + "x" * 5000))).status == 200
        for body in (chat("say 1 " + "x" * 10_000), pieces()):
            reply = await http.post(CHAT, data=body)
            assert reply.status == 413
            assert (await error_of(reply))["code"] == "request_too_large"
    assert len(house.fleet.requests) == 1


async def test_a_long_body_goes_through_and_curls_expectation_is_met(house):
    body = chat("say 1 " + "x" * 6_000_000)
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        "Expect: 100-continue\r\nConnection: close\r\n\r\n"
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", house.port)
    async with asyncio.timeout(10):
        writer.write(head)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
    writer.close()
    assert house.fleet.requests[0].data == body


async def test_a_body_that_does_not_arrive_is_408(build):
    config = Config()
    config.gateway.body_timeout_ms = 100
    house = await build(config)
    request = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode()
    answer = await raw(house.port, request, until=b"}}")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in answer


async def test_a_connection_without_a_request_is_closed(build):
    config = Config()
    config.gateway.idle_timeout_ms = 100
    house = await build(config)
    assert await raw(house.port, b"POST /v1/chat") == b""


async def test_more_streams_than_allowed_are_429_with_a_time_to_retry(build):
    config = Config()
    config.gateway.max_streams = 1
    house = await build(config)
    async with aiohttp.ClientSession(house.url) as http:
        first = await http.post(CHAT, data=chat("forever", stream=True))
        await first.content.readany()
        second = await http.post(CHAT, data=chat("say 1"))
        assert (second.status, second.headers["Retry-After"]) == (429, "1")
        assert (await error_of(second))["code"] == "too_many_streams"
        first.close()
        async with asyncio.timeout(1):
            await house.fleet.cancelled.wait()
        assert (await http.post(CHAT, data=chat("say 1"))).status == 200


async def test_bodies_of_waiting_requests_are_bounded_together(build):
    config = Config()
    config.gateway.open_bodies_bytes = 10_000
    house = await build(config)
    async with aiohttp.ClientSession(house.url) as http:
        streaming = await http.post(CHAT, data=chat("forever" + " " * 6000, stream=True))
        waiting = asyncio.create_task(http.post(CHAT, data=chat("mute" + " " * 6000)))
        async with asyncio.timeout(5):
            house.fleet.heard.clear()
            await house.fleet.heard.wait()
        refused = await http.post(CHAT, data=chat("say 1" + " " * 6000))
        assert refused.status == 429
        assert (await error_of(refused))["code"] == "too_many_bytes"
        waiting.cancel()
        async with asyncio.timeout(1):
            await house.fleet.cancelled.wait()
        assert (await http.post(CHAT, data=chat("say 1" + " " * 6000))).status == 200
        streaming.close()
    assert house.gateway.streams.held_bytes == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_takes_too_long_is_504_and_cancelled(build, stream):
    config = Config()
    config.gateway.request_timeout_ms = 200
    house = await build(config)
    async with aiohttp.ClientSession(house.url) as http:
        reply = await http.post(CHAT, data=chat("mute", stream=stream))
        assert reply.status == 504
        await error_of(reply)
    async with asyncio.timeout(1):
        await house.fleet.cancelled.wait()


async def test_a_stream_that_takes_too_long_ends_in_an_error_event_without_done(build):
    config = Config()
    config.gateway.request_timeout_ms = 300
    house = await build(config)
    async with aiohttp.ClientSession(house.url) as http:
        reply = await http.post(CHAT, data=chat("forever", stream=True))
        events = (await reply.read()).split(b"\n\n")
    assert reply.status == 200
    assert b"[DONE]" not in events[-2]
    error = json.loads(events[-2].removeprefix(b"data: "))["error"]
    assert error["code"] in ("request_timeout", "deadline_exceeded")
    assert house.gateway.streams.open == 0


async def test_a_client_that_reads_nothing_is_cut_off_and_its_request_cancelled(build, eventually):
    config = Config()
    config.gateway.slow_client_bytes = 64 * 1024
    config.gateway.slow_client_ms = 200
    house = await build(config)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", house.port))
        body = chat("flood 16000", stream=True)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        await loop.sock_sendall(client, head + body)
        await eventually(lambda: bool(house.fleet.cancels) and not house.gateway.streams.open, 20)
    assert house.count("slow_clients_total") == 1


async def test_a_client_that_catches_up_in_time_misses_nothing(build, eventually, monkeypatch):
    waiting: list[EventStream] = []
    catch_up = EventStream._catch_up

    async def noted(stream: EventStream) -> None:
        waiting.append(stream)
        await catch_up(stream)

    monkeypatch.setattr(EventStream, "_catch_up", noted)
    config = Config()
    config.gateway.slow_client_bytes = 4 * 1024 * 1024
    house = await build(config)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", house.port))
        body = chat("flood 4000", stream=True)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        await loop.sock_sendall(client, head + body)
        await eventually(lambda: bool(waiting), 20)
        house.fleet.finish.set()
        got = bytearray()
        async with asyncio.timeout(20):
            while not got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                got += await loop.sock_recv(client, 1 << 20)
    assert got.count(b"data: {") == waiting[0].chunks > 1000
    assert house.count("slow_clients_total") == 0


async def test_a_client_that_closes_its_connection_is_noticed_while_nothing_is_sent(house):
    body = chat("mute", stream=True)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    _, writer = await asyncio.open_connection("127.0.0.1", house.port)
    writer.write(head + body)
    await house.fleet.heard.wait()
    writer.close()
    async with asyncio.timeout(1):
        await house.fleet.cancelled.wait()
    assert house.fleet.cancels[0].id == house.fleet.headers[0].request_id


async def test_every_line_of_a_chunk_is_part_of_its_event(http):
    reply = await http.post(CHAT, data=chat("odd", stream=True))
    assert await reply.read() == b'data: {\ndata:  "odd": 1\ndata: }\n\ndata: [DONE]\n\n'


async def test_a_stream_without_a_word_is_done_at_once(http):
    reply = await http.post(CHAT, data=chat("say 0", stream=True))
    assert (reply.status, await reply.read()) == (200, b"data: [DONE]\n\n")


async def test_two_answers_to_one_request_are_502(http):
    reply = await http.post(CHAT, data=chat("twice"))
    assert reply.status == 502
    assert (await error_of(reply))["code"] == "bad_answer"


async def test_the_callers_own_deadline_is_kept(house, http):
    reply = await http.post(CHAT, data=chat("mute"), headers={"x-quartet-deadline-ms": "100"})
    assert reply.status == 504
    assert (await error_of(reply))["code"] == "deadline_exceeded"
    assert house.fleet.headers[0].deadline_ms == 100


async def test_compressed_bodies_are_taken_and_broken_ones_refused(house, http):
    body = chat("say 1")
    packed = {"Content-Encoding": "gzip"}
    assert (await http.post(CHAT, data=gzip.compress(body), headers=packed)).status == 200
    assert house.fleet.requests[0].data == body
    reply = await http.post(CHAT, data=b"no gzip at all", headers=packed)
    assert reply.status == 400
    await error_of(reply)
    bomb = gzip.compress(b"x" * 50_000_000)
    assert (await http.post(CHAT, data=bomb, headers=packed)).status == 413


async def test_without_a_broker_it_is_503_and_not_ready(house, http):
    await house.gateway.bus.close()
    reply = await http.post(CHAT, data=chat("say 1"))
    assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
    await error_of(reply)
    assert (await http.get("/ready")).status == 503


async def test_while_the_broker_is_away_a_request_is_refused_at_once_and_not_kept_for_later(house, http, monkeypatch):
    monkeypatch.setattr(type(house.gateway.bus), "connected", property(lambda _: False))  # which keeps what is sent
    reply = await http.post(CHAT, data=chat("say 1"))
    assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
    assert (await error_of(reply))["code"] == "no_broker"
    assert house.fleet.requests == []


async def test_a_fault_of_ours_is_an_error_object_and_not_a_broken_connection(house, http, monkeypatch):
    def fail(model: str) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(house.gateway.models, "check", fail)
    reply = await http.post(CHAT, data=chat("say 1"))
    assert reply.status == 500
    assert (await error_of(reply))["code"] == "internal_error"
    assert house.gateway.streams.open == 0


async def test_the_access_log_has_one_line_a_request_and_nothing_of_the_prompt(house, http):
    house.gateway.log = log = CapturingLogger()
    await (await http.post(CHAT, data=chat("say 2 my secret", stream=True))).read()
    await http.post(CHAT, data=chat("fail 503 my secret"))
    await http.get("/health")
    lines = [call.kwargs for call in log.calls if call.method_name == "info"]
    assert [(line["status"], line["outcome"], line["code"]) for line in lines] == [
        (200, "ok", ""),
        (503, "refused", "wished"),
    ]
    assert lines[0]["output_tokens"] == 2
    assert lines[0]["request"] == house.fleet.headers[0].request_id
    assert "secret" not in repr(log.calls)


async def test_an_http_1_0_client_gets_its_stream_until_the_connection_closes(house):
    body = chat("say 2", stream=True)
    head = f"POST {CHAT} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    answer = await raw(house.port, head + body)
    assert answer.startswith(b"HTTP/1.0 200 OK\r\n")
    assert answer.endswith(b"data: [DONE]\n\n")
    assert b"chunked" not in answer


async def test_health_readiness_and_metrics(house, http):
    assert (await http.get("/health")).status == 200
    assert (await http.get("/ready")).status == 200
    await (await http.post(CHAT, data=chat("say 2", stream=True))).read()
    text = await (await http.get("/metrics")).text()
    assert 'quartet_gateway_requests_total{endpoint="chat.completions",model="chat",status="200"} 1.0' in text
    assert 'quartet_gateway_first_byte_seconds_count{endpoint="chat.completions"} 1.0' in text
    assert "quartet_gateway_active_streams 0.0" in text


async def test_unknown_models_make_no_new_metric_labels(house, http):
    for number in range(20):
        body = chat("say 1").replace(b'"chat"', f'"model-{number}"'.encode(), 1)
        assert (await http.post(CHAT, data=body)).status == 404
    assert house.count("requests_total", endpoint="chat.completions", status="404", model="") == 20


async def test_it_is_not_ready_when_its_workers_fell_silent(house, http):
    house.gateway.models.expire(house.gateway.now_ns() + 10**11)
    reply = await http.get("/ready")
    assert reply.status == 503
    assert (await error_of(reply))["code"] == "not_ready"
    assert (await (await http.get("/v1/models")).json())["data"] == []
    assert (await http.get("/health")).status == 200


async def test_a_stop_lets_streams_finish_and_accepts_nobody(house, http):
    port = house.port
    house.gateway.config.service.stop_timeout_ms = 20_000
    reply = await http.post(CHAT, data=chat("forever", stream=True))
    await reply.content.readany()
    stop = asyncio.create_task(house.stop())
    await asyncio.sleep(0)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    house.fleet.finish.set()
    assert (await reply.read()).endswith(b"data: [DONE]\n\n")
    await stop


async def test_a_stop_ends_what_does_not_finish_with_an_error_event_and_a_cancel(house, eventually):
    async with aiohttp.ClientSession(house.url) as http:
        reply = await http.post(CHAT, data=chat("forever", stream=True))
        waiting = asyncio.create_task(http.post(CHAT, data=chat("mute")))
        await eventually(lambda: len(house.fleet.requests) == 2, 5)
        await house.stop()
        events = (await reply.read()).split(b"\n\n")
        assert json.loads(events[-2].removeprefix(b"data: "))["error"]["code"] == "shutting_down"
        assert (await waiting).status == 503
    await eventually(lambda: len({cancel.id for cancel in house.fleet.cancels}) == 2, 1)


async def test_a_taken_port_is_one_clear_error(house):
    house.gateway.config.gateway.listen = f"127.0.0.1:{house.port}"
    with pytest.raises(CannotListen) as error:
        async with http_site(house.gateway):
            pass
    assert str(error.value) == f"cannot listen on 127.0.0.1:{house.port} (gateway.listen): the port is taken"
