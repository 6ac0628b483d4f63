"""Scenarios about the broker itself: a real service as a process, and a broker that is late, lacking, or absent."""

import asyncio
import sys
from pathlib import Path

from scenarios.plot import Unmet
from scenarios.story import Broker

from quartet_bus.server import NatsServer

_LONGEST_S = 20.0
_PATIENCE_MS, _SHORT_PATIENCE_MS = 15_000, 1500
"""What a service waits for a broker that comes, and for one that never does."""


async def play_broker(told: Broker, directory: Path) -> None:
    """Start the service, and the broker when its time has come. Raises ``Unmet`` when it says something else."""
    server = NatsServer(directory / "nats", jetstream=told.jetstream)
    await server.start()
    never = told.comes == "never"
    url = "nats://127.0.0.1:1" if never else server.url
    if told.comes != "before":
        await server.stop()  # it keeps its port
    patience_ms = _SHORT_PATIENCE_MS if never else _PATIENCE_MS
    config = directory / "quartet.toml"
    config.write_text(
        f'[nats]\nurl = "{url}"\nconnect_timeout_ms = {patience_ms}\n'
        '[admin]\ngrpc = "127.0.0.1:0"\n[fleet]\ntargets = ["127.0.0.1:0"]\nport = 0\n'
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", told.service, "--config", str(config), stderr=asyncio.subprocess.PIPE
    )
    try:
        lines, missing = await _says(process, told.says[:1])
        if told.comes == "after its first words":
            await server.start()
        more, still_missing = await _says(process, told.says[1:])
        lines, missing = lines + more, missing + still_missing
        wrong = [f"it never said {text!r}: {lines}" for text in missing]
        if any("Traceback" in line for line in lines):
            wrong.append("it said more than a person wants to read")
        if told.exits is not None and (code := await process.wait()) != told.exits:
            wrong.append(f"it should end with {told.exits}, not {code}")
        if wrong:
            raise Unmet(1, "the service starts", wrong)
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
        await server.stop()


async def _says(process: asyncio.subprocess.Process, texts: list[str]) -> tuple[list[str], list[str]]:
    """(what it said, which of ``texts`` it did not say in their order)."""
    assert process.stderr is not None
    lines: list[str] = []
    left = list(texts)
    try:
        async with asyncio.timeout(_LONGEST_S):
            while left and (line := (await process.stderr.readline()).decode()):
                lines.append(line.rstrip())
                if left[0] in line:
                    del left[0]
    except TimeoutError:
        lines.append("(and then nothing)")
    return lines, left
