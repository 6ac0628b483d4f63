"""A process of ours: started with its output in a file, and ended by its number, whatever it was doing."""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from quartet_bus.orphans import follow_parent

_LAST_LINES = 8
_LAST_LINE_CHARS = 400
_LAST_BYTES = 16 * 1024


class Child:
    """One Python module run as a process, in a session of its own: a Ctrl-C in the terminal reaches only us.

    ``log`` takes its standard output and error. It does not outlive us, even when we are killed (on Linux).
    """

    def __init__(self, name: str, module: str, arguments: list[str], *, env: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        self._arguments = [sys.executable, "-m", module, *arguments]
        self._env = env
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Its process id, once started."""
        return None if self._process is None else self._process.pid

    @property
    def ended(self) -> int | None:
        """Its exit code (negative: the signal that ended it), None while it runs or was not started."""
        return None if self._process is None else self._process.returncode

    async def start(self) -> None:
        """Start it. Raises ``OSError``."""
        with self.log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(self._env),
                start_new_session=True,
                preexec_fn=follow_parent(),
            )

    async def wait(self) -> int:
        """Its exit code, when it has ended. It must have been started."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, timeout_s: float) -> None:
        """Ask it to end, then make it; on return it and everything it started are gone."""
        process = self._process
        if process is None:
            return
        try:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(timeout_s):
                    await process.wait()
        except TimeoutError:
            pass  # it had its time
        finally:
            # Its session holds only itself and its own children; what is left of them ends here.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    def last_words(self) -> list[str]:
        """The end of what it printed."""
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return [line[:_LAST_LINE_CHARS] for line in lines[-_LAST_LINES:]]

    def obituary(self) -> str:
        """How it ended, in one line, and below it what it said last."""
        code = self.ended
        how = "runs" if code is None else f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return "\n".join([f"{self.name} (pid {self.pid}) {how}", *(f"    {line}" for line in self.last_words())])
