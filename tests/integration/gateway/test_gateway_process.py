"""The gateway as the process that is deployed: uvloop, signals, exit codes, and ``curl`` as the client."""

import asyncio
import contextlib
import json
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from quartet_bus.config.schema import NatsSection
from quartet_bus.nats_bus import NatsBus
from quartet_bus.server import NatsServer

CHAT = "/v1/chat/completions"


def chat(content: str) -> str:
    return json.dumps({"model": "chat", "stream": True, "messages": [{"role": "user", "content": content}]})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def spawn(config: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "quartet_gateway",
        "--config",
        str(config),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )


async def last_words(process: asyncio.subprocess.Process) -> tuple[int, list[str]]:
    """Exit code, and what it said that is no JSON log line."""
    async with asyncio.timeout(20):
        _, said = await process.communicate()
    return process.returncode or 0, [line for line in said.decode().splitlines() if not line.startswith("{")]


class Running:
    """A gateway process, its address, and the fleet it talks to."""

    def __init__(self, process, url, fleet):
        self.process = process
        self.url = url
        self.fleet = fleet


@pytest.fixture
async def running(tmp_path, make_fleet) -> AsyncIterator[Running]:
    port = free_port()
    async with NatsServer(tmp_path / "nats", jetstream=False) as server:
        bus = NatsBus(NatsSection(url=server.url), name="fleet")
        await bus.open()
        fleet = make_fleet(bus)
        await fleet.start()
        config = tmp_path / "quartet.toml"
        config.write_text(
            f'nats.url = "{server.url}"\ngateway.listen = "127.0.0.1:{port}"\nservice.stop_timeout_ms = 20000\n'
        )
        process = await spawn(config)
        url = f"http://127.0.0.1:{port}"
        async with aiohttp.ClientSession() as http, asyncio.timeout(20):
            while not await ready(http, url):  # noqa: ASYNC110 - another process has no event to wait for
                await asyncio.sleep(0.02)
        yield Running(process, url, fleet)
        if process.returncode is None:
            process.kill()
            await process.wait()
        await fleet.stop()
        await bus.close()


async def ready(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(f"{url}/ready") as reply:
            return reply.status == 200
    except aiohttp.ClientConnectionError:
        return False


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl_streams_and_leaving_it_cancels(running):
    command = ["curl", "-sSN", "-D", "-", f"{running.url}{CHAT}", "-H", "Content-Type: application/json", "-d"]
    curl = await asyncio.create_subprocess_exec(*command, chat("say 3"), stdout=asyncio.subprocess.PIPE)
    said, _ = await curl.communicate()
    assert said.startswith(b"HTTP/1.1 200 OK\r\n")
    assert said.count(b"data: {") == 3
    assert said.endswith(b"data: [DONE]\n\n")

    curl = await asyncio.create_subprocess_exec(*command, chat("forever"), stdout=asyncio.subprocess.PIPE)
    assert curl.stdout is not None
    await curl.stdout.readuntil(b"data: ")
    curl.kill()
    async with asyncio.timeout(1):
        await running.fleet.cancelled.wait()
    assert running.fleet.cancels[0].id == running.fleet.headers[1].request_id
    await curl.wait()


async def test_sigterm_lets_a_stream_finish_and_exits_with_0(running):
    async with aiohttp.ClientSession() as http:
        reply = await http.post(f"{running.url}{CHAT}", data=chat("forever"))
        await reply.content.readany()
        running.process.send_signal(signal.SIGTERM)
        while await ready(http, running.url):  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
        running.fleet.finish.set()
        assert (await reply.read()).endswith(b"data: [DONE]\n\n")
    assert await last_words(running.process) == (0, [])


async def test_a_taken_port_is_one_line_and_exit_1(running, tmp_path):
    code, said = await last_words(await spawn(tmp_path / "quartet.toml"))
    listen = running.url.removeprefix("http://")
    assert (code, said) == (1, [f"quartet gateway: cannot listen on {listen} (gateway.listen): the port is taken"])


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('gateway.listen = "somewhere"', "gateway.listen = 'somewhere': must be HOST:PORT; port 0 takes a free one"),
        ('[gateway.keys]\n"sk-in-the-clear" = "acme"', "must be the SHA-256 of an API key as 64 hex digits"),
        ("gateway.max_stream = 7", "did you mean max_streams?"),
    ],
)
async def test_a_wrong_configuration_is_one_line_and_exit_2(tmp_path, text, line):
    async with NatsServer(tmp_path / "nats", jetstream=False) as server:
        config = tmp_path / "quartet.toml"
        config.write_text(f'nats.url = "{server.url}"\n{text}\n')
        code, said = await last_words(await spawn(config))
    assert code == 2
    assert len(said) == 1
    assert said[0].endswith(line)


async def test_gateways_of_one_host_share_a_port_and_one_may_leave(running, tmp_path):
    """The kernel gives each new connection to one of them."""
    port = free_port()
    config = tmp_path / "shared.toml"
    text = (tmp_path / "quartet.toml").read_text().replace(running.url.removeprefix("http://"), f"127.0.0.1:{port}")
    config.write_text(text + "gateway.reuse_port = true\ngateway.drain_notice_ms = 300\n")
    url = f"http://127.0.0.1:{port}"
    processes = [await spawn(config)]
    await asyncio.sleep(0.1)  # start times, which tell them apart, are hundredths of a second
    processes.append(await spawn(config))
    try:
        answered = await who_answers(url, at_least=2)
        assert len(answered) == 2
        processes[0].send_signal(signal.SIGTERM)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
            while processes[0].returncode is None:
                reply = await http.post(url + CHAT, data=chat("say 2"))
                assert (reply.status, (await reply.read())[-14:]) == (200, b"data: [DONE]\n\n")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(processes[0].wait(), 0.01)
        assert processes[0].returncode == 0
        assert len(await who_answers(url, at_least=1)) == 1
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def who_answers(url: str, *, at_least: int) -> set[str]:
    """Ask on fresh connections until so many different processes answered, and a while longer; their start times."""
    seen: set[str] = set()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
        async with asyncio.timeout(20):
            while len(seen) < at_least:
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    seen.add(await started_at(http, url))
                await asyncio.sleep(0.02)
        for _ in range(20):
            seen.add(await started_at(http, url))
    return seen


async def started_at(http: aiohttp.ClientSession, url: str) -> str:
    """What tells two processes apart that answer at one address: when each was started."""
    async with http.get(f"{url}/metrics") as reply:
        text = await reply.text()
    return next(line for line in text.splitlines() if "start_time_seconds" in line and not line.startswith("#"))
