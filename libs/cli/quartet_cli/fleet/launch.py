"""Starting, watching and stopping a fleet."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from quartet_bus.config.load import PREFIX, load
from quartet_bus.config.schema import Config
from quartet_bus.server import NatsServer
from quartet_cli.errors import CommandFailed
from quartet_cli.fleet.child import Child
from quartet_cli.fleet.layout import Doors, FleetOptions, Part, here, open_doors, parts_of, ring_path, shipped
from quartet_cli.fleet.probe import not_ready

RUNS = Path(".run")
READY_TIMEOUT_S = 90.0
_POLL_S = 0.1
_STOP_GRACE_S = 2.0

Progress = Callable[[int, Mapping[str, str]], None]
"""Called while a fleet starts, with how many parts it has and why those that are not ready are not."""


class Fleet:
    """The processes of one fleet, as an async context manager: inside it is ready, behind it nothing of it is left.

    Entering raises ``CommandFailed`` when a part ends or is not ready in time, ``PortTaken``, ``ConfigError`` for
    ``options.configs``, or what ``NatsServer.start`` raises. ``progress`` is told how far it is.
    """

    def __init__(self, options: FleetOptions, progress: Progress) -> None:
        self.options = options
        self.directory = Path()
        self.doors: Doors
        self.config: Config
        """What all parts share."""
        self.nats_url = options.nats_url
        self._progress = progress
        self._server: NatsServer | None = None
        self._parts: list[tuple[Part, Child]] = []
        self._made: Path | None = None

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def first_death(self) -> Child:
        """Return the first process that ends without being asked to."""
        waits = {asyncio.ensure_future(child.wait()): child for _, child in self._parts if child.ended is None}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return waits[done.pop()]

    @property
    def alive(self) -> list[str]:
        """The names of the parts that run."""
        return [part.name for part, child in self._parts if child.ended is None]

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by part."""
        return {part.name: child.pid for part, child in self._parts if child.pid is not None}

    async def stop(self) -> None:
        """End everything, the broker last, and remove what was written; doing it twice does nothing."""
        # A cancellation in here would leave processes behind: finish, then let it through.
        work = asyncio.ensure_future(self._stop())
        cancelled = None
        while not work.done():
            try:
                await asyncio.shield(work)
            except asyncio.CancelledError as error:
                cancelled = error
        work.result()
        if cancelled is not None:
            raise cancelled

    # Inside

    async def _start(self) -> None:
        options = self.options
        load((shipped("fleet"), *options.configs), env={})  # what is wrong in a user's file, also where ours wins
        self.doors = open_doors(options)
        self._make_directory()
        if not options.nats_url:
            self._server = NatsServer(self.directory / "nats", port=self.doors.nats)
            await self._server.start()
            self.nats_url = self._server.url
        written = self.directory / "here.toml"
        written.write_text(here(self.doors, self.nats_url, self.directory, options))
        configs = (shipped("fleet"), *options.configs, written)
        self.config = load(configs, env={})
        for part in parts_of(options, self.doors):
            child = self._child(part, configs)
            self._parts.append((part, child))
            await child.start()
        await self._ready()

    def _child(self, part: Part, configs: tuple[Path, ...]) -> Child:
        arguments = [argument for file in (*configs, *part.configs) for argument in ("--config", str(file))]
        # The fleet is what its files say: a variable meant for another one would move a port of this one.
        env = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        env[f"{PREFIX}SERVICE__HTTP_PORT"] = str(part.http_port)
        env[f"{PREFIX}SERVICE__INSTANCE"] = part.name
        return Child(part.name, part.module, arguments, env=env, log=self.directory / f"{part.name}.log")

    def _make_directory(self) -> None:
        given = self.options.directory
        if given is None:
            RUNS.mkdir(exist_ok=True)
            self.directory = Path(tempfile.mkdtemp(prefix="fleet-", dir=RUNS)).resolve()
        else:
            try:
                given.mkdir(parents=True)
            except FileExistsError:
                raise CommandFailed(f"{given} exists already; name a directory that does not") from None
            self.directory = given.resolve()
        self._made = self.directory

    async def _ready(self) -> None:
        waiting: dict[str, str] = {part.name: "starting" for part, _ in self._parts}
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while True:
                    for part, child in self._parts:
                        if child.ended is not None:
                            raise CommandFailed(child.obituary())
                        if part.name in waiting:
                            reason = await not_ready(part.http_port)
                            if reason is None:
                                del waiting[part.name]
                            else:
                                waiting[part.name] = reason
                    self._progress(len(self._parts), waiting)
                    if not waiting:
                        return
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            named = ", ".join(f"{name} ({reason})" for name, reason in waiting.items())
            raise CommandFailed(f"not ready after {READY_TIMEOUT_S:g} s: {named}") from None

    async def _stop(self) -> None:
        timeout_s = (self.config.service.stop_timeout_ms / 1000 if self._parts else 0.0) + _STOP_GRACE_S
        await asyncio.gather(*(child.stop(timeout_s) for _, child in self._parts))
        self._parts.clear()
        if self._server is not None:
            await self._server.stop()
            self._server = None
        if self.directory != Path():
            ring_path(self.directory).unlink(missing_ok=True)  # a collector that was killed leaves it
        if self._made is not None and not self.options.keep:
            shutil.rmtree(self._made, ignore_errors=True)
            if self.options.directory is None:
                with suppress(OSError):
                    self._made.parent.rmdir()  # unless another fleet runs there
        self._made = None
