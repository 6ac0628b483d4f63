"""The small HTTP door answers scrapers and probes, and nobody can hold it open."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from quartet_bus import http
from quartet_bus.http import MAX_CONNECTIONS, HttpDoor


class Service:
    reason: str | None = None


@pytest.fixture
async def service() -> Service:
    return Service()


@pytest.fixture
async def door(service: Service) -> AsyncIterator[HttpDoor]:
    async with HttpDoor("127.0.0.1", 0, not_ready=lambda: service.reason, metrics=lambda: b"m 1\n") as door:
        yield door


async def talk(door: HttpDoor, request: bytes) -> bytes:
    """Send ``request`` and return all that comes back until the door closes."""
    reader, writer = await asyncio.open_connection(door.host, door.port)
    writer.write(request)
    writer.write_eof()
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    return answer


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


async def test_health_and_readiness_say_why_not(door: HttpDoor, service: Service) -> None:
    for path in ("/healthz", "/readyz"):
        assert (await talk(door, get(path))).startswith(b"HTTP/1.1 200")
    service.reason = "no fleet"
    for path in ("/healthz", "/readyz?x=1"):
        answer = await talk(door, get(path))
        assert answer.startswith(b"HTTP/1.1 503")
        assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {"status": "not ready", "reason": "no fleet"}
    assert (await talk(door, get("/livez"))).startswith(b"HTTP/1.1 200")


async def test_metrics_are_prometheus_text(door: HttpDoor) -> None:
    answer = await talk(door, get("/metrics"))
    assert b"content-type: text/plain; version=0.0.4" in answer.lower()
    assert answer.endswith(b"\r\n\r\nm 1\n")


async def test_one_connection_takes_several_requests(door: HttpDoor) -> None:
    assert (await talk(door, get("/livez") * 3)).count(b"HTTP/1.1 200") == 3


async def test_head_has_no_body(door: HttpDoor) -> None:
    answer = await talk(door, b"HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (get("/nowhere"), b"404"),
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi", b"405"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nBig: " + b"x" * 20_000 + b"\r\n\r\n", b"431"),
    ],
)
async def test_what_is_not_served_gets_its_status(door: HttpDoor, request_bytes: bytes, status: bytes) -> None:
    assert (await talk(door, request_bytes)).split(b" ")[1] == status


async def test_a_body_that_waits_to_be_wanted_is_answered_without_it(door: HttpDoor) -> None:
    request = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\nExpect: 100-continue\r\n\r\n"
    assert (await talk(door, request)).startswith(b"HTTP/1.1 405")


async def test_a_connection_that_says_nothing_is_closed(door: HttpDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "IDLE_TIMEOUT_S", 0.05)
    reader, writer = await asyncio.open_connection(door.host, door.port)
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()


async def test_connections_are_bounded_and_the_rest_are_turned_away(door: HttpDoor) -> None:
    kept = []
    for _ in range(MAX_CONNECTIONS):
        reader, writer = await asyncio.open_connection(door.host, door.port)
        writer.write(get("/livez"))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        kept.append(writer)
    assert await talk(door, b"") == b""
    for writer in kept:
        writer.close()


async def test_a_taken_port_is_an_os_error(door: HttpDoor) -> None:
    second = HttpDoor("127.0.0.1", door.port, not_ready=lambda: None, metrics=lambda: b"")
    with pytest.raises(OSError, match="in use"):
        await second.__aenter__()


async def test_leaving_closes_open_connections() -> None:
    async with HttpDoor("127.0.0.1", 0, not_ready=lambda: None, metrics=lambda: b"") as door:
        reader, writer = await asyncio.open_connection(door.host, door.port)
        writer.write(get("/livez"))
        await reader.readline()
    while await asyncio.wait_for(reader.read(1000), 5):
        pass
    writer.close()
