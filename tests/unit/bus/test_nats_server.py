"""Our own nats-server starts as configured, says what is wrong, and leaves nothing behind."""

import asyncio
import os
from pathlib import Path

import pytest
from contract.bus_contract import held

from quartet_bus.config.schema import NatsSection
from quartet_bus.memory import MAX_PAYLOAD_BYTES
from quartet_bus.nats_bus import connect
from quartet_bus.server import NatsServer, ServerFailed, ServerNotFound, find_server


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_it_starts_with_our_limits_and_is_gone_when_stopped(tmp_path: Path) -> None:
    async with NatsServer(tmp_path / "nats") as server:
        pid = server.pid
        assert pid is not None
        bus = await connect(NatsSection(url=server.url))
        assert bus.max_payload_bytes == MAX_PAYLOAD_BYTES
        await bus.close()
        assert server.running
    assert not alive(pid)
    assert not server.running
    assert sorted(path.name for path in (tmp_path / "nats").iterdir()) == [
        "jetstream",
        "nats-server.conf",
        "nats-server.log",
    ]
    await server.stop()


async def test_started_again_it_has_the_same_address_and_its_logs(tmp_path: Path) -> None:
    from quartet_bus.bus import LogSpec

    log = LogSpec("ends", ("ends",), max_age_s=60.0, max_bytes=10_000)
    server = NatsServer(tmp_path)
    await server.start()
    url = server.url
    bus = await connect(NatsSection(url=url))
    await bus.keep(log)
    bus.publish("ends", b"kept")
    await held(bus, log, "ends", b"kept")
    await bus.close()
    await server.stop()
    async with server:
        assert server.url == url
        bus = await connect(NatsSection(url=url))
        assert [message.data for message in await held(bus, log, "ends", b"kept")] == [b"kept"]
        await bus.close()


async def test_a_server_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quartet_bus import server as module

    monkeypatch.setattr(module, "STOP_TIMEOUT_S", 0.3)
    server = NatsServer(tmp_path)
    await server.start()
    pid = server.pid
    assert pid is not None
    os.kill(pid, 19)  # SIGSTOP: it cannot even hear the request to end
    await server.stop()
    assert not alive(pid)


async def test_a_taken_port_is_one_clear_line(tmp_path: Path) -> None:
    async with NatsServer(tmp_path / "one") as first:
        port = int(first.url.rpartition(":")[2])
        with pytest.raises(ServerFailed, match="address already in use"):
            await NatsServer(tmp_path / "two", port=port).start()


async def test_a_wrong_configuration_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="no_such_setting"):
        await NatsServer(tmp_path, extra="no_such_setting: 1").start()


def test_the_program_is_looked_for_where_we_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nats-server"
    program.write_text("#!/bin/sh\n")
    monkeypatch.setenv("NATS_SERVER_BIN", str(program))
    with pytest.raises(ServerNotFound, match="not a program"):
        find_server()
    program.chmod(0o755)
    assert find_server() == program
    monkeypatch.delenv("NATS_SERVER_BIN")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server() == program
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ServerNotFound, match="nats-server-bin"):
        find_server()


async def test_being_cancelled_while_starting_leaves_no_process(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    starting = asyncio.ensure_future(server.start())
    while server.pid is None:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0)
    pid = server.pid
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not alive(pid)
