"""A service as a process: it starts, says it is ready, ends on a signal, and says in one line why it cannot."""

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from quartet_bus import subjects
from quartet_bus.config.schema import Config, NatsSection
from quartet_bus.messages import ControlReply, ControlRequest
from quartet_bus.nats_bus import connect
from quartet_bus.server import NatsServer
from quartet_bus.service import Service

PROGRAM = """
import asyncio
from contextlib import asynccontextmanager

from quartet_bus.messages import ControlReply
from quartet_bus.process import run
from quartet_bus.service import Service


class Probe(Service):
    name = "probe"

    async def start(self):
        await super().start()
        await self.controls({"status": lambda request: ControlReply(True)})

    async def stop(self):
        await super().stop()
        self.log.info("probe stopped")


@asynccontextmanager
async def edges(service):
    service.log.info("edges in")
    %s
    yield
    service.log.info("edges out")


run(Probe, edges)
"""


class Running:
    """One probe process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    async def until_said(self, message: str) -> dict[str, str]:
        assert self.process.stderr is not None
        async with asyncio.timeout(20):
            while line := (await self.process.stderr.readline()).decode():
                self.lines.append(line)
                if line.startswith("{") and json.loads(line)["message"] == message:
                    return dict(json.loads(line))
        raise AssertionError(f"never said {message!r}: {self.lines}")

    async def end(self) -> int:
        """Wait for the end; the rest of what was said is in ``lines``."""
        assert self.process.stderr is not None
        async with asyncio.timeout(20):
            self.lines += (await self.process.stderr.read()).decode().splitlines()
            return await self.process.wait()


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator:
    started: list[asyncio.subprocess.Process] = []

    async def start(config: str, *, in_edges: str = "pass", env: dict[str, str] | None = None) -> Running:
        (tmp_path / "quartet.toml").write_text(config)
        (tmp_path / "probe.py").write_text(PROGRAM % in_edges)
        started.append(
            await asyncio.create_subprocess_exec(
                sys.executable,
                str(tmp_path / "probe.py"),
                "--config",
                str(tmp_path / "quartet.toml"),
                stderr=asyncio.subprocess.PIPE,
                env={**os.environ, **(env or {})},
            )
        )
        return Running(started[-1])

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
            await process.wait()


def status(url: str) -> int:
    try:
        return int(urllib.request.urlopen(url, timeout=5).status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_serves_and_ends_with_0_on_a_signal(start, nats_url: str, number: signal.Signals) -> None:
    probe = await start(f'[nats]\nurl = "{nats_url}"\n[service]\ninstance = "p-{number}"')
    said = await probe.until_said("started")
    assert (said["service"], said["instance"], said["level"]) == ("probe", f"p-{number}", "info")
    assert said["timestamp"].endswith("Z")
    for path in ("/livez", "/healthz", "/readyz"):
        assert await asyncio.to_thread(status, f"http://{said['http']}{path}") == 200
    page = await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://{said['http']}/metrics").read())
    assert b"quartet_probe_bus_connected 1.0" in page
    assert b"process_resident_memory_bytes" in page
    bus = await connect(NatsSection(url=nats_url))
    asker = Service.__new__(type("Asker", (Service,), {"name": "asker"}))
    Service.__init__(asker, bus, Config(), instance="a", random=random.Random(1))
    reply = await asker.ask(
        subjects.control("probe", f"p-{number}", "status"), ControlRequest(), ControlReply, timeout_s=5.0
    )
    assert reply.ok
    await bus.close()
    probe.process.send_signal(number)
    assert await probe.end() == 0
    messages = [json.loads(line)["message"] for line in probe.lines]
    assert messages == ["edges in", "started", "stopping", "edges out", "probe stopped", "stopped"]


async def test_a_wrong_key_is_one_line_and_2(start, tmp_path: Path) -> None:
    probe = await start('[nats]\nurll = "x"')
    assert await probe.end() == 2
    assert probe.lines == [f"quartet probe: {tmp_path}/quartet.toml: nats.urll: unknown key; did you mean url?"]


async def test_a_wrong_variable_is_one_line_and_2(start) -> None:
    probe = await start("", env={"QUARTET_ROUTER__KAPPA": "-1"})
    assert await probe.end() == 2
    assert probe.lines == ["quartet probe: QUARTET_ROUTER__KAPPA: router.kappa = -1: must be a number at least 0"]


async def test_a_taken_port_is_one_line_and_1(start, nats_url: str) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        probe = await start(f'[nats]\nurl = "{nats_url}"\n[service]\nhttp_port = {port}')
        assert await probe.end() == 1
    assert len(probe.lines) == 1
    assert probe.lines[0].startswith(f"quartet probe: cannot listen on 127.0.0.1:{port}: ")
    assert "in use" in probe.lines[0]


async def test_a_broker_that_never_comes_is_one_line_and_1_and_was_announced(start) -> None:
    probe = await start('[nats]\nurl = "nats://127.0.0.1:1"\nconnect_timeout_ms = 1500')
    waiting = await probe.until_said("waiting for the NATS broker")
    assert waiting["url"] == "nats://127.0.0.1:1"
    assert await probe.end() == 1
    assert probe.lines[-1].startswith("quartet probe: no NATS broker at nats://127.0.0.1:1 within 1500 ms")
    assert not any("Traceback" in line for line in probe.lines)


async def test_it_can_be_ended_while_it_waits_for_the_broker(start) -> None:
    probe = await start('[nats]\nurl = "nats://127.0.0.1:1"\nconnect_timeout_ms = 0')
    await probe.until_said("waiting for the NATS broker")
    probe.process.terminate()
    assert await probe.end() == 0


async def test_a_failure_at_the_edges_is_one_line_without_traceback_and_1(start, nats_url: str) -> None:
    probe = await start(f'[nats]\nurl = "{nats_url}"', in_edges='raise RuntimeError("no such\\n device")')
    assert await probe.end() == 1
    assert probe.lines[-1] == "quartet probe: RuntimeError: no such device"
    assert not any("Traceback" in line for line in probe.lines)


async def test_without_a_broker_it_is_alive_and_not_ready(start, tmp_path: Path) -> None:
    async with NatsServer(tmp_path / "nats") as server:
        probe = await start(f'[nats]\nurl = "{server.url}"')
        said = await probe.until_said("started")
        await server.kill()
        await probe.until_said("lost the NATS broker")
        assert await asyncio.to_thread(status, f"http://{said['http']}/livez") == 200
        assert await asyncio.to_thread(status, f"http://{said['http']}/readyz") == 503
        await server.start()
        await probe.until_said("back at the NATS broker")
        assert await asyncio.to_thread(status, f"http://{said['http']}/readyz") == 200
        probe.process.terminate()
        assert await probe.end() == 0
